"""What this machine has, found without TensorFlow."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
from importlib import metadata
from pathlib import Path

from trainer.plan.checks.versions import TENSORFLOWS
from trainer.plan.devices import Machine

NVIDIA_SMI_DEADLINE_SECS = 5.0  # a second where its driver must be loaded first


def this_machine(*, with_gpu_memory: bool = False) -> Machine:
    """Cores, files and threads that this process may use, NVIDIA GPUs, and the versions of TensorFlow and Keras.

    Args:
        with_gpu_memory: also asks nvidia-smi for the memory of each GPU, which takes up to a second.
    """
    gpu_mib = memory_of_gpus() if with_gpu_memory else ()
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return Machine(
        cores=_cores(),
        gpus=len(gpu_mib) or len(list(Path("/dev").glob("nvidia[0-9]*"))),
        gpu_mib=gpu_mib,
        files=None if files == resource.RLIM_INFINITY else files,
        threads=_threads(),
        libraries={name: found for name in (*TENSORFLOWS, "keras") if (found := version_of(name)) is not None},
    )


def memory_of_gpus() -> tuple[int, ...]:
    """MiB of each GPU, in the order of their indices; empty where nvidia-smi is missing, slow or does not know."""
    command = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        told = subprocess.run(
            command, capture_output=True, text=True, timeout=NVIDIA_SMI_DEADLINE_SECS, check=True
        ).stdout
        return tuple(int(line) for line in told.split("\n") if line.strip())
    except (OSError, subprocess.SubprocessError, ValueError):  # ValueError: "[N/A]" of a GPU that shares its memory
        return ()


def version_of(distribution: str) -> str | None:
    """The installed version; none if it is not installed under that name."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def is_local(host: str) -> bool:
    """Whether a host name or address is of this machine."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        with socket.socket(family) as probe:
            probe.bind(address)
    except OSError:
        return False
    return True


def _cores() -> int:
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return allowed if quota == "max" else max(1, min(allowed, int(quota) // int(period)))
    except (OSError, ValueError):  # no cgroup v2, or no limit
        return allowed


def _threads() -> int | None:
    """The least of the limits of the kernel, of a container, and of this user if it has one."""
    limits = [_number("/proc/sys/kernel/pid_max"), _number("/sys/fs/cgroup/pids.max")]
    if os.geteuid() != 0:
        of_user = resource.getrlimit(resource.RLIMIT_NPROC)[0]
        limits.append(None if of_user == resource.RLIM_INFINITY else of_user)
    return min((limit for limit in limits if limit is not None), default=None)


def _number(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):  # not there; "max"
        return None


def oom_kills() -> int:
    """Processes that the kernel has killed since it started because memory ran out; 0 where it does not tell."""
    try:
        counts = dict(line.split() for line in Path("/proc/vmstat").read_text().splitlines())
    except OSError:
        return 0
    return int(counts.get("oom_kill", 0))
