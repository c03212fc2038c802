"""What a task is doing, served as a read-only page: heartbeat, health check and source of the progress table.

`GET /status` answers JSON, `GET /metrics` the numbers in Prometheus's text format. The page shows no environment.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from trainer.observe import prometheus

LAUNCHER = "launcher"  # GET /status?launcher: the reader is the launcher, whose end a task may have to notice
ALONE_SECS = 60.0  # without such a request, after which a launcher counts as dead
POLLS = 20  # in that time
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
SOCKET_PATH_BYTES = 100  # that every system allows


@dataclass
class Status:
    """What one task says about itself. Its main thread writes fields, the page's threads read them."""

    job: str
    index: int
    run: str  # path of the run directory
    config_hash: str
    tensorflow: str = ""  # version
    frozen: str = ""  # digest of what training never changes
    launch: str = ""  # the run directory, where one launcher gave it to all tasks
    # starting, building, roll call, waiting, training, saving, serving, evaluating, exporting, done
    state: str = "starting"
    is_listening: bool = False  # its TensorFlow server accepts sessions
    is_stopping: bool = False  # it was asked to stop
    ended_early: str | None = None  # why; only the chief ends a run before its last step
    is_ready: bool = False  # its shard too, if it holds one, can be loaded
    generation: int = 0  # of the state it works on; 0: none yet
    step: int = 0  # global step
    steps: int = 0  # that this process has made
    examples: int = 0  # that this process has computed
    missing: list[str] = field(default_factory=list)  # workers that a stalled step waits for
    stalled_secs: float = 0.0  # since the step last changed, when it stalls
    stuck: list[str] = field(default_factory=list)  # tasks that a step has waited for too long
    examples_per_second: float = 0.0  # of this task's replica
    wait_fraction: float = 0.0  # share of the step time spent waiting for parameters or gradients
    loss: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)  # as last reported; only the chief knows them
    learning_rate: float | None = None  # of the last report, where it varies; only the chief knows it
    started_at: float = field(default_factory=time.time)  # Unix time, seconds
    first_step_at: float | None = None  # Unix time, seconds

    def to_json(self) -> dict[str, Any]:
        return dataclasses.asdict(self) | {"pid": os.getpid(), "memory_bytes": resident_bytes(), "now": time.time()}

    def to_prometheus(self) -> str:
        return prometheus.text(self.to_json())


def resident_bytes() -> int:
    """Memory of this process that is in RAM; 0 where the system does not report it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES
    except OSError:
        return 0


def serve(status: Status, host: str, port: int, *, alone: Callable[[], None] | None = None) -> None:
    """Answers for a task on its control port, in a daemon thread, for the life of the process.

    Args:
        alone: called once when the launcher, after it has asked, does not ask any more: it has died.

    Raises:
        OSError: if the port is taken.
    """
    server = (_Server6 if ":" in host else _Server)((host, port), _handler(status))
    _start("status", server.serve_forever)
    if alone is not None:
        _start("launcher", lambda: _watch(server, alone, ALONE_SECS))


def serve_at(
    status: Status, path: str, *, alone: Callable[[], None] | None = None, alone_secs: float = ALONE_SECS
) -> None:
    """Answers at a Unix socket, for readers on another network too; the rest as `serve`."""
    server = _UnixServer(path, _handler(status))
    _start("status for the launcher", server.serve_forever)
    if alone is not None:
        _start("launcher", lambda: _watch(server, alone, alone_secs))


def _start(name: str, work: Callable[[], None]) -> None:
    threading.Thread(target=work, name=name, daemon=True).start()


def _watch(server: _Server, alone: Callable[[], None], alone_secs: float) -> None:
    """Counts polls, not seconds: a frozen process does not poll, so a launcher is not blamed for that time."""
    requests, idle_polls = 0, 0
    while idle_polls < POLLS:
        time.sleep(alone_secs / POLLS)
        idle_polls = idle_polls + 1 if server.launcher_requests == requests > 0 else 0
        requests = server.launcher_requests
    alone()


class _Server(ThreadingHTTPServer):
    launcher_requests = 0

    def server_bind(self) -> None:
        # The launcher has bound the port, without listening, so that nobody takes it before this task does.
        if hasattr(socket, "SO_REUSEPORT"):
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        # The page closes its connections first; while they linger, the next run could not bind the port.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints no traceback for a reader that hung up because this process was busy."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class _Server6(_Server):
    address_family = socket.AF_INET6


@contextmanager
def short_name(path: str) -> Iterator[str]:
    """Yields a name by which a socket is bound or reached: its path, or on Linux a shorter name if that is too long."""
    if len(os.fsencode(path)) <= SOCKET_PATH_BYTES:
        yield path
        return
    folder = os.open(os.path.dirname(path), os.O_PATH)
    try:
        yield f"/proc/self/fd/{folder}/{os.path.basename(path)}"
    finally:
        os.close(folder)


class _UnixServer(_Server):
    address_family = socket.AF_UNIX
    request_queue_size = 128  # a client that finds it full is refused at once, not served late as by TCP

    def __init__(self, path: str, handler: type[BaseHTTPRequestHandler]) -> None:
        self._path = Path(path)
        super().__init__(("", 0), handler)

    def server_bind(self) -> None:
        self._path.unlink(missing_ok=True)  # an earlier attempt's
        with short_name(str(self._path)) as name:
            self.socket.bind(name)


def _handler(status: Status) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        server: _Server
        timeout = 5  # seconds; a silent client must not keep its thread

        def do_GET(self) -> None:
            pages = {"/status": status.to_json, "/metrics": status.to_prometheus}
            path, _, reader = self.path.partition("?")
            if path not in pages:
                self.send_error(404, "only /status and /metrics exist")
                return
            if reader == LAUNCHER:
                self.server.launcher_requests += 1
            page = pages[path]()
            body = page if isinstance(page, str) else json.dumps(page)
            self.send_response(200)
            self.send_header("Content-Type", prometheus.CONTENT_TYPE if isinstance(page, str) else "application/json")
            self.send_header("Content-Length", str(len(body.encode())))
            self.end_headers()
            self.wfile.write(body.encode())

        def log_message(self, format: str, *args: object) -> None:
            """Logs nothing: the page is read twice a second."""

    return Handler
