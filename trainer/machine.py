"""What this machine has, found without TensorFlow."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from trainer.plan import Machine


def this_machine() -> Machine:
    """Cores that this process may use, a container's limit included, and NVIDIA GPUs."""
    return Machine(cores=_cores(), gpus=len(list(Path("/dev").glob("nvidia[0-9]*"))))


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
