"""`python -m trainer.commands.console.trial [--plan] < OVERRIDES`: the problems of a config, and its plan, as JSON.

A process of its own: Hydra keeps its state in globals, and TensorFlow takes seconds to import.
"""

import json
import sys
from dataclasses import asdict
from io import StringIO

from rich.console import Console

from trainer.commands import command
from trainer.commands.plan import make
from trainer.config import compose
from trainer.faults.problems import ConfigError
from trainer.plan import page


def main() -> None:
    """Reads a JSON list of overrides from stdin; the last line that it prints is the answer."""
    overrides, problems, plan = json.load(sys.stdin), [], ""
    try:
        config = compose.load(overrides, command.resolve, command.validate)
        if "--plan" in sys.argv[1:]:
            text = StringIO()
            page.show(make(config), console=Console(file=text, width=110, highlight=False))
            plan = text.getvalue()
    except ConfigError as error:
        problems = [asdict(problem) for problem in error.problems]
    print(json.dumps({"problems": problems, "plan": plan}))


if __name__ == "__main__":
    main()
