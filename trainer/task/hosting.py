"""Serves the shards of a task, each in a thread of its own."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from trainer.engine.sharded.host import ShardHost
from trainer.observe.placement.record import UPDATE, make_record
from trainer.observe.profile.record import SHARD
from trainer.observe.task_page import TaskState
from trainer.storage.journal import Load, Update
from trainer.task import watchdogs
from trainer.task.assemble import make_host
from trainer.task.context import Context, collect_garbage_from_now_on
from trainer.task.leave import leave, log_failure
from trainer.task.unsupervised import ChiefWatch, is_unsupervised, leave_if_workers_are_replaced

# After the last goodbye: a worker's session tidies up behind it, and TensorFlow would log an error, `Cleanup partition
# error: UNAVAILABLE`, if it found this server gone.
LINGER_SECS = 0.3


def run(context: Context) -> bool:
    """Serves the shards of a parameter server to the end of the run; the workers decide when that is.

    Returns:
        Whether the run was stopped before its end, where that must be told to a scheduler: a launcher knows.
    """
    context.directory.discard_described()
    chief = ChiefWatch(context) if is_unsupervised(context) else None
    wait_for_goodbyes(start(context))
    stopped = chief is not None and not chief.has_finished()
    time.sleep(LINGER_SECS)
    return stopped


def start(context: Context) -> list[ShardHost]:
    """Makes the hosts of this task's shards and has them serve; returns them, none where it has no shard."""
    hosts = [make_host(context, shard) for shard in context.shards]
    if not hosts:
        return []
    peers = _peers(context)
    context.roll_call(peers, until="is_listening")
    context.keep_open += hosts
    for host in hosts:
        host.connect(context.server.target, context.session_config(peers))
        if host.rows is not None:
            _start_thread(f"rows of shard {host.shard.index}", partial(host.rows.serve, host.session))
    watchdogs.watch_hosts(context)
    if is_unsupervised(context):
        leave_if_workers_are_replaced(context)
    context.status.is_ready = True
    context.status.state = TaskState.waiting
    first, *others = hosts
    _start_thread("shard host", partial(_serve, context, first, others))
    for number, other in enumerate(others, 2):
        _start_thread(f"shard host {number}", partial(_serve_beside, context, other))
    return hosts


def wait_for_goodbyes(hosts: Sequence[ShardHost], at_most_secs: float | None = None) -> None:
    """Returns when every worker has taken leave of each host, or has had this long to do so."""
    for host in hosts:
        if at_most_secs is None:
            host.wait_for_goodbyes()
            continue
        thread = threading.Thread(target=host.wait_for_goodbyes, daemon=True)
        thread.start()
        thread.join(at_most_secs)


def _peers(context: Context) -> list[str]:
    """Returns the hosts that a host talks to: only to agree on a norm, or on the order of arrivals."""
    strategy = context.plan.effective_strategy
    agrees_on_norm = context.config.optimizer.clip_norm is not None and not strategy.waits_for_one
    return list(context.plan.hosts) if agrees_on_norm or strategy.waits_for_quorum else []


def _serve_beside(context: Context, host: ShardHost) -> None:
    """Serves a shard beside the first one, which reports for this task: they move together."""
    host.load()
    host.serve(context.plan.steps, lambda *_: None)


def _serve(context: Context, host: ShardHost, others: Sequence[ShardHost]) -> None:
    step = host.load()
    updates = _Updates(context, host, step, host.read_tag()[0])
    context.holds_state = True
    context.journal.write(Load(updates.generation, step))
    is_ps = context.task.job == "ps"
    if is_ps:
        status = context.status
        status.generation, status.step, status.state = updates.generation, step, TaskState.serving
        context.stop.stay()  # the workers decide when: they need this shard to save it

    def missing() -> list[int]:
        return sorted({worker for one in (host, *others) for worker in one.missing()})

    watchdogs.watch_steps(context, lambda: updates.step, missing)
    host.is_tracing = context.config.device.log_placement
    if is_ps:
        collect_garbage_from_now_on()
    if context.recorder:
        host.record = partial(context.recorder.write, SHARD)
    host.serve(context.plan.steps, updates.report)


def _start_thread(name: str, work: Callable[[], None]) -> None:
    """Runs `work` beside the main thread; its failure ends the task, because nobody joins it."""

    def run() -> None:
        try:
            work()
        except Exception as error:
            leave(log_failure(error))

    threading.Thread(target=run, name=name, daemon=True).start()


@dataclass
class _Updates:
    """Reports each update of a host: in the journal, and on the status page of a parameter server."""

    context: Context
    host: ShardHost
    step: int
    generation: int
    began: float = field(default_factory=time.monotonic)
    waited_secs: float = 0.0

    def report(self, step: int, wait_secs: float) -> None:
        context = self.context
        if self.host.executed is not None:
            context.verify_placement(make_record(context.task.name, UPDATE, self.host.executed))
            self.host.executed = None
        self.waited_secs += wait_secs
        if context.config.history.journal:
            context.journal.write(Update(self.generation, step))
        self.step = step
        if context.task.job == "ps":
            context.status.step = step
            context.status.steps += 1
            context.status.wait_fraction = self.waited_secs / (time.monotonic() - self.began)
