"""Ends a run before its last step: when evaluations no longer improve, or a function of the user's file says so."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from trainer.config import user_file
from trainer.config.schema import EvaluateConfig
from trainer.observe.status import Status
from trainer.storage import evaluations
from trainer.storage.run_directory import RunDirectory
from trainer.workload.data.examples import users_code

STOP = "stop"  # what a hook returns to end the run
HOOKS = ("on_step", "on_evaluation", "on_end")  # functions of the user's file

_log = logging.getLogger(__name__)


class Hooks:
    """The functions of the user's file that the chief calls: on_step, on_evaluation, on_end."""

    def __init__(self, user: str | None, status: Status) -> None:
        functions = user_file.definitions(user) if user else {}
        self._functions: dict[str, Callable[..., Any]] = {name: functions[name] for name in HOOKS if name in functions}
        self._user, self._status = user, status

    def has(self, name: str) -> bool:
        return name in self._functions

    def call(self, name: str, step: int, logs: Mapping[str, float]) -> None:
        """Calls a hook, if there is one, with a step and values by name.

        Raises:
            DataError: if it fails; names its file and line.
        """
        if name not in self._functions:
            return
        with users_code(name):
            answer = self._functions[name](step, dict(logs))
        if answer == STOP:
            end_early(self._status, step, f"{name} of {self._user} returned {STOP!r}")


class Patience:
    """Ends a run whose evaluations no longer improve.

    It reads evaluations.jsonl, so that a chief that was restarted counts on, and an evaluator task may write it.
    """

    def __init__(self, config: EvaluateConfig, directory: RunDirectory, status: Status, hooks: Hooks) -> None:
        self._config, self._path, self._status, self._hooks = config, directory.evaluations, status, hooks
        self._size = self._path.stat().st_size if self._path.exists() else 0
        scored = evaluations.read(self._path)
        self._seen = len(scored)
        self._check(scored)

    @property
    def is_needed(self) -> bool:
        return self._config.patience is not None or self._hooks.has("on_evaluation")

    def poll(self, _: int = 0) -> None:
        """Reads what was written since the last call."""
        size = self._path.stat().st_size if self._path.exists() else 0
        if size == self._size:
            return
        self._size, scored = size, evaluations.read(self._path)
        for one in scored[self._seen :]:
            self._hooks.call("on_evaluation", one.step, one.scores)
        self._seen = len(scored)
        self._check(scored)

    def _check(self, scored: list[evaluations.Evaluation]) -> None:
        patience = self._config.patience
        if not scored or patience is None:
            return
        best = evaluations.best_of(scored, self._config.best_metric, min_delta=self._config.min_delta)
        if len(scored) - 1 - best >= patience:
            metric = evaluations.metric_of(scored[best], self._config.best_metric)
            was = f"it was {scored[best].scores[metric]:.4f} at step {scored[best].step}"
            end_early(self._status, scored[-1].step, f"{metric} has not improved in {patience} evaluations; {was}")


def end_early(status: Status, step: int, why: str) -> None:
    """Has the chief ask all replicas to stop with their next step."""
    if status.ended_early is None:
        status.ended_early = why
        _log.info("ending early, at step %d: %s", step, why)
