"""A contestant at work: started, paused, and asked how far it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from bench import counter, processes
from bench.contestants import ROOT, Contestant
from trainer.observe.peers import read_status
from trainer.observe.runs import pages_of
from trainer.observe.task_page import TaskPage
from trainer.plan.environment import QUIET

LOG = "bench.log"
LOG_LINES = 12  # shown of a contestant that failed
POLL_SECS = 0.05
PAGE_POLL_SECS, FILE_POLL_SECS = 0.005, 0.001  # while waiting for the next step
SILENT_SECS = 60.0  # without a step a contestant has failed
NURSERY = "trainer.launch.processes.nursery"


class ContestantError(RuntimeError):
    """A contestant did not start, ended or made no steps; `log` is the end of its output, `pid` its first process."""

    def __init__(self, why: str, log: list[str], pid: int) -> None:
        super().__init__(why)
        self.log, self.pid = log, pid


class Running:
    """A contestant and all its processes. Leaving the block ends them."""

    def __init__(self, contestant: Contestant, workload: str, directory: Path, *, cores: int) -> None:
        """Starts it.

        Args:
            directory: an empty one.
            cores: that its workers share.
        """
        self.contestant, self.workload, self._directory = contestant, workload, directory
        self.command = ["python", *contestant.command(workload, Path("RUN"), cores)]  # for who wants to type it
        self.first_step_secs: float | None = None  # from the command
        self.started_at = time.time()
        with (directory / LOG).open("wb") as log:
            self._process = processes.start(
                [sys.executable, *contestant.command(workload, directory, cores)],
                cwd=ROOT,
                env=os.environ
                | {"CUDA_VISIBLE_DEVICES": "-1"}
                | _quiet(contestant)
                | processes.without_warm_process(directory),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches the bench alone
            )

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *ignored: object) -> None:
        self.end()

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait_for_first_step(self, deadline_secs: float) -> None:
        """Returns when it has made a step.

        Raises:
            ContestantError: if it ends before, or takes too long.
        """
        deadline = time.monotonic() + deadline_secs
        while (first_at := self.progress()[1]) is None:
            self.check()
            if time.monotonic() > deadline:
                raise self.error(f"made no step within {deadline_secs:g} s")
            time.sleep(POLL_SECS)
        self.first_step_secs = first_at - self.started_at

    def progress(self, task: str = "worker:0") -> tuple[int, float | None]:
        """Returns the chief's global steps so far, and when the first was done (Unix time, seconds)."""
        if not self.contestant.is_ours:
            return counter.read(self._directory)
        page = self.page(task)
        return (page.step, page.first_step_at) if page else (0, None)

    def page(self, task: str) -> TaskPage | None:
        """Returns the status page of a task of ours; none while it does not answer."""
        try:
            tasks = json.loads((self._directory / "plan.json").read_text())["tasks"]
            control = next(entry["control"] for entry in tasks if entry["name"] == task)
            return read_status(control, timeout_secs=SILENT_SECS)
        except (OSError, ValueError):
            return None

    def next_step(self) -> tuple[int, float]:
        """Waits until a step is done; returns the global step, and the time of it (monotonic, seconds)."""
        began, poll_secs = time.monotonic(), PAGE_POLL_SECS if self.contestant.is_ours else FILE_POLL_SECS
        before, _ = self.progress()
        while (step := self.progress()[0]) <= before:
            self.check()
            if time.monotonic() - began > SILENT_SECS:
                raise self.error(f"made no step in {SILENT_SECS:g} s")
            time.sleep(poll_secs)
        return step, time.monotonic()

    def check(self) -> None:
        """Raises ContestantError if it has ended."""
        if self._process.poll() is not None:
            raise self.error(f"ended with exit code {self._process.returncode}")

    def error(self, why: str) -> ContestantError:
        lines = (self._directory / LOG).read_text(errors="replace").splitlines()
        return ContestantError(f"{self.contestant.name} {why}", [line[:400] for line in lines[-LOG_LINES:]], self.pid)

    def pause(self) -> None:
        processes.freeze(self.pid)

    def resume(self) -> None:
        processes.thaw(self.pid)

    def names(self) -> dict[int, str]:
        """Returns names of its processes by pid; tasks have theirs."""
        pids = processes.tree(self.pid)
        tasks = self._tasks()
        return {pid: tasks.get(pid) or self._name(pid, alone=len(pids) == 1) for pid in pids}

    def cpu_secs(self) -> dict[str, float]:
        """Returns the CPU time so far by process; those of one name are summed."""
        return _summed(self.names(), processes.cpu_secs)

    def peak_mib(self) -> dict[str, float]:
        """Returns the most memory that each process has had in RAM."""
        return _summed(self.names(), processes.peak_mib)

    def end(self) -> None:
        """Kills all processes, and waits until they are gone."""
        pids = processes.kill(self.pid)
        self._process.wait()
        processes.wait_until_gone(pids)

    def _tasks(self) -> dict[int, str]:
        if not self.contestant.is_ours:
            return {}
        try:
            pages = pages_of(json.loads((self._directory / "status.json").read_text()))
        except (OSError, ValueError):
            return {}
        return {page.pid: name for name, page in pages.items()}

    def _name(self, pid: int, *, alone: bool) -> str:
        if pid == self.pid:
            return "process" if alone else "launcher"
        command = processes.command_of(pid)
        named = [text.removeprefix("--task=") for text in command if text.startswith("--task=")]
        return named[0] if named else "nursery" if NURSERY in command else "others"


def _quiet(contestant: Contestant) -> dict[str, str]:
    """Returns the environment of a peer, changed only where it would hang the peer or fill its log."""
    return {} if contestant.is_ours else {name: QUIET[name] for name in ("TF_CPP_MIN_LOG_LEVEL", "grpc_proxy")}


def _summed(names: dict[int, str], measure: Any) -> dict[str, float]:
    totals: dict[str, float] = {}
    for pid, name in names.items():
        totals[name] = totals.get(name, 0.0) + measure(pid)
    return totals
