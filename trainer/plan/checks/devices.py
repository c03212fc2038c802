"""Checks `device:` of a config, and other mappings by job or task, such as `restart.max_of`. Pure."""

import difflib
import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from trainer.config.schema import AUTO, ClusterConfig, DeviceConfig
from trainer.config.words import count
from trainer.faults.problems import Problem
from trainer.plan.addresses import JOBS
from trainer.plan.checks.gpu_memory import check_gpu_memory
from trainer.plan.devices import GPU, Machine, key_of, named_parameters, of_task, tasks_of, uses

BY_TASK = ("gpus", "memory_fraction", "memory_mib", "growth", "intra_op_threads", "inter_op_threads", "soft_placement")
MEMORY = ("memory_fraction", "memory_mib", "growth")  # one of them at most
LEAST = {  # what a number must be at least, and why
    "memory_mib": (1, ": a task takes at least 1 MiB"),
    "intra_op_threads": (1, ": an operation needs a thread"),
    "inter_op_threads": (2, ": 1 deadlocks a server that waits in queues"),
}
MAX_CPUS = 64
NAME = re.compile(r"/(cpu|gpu):(0|[1-9]\d{0,3})", re.ASCII)


def check_devices(
    cluster: ClusterConfig, device: DeviceConfig, machine: Machine, here: Collection[tuple[str, int]], *, jit: bool
) -> Iterator[Problem]:
    """Yields every problem of a config's devices that the config and this machine show.

    Args:
        here: (job, index) of the tasks that run on this machine.
        jit: whether the step is compiled as a whole.
    """
    for mapping, key, value in _entries(device, BY_TASK):
        yield from _check_key(cluster, mapping, key, value)
    numbers = [*_check_numbers(device), *_check_indices(device)]
    yield from numbers
    yield from _check_there(device, machine, here)
    yield from _check_memory_keys(cluster, device)
    if not numbers:  # their sums would say the same once more
        yield from check_gpu_memory(cluster, device, machine, here)
    yield from _check_names(device)
    yield from _check_seen(cluster, device)
    if device.layers and jit:
        message = "train.jit=true compiles the whole step for one device"
        yield Problem("device.layers", "conflict", message, "leave out one of the two")


def _check_key(cluster: ClusterConfig, mapping: str, key: str, value: Any) -> Iterator[Problem]:
    """Checks that the key of an entry is a job or a task of the cluster."""
    sizes = {job: getattr(cluster, job) for job in JOBS if getattr(cluster, job)}
    if key in {*sizes, *(f"{job}:{index}" for job, index in tasks_of(cluster))}:
        return
    there = ", ".join(job + (f" ({job}:0)" if size == 1 else f" ({job}:0..{size - 1})") for job, size in sizes.items())
    message = f"{key!r} is neither a job nor a task of the cluster; available: {there}"
    job, _, index = key.partition(":")
    if job in JOBS and job not in sizes:
        remedy = f"leave it out, or choose a cluster with {job} tasks"
        yield Problem(f"{mapping}.{key}", "unknown-choice", message, remedy)
        return
    near = (difflib.get_close_matches(job, sizes, n=1) or ["worker"])[0]
    if index.isascii() and index.isdigit():
        near = f"{near}:{min(int(index), sizes[near] - 1)}"
    yield Problem(f"{mapping}.{key}", "unknown-choice", message, f"e.g. {_assignment(mapping, near, value)}")


def check_keys(
    cluster: ClusterConfig, mapping: str, given: Mapping[str, float], *, least: float, why: str = ""
) -> Iterator[Problem]:
    """Yields the problems of another mapping by job or task, whose values are numbers."""
    for key, value in given.items():
        yield from _check_key(cluster, mapping, key, value)
        yield from _check_least(mapping, key, value, least, why)


def _check_least(mapping: str, key: str, value: float, least: float, why: str) -> Iterator[Problem]:
    if not least <= value < math.inf:
        message = f"{value} is out of range; it must be at least {least}{why}"
        yield Problem(f"{mapping}.{key}", "out-of-range", message, f"e.g. {_assignment(mapping, key, least)}")


def _check_numbers(device: DeviceConfig) -> Iterator[Problem]:
    for key, value in device.memory_fraction.items():
        if not 0 < value <= 1:
            message = f"{value:g} is not in (0, 1]"
            remedy = "e.g. 0.45 each for two tasks on one GPU"
            yield Problem(f"device.memory_fraction.{key}", "out-of-range", message, remedy)
    for setting, (least, why) in LEAST.items():
        for mapping, key, value in _entries(device, (setting,)):
            yield from _check_least(mapping, key, value, least, why)


def _check_indices(device: DeviceConfig) -> Iterator[Problem]:
    for key, gpus in device.gpus.items():
        listed = list(dict.fromkeys(gpus))
        for gpu in listed:
            if gpu < 0:
                message = f"{gpu} is not a GPU index; indices start at 0"
                remedy = f"e.g. {_assignment('device.gpus', key, [0])}"
                yield Problem(f"device.gpus.{key}", "out-of-range", message, remedy)
            elif gpus.count(gpu) > 1:
                message = f"GPU {gpu} is listed twice in {_text(gpus)}"
                remedy = f"type {_assignment('device.gpus', key, listed)}"
                yield Problem(f"device.gpus.{key}", "duplicate", message, remedy)


