"""Checks on other tasks: whether they are up, what the chief is doing, and whether hosts reach this task."""

import logging
import re
import time
from collections.abc import Callable, Sequence

import tensorflow as tf

from trainer.engine.devices import device_of
from trainer.faults.exit_codes import UNAVAILABLE, TrainerError
from trainer.observe import peers
from trainer.observe.task_page import TaskPage, TaskState
from trainer.plan.plan import Task
from trainer.task.runtime import TaskRuntime
from trainer.task.spec import TaskSpec

RETRY_SECS = 1.0
ANSWER_MS = 15_000  # for all hosts to answer
CHIEF_POLL_SECS = 1.0
# States of a chief that has already moved away the files that it does not continue.
BEGUN = (TaskState.training, TaskState.waiting_for_data, TaskState.evaluating, TaskState.done)
REPLACED_SECS = 5.0  # of answers from another task, after which the host will not find this one by itself

_log = logging.getLogger(__name__)
v1 = tf.compat.v1


class UnreachableError(TrainerError):
    """A shard host cannot reach this task."""

    exit_code = UNAVAILABLE


def roll_call(
    spec: TaskSpec, status: TaskPage, names: Sequence[str], *, until: str, may_be_silent: bool = False
) -> None:
    """Waits until the tasks with these names are up; see `peers.roll_call`."""
    status.state = TaskState.roll_call
    peers.roll_call(
        status,
        [task for task in spec.plan.tasks if task.name in names and task != spec.task],
        until=until,
        deadline_secs=spec.config.timeouts.roll_call_secs,
        may_be_silent=may_be_silent,
        report=_log.info,
    )


class ChiefStatus:
    """Reads the chief's status page, and measures how long the chief has been silent."""

    def __init__(self, task: Task, *, now: Callable[[], float] = time.monotonic) -> None:
        self.task, self._now = task, now
        self.step, self.has_begun, self.has_ended_early = 0, False, False
        self._read_at = now() - CHIEF_POLL_SECS
        self._silent_since: float | None = None

    def poll(self) -> float:
        """Does the same as `read`, unless the page was read just now."""
        return self.read() if self._now() - self._read_at >= CHIEF_POLL_SECS else self._silent_secs()

    def read(self) -> float:
        """Reads the chief's page; returns for how many seconds it has been silent."""
        self._read_at = self._now()
        if page := peers.try_status(self.task.control, timeout_secs=2.0):
            self._silent_since = None
            self.step, self.has_begun = page.step, self.has_begun or page.state in BEGUN
            self.has_ended_early = self.has_ended_early or page.ended_early is not None
        elif self._silent_since is None:  # not since its last answer: it was not polled while a checkpoint was scored
            self._silent_since = self._read_at
        return self._silent_secs()

    def _silent_secs(self) -> float:
        return 0.0 if self._silent_since is None else self._now() - self._silent_since


def answered_instead(message: str) -> str | None:
    """Returns the task that answered instead of this one, as TensorFlow's error names it; None for any other error."""
    found = re.search(r"different device incarnation.*?/job:(\w+)/replica:0/task:(\d+)", message, re.DOTALL)
    return f"{found[1]}:{found[2]}" if found else None


def wait_until_reached(spec: TaskSpec, runtime: TaskRuntime) -> None:
    """Makes every shard host fetch a number from this task, until that succeeds.

    A host's connection to the task's last attempt may wait for minutes before it asks for the address again. Until then
    every call that has it fetch a tensor from here fails. If another task listens at the old address by then, the host
    stays connected to that one; this task then says so on its page, and the host leaves, to be started again.

    Raises:
        UnreachableError: if that takes longer than `timeouts.roll_call_secs`.
    """
    hosts, status = [host.name for host in spec.other_hosts], runtime.status
    with tf.Graph().as_default() as graph:
        with tf.device(device_of(spec.task.name)):
            number = v1.placeholder(tf.float32, [])
        fetched = []
        for host in hosts:
            with tf.device(device_of(host)):
                fetched.append(number + 1.0)
    config = spec.session_config(hosts)
    config.operation_timeout_in_ms = ANSWER_MS
    session = v1.Session(runtime.target, graph=graph, config=config)
    runtime.keep_open.append(session)
    began, replaced_since, last = time.monotonic(), None, ""
    while True:
        try:
            session.run(fetched, {number: 0.0})
            status.is_replaced = False
            return
        except (tf.errors.UnavailableError, tf.errors.DeadlineExceededError, tf.errors.AbortedError) as error:
            other = answered_instead(error.message)
            if isinstance(error, tf.errors.AbortedError) and other in (None, spec.task.name):
                raise
            reason = f"{other} answers" if other else _reason(error.message)
            now = time.monotonic()
            replaced_since = (replaced_since or now) if other else None
            status.is_replaced = replaced_since is not None and now - replaced_since > REPLACED_SECS
            if now - began > spec.config.timeouts.roll_call_secs:
                raise UnreachableError(f"a shard host cannot reach this task: {reason}") from error
            if reason != last:
                _log.info("a shard host cannot reach this task yet: %s", reason)
                last = reason
            time.sleep(RETRY_SECS)


def _reason(message: str) -> str:
    """Returns the line of TensorFlow's error that says what went wrong."""
    lines = [
        line for line in message.splitlines() if line and not line.startswith(("Graph execution error", "From /job"))
    ]
    return next((line for line in lines if "connect" in line), lines[0] if lines else message)
