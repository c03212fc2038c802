"""`python -m trainer.observe.loggers.follow NAME RUN`: passes a run to a logger until stdin ends, then the rest.

Each logger has a process: one that hangs, fails or takes long to import delays neither the run nor other loggers.
The progress is kept in loggers/NAME.json of the run directory, so logging resumes when the run does.
"""

import json
import select
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainer.config.command_line import typed
from trainer.observe import loggers, runs
from trainer.observe.loggers import LoggedRun, Logger
from trainer.observe.report.settings import flat
from trainer.storage.atomic import write_atomically
from trainer.storage.damage import read_json
from trainer.storage.json_lines import Tail
from trainer.storage.run_directory import RunDirectory

POLL_SECS = 1.0
REMEMBER_EVERY = 100  # lines, of which as many may be logged again if this process is killed


class Follower:
    """The part of a run that a logger has received."""

    def __init__(self, name: str, path: Path) -> None:
        self._directory = RunDirectory(path)
        self._history, self._evaluations = Tail(self._directory.history), Tail(self._directory.evaluations)
        self._note = self._directory.loggers / f"{name}.json"
        self._note.parent.mkdir(exist_ok=True)
        known = read_json(self._note)
        steps = known.get("steps")
        self._steps = {n: s for n, s in steps.items() if type(s) is int} if isinstance(steps, dict) else {}
        config, state = self._directory.read_config(), known.get("state")
        self._run = LoggedRun(path.name, config.name, path, flat(config), state if isinstance(state, dict) else {})
        self._logger: Logger = loggers.make(name)
        self._logger.start(self._run)
        self._remember()

    def follow(self) -> None:
        """Logs the new lines."""
        before, count = dict(self._steps), 0
        try:
            for file, step, values in self._lines():
                if step > self._steps.get(file, -1):
                    self._logger.log(step, values)
                    self._steps[file], count = step, count + 1
                    if count % REMEMBER_EVERY == 0:
                        self._remember()
        finally:
            if self._steps != before:
                self._remember()

    def finish(self) -> None:
        """Logs the rest and the summary."""
        self.follow()
        self._logger.finish(runs.read_summary(self._directory))

    def _lines(self) -> Iterator[tuple[str, int, dict[str, float]]]:
        for tail, prefix in ((self._history, ""), (self._evaluations, "eval_")):
            for line in tail.new():
                step, values = int(line.pop("step")), {name: one for name, one in line.items() if name != "seconds"}
                yield tail.path.name, step, {f"{prefix}{name}": value for name, value in values.items()}

    def _remember(self) -> None:
        write_atomically(self._note, json.dumps({"steps": self._steps, "state": self._run.state}))


def main(name: str, path: str) -> None:
    follower = Follower(name, Path(path))
    while not _has_ended(sys.stdin, POLL_SECS):
        follower.follow()
    follower.finish()


def _has_ended(stream: Any, timeout_secs: float) -> bool:
    """Whether the stream ends within that time; nothing is ever written to it."""
    return bool(select.select([stream], [], [], timeout_secs)[0])


if __name__ == "__main__":
    main(*typed())
