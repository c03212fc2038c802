"""The status page of a task: what it reports to its peers, to the launcher, and to Prometheus."""

from __future__ import annotations

import bisect
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from pathlib import Path
from typing import Any, TypedDict

from trainer.plan.serialize import from_json, to_json

STEP_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)  # seconds
PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")


class Contributions(TypedDict):
    """The gradients of a worker under async and backup, as the run's files name them."""

    applied: int
    dropped: int
    staleness_mean: float | None
    staleness_max: int | None
    staleness_histogram: list[int]  # gradients applied, by staleness; see staleness.py


class TaskState(Enum):
    """The state of a task; the value is the word that users read."""

    starting = "starting"
    building = "building"
    roll_call = "roll call"
    waiting = "waiting"  # for the first state of the parameters
    training = "training"
    waiting_for_data = "waiting for data"  # while it trains
    saving = "saving"
    serving = "serving"
    evaluating = "evaluating"
    exporting = "exporting"
    done = "done"
    # The launcher's words for a task that shows no page.
    restarting = "restarting"
    stopping = "stopping"
    stopped = "stopped"
    ended = "ended"  # with an error

    def text(self, code: int | None) -> str:
        """Returns the state in words, with the exit code of a task that ended with an error."""
        return f"{self.value} ({code})" if self is TaskState.ended else self.value

    @property
    def must_answer(self) -> bool:
        """Whether a task in this state answers within the heartbeat timeout, or is frozen."""
        return (self.is_at_work and self is not TaskState.done) or self in (TaskState.waiting, TaskState.saving)

    @property
    def may_take_long(self) -> bool:
        """Whether a step may take any time while a task is in this state."""
        return self in (TaskState.saving, TaskState.evaluating, TaskState.exporting)

    @property
    def is_at_work(self) -> bool:
        """Whether a task in this state takes part in the steps of the run."""
        return self in (
            TaskState.training,
            TaskState.waiting_for_data,
            TaskState.serving,
            TaskState.evaluating,
            TaskState.done,
        )

    @property
    def stops_between_steps(self) -> bool:
        """Whether a task in this state obeys a request to stop as soon as its step is done."""
        return self.is_at_work or self in (TaskState.saving, TaskState.exporting)


@dataclass
class TaskPage:
    """The report of one task about itself. Its main thread writes the fields; the threads of its server read them."""

    job: str
    index: int
    run: str  # path of the run directory
    config_hash: str
    tensorflow: str = ""  # version
    frozen: str = ""  # digest of what training never changes
    data: str = ""  # digest of the fingerprint of the data
    launch: str = ""  # the run directory, where one launcher gave it to all tasks
    state: TaskState = TaskState.starting
    is_listening: bool = False  # its TensorFlow server accepts sessions
    is_stopping: bool = False  # it was asked to stop
    ended_early: str | None = None  # why; only the chief ends a run before its last step
    is_replaced: bool = False  # a shard host is connected to another task instead of this one
    is_ready: bool = False  # its shard too, if it holds one, can be loaded
    waits_for_place: bool = False  # it could train, but another may compute for this worker
    computes_for: list[str] = field(default_factory=list)  # workers, itself too, whose replicas this one computes now
    can_stand_in_for: list[str] = field(default_factory=list)  # workers that it has an engine for
    places: dict[str, str] | None = None  # by worker, who computes for it, once the chief has decided
    generation: int = 0  # of the state it works on; 0: none yet
    step: int = 0  # global step
    steps: int = 0  # that this process has made
    examples: int = 0  # that this process has computed
    missing: list[str] = field(default_factory=list)  # workers that a stalled step waits for
    stalled_secs: float = 0.0  # since the step last changed, when it stalls
    stuck: list[str] = field(default_factory=list)  # tasks that a step has waited for too long
    evaluated: int = 0  # examples evaluated so far in the current evaluation
    data_secs: float = 0.0  # for which the current step has been waiting for its batch; 0 if it is not
    step_secs: float = 0.0  # that all steps of this process took; of these it
    wait_secs: float = 0.0  # waited for parameters or gradients, and
    compute_secs: float = 0.0  # computed the forward and backward pass
    step_buckets: list[int] = field(
        default_factory=lambda: [0] * (len(STEP_BUCKETS) + 1)
    )  # steps by how long they took; the last took longer than all STEP_BUCKETS
    examples_per_second: float = 0.0  # of this task's replica
    wait_fraction: float = 0.0  # share of the step time spent waiting for parameters or gradients
    loss: float | None = None
    metrics: dict[str, float] = field(default_factory=dict)  # as last reported; only the chief knows them
    learning_rate: float | None = None  # of the last report, where it varies; only the chief knows it
    contributions: dict[str, Contributions] = field(default_factory=dict)  # by worker; the chief knows them
    dropped_as: str = ""  # why gradients are dropped
    started_at: float = field(default_factory=time.time)  # Unix time, seconds
    first_step_at: float | None = None  # Unix time, seconds
    # Of the process, when the page was read.
    pid: int = 0
    memory_bytes: int = 0
    cpu_secs: float = 0.0
    now: float = 0.0  # Unix time, seconds

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> TaskPage:
        """Reads a page; fields missing in other versions have their defaults.

        Raises:
            KeyError, TypeError, ValueError: if it is not the page of a task.
        """
        return from_json(cls, value)

    @property
    def name(self) -> str:
        return f"{self.job}:{self.index}"

    def to_json(self) -> dict[str, Any]:
        return to_json(self)

    def as_of_now(self) -> TaskPage:
        """Returns the page of this process with values computed on demand: its time, memory and CPU time."""
        waits = self.state is TaskState.training and self.data_secs > 0
        return replace(
            self,
            state=TaskState.waiting_for_data if waits else self.state,
            pid=os.getpid(),
            memory_bytes=resident_bytes(),
            cpu_secs=time.process_time(),
            now=time.time(),
        )

    def count_step(self, secs: float) -> None:
        """Adds a step to the counts by duration."""
        self.step_buckets[bisect.bisect_left(STEP_BUCKETS, secs)] += 1


def resident_bytes() -> int:
    """Returns the resident memory of this process; 0 if the system does not report it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE_BYTES
    except OSError:
        return 0
