"""Real runs for the tests: the command a user types, with a deadline, and nothing left behind."""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from forks import Forks, forks

from trainer.launch.processes import warm

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "-1")
os.environ.setdefault("TF_GRPC_WORKER_CACHE_QUEUES", "4")  # or each server of a test keeps 64 threads for ever

DEADLINE_SECS = 90.0
NEEDS_DOCKER = "TRAINER_TESTS_NEED_DOCKER"  # set where tests of containers must run: CI
GPUS = len(list(Path("/dev").glob("nvidia[0-9]*")))
# Commands that run others as a user without any capability, and where no network namespace may be made.
UNPRIVILEGED = ["unshare", "--user", "--map-user=1234", "--map-group=1234"]
NO_NAMESPACES = 'echo 0 >/proc/sys/user/max_net_namespaces; exec "$@"'
REFUSED = ["unshare", "--user", "--map-root-user", "sh", "-c", NO_NAMESPACES, "sh"]
SMALL = ["train.batch_size=48", "train.steps=12", "summary.every=1", "checkpoint.every=5"]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--part", type=_part, metavar="K/N", help="of the cluster tests only the K-th of N parts")


def _part(text: str) -> tuple[int, int]:
    numbers = re.fullmatch(r"(\d+)/(\d+)", text)
    if numbers is None or not 1 <= int(numbers[1]) <= int(numbers[2]):
        raise argparse.ArgumentTypeError(f"{text!r} is not K/N with 1 <= K <= N, e.g. 3/8")
    return int(numbers[1]), int(numbers[2])


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if part := config.getoption("part"):
        k, n = part
        clusters = [item for item in items if item.get_closest_marker("cluster")]
        left_out = {item for item in clusters if zlib.crc32(item.nodeid.encode()) % n != k - 1}
        config.hook.pytest_deselected(items=list(left_out))
        items[:] = [item for item in items if item not in left_out]
    has_engine = bool(os.environ.get(NEEDS_DOCKER)) or _has_engine()
    for item in items:
        if GPUS == 0 and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="this machine has no GPU (no /dev/nvidia0)"))
        if not has_engine and item.get_closest_marker("docker"):
            reason = (
                "NO CONTAINER WAS TESTED: no Docker engine with Compose answers (docker info, docker compose version)"
            )
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(autouse=True)
def _end_clusters() -> Iterator[None]:
    yield
    if small_clusters := sys.modules.get("small_clusters"):  # it imports TensorFlow, which not every test needs
        small_clusters.end_trained()


def _has_engine() -> bool:
    try:
        return all(
            subprocess.run(["docker", *words], capture_output=True, timeout=20, check=False).returncode == 0
            for words in (["info"], ["compose", "version"])
        )
    except (OSError, subprocess.TimeoutExpired):
        return False


def pytest_configure(config: pytest.Config) -> None:
    """Lets all commands of a session start their tasks from one process that has imported TensorFlow."""
    if not hasattr(config, "workerinput"):
        folder = tempfile.mkdtemp(prefix="trainer-")
        config.add_cleanup(functools.partial(_end_warm_processes, folder))
        os.environ |= {"XDG_RUNTIME_DIR": folder, "TRAINER_WARM_MINUTES": "5"}


def _end_warm_processes(folder: str) -> None:
    for one in warm.find():
        warm.end(one)
    shutil.rmtree(folder)


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

    def wait(self, deadline_secs: float = DEADLINE_SECS) -> int:
        """The exit code; at the deadline the command is killed, and the test fails with its output."""
        try:
            self.output, _ = self.process.communicate(timeout=deadline_secs)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the command did not end within {deadline_secs:.0f} s\n{self.kill_and_explain()}")
        return self.process.returncode

    def kill_and_explain(self) -> str:
        """Kills the command, and returns what shows why it did not end."""
        self.end()
        return self.output

    def end(self) -> None:
        """Kills the command, if it is alive; tasks of a launcher die with it."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.output, _ = self.process.communicate()

    def wait_for_step(self, step: int, deadline_secs: float = DEADLINE_SECS) -> None:
        """Returns as soon as history.jsonl, which the chief writes line by line, has a global step."""
        deadline = time.monotonic() + deadline_secs
        while all(line["step"] < step for line in self.history()[-1:]):
            if self.process.poll():
                pytest.fail(f"ended with {self.wait()} before step {step}: {self.output}")
            if time.monotonic() > deadline:
                pytest.fail(f"step {step} was not reached within {deadline_secs:.0f} s\n{self.kill_and_explain()}")
            time.sleep(0.02)

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
        return "\n".join(f"== {log.name}\n{log.read_text(errors='replace')}" for log in self.logs())

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


def can_be_unprivileged() -> bool:
    """Whether a command can be run as a user without capabilities, and that user may make a network namespace."""
    try:
        ended = subprocess.run([*UNPRIVILEGED, "unshare", "--user", "--net", "true"], capture_output=True, check=False)
    except OSError:
        return False
    return ended.returncode == 0


def _is_task(pid: int) -> bool:
    try:
        return b"trainer" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def free_ports(count: int) -> list[int]:
    """Ports that nobody has now, and that the kernel gives to nobody of itself."""
    sockets = [socket.socket() for _ in range(count)]
    for free in sockets:
        free.bind(("127.0.0.1", 0))
    ports = [20000 + free.getsockname()[1] % 10000 for free in sockets]
    for free in sockets:
        free.close()
    return ports


@pytest.fixture(scope="session")
def python() -> Iterator[Forks]:
    """Runs command lines of Python that need no TensorFlow, in forks of one interpreter."""
    with forks("trainer.commands.command", "trainer.plan.validate", "trainer.launch.describe", "numpy") as interpreter:
        yield interpreter


@pytest.fixture(scope="session")
def tensorflow_python() -> Iterator[Forks]:
    """Runs command lines of Python that need TensorFlow, in forks of an interpreter that has imported it."""
    with forks("tensorflow", "trainer.task.server", "trainer.engine.instruments") as interpreter:
        yield interpreter


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """start(*overrides, environment={...}, within=[...]) -> Run; killed at the end of the test."""
    runs: list[Run] = []

    def start_one(*overrides: str, environment: dict[str, str] | None = None, within: Sequence[str] = ()) -> Run:
        runs.append(Run(list(overrides), tmp_path, environment or {}, within))
        return runs[-1]

    yield start_one
    for run in runs:
        run.end()


@pytest.fixture
def finish(start: Callable[..., Run]) -> Callable[..., Run]:
    """finish(*overrides) -> the Run, ended with 0."""

    def finish_one(*overrides: str) -> Run:
        run = start(*overrides)
        assert run.wait() == 0, run.output + "\n".join(log.read_text() for log in run.logs())
        return run

    return finish_one
