"""Atomic checkpoints: tensors by name, in a folder that is whole or not there.

    <run>/checkpoints/000001200/tensors.npz      parameters/<path>, state/<path>, slots/<slot>/<path>; plain arrays
    <run>/checkpoints/000001200/manifest.json    step, generation, facts, shapes, sizes, checksums; written last

A checkpoint grows in a hidden folder beside its place and gets there by one rename, so its writer may be killed at any
moment. It names parameters, never shards: it loads into a cluster of any shape. Nothing in it is unpickled, and links
are not followed.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import stat
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.config.words import count, size
from trainer.faults.failpoints import reach

FORMAT = 1
TENSORS, MANIFEST = "tensors.npz", "manifest.json"
FINISHED = re.compile(r"\d{9,}")  # the step
UNFINISHED = re.compile(r"\.\d{9,}\.tmp-(\d{1,10})")  # the step and its writer's process id
DAMAGED = (ValueError, TypeError, KeyError, AttributeError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)
ANOTHER = "give another one with resume=PATH, or start anew with resume=never"
NAMED_AT_MOST = 5  # tensors in one message
OVERHEAD_BYTES = 4096  # of a checkpoint, and for each of its tensors: headers, the manifest, blocks that are not full

Facts = Mapping[str, Any]  # of the run, for JSON: names of model and optimizer, slots, seed, replicas, ...
Tensors = Mapping[str, NDArray[Any]]
Shapes = Mapping[str, tuple[int, ...]]
Release = Callable[[Sequence[int]], Iterable[int]]  # steps due to be removed, rising -> those that may go
OnError = Callable[[OSError], None]


class CheckpointError(ValueError):
    """A checkpoint that cannot be used: where, what is wrong, what to do."""

    def __init__(self, path: Path, problem: str, remedy: str = ANOTHER) -> None:
        super().__init__(f"{path}: {problem}; {remedy}")
        self.path, self.problem, self.remedy = path, problem, remedy


@dataclass(frozen=True)
class Checkpoint:
    """What a manifest says of its checkpoint."""

    step: int  # updates applied
    generation: int
    path: Path
    facts: dict[str, Any]
    tensors: dict[str, tuple[int, ...]]  # shapes
    dtypes: dict[str, str]
    nbytes: int  # of tensors.npz
    sha256: str  # of tensors.npz


def read_manifest(path: Path) -> Checkpoint:
    """Reads what a checkpoint holds without reading its tensors.

    Raises:
        CheckpointError: if the folder, its manifest or its tensors are missing, damaged, a link, or of another size.
    """
    if path.is_symlink():
        raise CheckpointError(path, "it is a link", f"name the folder itself: resume={path.resolve()}")
    if not path.is_dir():
        raise CheckpointError(path, "it is not a directory" if path.exists() else "it does not exist")
    with _reading(path, MANIFEST) as file:
        checkpoint = _parse(path, file.read_bytes())
    with _reading(path, TENSORS) as file:
        nbytes = file.stat().st_size
    if nbytes != checkpoint.nbytes:
        raise CheckpointError(path, f"{TENSORS} has {nbytes} bytes instead of {checkpoint.nbytes}")
    return checkpoint


def verify(checkpoint: Checkpoint) -> None:
    """Reads the tensors once and raises a CheckpointError unless they have the manifest's checksum."""
    with _reading(checkpoint.path, TENSORS) as file:
        sha256 = _sha256(file)
    if sha256 != checkpoint.sha256:
        raise CheckpointError(checkpoint.path, f"{TENSORS} does not match its checksum")


