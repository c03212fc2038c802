"""`python -m trainer.observe.profile RUN`: merges the profile of a run that no launcher has summarized."""

import sys
from collections.abc import Sequence
from pathlib import Path

from trainer.config.command_line import typed
from trainer.faults import exit_codes
from trainer.observe.profile.merge import describe, merge
from trainer.storage.run_directory import RunDirectory


def main(arguments: Sequence[str]) -> int:
    if len(arguments) != 1 or arguments[0].startswith("-"):
        print("usage: python -m trainer.observe.profile RUN, a run directory with profile=true", file=sys.stderr)
        return exit_codes.CONFIG
    directory = RunDirectory(Path(arguments[0]))
    if not directory.profile.is_dir() or not directory.plan.is_file():
        what = f"{directory.profile} and {directory.plan} must both exist"
        print(f"{what}; name the run directory of a run that was started with profile=true", file=sys.stderr)
        return exit_codes.INPUT_MISSING
    try:
        print(describe(merge(directory)))
    except OSError as error:
        print(f"{error.filename or directory.profile}: {error.strerror}", file=sys.stderr)
        return exit_codes.STORAGE
    return exit_codes.OK


if __name__ == "__main__":
    sys.exit(main(typed()))
