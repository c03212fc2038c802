"""Commands under test: each ends, or shows why it does not when nothing about it has moved for long."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

STALLED_SECS = 90.0  # without any progress; how long a command takes is the machine's affair
LONGEST_SECS = 600.0
GPUS = len(list(Path("/dev").glob("nvidia[0-9]*")))
ON_HOSTS = [  # of several hosts, to be compared with a run of one
    *("cluster=2ps4w", "model=mlp", "model.options.width=256", "seed=4", "train.batch_size=48", "history.every=1"),
    "device.intra_op_threads={ps:1,worker:1}",
]
SMALL = ["train.batch_size=48", "train.steps=12", "history.every=1", "checkpoint.every=5"]

# Commands that run others as a user without any capability, and where no network namespace may be made.
UNPRIVILEGED = ["unshare", "--user", "--map-user=1234", "--map-group=1234"]
NO_NAMESPACES = 'echo 0 >/proc/sys/user/max_net_namespaces; exec "$@"'
REFUSED = ["unshare", "--user", "--map-root-user", "sh", "-c", NO_NAMESPACES, "sh"]


def wait_until(
    is_so: Callable[[], Any],
    *,
    progress: Callable[[], Any] = lambda: None,
    explain: Callable[[], str] = lambda: "",
    poll_secs: float = 0.02,
    stalled_secs: float = STALLED_SECS,
) -> Any:
    """Returns what `is_so` does as soon as that is true; fails with an explanation when nothing moves any more.

    Args:
        progress: returns something else whenever something has moved.
        stalled_secs: without progress, until it fails.
    """
    began = looked = moved = time.monotonic()
    last = None
    while not (answer := is_so()):
        now = time.monotonic()
        if now - looked > 1.0:
            looked = now
            if (present := progress()) != last:
                last, moved = present, now
        if now - moved > stalled_secs:
            pytest.fail(f"no progress for {stalled_secs:.0f} s\n{explain()}")
        if now - began > LONGEST_SECS:
            pytest.fail(f"not within {LONGEST_SECS:.0f} s\n{explain()}")
        time.sleep(poll_secs)
    return answer


class Command:
    """A command that works on a run directory, in a session of its own."""

    def __init__(self, words: Sequence[str], cwd: Path, environment: dict[str, str]) -> None:
        """Starts it; the directory is that of its run=PATH."""
        self.directory = cwd / next((word[4:] for word in words if word.startswith("run=")), "run")
        self.process = subprocess.Popen(
            words,
            cwd=cwd,
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.output = ""
        self._written = 0  # bytes, so far

    def wait(self) -> int:
        """The exit code; a command that makes no progress is killed, and the test fails with its output."""
        if not self.process.stdout.closed:  # nobody has read what it printed
            wait_until(self._has_ended, progress=self.progress, explain=self.kill_and_explain, poll_secs=0)
        return self.process.returncode

    def _has_ended(self) -> bool:
        try:
            self.output, _ = self.process.communicate(timeout=1.0)
        except subprocess.TimeoutExpired as running:
            self._written = len(running.output or b"")
        return self.process.returncode is not None

    def progress(self) -> Any:
        """What changes as long as the command gets on: its output, its files, the steps and states of its tasks."""
        seen: list[Any] = [self._written]
        for path in (Path(folder, name) for folder, _, names in os.walk(self.directory) for name in names):
            with contextlib.suppress(OSError, ValueError):  # it has just been removed, or is being written
                seen.append((path, path.stat().st_size))
                if path.name == "status.json":
                    tasks = json.loads(path.read_text())["tasks"]
                    seen.append([(name, page.get("step"), page.get("state")) for name, page in tasks.items()])
        return seen

    def kill_and_explain(self) -> str:
        """Kills the command, and returns what shows why it did not end."""
        self.end()
        return self.output

    def end(self) -> None:
        """Kills the command, if it is alive; tasks of a launcher die with it."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.output, _ = self.process.communicate()

    def wait_for_step(self, step: int) -> None:
        """Returns as soon as history.jsonl, which the chief writes line by line, has a global step."""

        def is_there() -> bool:
            if self.process.poll():
                pytest.fail(f"ended with {self.wait()} before step {step}: {self.output}")
            return any(line["step"] >= step for line in self.history()[-1:])

        wait_until(is_there, progress=self.progress, explain=self.kill_and_explain)

    def summary(self) -> dict[str, Any]:
        return json.loads((self.directory / "summary.json").read_text())

    def history(self) -> list[dict[str, Any]]:
        path = self.directory / "history.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def plan(self) -> dict[str, Any]:
        return json.loads((self.directory / "plan.json").read_text())


class Run(Command):
    """One `python -m trainer` in a directory of its own."""

    def __init__(
        self, overrides: Sequence[str], cwd: Path, environment: dict[str, str], within: Sequence[str] = ()
    ) -> None:
        """Starts it; `within` begins a command that runs the rest, e.g. in a network of its own."""
        if not any(o.startswith("run=") for o in overrides):
            overrides = [*overrides, f"run={cwd / 'run'}"]
        super().__init__([*within, sys.executable, "-m", "trainer", *overrides], cwd, environment)

    def kill_and_explain(self) -> str:
        """Makes every live task write the stacks of its threads into its log, kills the run, and returns all logs."""
        for number in (signal.SIGUSR1, signal.SIGUSR2):  # the second, for those that do not answer the first
            for pid in self.pids():
                os.kill(pid, number)
            time.sleep(1)  # the signal handlers of other processes have no other way to tell that they are done
        self.end()
        return "\n".join([self.output, *(f"== {log.name}\n{log.read_text(errors='replace')}" for log in self.logs())])

    def logs(self) -> list[Path]:
        return sorted((self.directory / "logs").glob("*.log"))

    def pids(self) -> list[int]:
        """Processes of this run's tasks that are alive, as their logs name them."""
        named = re.findall(r", pid (\d+):", "".join(log.read_text(errors="replace") for log in self.logs()))
        return [int(pid) for pid in named if _is_task(int(pid))]

    def tasks(self) -> list[str]:
        """The names of its tasks."""
        return [f"{task['job']}:{task['index']}" for task in self.plan()["tasks"]]

    def last_pid(self, task: str) -> int:
        """The process that a task is, or was last, as its log names it."""
        log = self.directory / "logs" / f"{task.replace(':', '-')}.log"
        return int(re.findall(r", pid (\d+):", log.read_text(errors="replace"))[-1])


def _is_task(pid: int) -> bool:
    try:
        return b"trainer" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def has_ended(pid: int) -> bool:
    """Whether a process is gone, or waits only for its parent to notice."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def can_be_unprivileged() -> bool:
    """Whether a command can be run as a user without capabilities, and that user may make a network namespace."""
    try:
        ended = subprocess.run([*UNPRIVILEGED, "unshare", "--user", "--net", "true"], capture_output=True, check=False)
    except OSError:
        return False
    return ended.returncode == 0


def free_ports(count: int) -> list[int]:
    """Ports that nobody has now, and that the kernel gives to nobody of itself."""
    sockets = [socket.socket() for _ in range(count)]
    for free in sockets:
        free.bind(("127.0.0.1", 0))
    ports = [20000 + free.getsockname()[1] % 10000 for free in sockets]
    for free in sockets:
        free.close()
    return ports
