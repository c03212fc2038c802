"""mode=log: hands a run to loggers, from where they were."""

from trainer.commands.runs.named import directory_of
from trainer.commands.start import Start
from trainer.config.schema import RunConfig
from trainer.faults import exit_codes
from trainer.launch import progress
from trainer.launch.ending import shown
from trainer.launch.loggers import Loggers


def run(config: RunConfig, start: Start) -> int:
    """Prints what became of each logger; returns 0, or 69 if one failed."""
    directory = directory_of(config)
    with Loggers(config.loggers, directory) as loggers, progress.note(f"{shown(directory.path)}: logging"):
        failures = loggers.finish()
    for line in failures:
        print(line)
    if not failures:
        print(f"{shown(directory.path)} was logged by {', '.join(config.loggers)}")
    return exit_codes.UNAVAILABLE if failures else exit_codes.OK
