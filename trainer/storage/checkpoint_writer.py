"""Writes checkpoints atomically, optionally in a background thread, and removes old ones."""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from trainer.config.words import count, size
from trainer.faults.failpoints import reach
from trainer.plan.description import FROZEN_FILE
from trainer.storage.atomic import link_or_copy, new_folder, remove_folder, remove_leftovers, write_synced
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

if TYPE_CHECKING:
    from trainer.storage.table_rows import ChangedRows  # imports numpy, which a launcher does not need

OVERHEAD_BYTES = 4096  # for each tensor: headers, its part of the manifest, blocks that are not full
Release = Callable[[Sequence[int]], Iterable[int]]  # steps due to be removed, rising -> those that may be
OnError = Callable[[OSError], None]


class FileEntry(TypedDict):
    """A file in a manifest."""

    bytes: int
    sha256: str


def write(
    folder: Path,
    step: int,
    generation: int,
    facts: Facts,
    tensors: Tensors,
    *,
    keep: int,
    release: Release = lambda due: due,
    shared: Sequence[Path] = (),
    rows: ChangedRows | None = None,
) -> Path:
    """Saves a checkpoint unless a valid one of that step exists; returns its folder, and removes what is not needed.

    It removes temporary folders of ended writers, and valid checkpoints older than the newest `keep` up to this
    step. Damaged ones remain for inspection until their step is saved again.

    Args:
        release: chooses which of the steps that are due are removed; by default all.
        shared: files that all checkpoints of the run have, as hard links where the file system has them.
        rows: of tables.

    Raises:
        OSError: if the disk fails or is full; earlier checkpoints are untouched, and nothing temporary stays.
    """
    path = folder / f"{step:09d}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        remove_leftovers(folder)
        if not is_valid(path):
            remove_folder(path)
            _check_room(folder, tensors, rows.nbytes if rows else 0)
            _save(path, step, generation, facts, tensors, shared, rows)
    except OSError as error:
        problem = f"the checkpoint of step {step} was not saved ({error.strerror or error}); earlier ones are untouched"
        raise OSError(error.errno, problem, str(path)) from error
    prune(folder, step, keep, release)
    return path


def check_space(folder: Path, nbytes: int, keep: int) -> None:
    """Fails early if a run's checkpoints of `nbytes` each will not fit: those it keeps, and the one being written.

    The folder need not exist; checkpoints already there are not counted again.

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
    """Copies a checkpoint and extra files (`notes`) into another folder atomically; returns the copy's folder.

    The copies are hard links where the file system has them.

    Raises:
        OSError: if the source does not exist, or the disk fails or is full.
    """
    path = folder / source.name
    folder.mkdir(parents=True, exist_ok=True)
    remove_leftovers(folder)
    remove_folder(path)
    with new_folder(path) as temporary:
        for name in (*_files_of(source), MANIFEST):
            link_or_copy(source / name, temporary / name)
        for name, text in notes.items():
            write_synced(temporary / name, text)
    return path


def _files_of(source: Path) -> list[str]:
    """Returns the files that a checkpoint names, or the known ones of a damaged checkpoint."""
    try:
        return list(read_manifest(source).files)
    except CheckpointError:
        return [name for name in (TENSORS, FROZEN_FILE) if (source / name).exists()]


def prune(folder: Path, step: int, keep: int, release: Release = lambda due: due) -> None:
    """Removes all but the newest valid checkpoints up to a step, and those not released; reads no checksums."""
    older = []
    for path in finished(folder):
        try:
            older += [path] if read_manifest(path).step < step else []
        except CheckpointError:
            continue
    due = {int(path.name): path for path in older[: max(0, len(older) - (keep - 1))]}
    for released in release(list(due)):
        remove_folder(due[released])


class Writer:
    """Saves checkpoints in a background thread, one at a time."""

    def __init__(
        self, folder: Path, *, keep: int, release: Release = lambda due: due, shared: Sequence[Path] = ()
    ) -> None:
        """Takes `keep`, `release` and `shared` of `write`."""
        self._write_now = partial(write, folder, keep=keep, release=release, shared=shared)
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._in_flight: Future[None] | None = None

    def save(
        self,
        step: int,
        generation: int,
        facts: Facts,
        tensors: Tensors,
        *,
        on_error: OnError | None = None,
        rows: ChangedRows | None = None,
    ) -> None:
        """Starts a save as soon as the previous one is on disk; the arrays must not change until it is done.

        Args:
            on_error: called in the background thread if this save fails; None: the next call raises the error.
            rows: of tables.

        Raises:
            OSError: if the previous save failed; this one is then not started.
        """
        self.wait()
        write_now = partial(self._write_now, step, generation, facts, dict(tensors), rows=rows)
        self._in_flight = self._pool.submit(_reporting, write_now, on_error)

    def poll(self) -> None:
        """Raises the error of the last save, if it has ended with one."""
        if self._in_flight is not None and self._in_flight.done():
            self.wait()

    def wait(self) -> None:
        """Waits until nothing is in flight; raises the error of the last save."""
        in_flight, self._in_flight = self._in_flight, None
        if in_flight is not None:
            in_flight.result()

    def close(self) -> None:
        """Waits like `wait`, then ends the thread."""
        try:
            self.wait()
        finally:
            self._pool.shutdown()


def _reporting(write_now: Callable[[], Path], on_error: OnError | None) -> None:
    try:
        write_now()
    except OSError as error:
        if on_error is None:
            raise
        on_error(error)


def _check_room(folder: Path, tensors: Tensors, rows_nbytes: int) -> None:
    """Fails early if the checkpoint will not fit; a full disk would break every other writer."""
    nbytes = rows_nbytes + sum(value.nbytes + OVERHEAD_BYTES for value in tensors.values())
    free = _free_bytes(folder)
    if free is not None and free < nbytes:
        raise OSError(errno.ENOSPC, f"{size(nbytes)} are needed, {size(free)} are free")


def _free_bytes(folder: Path) -> int | None:
    """Returns the bytes that an ordinary user may still write to a folder's disk; None if unknown."""
    usage = shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.exists()))
    return usage.free if usage.total else None


