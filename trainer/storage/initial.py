"""Finds the files with a run's initial values: those of `model.init`, or of the checkpoint that it resumes."""

from pathlib import Path

from trainer.faults import exit_codes
from trainer.faults.exit_codes import TrainerError
from trainer.faults.problems import ConfigError, Problem
from trainer.plan.description import FROZEN_FILE
from trainer.storage import checkpoint
from trainer.storage.checkpoint import MANIFEST, TENSORS, CheckpointError
from trainer.storage.run_directory import RunDirectory

SUFFIXES = (".keras", ".weights.h5", ".npz")
EXPORTED = ("params.npz", "model.keras", "model.weights.h5")  # in the order in which they are looked for
ANOTHER = "give another with model.init=PATH, or leave it out"


class MissingWeightsError(TrainerError):
    """The path in `model.init` does not exist."""

    exit_code = exit_codes.INPUT_MISSING


def files_of(init: str) -> tuple[str, ...]:
    """Returns the files that `model.init` names; for a run, those of its best checkpoint, or of its newest one.

    Raises:
        MissingWeightsError: if the path does not exist.
        ConfigError: if it is neither such a file nor such a directory.
        CheckpointError: if it is a damaged checkpoint.
    """
    path = Path(init).absolute()
    if not path.exists():
        raise MissingWeightsError(f"model.init={init}: {path} does not exist; {ANOTHER}")
    if path.is_file() and path.name.endswith(SUFFIXES):
        return (str(path),)
    if path.is_dir() and (found := _in_checkpoint(path) or _exported(path)):
        return tuple(map(str, found))
    message = f"{init} is neither a run, nor a checkpoint, nor a file that ends in {', '.join(SUFFIXES)}"
    remedy = "e.g. model.init=runs/first or model.init=model.keras"
    raise ConfigError([Problem("model.init", "malformed", message, remedy)])


def _in_checkpoint(path: Path) -> list[Path]:
    """Returns the files of the checkpoint that a directory is or contains."""
    if (path / MANIFEST).exists():
        return _files(path)
    for folder in (path / "best", path / "checkpoints", path):
        newest, skipped = checkpoint.newest_valid(folder)
        if newest is not None:
            return _files(newest.path)
        if skipped:
            raise CheckpointError(folder, f"no checkpoint in it is valid ({skipped[0]})", ANOTHER)
    return []


def _files(path: Path) -> list[Path]:
    try:
        checkpoint.verify(checkpoint.read_manifest(path))
    except CheckpointError as error:
        raise CheckpointError(error.path, error.problem, ANOTHER) from error
    return [file for file in (path / TENSORS, path / FROZEN_FILE) if file.exists()]


def _exported(path: Path) -> list[Path]:
    files = [folder / name for folder in (path, path / "export") for name in EXPORTED]
    return [file for file in files if file.exists()][:1]


def resumed(run: str | None, resume: str) -> Path | None:
    """Returns the checkpoint that a run will probably resume, verifying only the file that training never changes."""
    if resume == "never" or (resume == "auto" and run is None):
        return None
    named = RunDirectory(Path(run or "").resolve()).path if resume == "auto" else Path(resume)
    folders = [folder for folder in (named / "checkpoints", named) if folder.is_dir()]
    for path in [*(path for folder in folders for path in reversed(checkpoint.finished(folder))), named]:
        try:
            checkpoint.verify(found := checkpoint.read_manifest(path), only=FROZEN_FILE)
        except CheckpointError:  # reported when the run resumes
            continue
        return found.path
    return None
