"""What the parts of a task share: its plan, its status, its server, and the call for its peers."""

import gc
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from trainer.config.schema import RunConfig
from trainer.engine.tables.memory import BlockMemory
from trainer.engine.vectors.wire import FLOAT32, VectorWire
from trainer.observe.peers import roll_call
from trainer.observe.placement.record import PlacementRecord
from trainer.observe.placement.verify import verify
from trainer.observe.profile.record import Recorder
from trainer.observe.task_page import TaskPage, TaskState
from trainer.plan.layout import Shard
from trainer.plan.plan import Plan, Task
from trainer.storage.journal import Journal
from trainer.storage.run_directory import RunDirectory
from trainer.task.server import can_fuse, session_config
from trainer.task.signals import StopRequest

_log = logging.getLogger(__name__)


@dataclass
class Context:
    """One task of a run, and what its threads know of each other."""

    config: RunConfig
    plan: Plan
    directory: RunDirectory
    task: Task
    status: TaskPage
    stop: StopRequest
    journal: Journal
    recorder: Recorder | None = None  # of a profile
    rollbacks: int = 0  # how often the run has gone back to a checkpoint; counted before a chief may move the file away
    server: Any = None  # TensorFlow's; none in one process, and where all_reduce starts it
    wire: VectorWire = FLOAT32  # how vectors travel
    tables: Sequence[BlockMemory] = ()  # the memory of rows
    needs_hosts: bool = True  # until this task has all that it wants of them
    holds_state: bool = False  # its shard is loaded, so a peer's restart loses something
    # Sessions stay open until the process ends: closing one can wait for ever for a peer that has left.
    keep_open: list[Any] = field(default_factory=list)

    @property
    def shards(self) -> list[Shard]:
        """Returns the shards that this task hosts."""
        return [s for s in self.plan.shards if s.host == self.task.name] if self.plan.has_shard_hosts else []

    def session_config(self, peers: Sequence[str]) -> Any:
        """Returns the ConfigProto of a session that talks to `peers` besides this task's own devices."""
        return session_config(self.task, peers=peers, fuses=can_fuse(self.config.train))

    def roll_call(self, names: Sequence[str], until: str, *, may_be_silent: bool = False) -> None:
        """Waits until these tasks are up; see `peers.roll_call`."""
        self.status.state = TaskState.roll_call
        roll_call(
            self.status,
            [task for task in self.plan.tasks if task.name in names and task != self.task],
            until=until,
            deadline_secs=self.config.timeouts.roll_call_secs,
            may_be_silent=may_be_silent,
            report=_log.info,
        )

    def verify_placement(self, record: PlacementRecord) -> None:
        """Compares where a step ran with the plan; a task without a launcher's run directory writes nothing."""
        verify(record, self.plan, self.directory.path if self.directory.plan.exists() else None)


def collect_garbage_from_now_on() -> None:
    """Turns Python's collector of cycles on: until now nearly everything that was made is still in use."""
    gc.freeze()
    gc.enable()
