"""What this machine has, found without TensorFlow."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path

from trainer.devices import Machine

NVIDIA_SMI_DEADLINE_SECS = 5.0  # a second where its driver must be loaded first


def this_machine(*, with_gpu_memory: bool = False) -> Machine:
    """Cores that this process may use, a container's limit included, and NVIDIA GPUs.

    Args:
        with_gpu_memory: also asks nvidia-smi for the memory of each GPU, which takes up to a second.
    """
    gpu_mib = memory_of_gpus() if with_gpu_memory else ()
    return Machine(cores=_cores(), gpus=len(gpu_mib) or len(list(Path("/dev").glob("nvidia[0-9]*"))), gpu_mib=gpu_mib)


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
