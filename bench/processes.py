"""What Linux tells of processes and of the loopback interface: a program with all its children, frozen and measured."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path

TICKS_PER_SEC = os.sysconf("SC_CLK_TCK")
PROC = Path("/proc")
GONE_SECS = 20.0


def parse_stat(text: str) -> tuple[str, int, float]:
    """Of /proc/PID/stat: state letter, parent's pid, seconds of CPU time in user mode and in the kernel."""
    fields = text.rpartition(")")[2].split()  # a name, in parentheses before, may hold spaces
    return fields[0], int(fields[1]), (int(fields[11]) + int(fields[12])) / TICKS_PER_SEC


def parse_status_mib(text: str) -> float:
    """Of /proc/PID/status: the most memory that was in RAM (VmHWM), MiB; 0 for a process that is ending."""
    line = next((line for line in text.splitlines() if line.startswith("VmHWM:")), "VmHWM: 0 kB")
    return int(line.split()[1]) / 1024


def parse_net_dev(text: str, interface: str = "lo") -> tuple[int, int]:
    """Of /proc/net/dev: bytes and packets that an interface received."""
    line = next(line for line in text.splitlines() if line.strip().startswith(f"{interface}:"))
    fields = line.partition(":")[2].split()
    return int(fields[0]), int(fields[1])


def loopback() -> tuple[int, int]:
    """Bytes and packets that crossed the loopback interface since the machine started."""
    return parse_net_dev((PROC / "net/dev").read_text())


def tree(root: int) -> list[int]:
    """A process and all its children, and theirs; parents first, and none that has ended."""
    children: dict[int, list[int]] = {}
    alive = set()
    for path in PROC.glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            state, parent, _ = parse_stat(path.read_text())
            if state not in "ZX":
                pid = int(path.parent.name)
                alive.add(pid)
                children.setdefault(parent, []).append(pid)
    found = [root] if root in alive else []
    for pid in found:
        found.extend(children.get(pid, ()))
    return found


def freeze(root: int) -> None:
    """Stops a program: parents first, so that nobody sees others stand still; again, for who was started meanwhile."""
    frozen: set[int] = set()
    while new := [pid for pid in tree(root) if pid not in frozen]:
        for pid in new:
            _signal(pid, signal.SIGSTOP)
        frozen.update(new)


def thaw(root: int) -> None:
    """Lets a program go on, children first."""
    for pid in reversed(tree(root)):
        _signal(pid, signal.SIGCONT)


def kill(root: int) -> list[int]:
    """Ends a program that may be frozen, and returns the pids that it had."""
    freeze(root)  # or it could start others meanwhile
    pids = tree(root)
    for pid in pids:
        _signal(pid, signal.SIGKILL)
        _signal(pid, signal.SIGCONT)
    return pids


def wait_until_gone(pids: Iterable[int], secs: float = GONE_SECS) -> list[int]:
    """Waits for processes to end; returns those that are still there."""
    deadline = time.monotonic() + secs
    left = [pid for pid in pids if is_alive(pid)]
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        left = [pid for pid in left if is_alive(pid)]
    return left


def is_alive(pid: int) -> bool:
    try:
        return parse_stat((PROC / str(pid) / "stat").read_text())[0] not in "ZX"
    except OSError:
        return False


def cpu_secs(pid: int) -> float:
    """CPU time so far; 0 if the process has ended."""
    try:
        return parse_stat((PROC / str(pid) / "stat").read_text())[2]
    except OSError:
        return 0.0


def peak_mib(pid: int) -> float:
    try:
        return parse_status_mib((PROC / str(pid) / "status").read_text())
    except OSError:
        return 0.0


def command_of(pid: int) -> list[str]:
    try:
        return (PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return []


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
