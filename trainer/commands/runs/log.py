"""mode=log: hands a run to loggers, from where they were."""

from trainer.commands.runs.named import directory_of
from trainer.commands.start import Start
from trainer.config.schema import RunConfig
from trainer.faults import exit_codes
from trainer.faults.exit_codes import RunInUseError
from trainer.launch import progress
from trainer.launch.ending import shown
from trainer.launch.loggers import Loggers
from trainer.storage import lease


def run(config: RunConfig, start: Start) -> int:
    """Prints what became of each logger; returns 0, or 69 if one failed.

    Raises:
        RunInUseError: if the run has not ended.
    """
    directory = directory_of(config)
    if lease.owner(directory) is not None:
        raise RunInUseError(
            f"{shown(directory.path)} is running: its launcher has its loggers; log it when it has ended"
        )
    with Loggers(config.loggers, directory) as loggers, progress.note(f"{shown(directory.path)}: logging"):
        failures = loggers.finish(None)
    for line in failures:
        print(line)
    if not failures:
        print(f"{shown(directory.path)} was logged by {', '.join(config.loggers)}")
    return exit_codes.UNAVAILABLE if failures else exit_codes.OK
