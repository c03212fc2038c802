"""A program with all its processes, frozen and measured, and the traffic of the loopback interface."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from trainer.launch.processes.children import die_with_parent

GONE_SECS = 20.0


def parse_status_mib(text: str) -> float:
    """Returns the peak resident memory (VmHWM) of /proc/PID/status, MiB; 0 for a process that is ending."""
    line = next((line for line in text.splitlines() if line.startswith("VmHWM:")), "VmHWM: 0 kB")
    return int(line.split()[1]) / 1024


def loopback(pid: int) -> tuple[int, int]:
    """Bytes and packets that crossed the loopback interface of a process's network since it exists."""
    lines = Path(f"/proc/{pid}/net/dev").read_text().splitlines()
    received = next(line.split(":")[1].split() for line in lines if line.strip().startswith("lo:"))
    return int(received[0]), int(received[1])


def without_warm_process(folder: Path) -> dict[str, str]:
    """Returns the environment of a command with its own nursery: that of a warm process is not its descendant."""
    return {"XDG_RUNTIME_DIR": str(folder), "TRAINER_WARM_MINUTES": "0"}


def start(command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Starts a process that the kernel kills when this one dies; the options are those of subprocess.Popen."""
    parent = os.getpid()
    with _deferred_signals():
        return subprocess.Popen(command, preexec_fn=lambda: die_with_parent(parent), **options)


@contextlib.contextmanager
def _deferred_signals() -> Iterator[None]:
    """Defers signals around a fork, where Python ignores exceptions of its own calls: a Ctrl-C would be lost."""
    came: list[int] = []
    handlers = {
        number: signal.signal(number, lambda number, _: came.append(number))
        for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    for put_off in came:
        signal.raise_signal(put_off)


def tree(root: int) -> list[int]:
    """Returns a process and all its descendants; parents first, without those that have ended."""
    try:
        process = psutil.Process(root)
        return [one.pid for one in (process, *process.children(recursive=True)) if is_alive(one.pid)]
    except psutil.NoSuchProcess:
        return []


def freeze(root: int) -> None:
    """Stops a program, parents first, so that none sees its children stand still; again for those started meanwhile."""
    frozen: set[int] = set()
    while new := [pid for pid in tree(root) if pid not in frozen]:
        for pid in new:
            _signal(pid, signal.SIGSTOP)
        frozen.update(new)


def thaw(root: int) -> None:
    """Continues a program, children first."""
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
    """Waits for processes to end; returns those that are still alive."""
    deadline = time.monotonic() + secs
    alive = [pid for pid in pids if is_alive(pid)]
    while alive and time.monotonic() < deadline:
        time.sleep(0.02)
        alive = [pid for pid in alive if is_alive(pid)]
    return alive


def is_alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
    except psutil.NoSuchProcess:
        return False


def cpu_secs(pid: int) -> float:
    """Returns the CPU time so far, in user mode and in the kernel; 0 if the process has ended."""
    try:
        times = psutil.Process(pid).cpu_times()
        return times.user + times.system
    except psutil.NoSuchProcess:
        return 0.0


def peak_mib(pid: int) -> float:
    try:
        return parse_status_mib(Path(f"/proc/{pid}/status").read_text())  # psutil has no VmHWM
    except OSError:
        return 0.0


def command_of(pid: int) -> list[str]:
    try:
        return psutil.Process(pid).cmdline()
    except psutil.Error:
        return []


def _signal(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
