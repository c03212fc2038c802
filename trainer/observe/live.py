"""Reads a running run: its status, and its current parameters.

from trainer.observe.live import attach

run = attach("runs/mine")
run.status().step
step, values = run.parameters("dense*/kernel")
"""

import time
from pathlib import Path

import numpy as np

from trainer.faults import exit_codes
from trainer.faults.exit_codes import TrainerError
from trainer.observe import runs
from trainer.observe.runs import RunFacts
from trainer.storage import lease, questions
from trainer.storage.run_directory import RunDirectory

POLL_SECS = 0.02


class NotRunningError(TrainerError):
    """The request needs a running run."""

    exit_code = exit_codes.UNAVAILABLE


class LiveRun:
    """A run in a directory that this machine can read."""

    def __init__(self, path: Path) -> None:
        self._directory = RunDirectory(path)

    def status(self) -> RunFacts:
        """Returns the progress of the run, from its files."""
        return runs.read(self._directory.path)

    def parameters(self, *patterns: str, timeout_secs: float = 300.0) -> tuple[int, dict[str, np.ndarray]]:
        """Asks the chief for parameters and state, and waits for its next step.

        Args:
            patterns: of their paths, as `trainer plan` shows them (fnmatch), and "slots/..." for slots of the
                optimizer; none: all but the slots.
            timeout_secs: for the answer.

        Returns:
            The global step, and the values by path, all of that step. Under async a shard may be some steps ahead.

        Raises:
            NotRunningError: if the run is not under way, ends meanwhile, or does not answer in time.
            OSError: if its directory cannot be written.
        """
        path = self._directory.path
        answer, deadline = questions.ask(self._directory, patterns or ("*",)), time.monotonic() + timeout_secs
        try:
            while not answer.exists():
                if lease.owner(self._directory) is None:
                    raise NotRunningError(f"{path} is not running: it is {self.status().state}")
                if time.monotonic() > deadline:
                    raise NotRunningError(f"{path} has not answered within {timeout_secs:g} s")
                time.sleep(POLL_SECS)
            return questions.read(answer)
        finally:
            questions.withdraw(answer)


def attach(path: str | Path) -> LiveRun:
    """Returns the run in a directory.

    Raises:
        FileNotFoundError: if it is not a run directory.
    """
    if not runs.is_run(Path(path)):
        raise FileNotFoundError(f"{path} is not a run directory")
    return LiveRun(Path(path).resolve())
