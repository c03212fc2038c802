"""Shares of this machine, for trials of a sweep that run in parallel."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from trainer.config.schema import DeviceConfig, Launch, LaunchConfig
from trainer.config.typed import SweepConfig
from trainer.faults.problems import Problem
from trainer.plan.devices import Machine
from trainer.plan.environment import VISIBLE, allotted_gpus


@dataclass(frozen=True)
class TrialShare:
    """The cores and GPUs of one trial at a time; None: all that the sweep may use."""

    cores: frozenset[int] | None = None
    gpus: tuple[str, ...] | None = None

    def environment(self) -> dict[str, str]:
        return {} if self.gpus is None else {VISIBLE: ",".join(self.gpus) or "-1"}

    def prefix(self) -> list[str]:
        """Returns the words to type before a command so that it uses this share."""
        environment = ["env", *(f"{name}={value}" for name, value in self.environment().items())] if self.gpus else []
        return [*environment, *(["taskset", "-c", ",".join(map(str, sorted(self.cores)))] if self.cores else [])]

    @contextmanager
    def inherited(self) -> Iterator[None]:
        """Restricts processes started inside the context to these cores."""
        if self.cores is None:
            yield
            return
        before = os.sched_getaffinity(0)
        os.sched_setaffinity(0, self.cores)
        try:
            yield
        finally:
            os.sched_setaffinity(0, before)


def shares(asked: SweepConfig, machine: Machine) -> list[TrialShare]:
    """Returns `sweep.parallel` shares of this machine."""
    if not are_asked_for(asked):
        return [TrialShare()]
    one = machine_of(asked, machine)
    cores, gpus = sorted(os.sched_getaffinity(0)), allotted_gpus(os.environ) or [*map(str, range(machine.gpus))]
    return [
        TrialShare(frozenset(_nth(cores, one.cores, number)), tuple(_nth(gpus, one.gpus, number)))
        for number in range(asked.parallel)
    ]


def are_asked_for(asked: SweepConfig) -> bool:
    return _key(asked) is not None


def machine_of(asked: SweepConfig, machine: Machine) -> Machine:
    """Returns the part of the machine that a trial can use."""
    if not are_asked_for(asked):
        return machine
    cores = asked.cores_per_trial or max(1, machine.cores // asked.parallel)
    return replace(machine, cores=cores, gpus=asked.gpus_per_trial or 0)


def check(asked: SweepConfig, launch: LaunchConfig, device: DeviceConfig, machine: Machine) -> list[Problem]:
    """Returns the problems of the shares that a sweep asks for."""
    key = _key(asked)
    if key is None:
        return []
    if launch.name is not Launch.local:
        return [Problem(key, "conflict", "only works with launch=local", "leave it out, or type launch=local")]
    if not hasattr(os, "sched_setaffinity"):
        return [Problem(key, "not-available", "this system cannot assign cores to processes", "leave it out")]
    if asked.cores_per_trial is None and asked.gpus_per_trial is None:
        remedy = f"e.g. sweep.cores_per_trial={max(1, machine.cores // asked.parallel)}, or sweep.gpus_per_trial"
        return [Problem(key, "not-set", f"the machine must be divided among {asked.parallel} parallel trials", remedy)]
    if device.gpus and asked.gpus_per_trial is None:
        message = "device.gpus is set, but no trial gets a GPU"
        return [Problem("sweep.gpus_per_trial", "not-set", message, "e.g. sweep.gpus_per_trial=1")]
    wanted = {"cores": (asked.cores_per_trial or 1, machine.cores), "gpus": (asked.gpus_per_trial or 0, machine.gpus)}
    return [
        Problem(
            f"sweep.{name}_per_trial",
            "over-capacity",
            f"{asked.parallel} trials with {of_each} each need {total}; this machine has {there}",
            "run fewer trials at once, or give each less",
        )
        for name, (of_each, there) in wanted.items()
        if (total := asked.parallel * of_each) > there
    ]


def _key(asked: SweepConfig) -> str | None:
    """Returns the key that asks for shares; None if none does."""
    if asked.parallel > 1:
        return "sweep.parallel"
    given = {"sweep.cores_per_trial": asked.cores_per_trial, "sweep.gpus_per_trial": asked.gpus_per_trial}
    return next((key for key, value in given.items() if value is not None), None)


def _nth(listed: Sequence[Any], each: int, number: int) -> Sequence[Any]:
    return listed[number * each : (number + 1) * each]
