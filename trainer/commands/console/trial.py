"""`python -m trainer.commands.console.trial [--plan] < OVERRIDES`: the problems of a config, and its plan, as JSON.

This is a separate process: Hydra keeps its state in globals, and TensorFlow takes seconds to import.
"""

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

from trainer.commands import validation
from trainer.config import compose
from trainer.config.command_line import typed
from trainer.config.typed import TypedConfig
from trainer.faults.exit_codes import TrainerError
from trainer.faults.problems import ConfigError, Problem
from trainer.launch.planning import make

# Sections that no override of the console may have changed, whatever chose them.
FIXED = (
    *("slurm", "kubernetes", "security", "container", "plan", "prometheus", "chaos"),
    *("attach", "report", "runs", "console", "sweep"),
)


def main() -> None:
    """Reads overrides and the folder of the user's files from stdin, as JSON; the last line that it prints answers."""
    given, problems, plan = json.load(sys.stdin), [], None
    try:
        invocation = compose.load(given["overrides"], validation.complete)
        problems = [asdict(problem) for problem in _forbidden(invocation.typed, given["user_folder"])]
        if "--plan" in typed() and not problems:
            plan = make(invocation.config, mode=invocation.typed.mode)[1].to_json()
    except ConfigError as error:
        problems = [asdict(problem) for problem in error.problems]
    except TrainerError as error:
        problems = [asdict(Problem("plan", "failed", str(error), "see python -m trainer plan in a terminal"))]
    print(json.dumps({"problems": problems, "plan": plan}))


def _forbidden(config: TypedConfig, user_folder: str | None) -> Iterator[Problem]:
    """Yields the problems of a config with forbidden keys, however its overrides were written."""
    usual = TypedConfig()
    for name in FIXED:
        if getattr(config, name) != getattr(usual, name):
            yield Problem(name, "not-allowed", "cannot be set from the console", "start the run in a terminal")
    if replace(config.launch, name=usual.launch.name) != usual.launch:
        yield Problem("launch", "not-allowed", "cannot be set from the console", "start the run in a terminal")
    if config.user is not None:
        allowed = None if user_folder is None else Path(user_folder).resolve()
        if allowed is None or not Path(config.user).resolve().is_relative_to(allowed):
            yield Problem("user", "not-allowed", f"{config.user} is not below console.user_folder", "name a file in it")


if __name__ == "__main__":
    main()
