"""Measures what the tasks of an undisturbed run do in a time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from bench import processes
from trainer.observe.peers import read_status
from trainer.observe.task_page import TaskPage

START_SECS = 300.0
# Only steps: no checkpoints, hardly a line of history, and timeouts that a busy machine does not exceed.
ALONE = ["train.steps=10000000", "checkpoint.every=0", "history.every=1000000", "timeouts.heartbeat_secs=600"]
ALONE += ["timeouts.step_secs=600", "timeouts.roll_call_secs=300"]


class RunError(Exception):
    """A run did not train; says how it ended."""


class Sample(NamedTuple):
    """The progress of a run between two polls."""

    steps: int  # global steps
    secs: float
    cpu_secs: dict[str, float]  # by task
    wait_secs: float  # of the chief, until parameters were here

    @property
    def step_cpu_secs(self) -> float:
        """Returns the CPU seconds of all tasks for one step."""
        return sum(self.cpu_secs.values()) / self.steps


class SteadyRun:
    """A run that trains until it is ended."""

    def __init__(self, process: subprocess.Popen[bytes], directory: Path) -> None:
        self.process, self.directory = process, directory
        self.pids: set[int] = set()  # of its tasks
        self._controls: dict[str, str] = {}

    def wait_for_step(self, step: int) -> None:
        """Returns when the chief has made a step.

        Raises:
            RunError: if the run ends before, or takes too long.
        """
        deadline = time.monotonic() + START_SECS
        while True:
            if self.process.poll() is not None or time.monotonic() > deadline:
                output = (self.directory.parent / "output").read_text(errors="replace").strip().splitlines()
                raise RunError(" ".join(output[-3:]) or "it printed nothing")
            try:
                if self._pages()["worker:0"].step >= step:
                    return
            except (OSError, ValueError, KeyError):  # it has not started yet
                pass
            time.sleep(0.2)

    def measure(self, secs: float) -> Sample:
        """Polls the tasks at the begin and the end of a time."""
        before = self._poll()
        time.sleep(secs)
        after = self._poll()
        cpu = {name: after[1][name] - before[1][name] for name in after[1]}
        pages = self._pages()
        waited = pages["worker:0"].wait_fraction * (after[2] - before[2])
        return Sample(after[0] - before[0], after[2] - before[2], cpu, waited)

    def received_nbytes(self) -> int:
        """Bytes that crossed the loopback interface of its network."""
        return processes.loopback(self._pages()["worker:0"].pid)[0]

    def _poll(self) -> tuple[int, dict[str, float], float]:
        pages = self._pages()
        cpu = {name: processes.cpu_secs(page.pid) for name, page in pages.items()}
        self.pids |= {page.pid for page in pages.values()}
        return pages["worker:0"].step, cpu, time.monotonic()

    def _pages(self) -> dict[str, TaskPage]:
        if not self._controls:
            plan = json.loads((self.directory / "plan.json").read_text())
            self._controls = {task["name"]: task["control"] for task in plan["tasks"]}
        # The chief last, so that its step is of the time that is read next.
        names = sorted(self._controls, key="worker:0".__eq__)
        return {name: read_status(self._controls[name], timeout_secs=30.0) for name in names}


@contextmanager
def steady_run(overrides: Sequence[str]) -> Iterator[SteadyRun]:
    """Runs `python -m trainer` with these overrides in a temporary directory; its tasks end with the block."""
    with tempfile.TemporaryDirectory(prefix="trainer-bench-") as directory:
        run = Path(directory, "run")
        command = [sys.executable, "-m", "trainer", *ALONE, *overrides, f"run={run}"]
        with Path(directory, "output").open("wb") as output:
            process = subprocess.Popen(
                command,
                env=os.environ | processes.without_warm_process(Path(directory)),
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        steady = SteadyRun(process, run)
        try:
            yield steady
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # the launcher; its tasks die with it
            process.wait()
            processes.wait_until_gone(steady.pids)  # or the next run is measured beside their end
