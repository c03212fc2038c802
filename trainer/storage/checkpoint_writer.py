"""Writes checkpoints atomically, in a thread of its own, and removes old ones."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config.words import count, size
from trainer.faults.failpoints import reach
from trainer.storage.checkpoint import (
    FORMAT,
    MANIFEST,
    TENSORS,
    CheckpointError,
    Facts,
    Tensors,
    file_sha256,
    finished,
    is_valid,
    manifest_sha256,
    read_manifest,
)

UNFINISHED = re.compile(r"\.\d{9,}\.tmp-(\d{1,10})")  # the step and its writer's process id
OVERHEAD_BYTES = 4096  # of a checkpoint, and for each of its tensors: headers, the manifest, blocks that are not full
Release = Callable[[Sequence[int]], Iterable[int]]  # steps due to be removed, rising -> those that may go
OnError = Callable[[OSError], None]


def write(
    folder: Path,
    step: int,
    generation: int,
    facts: Facts,
    tensors: Tensors,
    *,
    keep: int,
    release: Release = lambda due: due,
) -> Path:
    """Saves a checkpoint unless a valid one of that step exists, and removes what is no longer needed.

    That is: temporary folders of writers that are gone, and valid checkpoints older than the newest `keep` up to this
    step. Damaged ones stay, for whoever wants to look, until their step is saved again.

    Args:
        release: chooses from the steps that are due to be removed; by default all go.

    Returns:
        The checkpoint's folder.

    Raises:
        OSError: if the disk fails or is full; what was saved before is untouched, and nothing temporary stays.
    """
    path = folder / f"{step:09d}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder)
        if not is_valid(path):
            remove(path)
            _check_room(folder, tensors)
            _save(path, {"step": step, "generation": generation, "facts": facts}, tensors)
    except OSError as error:
        problem = f"the checkpoint of step {step} was not saved ({error.strerror or error}); earlier ones are untouched"
        raise OSError(error.errno, problem, str(path)) from error
    prune(folder, step, keep, release)
    return path


def check_space(folder: Path, nbytes: int, keep: int) -> None:
    """Fails early where a run's checkpoints will not fit: those it keeps, and one more while it is written.

    Args:
        folder: what will hold them; it need not exist. Those that it holds already are not counted again.
        nbytes: of one checkpoint's tensors.

    Raises:
        OSError: saying what is needed, what is free and what to do.
    """
    number = max(1, keep + 1 - len(finished(folder)))
    free = _free_bytes(folder)
    if free is not None and free < number * nbytes:
        problem = (
            f"{count(number, 'checkpoint')} of {size(nbytes)} will not fit: {size(number * nbytes)} are needed, "
            f"{size(free)} are free; make room, choose another disk with run=PATH, or keep fewer with checkpoint.keep=1"
        )
        raise OSError(errno.ENOSPC, problem, str(folder))


def copy(source: Path, folder: Path, notes: Mapping[str, str]) -> Path:
    """Puts a checkpoint into another folder too, whole or not at all; where the disk can, it takes no more room.

    Args:
        notes: texts of files beside it, by name.

    Returns:
        The copy's folder.

    Raises:
        OSError: if the source is gone, or the disk fails or is full.
    """
    path = folder / source.name
    folder.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(folder)
    remove(path)
    with _growing(path) as temporary:
        for name in (TENSORS, MANIFEST):
            _link(source / name, temporary / name)
        for name, text in notes.items():
            _write_text(temporary / name, text)
    return path


def prune(folder: Path, step: int, keep: int, release: Release = lambda due: due) -> None:
    """Keeps the newest valid checkpoints up to a step, and what is not released; checksums are not read again."""
    older = []
    for path in finished(folder):
        try:
            older += [path] if read_manifest(path).step < step else []
        except CheckpointError:
            continue
    due = {int(path.name): path for path in older[: max(0, len(older) - (keep - 1))]}
    for released in release(list(due)):
        remove(due[released])


def remove(path: Path) -> None:
    """Removes a checkpoint, if it is there; who is killed meanwhile leaves a leftover, not half a checkpoint."""
    try:
        path.rename(_temporary(path))
    except FileNotFoundError:
        return
    _delete(_temporary(path))


class Writer:
    """Saves checkpoints in a background thread, one at a time."""

    def __init__(self, folder: Path, *, keep: int, release: Release = lambda due: due) -> None:
        """`keep` and `release` are those of `write`."""
        self._folder, self._keep, self._release = folder, keep, release
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._in_flight: Future[None] | None = None

    def save(
        self, step: int, generation: int, facts: Facts, tensors: Tensors, *, on_error: OnError | None = None
    ) -> None:
        """Starts a save, once the one before is on disk; the arrays must not change until then.

        Args:
            on_error: told, in the background thread, if this save fails; none: whoever calls next gets the error.

        Raises:
            OSError: if the save before failed; this one is then not started.
        """
        self.wait()
        self._in_flight = self._pool.submit(self._write, step, generation, facts, dict(tensors), on_error)

    def look(self) -> None:
        """Raises what the last save raised, if it has ended."""
        if self._in_flight is not None and self._in_flight.done():
            self.wait()

    def wait(self) -> None:
        """Returns when nothing is in flight; raises what the last save raised."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            in_flight.result()

    def close(self) -> None:
        """Like `wait`; afterwards the writer is of no more use."""
        try:
            self.wait()
        finally:
            self._pool.shutdown()

    def _write(self, step: int, generation: int, facts: Facts, tensors: Tensors, on_error: OnError | None) -> None:
        try:
            write(self._folder, step, generation, facts, tensors, keep=self._keep, release=self._release)
        except OSError as error:
            if on_error is None:
                raise
            on_error(error)


