"""Trains the replicas of a worker, and serves its shards if it has any."""

import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from trainer.engine.engine import Engine
from trainer.engine.sharded.worker import ShardedEngine
from trainer.engine.step_result import StepResult
from trainer.faults import exit_codes, failpoints
from trainer.faults.exit_codes import NotFiniteError, RollbackError
from trainer.observe.peers import try_status
from trainer.observe.placement.record import STEP, make_record
from trainer.observe.placement.verify import verify
from trainer.observe.profile.record import REPLICA
from trainer.observe.task_page import TaskPage, TaskState
from trainer.plan.layout import Parameter
from trainer.plan.plan import Plan, Task
from trainer.storage import journal
from trainer.task import hosting, not_finite, watchdogs
from trainer.task.assemble import Assembly, compute_device
from trainer.task.chief import initial_state
from trainer.task.chief.finish import finish
from trainer.task.chief.places import decide_places
from trainer.task.chief.wiring import Chief, assemble
from trainer.task.evaluator.score import make_evaluator
from trainer.task.leave import leave
from trainer.task.loop import AfterStep, train
from trainer.task.other_tasks import roll_call, wait_until_reached
from trainer.task.pace import Pace
from trainer.task.runtime import TaskRuntime, collect_garbage_from_now_on
from trainer.task.server import start_strategy
from trainer.task.signals import StopRequest
from trainer.task.spec import TaskSpec
from trainer.task.stand_ins import LetGo, StandIns, can_stand_in, wait_for_place
from trainer.task.unsupervised import save_before_hosts_leave
from trainer.workload.build import parameters_of
from trainer.workload.workload import open_workload

RECENT_STEPS = 20
LAST_GOODBYE_SECS = 10.0
CHIEF_FIRST_SECS = 60.0

_log = logging.getLogger(__name__)


def run(spec: TaskSpec, runtime: TaskRuntime) -> bool:
    """Trains this worker's replicas; returns whether the run was stopped before its last step."""
    assembly = Assembly.of(spec)
    if spec.plan.effective_strategy.has_ring:
        stopped = _train(assembly, runtime, _join_all_reduce(spec, runtime.status))
        _wait_for_the_ring(spec.plan, runtime.status)
        return stopped
    if can_stand_in(spec.config.restart, spec.plan) and spec.task.is_chief:
        decide_places(spec.plan.workers, runtime.status, is_over=lambda: not runtime.needs_hosts)
    hosts = hosting.start(assembly, runtime)
    try:
        stopped = _train(assembly, runtime)
    except NotFiniteError:  # the others see it too, and need these shards for that
        hosting.wait_for_goodbyes(hosts, LAST_GOODBYE_SECS)
        raise
    hosting.wait_for_goodbyes(hosts)
    if hosts and not spec.task.is_chief:  # the chief, which evaluates and exports, leaves later anyway
        time.sleep(hosting.LINGER_SECS)
    return stopped


def _join_all_reduce(spec: TaskSpec, status: TaskPage) -> Any:
    """Joins once all workers have seen each other: from then on TensorFlow keeps this process from answering."""
    workers = [task.name for task in spec.plan.workers]
    roll_call(spec, status, workers, until="is_listening")
    status.is_ready = True
    roll_call(spec, status, workers, until="is_ready", may_be_silent=True)
    return start_strategy(
        spec.plan, spec.task, pack_mib=spec.config.strategy.pack_mib, heartbeat_secs=spec.config.timeouts.heartbeat_secs
    )


def _wait_for_the_ring(plan: Plan, status: TaskPage) -> None:
    """Waits until the other workers have finished the last step: they may still receive a part of it from here."""
    deadline = time.monotonic() + LAST_GOODBYE_SECS
    for other in plan.workers:
        while time.monotonic() < deadline:
            page = try_status(other.control, 1.0)
            if page is None or page.step >= status.step:  # one that has left has all that it needs
                break
            time.sleep(0.02)


