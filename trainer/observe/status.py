"""What a task is doing, served as a read-only page: heartbeat, health check and source of the progress table.

`GET /status` answers JSON, `GET /metrics` the numbers in Prometheus's text format. The page shows no environment.
"""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.observe import metrics
from trainer.observe.metrics import STEP_BUCKETS
from trainer.observe.page_server import Page, PageServer, PageServer6, UnixPageServer, handler

ALONE_SECS = 60.0  # without such a request, after which a launcher counts as dead
POLLS = 20  # in that time
WAITS_FOR_DATA = "waiting for data"
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


@dataclass
class Status:
    """What one task says about itself. Its main thread writes fields, the page's threads read them."""

    job: str
    index: int
    run: str  # path of the run directory
    config_hash: str
    tensorflow: str = ""  # version
    frozen: str = ""  # digest of what training never changes
    data: str = ""  # digest of the fingerprint of the data
    launch: str = ""  # the run directory, where one launcher gave it to all tasks
    # starting, building, roll call, waiting, training, saving, serving, evaluating, exporting, done; "waiting for
    # data" takes the place of training while the step does that
    state: str = "starting"
    is_listening: bool = False  # its TensorFlow server accepts sessions
    is_stopping: bool = False  # it was asked to stop
    ended_early: str | None = None  # why; only the chief ends a run before its last step
    is_replaced: bool = False  # a shard host is connected to another task instead of this one
    is_ready: bool = False  # its shard too, if it holds one, can be loaded
    generation: int = 0  # of the state it works on; 0: none yet
    step: int = 0  # global step
    steps: int = 0  # that this process has made
    examples: int = 0  # that this process has computed
    missing: list[str] = field(default_factory=list)  # workers that a stalled step waits for
    stalled_secs: float = 0.0  # since the step last changed, when it stalls
    stuck: list[str] = field(default_factory=list)  # tasks that a step has waited for too long
    evaluated: int = 0  # examples evaluated so far in the current evaluation
    data_secs: float = 0.0  # for which the current step has been waiting for its batch; 0 if it is not
    step_secs: float = 0.0  # that all steps of this process took; of these it
    wait_secs: float = 0.0  # waited for parameters or gradients, and
    compute_secs: float = 0.0  # computed the forward and backward pass
    step_buckets: list[int] = field(
        default_factory=lambda: [0] * (len(STEP_BUCKETS) + 1)
    )  # steps by how long they took
    examples_per_second: float = 0.0  # of this task's replica
    wait_fraction: float = 0.0  # share of the step time spent waiting for parameters or gradients
    loss: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)  # as last reported; only the chief knows them
    learning_rate: float | None = None  # of the last report, where it varies; only the chief knows it
    contributions: dict[str, dict[str, Any]] = field(default_factory=dict)  # see staleness.py; the chief knows it
    dropped_as: str = ""  # why gradients are dropped
    started_at: float = field(default_factory=time.time)  # Unix time, seconds
    first_step_at: float | None = None  # Unix time, seconds

    def to_json(self) -> dict[str, Any]:
        of_process = {"pid": os.getpid(), "memory_bytes": resident_bytes(), "cpu_secs": time.process_time()}
        page = dataclasses.asdict(self) | of_process | {"now": time.time()}
        return page | ({"state": WAITS_FOR_DATA} if self.state == "training" and self.data_secs else {})

    def pages(self) -> dict[str, Page]:
        """What this task answers, by path."""
        return {
            "/status": ("application/json", lambda: json.dumps(self.to_json()).encode()),
            "/metrics": (metrics.CONTENT_TYPE, lambda: metrics.text([self.to_json()])),
        }


def resident_bytes() -> int:
    """Memory of this process that is in RAM; 0 where the system does not report it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES
    except OSError:
        return 0


def serve(
    status: Status, host: str, port: int, *, names: Sequence[str] = (), alone: Callable[[], None] | None = None
) -> None:
    """Answers for a task on its control port, in a daemon thread, for the life of the process.

    Args:
        names: by which others reach this machine, beside its own.
        alone: called once when the launcher, after it has asked, does not ask any more: it has died.

    Raises:
        OSError: if the port is taken.
    """
    answer = handler(status.pages(), names)
    server = (PageServer6 if ":" in host else PageServer)((host, port), answer)
    _start("status", server.serve_forever)
    if alone is not None:
        _start("launcher", lambda: _watch(server, alone, ALONE_SECS))


def serve_at(
    status: Status, path: str, *, alone: Callable[[], None] | None = None, alone_secs: float = ALONE_SECS
) -> None:
    """Answers at a Unix socket, for readers on another network too; the rest as `serve`."""
    server = UnixPageServer(path, handler(status.pages()))
    _start("status for the launcher", server.serve_forever)
    if alone is not None:
        _start("launcher", lambda: _watch(server, alone, alone_secs))


def _start(name: str, work: Callable[[], None]) -> None:
    threading.Thread(target=work, name=name, daemon=True).start()


def _watch(server: PageServer, alone: Callable[[], None], alone_secs: float) -> None:
    """Counts polls, not seconds: a frozen process does not poll, so a launcher is not blamed for that time."""
    requests, idle_polls = 0, 0
    while idle_polls < POLLS:
        time.sleep(alone_secs / POLLS)
        idle_polls = idle_polls + 1 if server.launcher_requests == requests > 0 else 0
        requests = server.launcher_requests
    alone()
