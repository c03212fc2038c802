"""What a launcher knows of its tasks while they live, and how a run ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from trainer.faults import exit_codes
from trainer.plan.plan import Task

LOG_LINES = 20
WORKING = ("training", "saving", "serving", "evaluating", "exporting", "done")  # in which it can stop in its own time


@dataclass
class Attempt:
    """What the launcher knows of a task."""

    task: Task
    number: int = 0  # how often it was started again
    pid: int | None = None
    code: int | None = None  # once it has ended
    page: dict[str, Any] | None = None  # as last read
    heard_at: float = 0.0  # when, monotonic
    was_asked: bool = False  # for its stacks, since then
    began_at: float = 0.0  # monotonic
    starts_at: float | None = None  # it waits to be started again until then, monotonic
    ended_for: str | None = None  # why this process ended it
    peak_bytes: int = 0  # most memory that was seen

    @property
    def state(self) -> str:
        if self.starts_at is not None:
            return "restarting"
        if self.code is not None:
            return {0: "done", exit_codes.TERMINATED: "stopped"}.get(self.code, f"ended ({self.code})")
        return self.page["state"] if self.page else "starting"

    @property
    def why(self) -> str:
        """Why it has ended, in words."""
        assert self.code is not None
        return self.ended_for or exit_codes.meaning(self.code)

    @property
    def has_failed(self) -> bool:
        return self.code not in (None, exit_codes.OK, exit_codes.TERMINATED)

    @property
    def is_stopping(self) -> bool:
        """Whether it was asked to stop, by whomever."""
        return self.code == exit_codes.TERMINATED or (self.page is not None and self.page["is_stopping"])

    @property
    def is_up(self) -> bool:
        """Whether a signal to stop would be obeyed at a step boundary."""
        is_needed = self.task.job != "evaluator"
        return self.starts_at is None and (self.code is not None or self.state in WORKING or not is_needed)


@dataclass(frozen=True)
class Failure:
    """The first failure of a run, as it was when it happened."""

    task: Task
    code: int
    tail: list[str]  # of its log
    why: str  # in words


@dataclass
class RunOutcome:
    """How a run ended."""

    failed: Failure | None = None  # none: it did not fail in the end
    restarts: dict[str, int] = field(default_factory=dict)  # by task that they were needed for
    first_step_at: float | None = None  # Unix time, seconds


def log_tail(log: Path, task: str) -> list[str]:
    """The end of a task's log; of its last life, where the log holds earlier ones."""
    said = log.read_text(errors="replace").splitlines() if log.exists() else []
    starts = [number for number, text in enumerate(said) if text.startswith(f"{task} of ")]
    return said[starts[-1] if starts else 0 :][-LOG_LINES:]
