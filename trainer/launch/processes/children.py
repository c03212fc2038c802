"""Manages child processes: lists living ones, reaps ended ones, and ends them with their parent."""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def ended_children() -> Iterator[tuple[int, int]]:
    """Yields the process id and exit code of each child that has ended, and reaps it."""
    with contextlib.suppress(ChildProcessError):  # there are no children
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            yield ended[0], os.waitstatus_to_exitcode(ended[1])


def live_children() -> set[int]:
    """Returns the live children of this process; none on systems without /proc."""
    children = set()
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it has just ended
            state, parent, *_ = path.read_text().rpartition(")")[2].split()
            if int(parent) == os.getpid() and state != "Z":
                children.add(int(path.parent.name))
    return children


def adopt_orphans() -> None:
    """On Linux, makes this process the parent of its children's children once their parents have ended."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def die_with_parent(parent: int) -> None:
    """On Linux, makes the kernel kill this process when its parent dies; elsewhere the nursery ends its tasks."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before the call
            os._exit(70)
