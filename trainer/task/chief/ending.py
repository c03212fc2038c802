"""Ends a run before its last step: when evaluations no longer improve, or a hook of the user's file asks for it."""

import logging
from collections.abc import Callable, Mapping
from typing import Any

from trainer.config import user_file
from trainer.engine.step_result import StepResult
from trainer.observe.task_page import TaskPage
from trainer.workload.data.errors import users_code

STOP = "stop"  # what a hook returns to end the run

_log = logging.getLogger(__name__)


class Hooks:
    """The functions of the user's file that the chief calls: on_step, on_evaluation, on_end."""

    def __init__(self, user: str | None, status: TaskPage) -> None:
        functions = user_file.definitions(user) if user else {}
        self._functions: dict[str, Callable[..., Any]] = {
            name: functions[name] for name in user_file.HOOKS if name in functions
        }
        self._user, self._status = user, status

    def has(self, name: str) -> bool:
        return name in self._functions

    def follow(self, state: StepResult | None, *, is_asked: bool) -> None:
        """Records that the state belongs to a stopping run, if neither a signal nor an evaluation says so."""
        if state and state.stop and not is_asked and self._functions:
            end_early(self._status, state.step, f"a hook of {self._user} returned {STOP!r} before a restart")

    def call(self, name: str, step: int, logs: Mapping[str, float]) -> None:
        """Calls a hook, if there is one, with a step and values by name.

        Raises:
            DataError: if it fails; names its file and line.
        """
        if name not in self._functions:
            return
        with users_code(name):
            answer = self._functions[name](step, dict(logs))
        if answer == STOP and name != "on_end":
            end_early(self._status, step, f"{name} of {self._user} returned {STOP!r}")


def end_early(status: TaskPage, step: int, why: str) -> None:
    """Makes the chief ask all replicas to stop with their next step."""
    if status.ended_early is None:
        status.ended_early = why
        _log.info("ending early, at step %d: %s", step, why)
