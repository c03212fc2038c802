"""The lease on a run directory: one run at a time may use it."""

from __future__ import annotations

import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from trainer.faults.exit_codes import RunInUseError
from trainer.storage.run_directory import RunDirectory, with_remedy

PROBES_SECS = 0.2  # `owner` holds the lock of an unused run for microseconds


class Lease:
    """Locks a run directory for as long as this process lives; the kernel releases it, whatever ends the process."""

    def __init__(self, directory: RunDirectory) -> None:
        path = directory.lock
        with with_remedy(directory.path):
            self._file = _open_locked(path)
            while not _is_at(path, self._file):  # its owner removed it between our opening and our locking
                self._file.close()
                self._file = _open_locked(path)
            self._file.truncate(0)
            self._file.write(f"{os.getpid()}\n")
            self._file.flush()

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        path = Path(self._file.name)
        path.unlink(missing_ok=True)
        self._file.close()
        with suppress(OSError):  # not empty; only a run that was refused before it began leaves nothing
            path.parent.rmdir()


def _open_locked(path: Path) -> TextIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    file = open(path, "a+")  # noqa: SIM115 (the lease closes it)
    try:
        _lock(file)
    except OSError as error:
        file.seek(0)
        owner = file.read().strip() or "unknown"
        file.close()
        raise RunInUseError(
            f"{path.parent} is in use by process {owner}; wait for it, or choose another directory with run=PATH"
        ) from error
    return file


def _lock(file: TextIO) -> None:
    """Locks a file; retries for a while, because a reader of the owner locks it for a moment.

    Raises:
        OSError: if another process holds it.
    """
    deadline = time.monotonic() + PROBES_SECS
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(PROBES_SECS / 20)


def owner(directory: RunDirectory) -> int | None:
    """Returns the process that uses a run directory: its launcher, or its chief; 0 if its number is unknown.

    Returns:
        None if no process does.
    """
    try:
        file = directory.lock.open()
    except FileNotFoundError:
        return None
    except OSError:  # another user's
        return 0
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError:
            return int(text) if (text := file.read().strip()).isdigit() else 0
    return None


def _is_at(path: Path, file: TextIO) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False
