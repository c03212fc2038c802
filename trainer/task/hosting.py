"""Serves the shards of a task, each in its own thread."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from trainer.engine.sharded.host import ShardHost
from trainer.observe.placement.record import UPDATE, make_record
from trainer.observe.placement.verify import verify
from trainer.observe.profile.record import SHARD
from trainer.observe.task_page import TaskState
from trainer.storage.journal import Load, Update
from trainer.task import watchdogs
from trainer.task.assemble import Assembly
from trainer.task.leave import leave, log_failure
from trainer.task.other_tasks import roll_call
from trainer.task.runtime import TaskRuntime, collect_garbage_from_now_on
from trainer.task.spec import TaskSpec
from trainer.task.unsupervised import leave_if_workers_are_replaced, watch_chief

# After the last goodbye: a worker's session still cleans up, and TensorFlow would log an error, `Cleanup partition
# error: UNAVAILABLE`, if this server had ended.
LINGER_SECS = 0.3


def run(spec: TaskSpec, runtime: TaskRuntime) -> bool:
    """Serves the shards of a parameter server to the end of the run; the workers decide when that is.

    Returns:
        Whether the run was stopped before its end, if a scheduler must know; a launcher knows.
    """
    spec.directory.discard_described()
    chief = watch_chief(spec) if spec.is_unsupervised else None
    wait_for_goodbyes(start(Assembly.of(spec), runtime))
    if chief:
        chief.read()
    time.sleep(LINGER_SECS)
    return chief is not None and runtime.status.step < spec.plan.steps and not chief.has_ended_early


def start(assembly: Assembly, runtime: TaskRuntime) -> list[ShardHost]:
    """Makes the hosts of this task's shards and starts serving; returns them, or nothing if it has no shard."""
    spec = assembly.spec
    hosts = [assembly.make_host(shard) for shard in spec.shards]
    if not hosts:
        return []
    status, peers = runtime.status, _peers(spec)
    roll_call(spec, status, peers, until="is_listening")
    runtime.keep_open += hosts
    for host in hosts:
        host.connect(runtime.target, spec.session_config(peers))
        if host.rows is not None:
            _start_thread(f"rows of shard {host.shard.index}", partial(host.rows.serve, host.session))
    watchdogs.watch_hosts(spec, runtime)
    if spec.is_unsupervised:
        leave_if_workers_are_replaced(spec.plan, runtime)
    status.is_ready = True
    status.state = TaskState.waiting
    first, *others = hosts
    _start_thread("shard host", partial(_serve, spec, runtime, first, others))
    for number, other in enumerate(others, 2):
        _start_thread(f"shard host {number}", partial(_serve_beside, spec.plan.steps, other))
    return hosts


def wait_for_goodbyes(hosts: Sequence[ShardHost], at_most_secs: float | None = None) -> None:
    """Waits until every worker has said goodbye to each host, or for this long."""
    for host in hosts:
        if at_most_secs is None:
            host.wait_for_goodbyes()
            continue
        thread = threading.Thread(target=host.wait_for_goodbyes, daemon=True)
        thread.start()
        thread.join(at_most_secs)


def _peers(spec: TaskSpec) -> list[str]:
    """Returns the hosts with which a host must agree on a norm, or on the order of arrivals."""
    strategy = spec.plan.effective_strategy
    agrees_on_norm = spec.config.optimizer.clip_norm is not None and not strategy.waits_for_one
    return list(spec.plan.hosts) if agrees_on_norm or strategy.waits_for_quorum else []


def _serve_beside(steps: int, host: ShardHost) -> None:
    """Serves a shard beside the first one, which reports for this task: they move together."""
    host.load()
    host.serve(steps, lambda *_: None)


def _serve(spec: TaskSpec, runtime: TaskRuntime, host: ShardHost, others: Sequence[ShardHost]) -> None:
    step, status = host.load(), runtime.status
    updates = _Updates(spec, runtime, host, step, host.read_tag()[0])
    runtime.holds_state = True
    runtime.journal.write(Load(updates.generation, step))
    is_ps = spec.task.job == "ps"
    if is_ps:
        status.generation, status.step, status.state = updates.generation, step, TaskState.serving
        runtime.stop.stay()  # the workers decide when: they need this shard to save it

    def missing() -> list[int]:
        return sorted({worker for one in (host, *others) for worker in one.missing()})

    watchdogs.watch_steps(spec, runtime, lambda: updates.step, missing)
    host.is_tracing = spec.config.device.log_placement
    if is_ps:
        collect_garbage_from_now_on()
    if runtime.recorder:
        host.record = partial(runtime.recorder.write, SHARD)
    host.serve(spec.plan.steps, updates.report)


def _start_thread(name: str, work: Callable[[], None]) -> None:
    """Runs `work` beside the main thread; its failure ends the task, because no thread joins it."""

    def run() -> None:
        try:
            work()
        except Exception as error:
            leave(log_failure(error))

    threading.Thread(target=run, name=name, daemon=True).start()


@dataclass
class _Updates:
    """Reports each update of a host in the journal, and on the status page of a parameter server."""

    spec: TaskSpec
    runtime: TaskRuntime
    host: ShardHost
    step: int
    generation: int
    began: float = field(default_factory=time.monotonic)
    waited_secs: float = 0.0

    def report(self, step: int, wait_secs: float) -> None:
        spec, status = self.spec, self.runtime.status
        if self.host.executed is not None:
            verify(make_record(spec.task.name, UPDATE, self.host.executed), spec.plan, spec.directory)
            self.host.executed = None
        self.waited_secs += wait_secs
        if spec.config.history.journal:
            self.runtime.journal.write(Update(self.generation, step))
        self.step = step
        if spec.task.job == "ps":
            status.step = step
            status.steps += 1
            status.wait_fraction = self.waited_secs / (time.monotonic() - self.began)
