"""trainer log: passes a run to loggers, from where they stopped."""

from collections.abc import Sequence

from trainer.faults import exit_codes
from trainer.faults.exit_codes import RunInUseError
from trainer.launch import progress
from trainer.launch.ending import shown
from trainer.launch.loggers import Loggers
from trainer.storage import lease
from trainer.storage.run_directory import RunDirectory


def run(directory: RunDirectory, loggers: Sequence[str]) -> int:
    """Prints the result of each logger; returns 0, or 69 if one failed.

    Raises:
        RunInUseError: if the run has not ended.
    """
    if lease.owner(directory) is not None:
        raise RunInUseError(
            f"{shown(directory.path)} is still running and its launcher feeds its loggers; try again when it has ended"
        )
    with Loggers(loggers, directory) as processes, progress.note(f"{shown(directory.path)}: logging"):
        failures = processes.finish(None)
    for line in failures:
        print(line)
    if not failures:
        print(f"{shown(directory.path)} was handed to {', '.join(loggers)}")
    return exit_codes.UNAVAILABLE if failures else exit_codes.OK
