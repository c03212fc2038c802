"""Finds, or starts, a process of this user that has imported TensorFlow and outlives the command that started it.

    command  --connect-->  warm process  --fork-->  nursery of that command  --fork-->  tasks

The name of its socket is a hash of what the import can depend on: code, interpreter, libraries, environment, limits
of the process. So a command never meets a process that differs from the one it would have started itself.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import re
import resource
import signal
import socket
import stat
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from trainer.config.versions import PACKAGE

START_SECS = 20.0  # for a new process to listen; it imports TensorFlow after that
# Variables that are read while libraries are imported, or before; all others are those of the command.
VARIABLES = re.compile(
    "(PYTHON|LD_|TF_|XLA_|KERAS_|CUDA_|NVIDIA_|OMP_|MKL_|OPENBLAS_|MALLOC_|GLIBC_|GRPC_|ABSL_|LC_).*"
    "|LANG|LANGUAGE|HOME|TMPDIR|TZ|VIRTUAL_ENV"
)
NAMESPACES = ("cgroup", "ipc", "mnt", "net", "pid", "time", "user", "uts")


@dataclass(frozen=True)
class Warm:
    """A process that has imported TensorFlow and waits for commands."""

    pid: int
    socket: Path

    def memory_bytes(self) -> int:
        """Returns its resident memory; 0 if it has ended."""
        try:
            return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except OSError:
            return 0


def connect(
    minutes: float, environment: Mapping[str, str], stderr: BinaryIO, memory: int | None
) -> socket.socket | None:
    """Connects to a new nursery, which a warm process forks.

    Args:
        minutes: how long the warm process stays after this command; 0 starts none.
        environment: of the nursery.
        stderr: of the nursery, and of a warm process that is started.
        memory: the open memory file that the tasks inherit.

    Returns:
        The nursery's control socket; None if there is no warm process, or none can be kept safely on this system.
    """
    folder = _folder()
    if sys.platform != "linux" or memory is None or (not minutes and not any(folder.glob("*.sock"))):
        return None
    try:
        path = folder / f"{_hash(facts(os.environ))}.sock"
        with locked(folder):
            connection = _connect(path)
            if connection is None and minutes:
                connection = _start(path, environment, stderr)
        if connection is not None:
            _send_request(connection, minutes, environment, [stderr.fileno(), memory])
        return connection
    except OSError:
        return None  # the command starts its own nursery


def find() -> Iterator[Warm]:
    """Yields the warm processes of this user."""
    for path in sorted(_folder().glob("*.sock")):
        with contextlib.suppress(OSError):
            connection = _connect(path)
            if connection is not None:
                with connection:
                    yield Warm(_peer(connection)[0], path)


def end(warm: Warm) -> bool:
    """Ends a warm process; returns whether it existed. Runs that it started continue."""
    warm.socket.unlink(missing_ok=True)  # first, or it could be that of a successor
    try:
        os.kill(warm.pid, signal.SIGTERM)
    except ProcessLookupError:
        return False
    return True


def code_version() -> str:
    """Returns a hash of the trainer's code and of the folders that hold its libraries."""
    files = sorted(PACKAGE.rglob("*.py"))
    folders = [Path(entry) for entry in sys.path[1:]]
    return _hash([(str(path), path.stat().st_mtime_ns) for path in (*files, *folders) if path.exists()])


def facts(environment: Mapping[str, str]) -> list[Any]:
    """Returns everything that the import can depend on."""
    return [
        code_version(),
        (sys.executable, sys.version, sys.flags, sys.path[1:]),
        sorted((name, value) for name, value in environment.items() if VARIABLES.fullmatch(name)),
        [resource.getrlimit(getattr(resource, name)) for name in sorted(dir(resource)) if name.startswith("RLIMIT_")],
        (sorted(os.sched_getaffinity(0)), os.getpriority(os.PRIO_PROCESS, 0)),
        (os.getresuid(), os.getresgid(), sorted(os.getgroups())),
        [os.readlink(f"/proc/self/ns/{name}") for name in NAMESPACES if os.path.exists(f"/proc/self/ns/{name}")],
        _groups(Path("/proc/self/cgroup").read_text()),
        Path("/proc/self/oom_score_adj").read_text(),
        re.findall("^(?:Cap|NoNewPrivs|Seccomp|Umask).*", Path("/proc/self/status").read_text(), re.MULTILINE),
    ]


def _groups(text: str) -> list[str]:
    """Returns the control groups that may limit a process, except roots, which contain every process."""
    return sorted(line.partition(":")[2] for line in text.splitlines() if not line.endswith(":/"))


def _hash(value: Any) -> str:
    return hashlib.sha256(repr(value).encode()).hexdigest()[:16]


def _folder() -> Path:
    runtime = os.environ.get("XDG_RUNTIME_DIR")
    return Path(runtime, "trainer") if runtime else Path(tempfile.gettempdir(), f"trainer-{os.getuid()}")


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the lock on a folder of sockets, which only this user may enter.

    Raises:
        PermissionError: if others may enter it.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o077:
        raise PermissionError(f"{folder} is open to other users")
    with open(folder / "lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _connect(path: Path) -> socket.socket | None:
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(str(path))
        if is_ours(connection):
            return connection
    except (FileNotFoundError, ConnectionRefusedError):
        pass
    connection.close()
    return None


def is_ours(connection: socket.socket) -> bool:
    """Whether the process at the other end runs as this user."""
    return _peer(connection)[1] == os.getuid()


def _peer(connection: socket.socket) -> tuple[int, int]:
    """Returns the pid and the user of the process at the other end."""
    pid, user, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return pid, user


def _start(path: Path, environment: Mapping[str, str], stderr: BinaryIO) -> socket.socket | None:
    path.unlink(missing_ok=True)  # left by a process that was killed
    process = subprocess.Popen(
        [sys.executable, "-m", "trainer.launch.processes.warm_server", str(path)],
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=stderr,
        start_new_session=True,
    )
    deadline = time.monotonic() + START_SECS
    while process.poll() is None and time.monotonic() < deadline:
        if connection := _connect(path):
            return connection
        time.sleep(0.005)
    process.kill()
    return None


def _send_request(
    connection: socket.socket, minutes: float, environment: Mapping[str, str], files: Sequence[int]
) -> None:
    request = {"minutes": minutes, "cwd": os.getcwd(), "environment": dict(environment), "path": sys.path[0]}
    with tempfile.TemporaryFile() as file:
        file.write(json.dumps(request).encode())
        file.flush()
        socket.send_fds(connection, [b"1"], [file.fileno(), *files])