def _save(
    path: Path,
    step: int,
    generation: int,
    facts: Facts,
    tensors: Tensors,
    shared: Sequence[Path],
    rows: ChangedRows | None,
) -> None:
    with new_folder(path) as temporary:
        _write_tensors(temporary / TENSORS, tensors)
        for file in shared:
            link_or_copy(file, temporary / file.name)
        files = {TENSORS: _describe(temporary / TENSORS), **{file.name: _describe_shared(file) for file in shared}}
        if rows is not None:
            of_rows, names = rows.write(temporary)
            files |= {name: _describe_shared(temporary / name) for name in names}
            facts = {**facts, **of_rows}
        shapes = {name: {"shape": value.shape, "dtype": value.dtype.name} for name, value in tensors.items()}
        manifest = {"step": step, "generation": generation, "facts": facts, "tensors": shapes, "files": files}
        reach("save-data", step)
        _write_manifest(temporary / MANIFEST, manifest)
        reach("save-manifest", step)


def _describe(file: Path) -> FileEntry:
    """Returns the manifest entry of a file."""
    return {"bytes": file.stat().st_size, "sha256": file_sha256(file)}


def _describe_shared(file: Path) -> FileEntry:
    """Returns the manifest entry of a file that all checkpoints share, reading it only once."""
    return _describe_unchanged(file, file.stat().st_ino, file.stat().st_mtime_ns)


@cache
def _describe_unchanged(file: Path, _inode: int, _mtime_ns: int) -> FileEntry:
    return _describe(file)


def _write_tensors(file: Path, tensors: Tensors) -> None:
    for name, value in tensors.items():
        if value.dtype.kind not in "biuf":  # others are pickled, or come back as raw bytes (bfloat16)
            raise TypeError(f"{name} is {value.dtype}; a checkpoint holds plain numbers: cast it to float32")
    import numpy as np  # here, because a launcher writes no tensor

    arrays: dict[str, Any] = dict(tensors)
    with file.open("xb") as opened:
        np.savez(opened, **arrays)
        opened.flush()
        os.fsync(opened.fileno())


def _write_manifest(file: Path, manifest: Mapping[str, object]) -> None:
    plain = json.loads(json.dumps({"format": FORMAT, **manifest}))  # as a reader gets it: lists for tuples, text keys
    plain["sha256"] = manifest_sha256(plain)
    write_synced(file, json.dumps(plain, indent=1))