def _check_room(folder: Path, tensors: Tensors) -> None:
    """Refuses to begin what cannot end: a disk that is full, even for a moment, fails all who write to it."""
    free, nbytes = _free_bytes(folder), sum(value.nbytes + OVERHEAD_BYTES for value in tensors.values())
    if free is not None and free < nbytes:
        raise OSError(errno.ENOSPC, f"{size(nbytes)} are needed, {size(free)} are free")


def _free_bytes(folder: Path) -> int | None:
    """What an ordinary user may still write to a folder's disk; None where the file system does not tell."""
    usage = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists()))
    return usage.free if usage.total else None


def _save(path: Path, manifest: dict[str, Any], tensors: Tensors) -> None:
    with _growing(path) as temporary:
        _write_tensors(temporary / TENSORS, tensors)
        file = {"bytes": (temporary / TENSORS).stat().st_size, "sha256": file_sha256(temporary / TENSORS)}
        shapes = {name: {"shape": value.shape, "dtype": value.dtype.name} for name, value in tensors.items()}
        reach("save-data", manifest["step"])
        _write_manifest(temporary / MANIFEST, {**manifest, "tensors": shapes, "files": {TENSORS: file}})
        reach("save-manifest", manifest["step"])


@contextmanager
def _growing(path: Path) -> Iterator[Path]:
    """Gives a hidden folder to fill, which then gets to its place by one rename."""
    temporary = _temporary(path)
    try:
        temporary.mkdir()
        yield temporary
        _sync(temporary)
        temporary.rename(path)
        reach("rename", int(path.name))
        _sync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # after the rename there is none


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp-{os.getpid()}")


def _write_tensors(file: Path, tensors: Tensors) -> None:
    for name, value in tensors.items():
        if value.dtype.kind not in "biuf":  # others are pickled, or come back as raw bytes (bfloat16)
            raise TypeError(f"{name} is {value.dtype}; a checkpoint holds plain numbers: cast it to float32")
    arrays: dict[str, Any] = dict(tensors)
    with file.open("xb") as opened:
        np.savez(opened, **arrays)
        opened.flush()
        os.fsync(opened.fileno())


def _write_manifest(file: Path, manifest: dict[str, Any]) -> None:
    plain = json.loads(json.dumps({"format": FORMAT, **manifest}))  # as it will be read: lists for tuples, text keys
    plain["sha256"] = manifest_sha256(plain)
    _write_text(file, json.dumps(plain, indent=1))


def _write_text(file: Path, text: str) -> None:
    with file.open("x") as opened:
        opened.write(text)
        opened.flush()
        os.fsync(opened.fileno())


def _link(source: Path, target: Path) -> None:
    """A second name for a file that is never written again; a copy where the file system has no such names."""
    try:
        os.link(source, target, follow_symlinks=False)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(source, target, follow_symlinks=False)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _remove_leftovers(folder: Path) -> None:
    """Deletes temporary folders of processes that are gone, and of this one, which has one save in flight at most."""
    for path in folder.iterdir():
        writer = UNFINISHED.fullmatch(path.name)
        if writer and (int(writer[1]) == os.getpid() or not _is_alive(int(writer[1]))):
            _delete(path)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _is_alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True
