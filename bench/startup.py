"""Measures the time from the command to the first step, and from a task's death to its successor's first step."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from bench.config import BenchConfig
from bench.contestants import Contestant
from bench.running import POLL_SECS, ContestantError, Running

CLUSTERS = ("2ps4w", "1ps2w", "local")
DIES = {"2ps4w": "worker:1"}  # by cluster, the task that is killed
TARGETS_SECS = {"2ps4w": 5.0, "local": 4.0}  # at most, by cluster
TRAINS_SECS = 2.0  # before the task is killed


@dataclass(frozen=True)
class ClusterStart:
    """One start of a cluster."""

    cluster: str
    first_step_secs: float | None = None  # from the command
    successor_secs: float | None = None  # from the death of a task to the first step of its successor
    peak_mib: dict[str, float] | None = None  # by process
    failed: str | None = None


def measure(cluster: str, directory: Path, options: BenchConfig, cores: int) -> ClusterStart:
    """Starts the shipped cnn on a cluster, as a user would, and kills a task of it."""
    overrides = (f"cluster={cluster}", "train.steps=1000000000", f"run={directory}")
    with Running(_AsTyped(cluster, cluster, 0, overrides=overrides), "cnn", directory, cores=cores) as running:
        try:
            running.wait_for_first_step(options.start_secs)
            successor = _replace(running, DIES[cluster], options.start_secs) if cluster in DIES else None
        except ContestantError as error:
            return ClusterStart(cluster, failed=str(error))
        return ClusterStart(cluster, running.first_step_secs, successor, running.peak_mib())


class _AsTyped(Contestant):
    """One of our runs with nothing but its own overrides."""

    def command(self, workload: str, directory: Path, cores: int) -> list[str]:
        return ["-m", "trainer", *self.overrides]


def _replace(running: Running, task: str, deadline_secs: float) -> float:
    """Kills a task; returns the seconds from then to the first step of the one that takes its place."""
    pid, _ = _first_step(running, task, deadline_secs, but=0)
    time.sleep(TRAINS_SECS)
    died_at = time.time()
    os.kill(pid, signal.SIGKILL)
    _, first_step_at = _first_step(running, task, deadline_secs, but=pid)
    return first_step_at - died_at


def _first_step(running: Running, task: str, deadline_secs: float, *, but: int) -> tuple[int, float]:
    """Waits for a step of a task that is not the process `but`; returns its pid, and when that was (Unix time, s)."""
    deadline = time.monotonic() + deadline_secs
    while (page := running.page(task)) is None or page.pid == but or page.first_step_at is None:
        running.check()
        if time.monotonic() > deadline:
            raise running.error(f"waited {deadline_secs:g} s for the first step of {task}")
        time.sleep(POLL_SECS)
    return page.pid, page.first_step_at
