"""Finds the run that run=PATH names."""

from pathlib import Path

from trainer.faults import exit_codes
from trainer.faults.exit_codes import TrainerError
from trainer.observe import runs
from trainer.storage.run_directory import RunDirectory


class NoSuchRunError(TrainerError):
    """run=PATH names no run directory."""

    exit_code = exit_codes.INPUT_MISSING


def directory_of(run: str | None) -> RunDirectory:
    """Returns the directory of the run that run=PATH names.

    Raises:
        NoSuchRunError: if it has no config.yaml and plan.json.
    """
    assert run is not None  # it was checked
    path = Path(run)
    if not runs.is_run(path):
        why = "is not a run directory: it has no config.yaml and plan.json" if path.exists() else "does not exist"
        hint = "; python -m trainer runs lists those in runs/" if Path("runs").is_dir() else ""
        raise NoSuchRunError(f"{path} {why}{hint}")
    return RunDirectory(path.resolve())