def _train(assembly: Assembly, runtime: TaskRuntime, strategy: Any = None) -> bool:
    """Builds the engine, connects it and trains; `strategy` comes from `server.start_strategy`, under all-reduce."""
    spec = assembly.spec
    config, plan, task, status = spec.config, spec.plan, spec.task, runtime.status
    status.state = TaskState.building
    # The chief loads the values, and writes the trained model.
    workload = open_workload(config, plan, spec.directory.frozen, with_values=task.is_chief)
    spec.directory.discard_described()
    _check_planned(plan, parameters_of(workload.model, config.train.precision.value, plan.frozen.paths))
    engine = assembly.make_engine(workload, strategy)
    evaluator = None
    if task.is_chief and plan.trainers == plan.tasks:  # else an evaluator task does it
        evaluator = make_evaluator(
            config.evaluate, workload, compute_device(plan, task), assembly.make_tables(workload)
        )
    if plan.has_shard_hosts:
        roll_call(spec, status, plan.hosts, until="is_ready")
        if not spec.shards:
            watchdogs.watch_hosts(spec, runtime)  # from here on: a session waits for ever for a host that was restarted
        if spec.is_unsupervised:
            wait_until_reached(spec, runtime)
    runtime.keep_open += [engine, evaluator]
    engine.connect(runtime.target, spec.session_config(plan.hosts))
    pace, stand_ins = Pace(), StandIns(assembly, runtime, workload)
    if task.is_chief:
        status.computes_for = [task.name]
    elif can_stand_in(config.restart, plan):
        assert isinstance(engine, ShardedEngine)
        wait_for_place(spec.chief, status, partial(engine.has_ended, plan.steps))
    if not task.is_chief:
        is_stopped = _step_to_the_end(spec, runtime, engine, pace, engine.start(), stand_ins)
        return is_stopped and not _has_ended_early(spec.chief, runtime.stop)
    if spec.is_unsupervised:
        save_before_hosts_leave(spec, runtime)
    if evaluator is not None:
        evaluator.connect(runtime.target, spec.session_config(plan.hosts if plan.sends_rows else []))
    start = initial_state.start(spec, runtime, engine, workload.model)
    chief = assemble(spec, runtime, engine, workload.objective, assembly.tables, evaluator, start)
    stopped = _step_to_the_end(spec, runtime, engine, pace, start.step, stand_ins, chief)
    stopped = stopped and status.ended_early is None
    runtime.needs_hosts = False
    return finish(chief, pace, workload, stopped=stopped, resumed_from=start.checkpoint)


def _has_ended_early(chief: Task, stop: StopRequest) -> bool:
    """Whether the chief, not a signal, asked to stop."""
    deadline = time.monotonic() + CHIEF_FIRST_SECS
    while not stop.requested and time.monotonic() < deadline:
        page = try_status(chief.control, 2.0)
        if page and page.step > 0:  # else it was restarted, and does not know yet
            return page.ended_early is not None
        time.sleep(0.1)
    return False


def _check_planned(plan: Plan, parameters: Sequence[Parameter]) -> None:
    """Fails if the built model is not the planned one, e.g. because its data has changed."""
    planned = {piece.path: piece.shape for shard in plan.shards for piece in (*shard.trainable, *shard.state)}
    built = {p.path: p.shape for p in parameters}
    if built != planned:
        different = sorted(path for path in built.keys() | planned.keys() if built.get(path) != planned.get(path))
        raise RuntimeError(f"the model differs from the planned one in {', '.join(different[:5])}")


