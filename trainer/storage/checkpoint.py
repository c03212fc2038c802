"""Reads checkpoints: tensors by name, in a folder that is either complete or absent.

    <run>/checkpoints/000001200/tensors.npz      parameters/<path>, state/<path>, slots/<slot>/<path>; plain arrays
    <run>/checkpoints/000001200/frozen.npz       what training never changes, if anything; one file for all checkpoints
    <run>/checkpoints/000001200/manifest.json    step, generation, facts, shapes, sizes, checksums; written last

A checkpoint is written into a hidden folder and put in place by one rename, so its writer may be killed at any moment.
It names parameters, never shards: it loads into a cluster of any shape. Nothing in it is unpickled, and links are not
followed.
"""

from __future__ import annotations

import hashlib
import json
import re
import stat
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer.config import shell
from trainer.config.words import some
from trainer.faults import exit_codes
from trainer.faults.exit_codes import TrainerError
from trainer.plan.layout import Parameter, slot_shape

if TYPE_CHECKING:
    from numpy.typing import NDArray

FORMAT = 1
TENSORS, MANIFEST = "tensors.npz", "manifest.json"
FINISHED = re.compile(r"\d{9,}")  # the step
DAMAGED = (ValueError, TypeError, KeyError, AttributeError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error)
ANOTHER = "give another with resume=PATH, or start over with resume=never"
NAMED_AT_MOST = 5  # tensors in one message

Facts = Mapping[str, Any]  # of the run, for JSON: names of model and optimizer, slots, seed, replicas, ...
Tensors = Mapping[str, "NDArray[Any]"]
Shapes = Mapping[str, tuple[int, ...]]


class CheckpointError(TrainerError, ValueError):
    """A checkpoint cannot be used; the message has its path, the problem and a remedy."""

    exit_code = exit_codes.CHECKPOINT

    def __init__(self, path: Path, problem: str, remedy: str = ANOTHER) -> None:
        super().__init__(f"{path}: {problem}; {remedy}")
        self.path, self.problem, self.remedy = path, problem, remedy


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint as its manifest describes it."""

    step: int  # updates applied
    generation: int
    path: Path
    facts: dict[str, Any]
    tensors: dict[str, tuple[int, ...]]  # shapes
    dtypes: dict[str, str]
    files: dict[str, File]  # by name; without the manifest


@dataclass(frozen=True)
class File:
    """A file of a checkpoint."""

    nbytes: int
    sha256: str


def read_manifest(path: Path) -> Checkpoint:
    """Reads a checkpoint's manifest, not its tensors.

    Raises:
        CheckpointError: if the folder, its manifest or its tensors are missing, damaged, a link, or of another size.
    """
    if path.is_symlink():
        raise CheckpointError(
            path, "is a link", f"name the folder itself: {shell.typed('resume', str(path.resolve()))}"
        )
    if not path.is_dir():
        raise CheckpointError(path, "is not a directory" if path.exists() else "does not exist")
    with _reading(path, MANIFEST) as file:
        checkpoint = _parse(path, file.read_bytes())
    for name, expected in checkpoint.files.items():
        with _reading(path, name) as file:
            nbytes = file.stat().st_size
        if nbytes != expected.nbytes:
            raise CheckpointError(path, f"{name} has {nbytes} bytes instead of {expected.nbytes}")
    return checkpoint


def verify(checkpoint: Checkpoint, *, only: str | None = None) -> None:
    """Raises a CheckpointError unless its files, or just the named one, match the manifest's checksums."""
    for name, expected in checkpoint.files.items():
        if only not in (None, name):
            continue
        with _reading(checkpoint.path, name) as file:
            sha256 = file_sha256(file)
        if sha256 != expected.sha256:
            raise CheckpointError(checkpoint.path, f"{name} does not match its checksum")


