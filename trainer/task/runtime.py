"""The state that the threads of a task share while it runs."""

import gc
from dataclasses import dataclass, field
from typing import Any

from trainer.observe.profile.record import Recorder
from trainer.observe.task_page import TaskPage
from trainer.storage.journal import Journal
from trainer.task.signals import StopRequest


@dataclass
class TaskRuntime:
    """The part of a task that changes; `TaskSpec` is the other."""

    status: TaskPage
    stop: StopRequest
    journal: Journal
    recorder: Recorder | None = None  # of a profile
    target: str = ""  # TensorFlow's server, for sessions; empty for a task without one
    needs_hosts: bool = True  # until the worker has all that it wants of them
    holds_state: bool = False  # the host of a shard has loaded it, so a peer's restart loses something
    # Sessions stay open until the process ends: closing one can wait for ever for a peer that has left.
    keep_open: list[Any] = field(default_factory=list)


def collect_garbage_from_now_on() -> None:
    """Enables Python's garbage collector of cycles: until now, nearly every object is still in use."""
    gc.freeze()
    gc.enable()
