"""Threads that watch a task from inside: they notice lost shard hosts, and steps that stall."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence

import tensorflow as tf

from trainer.engine.engine import Engine
from trainer.observe import heartbeats
from trainer.observe.peers import try_status
from trainer.observe.stall import STALL_SECS, Stall, describe
from trainer.observe.task_page import TaskPage, TaskState
from trainer.plan.plan import Plan
from trainer.task.leave import leave
from trainer.task.runtime import TaskRuntime
from trainer.task.spec import TaskSpec

STEP_POLL_SECS = 1.0

_log = logging.getLogger(__name__)


def watch_hosts(spec: TaskSpec, runtime: TaskRuntime) -> None:
    """Ends this task when a shard host no longer answers, or was restarted and has lost its state."""
    timeout_secs = spec.config.timeouts.heartbeat_secs
    may_start_again = bool(spec.shards)  # no state is lost before one is loaded

    def fail(code: int, why: str) -> None:
        _log.error("failed: %s", why)
        leave(code)

    heartbeats.watch(
        heartbeats.Heartbeats(spec.task.name, spec.other_hosts, timeout_secs=timeout_secs, now=time.monotonic()),
        timeout_secs=timeout_secs,
        is_over=lambda: not runtime.needs_hosts,
        loses=lambda: runtime.holds_state or not may_start_again,
        leave=fail,
    )


def watch_steps(
    spec: TaskSpec, runtime: TaskRuntime, step_of: Callable[[], int], missing: Callable[[], list[int]] | None
) -> None:
    """Reports on the status page, and in the log, which tasks a stalled step waits for.

    Args:
        missing: asks the shard for the workers that it waits for; None if the step belongs to this task alone.
    """
    stall = Stall(limit_secs=spec.config.timeouts.step_secs, now=time.monotonic())

    def watch() -> None:
        while runtime.needs_hosts:
            _poll(spec, runtime.status, stall, step_of, missing)
            time.sleep(STEP_POLL_SECS)

    threading.Thread(target=watch, name="stalls", daemon=True).start()


def watch_data(status: TaskPage, engine: Engine) -> None:
    """Reports on the status page how long the current step has been waiting for its batch."""

    def watch() -> None:
        with contextlib.suppress(tf.errors.OpError, RuntimeError):  # the engine is closed
            while True:
                status.data_secs = engine.data_wait_secs()
                time.sleep(STEP_POLL_SECS)
        status.data_secs = 0.0

    threading.Thread(target=watch, name="data", daemon=True).start()


def _poll(
    spec: TaskSpec, status: TaskPage, stall: Stall, step_of: Callable[[], int], missing: Callable[[], list[int]] | None
) -> None:
    workers = [task.name for task in spec.plan.workers]
    now, step = time.monotonic(), step_of()
    secs = stall.poll(step, now)
    is_stalled = (
        secs > STALL_SECS and status.state in (TaskState.training, TaskState.serving) and step < spec.plan.steps
    )
    names = []
    if is_stalled:
        names = [workers[i] for i in missing()] if missing else [spec.task.name]
    if not is_stalled or step_of() != step:  # it moved meanwhile, so who is missing has been for a moment only
        status.missing, status.stuck, status.stalled_secs = [], [], 0.0
        return
    status.missing, status.stalled_secs = names, secs
    status.stuck = names if stall.is_stuck(now) else []
    if missing and names and stall.is_due(now):
        _log.warning(describe(step, secs, workers, names, _steps_of(spec.plan, names)))


def _steps_of(plan: Plan, names: Sequence[str]) -> dict[str, tuple[int, float]]:
    """Returns, by answering task, its step, heard 0 s ago."""
    pages = {task.name: try_status(task.control, 1.0) for task in plan.tasks if task.name in names}
    return {name: (page.step, 0.0) for name, page in pages.items() if page}