def newest_valid(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """Finds the valid checkpoint of the highest step, by manifest and checksum, in a folder that need not exist.

    Returns:
        The checkpoint, or None, and for each newer one why it was skipped. None with reasons means that all checkpoints
        are damaged, which is not the same as a fresh run.
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
        CheckpointError: if the file is damaged, holds NaN, or has names, shapes or types other than its manifest's.
    """
    import numpy as np  # here, because a launcher reads no tensor

    path = checkpoint.path
    with _reading(path, TENSORS) as file, np.load(file, allow_pickle=False) as archive:
        tensors = {name: archive[name] for name in archive.files}
    if tensors.keys() != checkpoint.tensors.keys():
        names = _some(sorted(tensors.keys() ^ checkpoint.tensors.keys()))
        raise CheckpointError(path, f"{TENSORS} and {MANIFEST} disagree on {names}")
    for name, value in tensors.items():
        actual, expected = (value.shape, value.dtype.name), (checkpoint.tensors[name], checkpoint.dtypes[name])
        if actual != expected:
            raise CheckpointError(path, f"{name} is {_words(*actual)}, but {MANIFEST} says {_words(*expected)}")
        if np.isnan(value).any():
            raise CheckpointError(path, f"{name} holds NaN", "give an earlier one with resume=PATH")
    return tensors


def shapes_of(parameters: Iterable[Parameter], slots: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Returns the shapes of the tensors in a checkpoint of these parameters, by name."""
    parameters = list(parameters)
    shapes = {f"{'parameters' if p.trainable else 'state'}/{p.path}": p.shape for p in parameters}
    for slot in slots:
        of_slot = {p.path: slot_shape(slot, p.shape) for p in parameters if p.trainable}
        shapes |= {f"slots/{slot}/{path}": shape for path, shape in of_slot.items() if shape is not None}
    return shapes


def check_fits(checkpoint: Checkpoint, expected: Shapes, *, frozen: str = "") -> None:
    """Raises a CheckpointError unless a checkpoint holds exactly the tensors that a run expects, in their shapes.

    Args:
        frozen: digest of what training never changes; it must be that of the run that saved it.
    """
    their_slots, our_slots = _slots(checkpoint.tensors), _slots(expected)
    theirs = {name: shape for name, shape in checkpoint.tensors.items() if _slot(name) in our_slots | {None}}
    ours = {name: shape for name, shape in expected.items() if _slot(name) in their_slots | {None}}
    names_by_problem = {
        "it lacks ": [name for name in ours if name not in theirs],
        "the model does not have its ": [name for name in theirs if name not in ours],
        "other shapes: ": [
            f"{name} (there {theirs[name]}, here {shape})"
            for name, shape in ours.items()
            if theirs.get(name, shape) != shape
        ],
    }
    problems = [text + _some(names) for text, names in names_by_problem.items() if names]
    if their_slots != our_slots:
        problems.insert(0, f"other slots (there {_some(sorted(their_slots))}, here {_some(sorted(our_slots))})")
    if not problems and checkpoint.facts.get("frozen", "") != frozen:
        problems.append("its frozen weights have other values")
    if problems:
        remedy = "choose another directory with run=PATH, or start over with resume=never"
        raise CheckpointError(checkpoint.path, "does not fit this run: " + "; ".join(problems), remedy)


def finished(folder: Path) -> list[Path]:
    """Lists the checkpoints of a folder by rising step, valid or not; the folder need not exist."""
    if folder.exists() and not folder.is_dir():
        raise CheckpointError(folder, "is not a directory")
    paths = folder.iterdir() if folder.exists() else ()
    return sorted((path for path in paths if FINISHED.fullmatch(path.name)), key=lambda path: int(path.name))


@contextmanager
def _reading(path: Path, name: str) -> Iterator[Path]:
    """Yields a plain file of a checkpoint; any error while it is read becomes a CheckpointError."""
    file = path / name
    try:
        if not stat.S_ISREG(file.lstat().st_mode):
            raise CheckpointError(path, f"{name} is a link, or not a plain file")
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
        problem = f"has format {manifest['format']}, but this version reads format {FORMAT}"
        raise CheckpointError(path, problem, "use the version that wrote it, or start over with resume=never")
    if manifest.pop("sha256", None) != manifest_sha256(manifest):
        raise CheckpointError(path, f"{MANIFEST} does not match its own checksum; it was edited or damaged")
    step, tensors, files = manifest["step"], manifest["tensors"], manifest["files"]
    if FINISHED.fullmatch(path.name) and int(path.name) != step:
        raise CheckpointError(path, f"holds step {step}", f"rename it to {step:09d}")
    return Checkpoint(
        step=step,
        generation=manifest["generation"],
        path=path,
        facts=manifest["facts"],
        tensors={name: tuple(tensor["shape"]) for name, tensor in tensors.items()},
        dtypes={name: tensor["dtype"] for name, tensor in tensors.items()},
        files={
            name: File(files[name]["bytes"], files[name]["sha256"]) for name in (TENSORS, *(files.keys() - {TENSORS}))
        },
    )


def manifest_sha256(manifest: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def file_sha256(file: Path) -> str:
    digest = hashlib.sha256()
    with file.open("rb") as opened:
        while chunk := opened.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def is_valid(path: Path) -> bool:
    try:
        verify(read_manifest(path))
    except CheckpointError:
        return False
    return True


def _slot(name: str) -> str | None:
    """Returns the slot in a tensor's name, or None for a parameter or a state."""
    return name.split("/")[1] if name.startswith("slots/") else None


def _slots(names: Shapes) -> set[str | None]:
    return {_slot(name) for name in names} - {None}


def _some(names: list[Any]) -> str:
    return some(names, NAMED_AT_MOST) or "nothing"


def _words(shape: tuple[int, ...], dtype: str) -> str:
    return f"{dtype} {list(shape)}"
