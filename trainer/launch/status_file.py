"""Writes the launcher's view of a run and its tasks to status.json, about four times a second."""

import contextlib
import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.config import versions
from trainer.config.command_line import program, typed
from trainer.launch.attempts import Attempts, PlannedRun
from trainer.observe.page_server import LOOPBACK
from trainer.observe.peers import UNIX
from trainer.plan.plan import Task
from trainer.storage.atomic import write_atomically


class StatusFile:
    """The status.json of one launch."""

    def __init__(self, planned: PlannedRun) -> None:
        """Collects the values that stay the same."""
        self._path = planned.directory.status
        self._host = socket.gethostname()
        self._tasks = {task.name: self._facts(task) for task in planned.plan.tasks}
        self._run = {
            "launcher": {"pid": os.getpid(), "host": self._host, "command": command(), "folder": str(Path.cwd())},
            "versions": versions.describe(),
            "started_at": planned.started_at,
            "steps": planned.plan.steps,
        }

    def _facts(self, task: Task) -> dict[str, Any]:
        is_socket = task.control.startswith(UNIX)  # an isolated run's; /metrics is behind it too
        host = "" if is_socket else task.control.rpartition(":")[0].strip("[]")
        page = task.control if is_socket else f"http://{task.control}/metrics"
        return {"host": self._host if host in ("", *LOOPBACK) else host, "metrics": page, "log": task.log}

    def write(self, attempts: Attempts, waits: Mapping[str, Mapping[str, float]]) -> None:
        """Replaces the file; the chief reports a full disk."""
        current = attempts.current
        status = self._run | {
            "time": time.time(),
            "tasks": {name: attempt.page.to_json() for name, attempt in current.items() if attempt.page},
            "states": {name: attempt.state_text for name, attempt in current.items()},
            "attempts": {
                name: self._tasks[name] | {"restarts": attempt.number, "pid": attempt.pid, "code": attempt.code}
                for name, attempt in current.items()
            },
            "waits": waits,
        }
        with contextlib.suppress(OSError):
            write_atomically(self._path, json.dumps(status, indent=1))


def command() -> list[str]:
    """Returns the command that was typed."""
    return [*program(), *typed()]
