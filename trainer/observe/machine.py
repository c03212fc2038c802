"""Reads the resources of this machine: cores, memory, GPUs, limits of control groups. Imports no TensorFlow."""

import os
import re
import resource
import socket
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TypeVar

from trainer.plan.checks.versions import TENSORFLOWS
from trainer.plan.devices import Machine
from trainer.plan.environment import allotted_gpus

NVIDIA_SMI_DEADLINE_SECS = 5.0  # a second where its driver must be loaded first
Number = TypeVar("Number", int, float)
ROOT = Path("/")  # tests use another folder


@dataclass(frozen=True)
class CgroupLimits:
    """The tightest limits of all control groups around this process; None: no limit."""

    cores: float | None = None
    memory_bytes: int | None = None
    memory_used_bytes: int = 0  # of that limit, without files that are only cached
    threads: int | None = None


def this_machine(*, with_gpu_memory: bool = False) -> Machine:
    """Returns the cores, files and threads of this process, NVIDIA GPUs, and versions of TensorFlow and Keras.

    Args:
        with_gpu_memory: also asks nvidia-smi for the memory of each GPU, which takes up to a second.
    """
    gpu_mib = memory_of_gpus() if with_gpu_memory else ()
    allotted = allotted_gpus(os.environ)
    if allotted and all(number.isdigit() and int(number) < len(gpu_mib) for number in allotted):
        gpu_mib = tuple(gpu_mib[int(number)] for number in allotted)
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    limits = cgroup_limits()
    return Machine(
        cores=usable_cores(limits.cores),
        gpus=len(allotted) or len(gpu_mib) or len(list(Path("/dev").glob("nvidia[0-9]*"))),
        gpu_mib=gpu_mib,
        files=None if files == resource.RLIM_INFINITY else files,
        threads=_threads(limits.threads),
        memory_bytes=_least([limits.memory_bytes, _memory_of_machine()]),
        libraries={name: version for name in (*TENSORFLOWS, "keras") if (version := version_of(name)) is not None},
    )


def _memory_of_machine() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (OSError, ValueError):
        return None


def memory_of_gpus() -> tuple[int, ...]:
    """Returns MiB of each GPU, by index; empty if nvidia-smi is missing, slow or does not know."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        listed = subprocess.run(
            command, capture_output=True, text=True, timeout=NVIDIA_SMI_DEADLINE_SECS, check=True
        ).stdout
        return tuple(int(line) for line in listed.split("\n") if line.strip())
    except (OSError, subprocess.SubprocessError, ValueError):  # ValueError: "[N/A]" of a GPU that shares its memory
        return ()


def version_of(distribution: str) -> str | None:
    """Returns the installed version; None if there is no such distribution."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def is_local(host: str) -> bool:
    """Whether a host name or address belongs to this machine."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def usable_cores(limit: float | None, allowed: int | None = None) -> int:
    """Returns the whole cores of this process, at least one: those it may be scheduled on, up to its groups' limit."""
    if allowed is None:
        allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return allowed if limit is None else max(1, min(allowed, int(limit)))


def cgroup_limits(root: Path = ROOT) -> CgroupLimits:
    """Reads the limits of the control groups (v1 and v2) that this process is in, and of all groups around them."""
    folders = _cgroup_folders(root)
    cores = [
        _quota(read(folder / "cpu.max"))
        or _quota(read(folder / "cpu.cfs_quota_us") + " " + read(folder / "cpu.cfs_period_us"))
        for folder in folders
    ]
    memory = [
        (limit, _memory_used(read(folder / used), read(folder / "memory.stat")))
        for folder in folders
        for most, used in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
        if (limit := _number(folder / most)) is not None
    ]
    memory_bytes, memory_used_bytes = min(memory, default=(None, 0))
    return CgroupLimits(
        _least(cores), memory_bytes, memory_used_bytes, _least(_number(folder / "pids.max") for folder in folders)
    )


def memory_info(root: Path = ROOT) -> dict[str, int]:
    """Returns bytes by name, as in /proc/meminfo; empty on systems other than Linux."""
    lines = re.findall(r"^(\w+):\s+(\d+) kB$", read(root / "proc/meminfo"), re.MULTILINE)
    return {name: int(kib) * 1024 for name, kib in lines}


def _cgroup_folders(root: Path) -> list[Path]:
    """Returns the folders that may hold limits of this process, outermost last.

    A container often sees its own group as the root, so the root is always among them.
    """
    folders = []
    for line in read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        names = controllers.split(",")
        if not {"", "cpu", "memory", "pids"}.intersection(names):
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        # v1 mounts each controller by its name, or joined ones together; v2 is at the top, or beside those of v1.
        for mount in ("", "unified") if controllers == "" else dict.fromkeys([*names, controllers]):
            top = root / "sys/fs/cgroup" / mount
            folders += [top.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
    return folders


def _quota(text: str) -> float | None:
    """Returns cores, from "quota period" in microseconds."""
    quota, _, period = " ".join(text.split()).partition(" ")
    if not (quota.isdigit() and period.isdigit() and int(period)):  # "max" in v2, -1 in v1
        return None
    return int(quota) / int(period)


def _memory_used(usage: str, stat: str) -> int:
    """Returns the bytes that a group cannot reclaim: everything except idle cached files."""
    idle = re.findall(r"^(?:total_)?inactive_file (\d+)$", stat, re.MULTILINE)[-1:]  # v1: the total comes after
    return max(0, int(usage) - sum(map(int, idle))) if usage.strip().isdigit() else 0


def _threads(of_cgroups: int | None) -> int | None:
    """Returns the lowest limit of threads: of the kernel, the control groups, or this user."""
    limits = [_number(ROOT / "proc/sys/kernel/pid_max"), of_cgroups]
    if os.geteuid() != 0:
        of_user = resource.getrlimit(resource.RLIMIT_NPROC)[0]
        limits.append(None if of_user == resource.RLIM_INFINITY else of_user)
    return _least(limits)


def _least(limits: Iterable[Number | None]) -> Number | None:
    return min((limit for limit in limits if limit is not None), default=None)


def _number(path: Path) -> int | None:
    """Returns a limit; None if there is no file or no limit: "max" in v2, a number near 2**63 in v1."""
    text = read(path).strip()
    return int(text) if text.isdigit() and int(text) < 2**60 else None


def read(path: Path) -> str:
    """Returns the text of a file; empty if it cannot be read, as on systems other than Linux."""
    try:
        return path.read_text()
    except OSError:
        return ""


def oom_kills() -> int:
    """Returns the processes that the kernel has killed for lack of memory; 0 if it does not count them."""
    counts = dict(line.split() for line in read(ROOT / "proc/vmstat").splitlines())
    return int(counts.get("oom_kill", 0))
