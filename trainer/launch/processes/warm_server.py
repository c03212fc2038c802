"""`python -m trainer.launch.processes.warm_server SOCKET`: imports TensorFlow once and forks a nursery per command.

It ends when no command has used it for the minutes that the last one asked for, or when the code has changed.
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.config.command_line import typed
from trainer.launch.processes import nursery, warm
from trainer.plan.environment import MEMORY

POLL_SECS = 2.0
REQUEST_SECS = 5.0  # for a command to send its request


def main() -> None:
    """Serves the socket with the path in the first argument."""
    path, code = Path(typed()[0]), warm.code_version()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen()
        nursery.import_everything()
        os.chdir("/")
        _serve(listener, path, code)


def _serve(listener: socket.socket, path: Path, code: str) -> None:
    nurseries: set[int] = set()
    minutes, used_at = 0.0, time.monotonic()
    while True:
        if select.select([listener], [], [], POLL_SECS)[0] and (asked := _answer(listener, nurseries)) is not None:
            minutes, used_at = asked or minutes, time.monotonic()
        nurseries -= {pid for pid in nurseries if os.waitpid(pid, os.WNOHANG)[0]}
        if nurseries:
            used_at = time.monotonic()
        if warm.code_version() == code and time.monotonic() < used_at + 60 * minutes:
            continue
        with warm.locked(path.parent):  # commands connect with the lock held: none has found the socket after this
            path.unlink(missing_ok=True)
        while select.select([listener], [], [], 0)[0]:  # but some may have before
            _answer(listener, nurseries)
        return


def _answer(listener: socket.socket, nurseries: set[int]) -> float | None:
    """Forks a nursery for a connected command, and returns the minutes that it asks for; None without a command."""
    connection, _ = listener.accept()
    with connection:
        connection.settimeout(REQUEST_SECS)
        try:
            _, descriptors, _, _ = socket.recv_fds(connection, 1, 3)
        except TimeoutError:
            return None
        if len(descriptors) != 3 or not warm.is_ours(connection):  # only a probe of the socket
            return None
        with open(descriptors[0], "rb") as file:
            file.seek(0)
            request = json.load(file)
        pid = os.fork()
        if pid == 0:
            listener.close()
            _become_nursery(connection, descriptors[1], descriptors[2], request)
        for descriptor in descriptors[1:]:
            os.close(descriptor)
        nurseries.add(pid)
        return float(request["minutes"])


def _become_nursery(connection: socket.socket, stderr: int, memory: int, request: Mapping[str, Any]) -> None:
    """Serves a command like a nursery that the command started, and never returns."""
    try:
        os.setsid()
        os.dup2(stderr, 2)
        os.close(stderr)
        os.environ.clear()
        os.environ.update(request["environment"] | {MEMORY: f"/proc/self/fd/{memory}"})
        os.chdir(request["cwd"])
        sys.path[0] = request["path"]
        connection.settimeout(None)
        nursery.serve(connection, can_fork=True)
    finally:
        with contextlib.suppress(OSError):
            sys.stderr.flush()
        os._exit(0)


if __name__ == "__main__":
    main()
