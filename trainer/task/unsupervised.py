"""What a task does where no launcher watches over the run, as in the pods or the step of a scheduler.

A scheduler moves one task at a time: it sends SIGTERM to that one, and starts it again, perhaps elsewhere. A worker
without a shard then leaves alone, and the others wait for its successor, as after a kill. The chief saves first, and so
it does for a task that holds a part of the state; then all leave, to be started again. Only a run that has ended ends
its tasks with 0.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable

from trainer.faults import exit_codes
from trainer.observe.peers import read_status, try_status
from trainer.task.context import Context
from trainer.task.leave import leave

CHIEF_SECS = 5.0  # for the chief to have been asked to stop too: then the whole run stops
POLL_SECS = 0.25
READ_SECS = 1.0
WORKERS_SECS = 5.0  # between two looks at the pages of workers

_log = logging.getLogger(__name__)


def is_unsupervised(context: Context) -> bool:
    """Whether a scheduler started this task, and not a launcher."""
    return not context.status.launch


def stops_alone(context: Context) -> bool:
    """Whether this task can leave, and come back, while the others keep the state of the run."""
    is_worker = context.task.job == "worker" and not context.task.is_chief
    return is_unsupervised(context) and is_worker and context.plan.has_shard_hosts and not context.shards


def leave_unless_all_stop(context: Context) -> None:
    """Ends this worker soon, unless the chief was asked to stop as well, as when a whole job is ended."""
    chief, deadline = context.plan.task("worker", 0), time.monotonic() + CHIEF_SECS
    _log.info("asked to stop; leaving alone unless worker:0 stops too")
    while time.monotonic() < deadline:
        page = try_status(chief.control, READ_SECS)
        if page and (page.is_stopping or page.ended_early is not None):
            context.stop.stops_all = True  # where nobody waits for the others, each asks for itself
            return
        time.sleep(POLL_SECS)
    _log.info("leaving; the others wait for this task's next attempt")
    leave(exit_codes.TERMINATED)


def save_before_hosts_leave(context: Context) -> None:
    """Has the chief stop the run, and so save it, as soon as a task that holds a part of the state is asked to stop."""
    hosts = [task for task in context.plan.tasks if task.name in context.plan.hosts and task != context.task]

    def watch() -> None:
        while context.needs_hosts and not context.stop.requested:
            for host in hosts:
                page = try_status(host.control, READ_SECS)
                if page and page.is_stopping:
                    _log.warning("%s was asked to stop; saving, and stopping the run", host.name)
                    context.stop.request()
                    return
            time.sleep(POLL_SECS)

    _start("evictions", watch)


def leave_if_workers_are_replaced(context: Context) -> None:
    """Ends this shard host when a worker reports that a host is connected to another task instead of that worker.

    Such a connection stays open, so the worker would wait for ever. When a host leaves, all tasks do, and resume from
    the newest checkpoint with new connections.
    """
    waits_for_all = context.plan.effective_strategy.waits_for_all

    def watch() -> None:
        step = None
        while context.needs_hosts:
            time.sleep(WORKERS_SECS)
            before, step = step, context.status.step
            if waits_for_all and before != step:
                continue  # so every worker takes part
            for worker in context.plan.workers:
                page = try_status(worker.control, READ_SECS)
                if page and page.is_replaced:
                    _log.error("failed: a shard host is connected to another task instead of %s", worker.name)
                    leave(exit_codes.INCOMPLETE)

    _start("workers", watch)


class ChiefWatch:
    """A shard host's view of the chief: whether it has ended the run, and whether it is still there."""

    def __init__(self, context: Context) -> None:
        self.has_ended_run = False
        self._context, self._chief = context, context.plan.task("worker", 0)
        _start("chief", self._watch)

    def has_finished(self) -> bool:
        """Whether the run has made its last step, or was ended early by its chief."""
        self._read()
        return self.has_ended_run or self._context.status.step >= self._context.plan.steps

    def _watch(self) -> None:
        """Leaves when the chief does not come back: nobody else would ever end this task."""
        patience, heard_at = self._context.config.timeouts.roll_call_secs, time.monotonic()
        while True:
            if self._read():
                heard_at = time.monotonic()
            elif time.monotonic() - heard_at > patience:
                _log.error("failed: worker:0 at %s has not answered for %.0f s", self._chief.control, patience)
                leave(exit_codes.UNAVAILABLE)
            time.sleep(POLL_SECS)

    def _read(self) -> bool:
        with contextlib.suppress(OSError, ValueError):
            page = read_status(self._chief.control, timeout_secs=READ_SECS)
            self.has_ended_run = self.has_ended_run or page.ended_early is not None
            return True
        return False


def _start(name: str, work: Callable[[], None]) -> None:
    threading.Thread(target=work, name=name, daemon=True).start()