def _check_there(device: DeviceConfig, machine: Machine, here: Collection[tuple[str, int]]) -> Iterator[Problem]:
    """Checks that the GPUs of this machine's tasks exist; other machines are not known here."""
    for gpu in sorted({gpu for task in here for gpu in of_task(device.gpus, *task) or ()}):
        if gpu >= machine.gpus:
            there = "GPU 0" if machine.gpus == 1 else f"GPUs 0..{machine.gpus - 1}" if machine.gpus else "no GPU"
            message = f"there is no GPU {gpu}; this machine has {there}"
            remedy = f"choose from {there}" if machine.gpus else "type device=cpu, or leave device.gpus out"
            yield Problem("device.gpus", "not-available", message, remedy)


def _check_memory_keys(cluster: ClusterConfig, device: DeviceConfig) -> Iterator[Problem]:
    """Checks that a task with a setting of GPU memory has a GPU, and no other such setting."""
    tasks, memory = tasks_of(cluster), _entries(device, MEMORY)
    for mapping, key, value in memory:
        meant = [task for task in tasks if key in (task[0], f"{task[0]}:{task[1]}")]
        if meant and value is not False and not any(of_task(device.gpus, *task) for task in meant):
            message = f"{key} sees no GPU"
            yield Problem(f"{mapping}.{key}", "not-set", message, f"add {_assignment('device.gpus', key, [0])}")
    reported = set()
    for job, index in tasks:
        keys = {(f"device.{name}", key_of(getattr(device, name), job, index)) for name in MEMORY}
        given = [f"{mapping}.{key}" for mapping, key, value in memory if (mapping, key) in keys and value is not False]
        if len(given) > 1 and tuple(given) not in reported:
            reported.add(tuple(given))
            message = (
                f"{job}:{index} sets more than one of memory_fraction, memory_mib and growth: {' and '.join(given)}"
            )
            yield Problem(given[0], "conflict", message, "keep only one of them")


def _check_names(device: DeviceConfig) -> Iterator[Problem]:
    """Checks that devices inside a task are written in one form, and that each replica has its own."""
    named = [("device.replicas", name) for name in dict.fromkeys(device.replicas)]
    named += [("device.parameters", name) for name in named_parameters(device)]
    named += [(f"device.layers.{pattern}", name) for pattern, name in device.layers.items()]
    for key, name in named:
        match = NAME.fullmatch(name)
        if match is None:
            first = f"{AUTO}, " if key == "device.parameters" else ""
            message = f"{name!r} is not a device; available: {first}/cpu:0, /cpu:1, ... and /gpu:0, /gpu:1, ..."
            yield Problem(key, "malformed", message, f"write {_nearest(name) or (AUTO if first else '/cpu:0')}")
        elif match[1] == "cpu" and int(match[2]) >= MAX_CPUS:
            message = f"{name} is out of range; a task has /cpu:0 to /cpu:{MAX_CPUS - 1}"
            yield Problem(key, "out-of-range", message, f"e.g. /cpu:{MAX_CPUS - 1}")
    for name in dict.fromkeys(device.replicas):
        if device.replicas.count(name) > 1:
            remedy = f"type device.replicas={_text(list(dict.fromkeys(device.replicas)))}"
            message = f"{name} is listed twice; train.replicas says how many replicas the devices compute in turn"
            yield Problem("device.replicas", "duplicate", message, remedy)


def _check_seen(cluster: ClusterConfig, device: DeviceConfig) -> Iterator[Problem]:
    """Checks that the task sees every /gpu:N; N counts visible GPUs from 0, whatever their index on the host."""
    reported = set()
    for job, index in tasks_of(cluster):
        gpus = list(of_task(device.gpus, job, index) or ())
        for key, names in uses(cluster, device, job, index).items():
            for name in names:
                number = int(name.removeprefix(GPU)) if name.startswith(GPU) and NAME.fullmatch(name) else -1
                if number >= len(gpus) and (key, name) not in reported:
                    reported.add((key, name))
                    visible = f"{count(len(gpus), 'GPU')} ({', '.join(map(str, gpus))})" if gpus else "no GPU"
                    message = f"there is no {name}: {job}:{index} sees {visible}"
                    yield Problem(key, "not-available", message, _more(device, job, index, number))


def _more(device: DeviceConfig, job: str, index: int, number: int) -> str:
    """Returns the override that makes one more GPU visible to a task."""
    gpus = list(of_task(device.gpus, job, index) or ())
    free = [gpu for gpu in range(len(gpus) + number + 1) if gpu not in gpus]
    key, wanted = key_of(device.gpus, job, index) or job, gpus + free[: number + 1 - len(gpus)]
    return f"add {_assignment('device.gpus', key, wanted)}"


def _nearest(name: str) -> str | None:
    """Returns the device that was probably meant by `device:CPU:1`, `gpu1` or `/GPU:0`; None if it names no kind."""
    match = re.search(r"(cpu|gpu)\D*(\d{0,4})$", name, re.ASCII | re.IGNORECASE)
    return f"/{match[1].lower()}:{int(match[2] or 0)}" if match else None


def _entries(device: DeviceConfig, settings: Iterable[str]) -> list[tuple[str, str, Any]]:
    return [
        (f"device.{setting}", key, value) for setting in settings for key, value in getattr(device, setting).items()
    ]


def _assignment(mapping: str, key: str, value: Any) -> str:
    """Returns an entry of a mapping as it is typed in a shell; Hydra reads a bare : as the end of the key."""
    escaped = key.replace(":", "\\:")
    return f"'{mapping}={{{escaped}:{_text(value)}}}'"


def _text(value: Any) -> str:
    return str(value).replace(" ", "").replace("'", "").lower()