def newest_valid(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The checkpoint of the highest step that is whole, by its manifest and checksum.

    Args:
        folder: what holds the checkpoints of a run; it need not exist.

    Returns:
        The checkpoint, or None, and for each newer one why it was skipped. None with a reason means that there are
        checkpoints and all are damaged, which is not the same as a fresh run.
    """
    skipped = []
    for path in reversed(finished(folder)):
        try:
            checkpoint = read_manifest(path)
            verify(checkpoint)
        except CheckpointError as error:
            skipped.append(f"{error.path}: {error.problem}")
        else:
            return checkpoint, skipped
    return None, skipped


def load(checkpoint: Checkpoint) -> dict[str, NDArray[Any]]:
    """Reads every tensor.

    Raises:
        CheckpointError: if the file is damaged, holds NaN, or other names, shapes or types than its manifest says.
    """
    path = checkpoint.path
    with _reading(path, TENSORS) as file, np.load(file, allow_pickle=False) as archive:
        tensors = {name: archive[name] for name in archive.files}
    if tensors.keys() != checkpoint.tensors.keys():
        names = _some(sorted(tensors.keys() ^ checkpoint.tensors.keys()))
        raise CheckpointError(path, f"{TENSORS} and {MANIFEST} disagree on {names}")
    for name, value in tensors.items():
        found, expected = (value.shape, value.dtype.name), (checkpoint.tensors[name], checkpoint.dtypes[name])
        if found != expected:
            raise CheckpointError(path, f"{name} is {_words(*found)}, but {MANIFEST} says {_words(*expected)}")
        if np.isnan(value).any():
            raise CheckpointError(path, f"{name} holds NaN", "give an earlier one with resume=PATH")
    return tensors


def check_fits(checkpoint: Checkpoint, expected: Shapes) -> None:
    """Raises a CheckpointError unless a checkpoint holds exactly the tensors a run needs.

    Args:
        expected: shape of every tensor of the run, by its name in a checkpoint.
    """
    held, kept = _slots(checkpoint.tensors), _slots(expected)
    theirs = {name: shape for name, shape in checkpoint.tensors.items() if _slot(name) in kept | {None}}
    ours = {name: shape for name, shape in expected.items() if _slot(name) in held | {None}}
    problems = {
        "it lacks ": [name for name in ours if name not in theirs],
        "the model does not have its ": [name for name in theirs if name not in ours],
        "other shapes: ": [
            f"{name} (there {theirs[name]}, here {shape})"
            for name, shape in ours.items()
            if theirs.get(name, shape) != shape
        ],
    }
    said = [text + _some(names) for text, names in problems.items() if names]
    if held != kept:
        said.insert(0, f"its optimizer kept {_some(sorted(held))}, this run's keeps {_some(sorted(kept))}")
    if said:
        remedy = "train the model and optimizer it was saved from, or start anew with resume=never"
        raise CheckpointError(checkpoint.path, "it does not fit this run: " + "; ".join(said), remedy)


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
        if not _is_valid(path):
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


def finished(folder: Path) -> list[Path]:
    """The checkpoints of a folder by rising step, valid or not; it need not exist."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(folder, "it is not a directory")
    found = folder.iterdir() if folder.exists() else ()
    return sorted((path for path in found if FINISHED.fullmatch(path.name)), key=lambda path: int(path.name))


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


@contextmanager
def _reading(path: Path, name: str) -> Iterator[Path]:
    """Gives a plain file of a checkpoint; whatever reading it raises becomes a CheckpointError."""
    file = path / name
    try:
        if not stat.S_ISREG(file.lstat().st_mode):
            raise CheckpointError(path, f"{name} is a link, or no plain file")
        yield file
    except CheckpointError:
        raise
    except FileNotFoundError as error:
        raise CheckpointError(path, f"{name} is missing") from error
    except OSError as error:
        raise CheckpointError(path, f"{name} cannot be read ({error.strerror or error})") from error
    except DAMAGED as error:
        raise CheckpointError(path, f"{name} is damaged ({error})") from error


def _parse(path: Path, text: bytes) -> Checkpoint:
    manifest = json.loads(text)
    if manifest["format"] != FORMAT:
        problem = f"it has format {manifest['format']}, this version reads format {FORMAT}"
        raise CheckpointError(path, problem, "use the version that wrote it, or start anew with resume=never")
    if manifest.pop("sha256", None) != _manifest_sha256(manifest):
        raise CheckpointError(path, f"{MANIFEST} does not match its own checksum; it was edited or damaged")
    step, tensors, file = manifest["step"], manifest["tensors"], manifest["files"][TENSORS]
    if FINISHED.fullmatch(path.name) and int(path.name) != step:
        raise CheckpointError(path, f"it holds step {step}", f"rename it to {step:09d}")
    return Checkpoint(
        step=step,
        generation=manifest["generation"],
        path=path,
        facts=manifest["facts"],
        tensors={name: tuple(tensor["shape"]) for name, tensor in tensors.items()},
        dtypes={name: tensor["dtype"] for name, tensor in tensors.items()},
        nbytes=file["bytes"],
        sha256=file["sha256"],
    )


def _manifest_sha256(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while chunk := opened.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def _is_valid(path: Path) -> bool:
    try:
        verify(read_manifest(path))
    except CheckpointError:
        return False
    return True


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
        file = {"bytes": (temporary / TENSORS).stat().st_size, "sha256": _sha256(temporary / TENSORS)}
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
    plain["sha256"] = _manifest_sha256(plain)
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


def _slot(name: str) -> str | None:
    """The slot of a tensor's name, or None for a parameter or a state."""
    return name.split("/")[1] if name.startswith("slots/") else None


def _slots(names: Shapes) -> set[str | None]:
    return {_slot(name) for name in names} - {None}


def _some(names: list[Any]) -> str:
    """The first names of a list, for a message."""
    more = f" and {len(names) - NAMED_AT_MOST} more" if len(names) > NAMED_AT_MOST else ""
    return ", ".join(names[:NAMED_AT_MOST]) + more if names else "nothing"


def _words(shape: tuple[int, ...], dtype: str) -> str:
    return f"{dtype} {list(shape)}"
