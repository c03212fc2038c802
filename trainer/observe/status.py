"""Serves the status page of a task: heartbeat, health check and source of the progress table.

`GET /status` answers JSON, `GET /metrics` the numbers in Prometheus's text format. The page shows no environment.
"""

import json
import threading
import time
from collections.abc import Callable, Sequence

from trainer.observe.page_server import METRICS_TYPE, Page, PageServer, PageServer6, UnixPageServer, handler
from trainer.observe.task_page import TaskPage

ALONE_SECS = 60.0  # without such a request, after which a launcher counts as dead
POLLS = 20  # in that time


def pages(page: TaskPage) -> dict[str, Page]:
    """Returns the pages of a task, by path."""
    return {
        "/status": ("application/json", lambda: json.dumps(page.as_of_now().to_json()).encode()),
        "/metrics": (METRICS_TYPE, lambda: _metrics(page)),
    }


def _metrics(page: TaskPage) -> bytes:
    from trainer.observe import metrics  # imports prometheus_client: most tasks are never asked

    return metrics.text([page.as_of_now()])


def serve(
    page: TaskPage, host: str, port: int, *, names: Sequence[str] = (), alone: Callable[[], None] | None = None
) -> None:
    """Answers for a task on its control port, in a daemon thread, for the life of the process.

    Args:
        names: by which others reach this machine, besides its own.
        alone: called once when the launcher stops polling this page: it has died.

    Raises:
        OSError: if the port is taken.
    """
    answer = handler(pages(page), names)
    server = (PageServer6 if ":" in host else PageServer)((host, port), answer)
    _start("status", server.serve_forever)
    if alone is not None:
        _start("launcher", lambda: _watch(server, alone, ALONE_SECS))


def serve_at(
    page: TaskPage, path: str, *, alone: Callable[[], None] | None = None, alone_secs: float = ALONE_SECS
) -> None:
    """Answers at a Unix socket, for readers on other networks too; otherwise like `serve`."""
    server = UnixPageServer(path, handler(pages(page)))
    _start("status for the launcher", server.serve_forever)
    if alone is not None:
        _start("launcher", lambda: _watch(server, alone, alone_secs))


def _start(name: str, work: Callable[[], None]) -> None:
    threading.Thread(target=work, name=name, daemon=True).start()


def _watch(server: PageServer, alone: Callable[[], None], alone_secs: float) -> None:
    """Counts polls, not seconds, so that a launcher is not blamed while this process was frozen."""
    requests, idle_polls = 0, 0
    while idle_polls < POLLS:
        time.sleep(alone_secs / POLLS)
        idle_polls = idle_polls + 1 if server.launcher_requests == requests > 0 else 0
        requests = server.launcher_requests
    alone()
