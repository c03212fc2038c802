"""Status pages of tasks, for tests."""

from __future__ import annotations

from typing import Any

from trainer.observe.task_page import TaskPage, TaskState


def page(task: str = "worker:0", state: str = "starting", **told: Any) -> TaskPage:
    """The page of a task of the run runs/x."""
    job, _, index = task.partition(":")
    return TaskPage(job, int(index), **{"run": "runs/x", "config_hash": "c0ffee", "state": TaskState(state), **told})
