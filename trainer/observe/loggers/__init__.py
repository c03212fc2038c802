"""Passes the history of a run to a file, MLflow, Weights & Biases, or a class of an installed package."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any, Protocol

from trainer.plan.checks.loggers import loggers


@dataclass(frozen=True)
class LoggedRun:
    """The run to log."""

    name: str  # of its directory
    experiment: str  # the `name` of its config
    path: Path
    config: Mapping[str, str]  # values by dotted key, as they are typed
    state: dict[str, Any] = field(default_factory=dict)  # what a logger wants to find when the run is continued


class Logger(Protocol):
    """The interface of a class that a logger's entry point names; it is made without arguments."""

    def start(self, run: LoggedRun) -> None:
        """Called once, before the first step or when the run is continued."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Called with a line of history.jsonl, or the scores of an evaluation as eval_NAME."""

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Called once, with summary.json, when the run has ended."""


def make(name: str) -> Logger:
    """Returns the logger of that name.

    Raises:
        ImportError: if its package is not installed.
    """
    module, _, attribute = loggers()[name].partition(":")
    return getattr(import_module(module), attribute)()
