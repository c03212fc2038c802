"""Shares of this machine, on which the trials of a sweep run at the same time."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from trainer.config.schema import Launch, RunConfig, SweepConfig
from trainer.faults.problems import Problem
from trainer.plan.devices import Machine
from trainer.plan.environment import VISIBLE, allotted_gpus


@dataclass(frozen=True)
class Share:
    """What one trial at a time may use; None: all that the sweep may."""

    cores: frozenset[int] | None = None
    gpus: tuple[str, ...] | None = None

    def environment(self) -> dict[str, str]:
        return {} if self.gpus is None else {VISIBLE: ",".join(self.gpus) or "-1"}

    def prefix(self) -> list[str]:
        """What a person types before a command for it to use this share."""
        environment = ["env", f"{VISIBLE}={','.join(self.gpus)}"] if self.gpus else []
        return [*environment, *(["taskset", "-c", ",".join(map(str, sorted(self.cores)))] if self.cores else [])]

    @contextmanager
    def inherited(self) -> Iterator[None]:
        """Processes that are started meanwhile may use these cores only."""
        if self.cores is None:
            yield
            return
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self.cores)
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)


def shares(config: RunConfig, machine: Machine) -> list[Share]:
    """As many as `sweep.parallel`."""
    asked = config.sweep
    if not _shares_out(asked):
        return [Share()]
    of_each = asked.cores_per_trial or max(1, machine.cores // asked.parallel), asked.gpus_per_trial or 0
    cores, gpus = sorted(os.sched_getaffinity(0)), allotted_gpus(os.environ) or [*map(str, range(machine.gpus))]
    parts = [[slice(number * each, (number + 1) * each) for each in of_each] for number in range(asked.parallel)]
    return [Share(frozenset(cores[own_cores]), tuple(gpus[own_gpus])) for own_cores, own_gpus in parts]


def check(config: RunConfig, machine: Machine) -> list[Problem]:
    """What is wrong with the shares that a sweep asks for."""
    asked = config.sweep
    if not _shares_out(asked):
        return []
    if config.launch.name is not Launch.local:
        return [Problem("sweep.parallel", f"not with launch={config.launch.name.value}", "launch=local")]
    if not hasattr(os, "sched_setaffinity"):
        return [Problem("sweep.parallel", "this system cannot share out its cores", "sweep.parallel=1")]
    if asked.cores_per_trial is None and asked.gpus_per_trial is None:
        remedy = f"e.g. sweep.cores_per_trial={max(1, machine.cores // asked.parallel)}, or sweep.gpus_per_trial"
        return [Problem("sweep.parallel", f"{asked.parallel} trials at a time need a share each", remedy)]
    wanted = {"cores": (asked.cores_per_trial or 1, machine.cores), "gpus": (asked.gpus_per_trial or 0, machine.gpus)}
    return [
        Problem(
            f"sweep.{name}_per_trial",
            f"{asked.parallel} trials with {of_each} each need {total}; this machine has {there}",
            "fewer trials at a time, or less for each",
        )
        for name, (of_each, there) in wanted.items()
        if (total := asked.parallel * of_each) > there
    ]


def _shares_out(asked: SweepConfig) -> bool:
    return asked.parallel > 1 or asked.cores_per_trial is not None or asked.gpus_per_trial is not None
