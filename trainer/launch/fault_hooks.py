"""The interface by which chaos injects faults while a run is supervised."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from trainer.observe.task_page import TaskPage
from trainer.plan.plan import Plan


@dataclass(frozen=True)
class RunView:
    """The state of all tasks at one moment."""

    now: float  # seconds, of the monotonic clock
    pages: Mapping[str, TaskPage]  # last status page by task, of its current attempt
    pids: Mapping[str, int]  # of the tasks that are alive
    signal: Callable[[str, int], None]  # sends a signal to a task


class FaultHooks(Protocol):
    """Hooks that the launcher calls."""

    def begin(self, plan: Plan) -> None:
        """Called when the ports are known, before any task starts."""

    def environment(self, task: str) -> Mapping[str, str]:
        """Returns variables for the next attempt of a task, besides the task's own."""

    def act(self, view: RunView) -> None:
        """Called every few moments."""

    def end(self) -> None:
        """Called when all tasks have ended."""
