"""Lets a task act without a launcher, as in the pods or the step of a scheduler.

A scheduler moves one task at a time: it sends SIGTERM to that task, and restarts it, perhaps elsewhere. A worker
without a shard then exits alone, and the others wait for its successor, as after a kill. The chief saves first, and so
it does for a task that holds a part of the state; then all exit, to be restarted. Only a run that has ended ends
its tasks with 0.
"""

import logging
import threading
import time
from collections.abc import Callable

from trainer.faults import exit_codes
from trainer.observe.peers import try_status
from trainer.plan.plan import Plan, Task
from trainer.task.leave import leave
from trainer.task.other_tasks import ChiefStatus
from trainer.task.runtime import TaskRuntime
from trainer.task.signals import StopRequest
from trainer.task.spec import TaskSpec

CHIEF_SECS = 5.0  # for the chief to have been asked to stop too: then the whole run stops
POLL_SECS = 0.25
READ_SECS = 1.0
WORKERS_SECS = 5.0  # between two looks at the pages of workers

_log = logging.getLogger(__name__)


def leave_unless_all_stop(chief: Task, stop: StopRequest) -> None:
    """Ends this worker soon, unless the chief was asked to stop as well, as when a whole job is ended."""
    deadline = time.monotonic() + CHIEF_SECS
    _log.info("asked to stop; only this task exits, unless worker:0 stops too")
    while time.monotonic() < deadline:
        page = try_status(chief.control, READ_SECS)
        if page and (page.is_stopping or page.ended_early is not None):
            stop.stops_all = True  # if workers do not wait for each other, each asks for itself
            return
        time.sleep(POLL_SECS)
    _log.info("exiting; the others wait for this task's next attempt")
    leave(exit_codes.TERMINATED)


def save_before_hosts_leave(spec: TaskSpec, runtime: TaskRuntime) -> None:
    """Makes the chief stop, and so save, the run as soon as a task that holds a part of the state is asked to stop."""
    stop = runtime.stop

    def watch() -> None:
        while runtime.needs_hosts and not stop.requested:
            for host in spec.other_hosts:
                page = try_status(host.control, READ_SECS)
                if page and page.is_stopping:
                    _log.warning("%s was asked to stop; saving, and stopping the run", host.name)
                    stop.request()
                    return
            time.sleep(POLL_SECS)

    _start("evictions", watch)


def leave_if_workers_are_replaced(plan: Plan, runtime: TaskRuntime) -> None:
    """Ends this shard host when a worker reports that a host is connected to another task instead of that worker.

    Such a connection stays open, so the worker would wait forever. When a host exits, all tasks do, and resume from
    the newest checkpoint with new connections.
    """
    waits_for_all = plan.effective_strategy.waits_for_all

    def watch() -> None:
        step = None
        while runtime.needs_hosts:
            time.sleep(WORKERS_SECS)
            before, step = step, runtime.status.step
            if waits_for_all and before != step:
                continue  # so every worker takes part
            for worker in plan.workers:
                page = try_status(worker.control, READ_SECS)
                if page and page.is_replaced:
                    _log.error("failed: a shard host is connected to another task instead of %s", worker.name)
                    leave(exit_codes.INCOMPLETE)

    _start("workers", watch)


def watch_chief(spec: TaskSpec) -> ChiefStatus:
    """Makes a shard host exit when the chief does not return: nothing else would ever end this task."""
    chief, patience = ChiefStatus(spec.chief), spec.config.timeouts.roll_call_secs

    def watch() -> None:
        while chief.read() <= patience:
            time.sleep(POLL_SECS)
        _log.error("failed: worker:0 at %s has not answered for %.0f s", chief.task.control, patience)
        leave(exit_codes.UNAVAILABLE)

    _start("chief", watch)
    return chief


def _start(name: str, work: Callable[[], None]) -> None:
    threading.Thread(target=work, name=name, daemon=True).start()
