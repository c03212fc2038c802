"""Who breaks things on purpose while a run is watched, and what it may see and do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from trainer.plan.plan import Plan


@dataclass(frozen=True)
class Seen:
    """The tasks at one moment."""

    now: float  # seconds, of the monotonic clock
    pages: Mapping[str, Mapping[str, Any]]  # last status page by task, of its present life
    pids: Mapping[str, int]  # of the tasks that are alive
    lives: Mapping[str, int]  # which life each task is in; 0: the first
    signal: Callable[[str, int], None]  # sends a signal to a task


class Injector(Protocol):
    """Is called by the launcher."""

    def begin(self, plan: Plan) -> None:
        """Comes when the ports are known, and before any task is started."""

    def environment(self, task: str, life: int) -> Mapping[str, str]:
        """What a task finds in its environment beside its own."""

    def act(self, seen: Seen) -> None:
        """Comes every few moments."""

    def end(self) -> None:
        """Comes when all tasks have ended."""
