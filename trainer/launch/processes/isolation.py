"""Puts tasks into an isolated network namespace, which has only a loopback device and which no others can reach.

TensorFlow's server listens on every interface without authentication, so anyone who reaches it can run code. Root makes
such a namespace directly, any other user within a user namespace. Files, signals and shared memory are as before.
"""

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
import sys
from functools import cache
from pathlib import Path

from trainer.config.schema import Isolate, RunConfig
from trainer.config.typed import Mode
from trainer.faults.problems import ConfigError, Problem
from trainer.observe.page_server import short_name
from trainer.plan.checks import isolation as checks

CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000  # linux/sched.h
SIOCGIFFLAGS, SIOCSIFFLAGS, IFF_UP = 0x8913, 0x8914, 1  # linux/sockios.h, linux/if.h
CAPABILITY_VERSION = 0x20080522  # linux/capability.h
GPU_MEMORY = "/dev/nvidia-uvm"  # CUDA's; a program of root's makes it, which cannot be root in a user namespace
USER_CODE = "the code of user= may need a network; security.isolate=always isolates the tasks anyway"


def why_not(config: RunConfig, pages: Path | None = None) -> str:
    """Returns why the tasks of a run use this machine's network; empty if they are isolated.

    Args:
        pages: folder for the sockets of their status pages, which is made.

    Raises:
        ConfigError: if they must be isolated, and cannot.
    """
    isolate = config.security.isolate
    if isolate is Isolate.never:
        return "security.isolate=never"
    reason = checks.why_not(config, Mode.train) or why_impossible() or _why_no_gpu(config)
    if not reason and config.user is not None and isolate is Isolate.auto:
        return USER_CODE
    reason = reason or _why_no_socket(pages)
    if reason and isolate is Isolate.always:
        message = f"this machine cannot isolate runs: {reason}"
        remedy = "leave it out; trainer doctor says more"
        raise ConfigError([Problem("security.isolate", "not-available", message, remedy)])
    return reason


@cache
def why_impossible() -> str:
    """Returns why this user cannot have such a namespace, tried in a child process; empty if it works."""
    if sys.platform != "linux":
        return "it needs Linux"
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            enter()
        except Exception as error:
            os.write(writer, f"this system refuses it ({getattr(error, 'strerror', error)})".encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader) as answer:
        reason = answer.read()
    os.waitpid(child, 0)
    return reason


def enter() -> None:
    """Moves this process, which must have no second thread, and its later children into a new namespace.

    Raises:
        OSError: if the system does not allow it; the process may then be in a half-made one.
    """
    user, group = os.geteuid(), os.getegid()
    _call("unshare", CLONE_NEWNET if user == 0 else CLONE_NEWNET | CLONE_NEWUSER)
    if user != 0:  # in the new user namespace they keep their numbers, so files keep their owners
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as device:
        flags = struct.unpack("16sh14x", fcntl.ioctl(device, SIOCGIFFLAGS, struct.pack("16sh14x", b"lo", 0)))[1]
        fcntl.ioctl(device, SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | IFF_UP))
    if user != 0:  # it has all capabilities there, also over files of this user that are not writable
        _call("capset", struct.pack("Ii", CAPABILITY_VERSION, 0), bytes(24))


def join(pid: int) -> None:
    """Moves this process, which must have no second thread, into the namespace of another.

    Raises:
        OSError: if that process has ended.
    """
    for kind in ("net",) if os.geteuid() == 0 else ("user", "net"):
        with open(f"/proc/{pid}/ns/{kind}") as namespace:
            _call("setns", namespace.fileno(), 0)


def _call(function: str, *arguments: object) -> None:
    """Calls a function of the C library, which returns 0 if it succeeds."""
    library = ctypes.CDLL(None, use_errno=True)
    if getattr(library, function)(*arguments) != 0:
        raise OSError(ctypes.get_errno(), f"{function}: {os.strerror(ctypes.get_errno())}")


def remove_sockets(folder: Path) -> None:
    """Removes the sockets in a folder, and the folder if nothing else is in it."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            if path.is_socket():
                path.unlink()
        folder.rmdir()


def _why_no_gpu(config: RunConfig) -> str:
    if any(config.device.gpus.values()) and os.geteuid() != 0 and not os.path.exists(GPU_MEMORY):
        return f"{GPU_MEMORY} does not exist yet (nvidia-modprobe -u -c=0)"
    return ""


def _why_no_socket(folder: Path | None) -> str:
    if folder is None:
        return ""
    probe = folder / "probe"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        with socket.socket(socket.AF_UNIX) as one, short_name(str(probe)) as name:
            one.bind(name)
        probe.unlink()
    except OSError as error:
        return f"{folder} cannot hold sockets ({error.strerror})"
    return ""
