"""trainer report: writes the report of a run, or of several runs side by side, as one HTML file."""

from pathlib import Path

from trainer.commands.runs.named import NoSuchRunError
from trainer.config.typed import ReportCommandConfig
from trainer.faults import exit_codes
from trainer.launch.ending import shown
from trainer.observe import runs
from trainer.observe.report import page
from trainer.storage.run_directory import RunDirectory


def run(directory: RunDirectory, options: ReportCommandConfig) -> int:
    """Writes the report and prints where it is; returns 0.

    Raises:
        NoSuchRunError: if one of them is not a run directory.
    """
    others = [Path(name) for name in options.beside]
    for path in others:
        if not runs.is_run(path):
            raise NoSuchRunError(f"report.beside: {path} is not a run directory")
    file = None if options.file is None else Path(options.file)
    print(shown(page.write(directory.path, [path.resolve() for path in others], file).resolve()))
    return exit_codes.OK
