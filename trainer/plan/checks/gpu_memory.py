"""Checks whether the tasks that share a GPU fit into its memory. Pure: no TensorFlow.

A GPU belongs to a host; tasks are on one host if their addresses name the same host.
"""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

from trainer.config.schema import ClusterConfig, DeviceConfig
from trainer.config.words import listed, some
from trainer.faults.problems import Problem
from trainer.plan.devices import THIS_HOST, Machine, host_of, of_task, tasks_of

FITS = 1 + 1e-9  # 0.1 + 0.2 + 0.7 is a little more than 1


class GpuShare(NamedTuple):
    """The memory of a GPU that one task takes; without a setting, TensorFlow's default: nearly all that is free."""

    task: str
    fraction: float | None
    mib: int | None
    growth: bool

    @property
    def is_open(self) -> bool:
        """Whether no setting limits the task's share."""
        return self.fraction is None and self.mib is None and not self.growth


class SharedGpu(NamedTuple):
    """One GPU and the tasks that see it."""

    name: str  # GPU 0, or GPU 0 of 10.0.0.2
    mib: int | None  # all of its memory, where known
    shares: Sequence[GpuShare]


def check_gpu_memory(
    cluster: ClusterConfig, device: DeviceConfig, machine: Machine, here: Collection[tuple[str, int]]
) -> Iterator[Problem]:
    """Yields a problem for every GPU whose tasks cannot all have the memory they take; `here` run on this machine."""
    for gpu in _shared(cluster, device, machine, here):
        undecided = [share.task for share in gpu.shares if share.is_open]
        if len(undecided) > 1:
            message = f"{_list(undecided)} share {gpu.name}, and the first would take nearly all of its memory"
            remedy = f"add 'device.memory_fraction={_each(undecided, math.floor(90 / len(gpu.shares)) / 100)}'"
            yield Problem("device.memory_fraction", "over-capacity", message, remedy)
        yield from _too_much(gpu)


def warn_of_gpu_memory(
    cluster: ClusterConfig, device: DeviceConfig, machine: Machine, here: Collection[tuple[str, int]]
) -> Iterator[Problem]:
    """Yields a warning for every GPU where a task's memory depends on which task starts first."""
    for gpu in _shared(cluster, device, machine, here):
        loose = [share.task for share in gpu.shares if share.is_open or share.growth]
        if loose and len(gpu.shares) > 1:
            takes = "takes whatever is free" if len(loose) == 1 else "take whatever is free"
            message = f"{gpu.name} is shared by {len(gpu.shares)} tasks, and {_list(loose)} {takes}"
            remedy = "give each of them a memory_fraction or memory_mib"
            yield Problem("device.memory_fraction", "doubtful", message, remedy)


def _too_much(gpu: SharedGpu) -> Iterator[Problem]:
    fractions = [share.fraction for share in gpu.shares if share.fraction is not None]
    mibs = [share.mib for share in gpu.shares if share.mib is not None]
    of_mibs = sum(mibs) / gpu.mib if gpu.mib else 0.0
    if sum(fractions) + of_mibs <= FITS:
        return
    count = len(fractions) + len(mibs)
    if gpu.mib is None or not mibs:
        message = f"the tasks on {gpu.name} take {_terms(fractions)} = {sum(fractions):g} > 1 of its memory"
        remedy = f"give each at most {math.floor(100 / count) / 100:g}"
        yield Problem("device.memory_fraction", "over-capacity", message, remedy)
    else:
        terms = " + ".join(filter(None, [_terms(fractions, f" x {gpu.mib}"), _terms(mibs)]))
        mib = f"{sum(fractions) * gpu.mib + sum(mibs):.0f} MiB, and it has {gpu.mib}"
        message = f"the tasks on {gpu.name} take {terms} = {mib}"
        yield Problem("device.memory_mib", "over-capacity", message, f"give each at most {gpu.mib // count} MiB")


def _shared(
    cluster: ClusterConfig, device: DeviceConfig, machine: Machine, here: Collection[tuple[str, int]]
) -> list[SharedGpu]:
    """Returns every GPU that some task sees, by host and index."""
    tasks: dict[tuple[str, int], list[tuple[str, int]]] = {}
    for task in tasks_of(cluster):
        for gpu in set(of_task(device.gpus, *task) or ()):
            tasks.setdefault((host_of(cluster, *task), gpu), []).append(task)
    return [
        SharedGpu(
            f"GPU {gpu}" if host == THIS_HOST else f"GPU {gpu} of {host}",
            machine.gpu_mib[gpu] if seen_by[0] in here and 0 <= gpu < len(machine.gpu_mib) else None,
            [
                GpuShare(
                    f"{job}:{index}",
                    of_task(device.memory_fraction, job, index),
                    of_task(device.memory_mib, job, index),
                    bool(of_task(device.growth, job, index)),
                )
                for job, index in seen_by
            ],
        )
        for (host, gpu), seen_by in sorted(tasks.items())
    ]


def _terms(sizes: Sequence[float], unit: str = "") -> str:
    """Returns the terms of a sum, equal ones as one product: 2 x 0.4 + 0.1."""
    return " + ".join(
        f"{count} x {size:.10g}{unit}" if count > 1 else f"{size:.10g}{unit}" for size, count in Counter(sizes).items()
    )


def _list(tasks: Sequence[str]) -> str:
    return some(tasks, 3) if len(tasks) > 4 else listed(tasks)


def _each(tasks: Sequence[str], fraction: float) -> str:
    """Returns entries by job or task that give each of these tasks the same value."""
    jobs = dict.fromkeys(task.partition(":")[0] for task in tasks)
    return "{" + ",".join(f"{job}:{fraction:g}" for job in jobs) + "}"