def _step_to_the_end(
    spec: TaskSpec,
    runtime: TaskRuntime,
    engine: Engine,
    pace: Pace,
    start: int,
    stand_ins: StandIns,
    chief: Chief | None = None,
) -> bool:
    """Takes steps from global step `start` on; returns whether the run was stopped before its last step."""
    config, plan, status, stop = spec.config, spec.plan, runtime.status, runtime.stop
    runtime.journal.write(journal.Join(start, plan.replica_numbers(spec.task)))
    if plan.effective_strategy.waits_for_one or not plan.has_shard_hosts:  # else its hosts know who is missing
        watchdogs.watch_steps(spec, runtime, lambda: status.step, None)
    watchdogs.watch_data(status, engine)
    stop.let_step_finish()
    status.generation, status.step, status.state = engine.generation, start, TaskState.training
    collect_garbage_from_now_on()
    pace.began = time.monotonic()
    is_last = plan.effective_strategy.waits_for_all and initial_state.state_of(engine).is_last
    engine.is_tracing = config.device.log_placement
    if chief and not engine.is_tracing:
        chief.report.events.graph(engine.graph)
    stand_ins.watch()
    try:
        _, stopped = train(
            engine,
            start=start,
            until=start if is_last else plan.steps,
            stop_requested=lambda: stop.stops_all or status.ended_early is not None,
            reductions=lambda: chief.judge.reductions if chief else 0,
            gradients_every=config.history.histogram_every if chief else 0,
            between=chief.between if chief else [partial(stand_ins.give_up, spec.task.name)],
            after=[*_make_actions(spec, runtime, engine, pace, start, chief), *(chief.after if chief else [])],
            on_bad=not_finite.reaction(config.train.on_not_finite, rollbacks=spec.rollbacks),
        )
    except LetGo:
        stand_ins.finish()
        _log.info("another worker computes for this one; exiting")
        leave(exit_codes.TERMINATED)
    except RollbackError as error:
        if chief:
            chief.saver.roll_back(error.step)
        else:  # the chief, which may still be writing a checkpoint, leaves first; then all others are ended
            time.sleep(CHIEF_FIRST_SECS)
        raise
    except NotFiniteError:
        runtime.needs_hosts = False
        if not plan.effective_strategy.waits_for_all:  # else every worker stops at the same step
            engine.step(stop=True)
        stand_ins.finish(LAST_GOODBYE_SECS)
        engine.leave()
        raise
    stand_ins.finish()
    if chief is None:
        runtime.needs_hosts = False
        engine.leave()
    return stopped or is_last


def _make_actions(
    spec: TaskSpec, runtime: TaskRuntime, engine: Engine, pace: Pace, start: int, chief: Chief | None
) -> Sequence[AfterStep]:
    """Returns the actions of every worker on the result of a step, in order."""
    status, plan, replicas = runtime.status, spec.plan, spec.plan.replica_numbers(spec.task)
    examples = plan.replica_batch * len(replicas)

    def write_journal(result: StepResult) -> None:
        if spec.config.history.journal and result.step < plan.steps:
            runtime.journal.write(journal.Push(result.generation, result.step, replicas))

    def write_profile(result: StepResult) -> None:
        if runtime.recorder and result.stamps:
            runtime.recorder.write(REPLICA, result.step + 1, result.stamps)

    def verify_placement(result: StepResult) -> None:
        if (ran := engine.executed) is not None:
            record = make_record(spec.task.name, STEP, ran, scopes=engine.scopes, variables=engine.variables)
            verify(record, plan, spec.directory)
            if chief:
                chief.report.events.graph(engine.graph, {o.name: o.device for o in ran.operations})
            engine.executed = None

    def update_status(result: StepResult) -> None:
        pace.tick(result)
        status.generation, status.step = result.generation, result.step
        failpoints.reach("step", result.step)
        status.step_secs += pace.step_secs[-1]
        status.wait_secs += result.wait_secs
        status.compute_secs += result.compute_secs
        status.count_step(pace.step_secs[-1])
        status.wait_fraction = pace.wait_fraction(RECENT_STEPS)
        status.examples_per_second = examples * pace.steps_per_second(RECENT_STEPS)
        if result.step > start:
            status.steps, status.examples = status.steps + 1, status.examples + examples
            status.loss = result.loss
            status.first_step_at = status.first_step_at or time.time()

    return write_journal, write_profile, verify_placement, update_status
