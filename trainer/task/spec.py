"""The constants of a task: its run, its entry in the plan, and what follows from them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainer.config.schema import RunConfig
from trainer.plan.layout import Shard
from trainer.plan.plan import Plan, Task
from trainer.storage.run_directory import RunDirectory
from trainer.task.server import can_fuse, session_config


@dataclass(frozen=True)
class TaskSpec:
    """One task of a run; its fields never change."""

    config: RunConfig
    plan: Plan
    directory: RunDirectory
    task: Task
    rollbacks: int = 0  # how often the run had rolled back when the task started

    @property
    def chief(self) -> Task:
        """Returns the task that saves, evaluates and ends the run."""
        return self.plan.task("worker", 0)

    @property
    def shards(self) -> list[Shard]:
        """Returns the shards that this task hosts."""
        return [s for s in self.plan.shards if s.host == self.task.name] if self.plan.has_shard_hosts else []

    @property
    def other_hosts(self) -> list[Task]:
        """Returns the other tasks that host shards."""
        return [task for task in self.plan.tasks if task.name in self.plan.hosts and task != self.task]

    @property
    def is_unsupervised(self) -> bool:
        """Whether a scheduler started this task, and not a launcher."""
        return self.config.job is not None

    @property
    def stops_alone(self) -> bool:
        """Whether this task can exit and rejoin while the others keep the state of the run."""
        is_worker = self.task.job == "worker" and not self.task.is_chief
        return self.is_unsupervised and is_worker and self.plan.has_shard_hosts and not self.shards

    def session_config(self, peers: Sequence[str] = ()) -> Any:
        """Returns the ConfigProto of a session that talks to `peers` besides this task's own devices."""
        return session_config(self.task, peers=peers, fuses=can_fuse(self.config.train))
