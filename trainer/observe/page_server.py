"""Serves read-only pages over HTTP: the status of a task, and the metrics of a run."""

import ipaddress
import os
import socket
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

LAUNCHER = "launcher"  # GET /status?launcher: the reader is the launcher, whose end a task may have to notice
LOOPBACK = ("localhost", "127.0.0.1", "::1")
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"  # of the page /metrics
SOCKET_PATH_BYTES = 100  # that every system allows

Page = tuple[str, Callable[[], bytes]]  # type of its content, and what gives it


class PageServer(ThreadingHTTPServer):
    launcher_requests = 0

    def server_bind(self) -> None:
        # The launcher has bound the port, without listening, so that no program takes it before this task does.
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


class PageServer6(PageServer):
    address_family = socket.AF_INET6


@contextmanager
def short_name(path: str) -> Iterator[str]:
    """Yields a name to bind or reach a socket: its path, or on Linux a shorter name if the path is too long."""
    if len(os.fsencode(path)) <= SOCKET_PATH_BYTES:
        yield path
        return
    folder = os.open(os.path.dirname(path), os.O_PATH)
    try:
        yield f"/proc/self/fd/{folder}/{os.path.basename(path)}"
    finally:
        os.close(folder)


class UnixPageServer(PageServer):
    address_family = socket.AF_UNIX
    request_queue_size = 128  # a client that finds it full is refused at once, not served late as by TCP

    def __init__(self, path: str, handler: type[BaseHTTPRequestHandler]) -> None:
        self._path = Path(path)
        super().__init__(("", 0), handler)

    def server_bind(self) -> None:
        self._path.unlink(missing_ok=True)  # an earlier attempt's
        with short_name(str(self._path)) as name:
            self.socket.bind(name)


def handler(pages: Mapping[str, Page], hosts: Collection[str] = ()) -> type[BaseHTTPRequestHandler]:
    """Answers GET for some paths.

    Args:
        pages: by path.
        hosts: names of this server, besides localhost, the machine's name, and any IP address. A request
            for another name is refused: a page in a browser may have sent it, under a name that leads to this machine.
    """

    class Handler(BaseHTTPRequestHandler):
        server: PageServer
        timeout = 5  # seconds; a silent client must not keep its thread

        def do_GET(self) -> None:
            path, _, reader = self.path.partition("?")
            if not is_known_host(self.headers.get("Host"), hosts):
                self.send_error(421, "unknown host name; use the machine's name or its IP address")
                return
            if path not in pages:
                self.send_error(404, f"only {' and '.join(pages)} exist")
                return
            if reader == LAUNCHER:
                self.server.launcher_requests += 1
            kind, make = pages[path]
            body = make()
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Logs nothing: a page is read twice a second."""

    return Handler


def is_known_host(header: str | None, hosts: Collection[str]) -> bool:
    """Whether the Host of a request is an IP address, localhost, this machine's name, or one of `hosts`."""
    if header is None:
        return True  # a browser always sends one
    name = header.rpartition("]")[0].lstrip("[") if header.startswith("[") else header.partition(":")[0]
    if name.lower() in {known.lower() for known in ("localhost", LAUNCHER, socket.gethostname(), *hosts)}:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
