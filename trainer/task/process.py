"""The life of one task, from its run directory, job and index to its exit code."""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import tensorflow as tf

from trainer.config.schema import RunConfig
from trainer.engine.engine import Engine
from trainer.engine.sharded.host import ShardHost
from trainer.engine.step_result import StepResult
from trainer.engine.vectors.shared_memory import Memory
from trainer.faults import exit_codes, failpoints
from trainer.faults.exit_codes import NotFiniteError, RollbackError, TrainerError
from trainer.observe import status as status_page
from trainer.observe.heartbeats import Heartbeats, watch
from trainer.observe.machine import is_local
from trainer.observe.peers import PeerError, read_status, roll_call
from trainer.observe.placement.executed import Executed
from trainer.observe.placement.record import STEP, UPDATE, make_record
from trainer.observe.placement.verify import verify
from trainer.observe.profile.record import REPLICA, SHARD, Recorder
from trainer.observe.stall import STALL_SECS, Stall, describe
from trainer.observe.status import Status
from trainer.plan import addresses
from trainer.plan.environment import LAUNCHER, LINKS, REPORTS_PROGRESS
from trainer.plan.layout import Parameter
from trainer.plan.plan import Plan, Task
from trainer.storage import rollbacks
from trainer.storage.checkpoint import Checkpoint
from trainer.storage.journal import Journal
from trainer.storage.run_directory import RunDirectory, config_hash
from trainer.task import log, not_finite
from trainer.task.assemble import compute_device, make_engine, make_host, open_memory
from trainer.task.chief.actions import Chief
from trainer.task.chief.initial_state import first_snapshot, missed_at
from trainer.task.evaluator import life
from trainer.task.evaluator.score import Evaluator
from trainer.task.loop import train
from trainer.task.pace import Pace
from trainer.task.server import can_fuse, configure_eager, session_config, start_server, start_strategy
from trainer.task.signals import StopRequest
from trainer.workload.build import open_workload, parameters_of
from trainer.workload.data import find_data_error

_log = logging.getLogger(__name__)

RECENT_STEPS = 20
LOOK_EVERY_SECS = 1.0  # at whether a step stalls
LAST_GOODBYE_SECS = 10.0
CHIEF_FIRST_SECS = 60.0


def main(run: str, job: str, index: int, config: RunConfig | None = None) -> NoReturn:
    """Plays a task of a run that a launcher prepared.

    Args:
        config: the run's, if somebody has read it already.
    """
    directory = RunDirectory(Path(run))
    links = json.loads(os.environ.get(LINKS, "{}"))
    play(config or directory.read_config(), directory.read_plan().reached_by(links), directory, job, index)


def play(config: RunConfig, plan: Plan, directory: RunDirectory, job: str, index: int) -> NoReturn:
    """Plays a task and ends the process; whatever goes wrong is printed, and told by the exit code."""
    faulthandler.enable()
    task = plan.task(job, index)
    log.set_up(task.name)
    _log.info("%s%s of %s, pid %d: %s", log.STARTED, task.name, directory.path, os.getpid(), plan.describe())
    player = _Player(config, plan, directory, task)
    try:
        code = player.play()
    except Exception as error:
        code = _log_failure(error)
    leave(code)


def _log_failure(raised: Exception) -> int:
    """Logs what ends this process, with the traceback of what nobody expected; returns the exit code."""
    error = find_data_error(raised) or raised
    code = exit_codes.exit_code_of(error)
    if code == exit_codes.INTERNAL and not isinstance(error, TrainerError):
        _log.error("unexpected error", exc_info=error)
    _log.error("failed: %s: %s", type(error).__name__, _first_lines(error))
    return code


def leave(code: int) -> NoReturn:
    """Ends the process without finalizing it: closing a session, or a server, can wait for peers that are gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _first_lines(error: Exception) -> str:
    """A TensorFlow error without the graph it quotes."""
    text = getattr(error, "message", None) or str(error)
    return "\n".join(text.splitlines()[:12])


class _Player:
    """One task at work."""

    def __init__(self, config: RunConfig, plan: Plan, directory: RunDirectory, task: Task) -> None:
        self._config, self._plan, self._directory, self._task = config, plan, directory, task
        self._stop = StopRequest(told=self._tell_stop, asked=self._tell_state)
        self._status = Status(
            task.job, task.index, str(directory.path), config_hash(config), tensorflow=tf.version.VERSION
        )
        if config.job is None:
            self._status.launch = str(directory.path)
        self._shards = [shard for shard in plan.shards if shard.host == task.name] if plan.has_shard_hosts else []
        self._server: Any = None
        self._strategy: Any = None  # of all-reduce training
        # A task that a scheduler started has no run directory; that of a container may be for reading only.
        writes = directory.plan.exists() and os.access(directory.path, os.W_OK)
        self._journal = Journal(directory.journal / f"{task.job}-{task.index}.jsonl" if writes else None)
        self._recorder = Recorder(directory, task, plan.task("worker", 0)) if config.profile else None
        self._memory: Memory | None = None
        self._holds_state = False
        self._rollbacks = rollbacks.count_rollbacks(directory.rollbacks)
        self._needs_hosts = True  # until this task has all that it wants of them
        # Sessions stay open until the process ends: closing one can wait for ever for a peer that has left.
        self._keep_open: list[Any] = []

    def _tell_stop(self) -> None:
        self._status.is_stopping = True

    def _tell_state(self) -> None:
        """Follows the stacks that `kill -USR1 PID` writes into the log."""
        _log.info("state: %s", json.dumps(self._status.to_json()))

    def _stop_alone(self) -> None:
        """Does what a launcher that was killed cannot ask for any more."""
        _log.warning("the launcher does not ask any more; saving and stopping")
        os.kill(os.getpid(), signal.SIGTERM)

    def play(self) -> int:
        host, port = addresses.host_of(self._task.control), int(self._task.control.rpartition(":")[2])
        # A name may be a scheduler's, of an address that only others reach this task by.
        try:
            status_page.serve(self._status, host if is_local(host) else "", port)
        except OSError as error:
            raise PeerError(f"{self._task.control} is taken ({error.strerror}); stop what listens there") from error
        if LAUNCHER in os.environ:
            status_page.serve_at(self._status, os.environ[LAUNCHER], alone=self._stop_alone)
        if self._task.job == "evaluator":
            _collect_from_now_on()
            life.play(self._config, self._plan, self._directory, self._task, self._status, self._stop)
            return exit_codes.TERMINATED if self._stop.requested else exit_codes.OK
        self._make_devices()
        self._memory = open_memory(self._plan)
        self._status.is_listening = True
        if self._plan.has_shard_hosts and not self._task.is_chief and not self._status.launch:
            self._roll_call(["worker:0"], until="is_listening")  # no launcher would miss it
        if self._plan.effective_strategy.has_ring:
            self._join_all_reduce([task.name for task in self._plan.workers])
        shard_hosts = self._start_hosting() if self._shards else []
        try:
            stopped = self._train() if self._task.job == "worker" else False
        except NotFiniteError:
            for shard_host in shard_hosts:  # the others come to see it too, and need this shard for that
                _wait_at_most(LAST_GOODBYE_SECS, shard_host.wait_for_goodbyes)
            raise
        for shard_host in shard_hosts:
            shard_host.wait_for_goodbyes()
        if self._plan.effective_strategy.has_ring:
            self._stay_for_the_ring()
        self._status.state = "done"
        _log.info("done at step %d", self._status.step)
        return exit_codes.TERMINATED if stopped or self._stop.requested else exit_codes.OK

    def _make_devices(self) -> None:
        """Makes this process's devices and thread pools; whatever comes first decides their size for all."""
        if self._plan.effective_strategy.is_one_process:
            self._keep_open.append(tf.compat.v1.Session(graph=tf.Graph(), config=self._session_config([])))
            return
        if self._plan.effective_strategy.has_ring:  # its strategy starts the server, when the others are there
            configure_eager(self._task, fuses=can_fuse(self._config.train))
            return
        try:
            self._server = start_server(self._plan, self._task)
        except tf.errors.UnknownError as error:
            raise PeerError(f"{self._task.address} cannot be listened on: {error.message}") from error

    def _join_all_reduce(self, workers: list[str]) -> None:
        """Goes in when all workers have seen each other: from then on TensorFlow keeps this process from answering."""
        self._roll_call(workers, until="is_listening")
        self._status.is_ready = True
        self._roll_call(workers, until="is_ready", may_be_silent=True)
        self._strategy = start_strategy(
            self._plan,
            self._task,
            pack_mib=self._config.strategy.pack_mib,
            heartbeat_secs=self._config.timeouts.heartbeat_secs,
        )

    def _stay_for_the_ring(self) -> None:
        """Stays until the other workers have made the last step too: they may be receiving a part of it from here."""
        deadline = time.monotonic() + LAST_GOODBYE_SECS
        for other in self._plan.workers:
            with contextlib.suppress(OSError, ValueError):  # it has left, so it has all it needs
                while time.monotonic() < deadline:
                    if read_status(other.control, timeout_secs=1.0)["step"] >= self._status.step:
                        break
                    time.sleep(0.02)

    def _session_config(self, peers: list[str]) -> Any:
        return session_config(self._task, peers=peers, fuses=can_fuse(self._config.train))

    def _hosts(self) -> list[str]:
        """The tasks that hold shards for others."""
        return list(self._plan.hosts)

    def _roll_call(self, names: list[str], until: str, *, may_be_silent: bool = False) -> None:
        self._status.state = "roll call"
        roll_call(
            self._status,
            [task for task in self._plan.tasks if task.name in names and task != self._task],
            until=until,
            deadline_secs=self._config.timeouts.roll_call_secs,
            may_be_silent=may_be_silent,
            report=_log.info,
        )

    def _start_hosting(self) -> list[ShardHost]:
        """Makes this task's shards, and serves each in a thread of its own."""
        shard_hosts = [make_host(self._config, self._plan, shard, self._memory) for shard in self._shards]
        # Only to agree on a norm, or on the order of arrivals, do hosts talk to each other.
        strategy = self._plan.effective_strategy
        agrees_on_norm = self._config.optimizer.clip_norm is not None and not strategy.waits_for_one
        peers = self._hosts() if agrees_on_norm or strategy.waits_for_quorum else []
        self._roll_call(peers, until="is_listening")
        self._keep_open += shard_hosts
        for shard_host in shard_hosts:
            shard_host.connect(self._server.target, self._session_config(peers))
        self._watch_hosts()
        self._status.is_ready = True
        self._status.state = "waiting"
        first, *others = shard_hosts
        _start_thread("shard host", lambda: self._host(first, others))
        for number, other in enumerate(others, 2):
            _start_thread(f"shard host {number}", partial(self._host_bucket, other))
        return shard_hosts

    def _host_bucket(self, shard_host: ShardHost) -> None:
        """Serves a shard beside the first one, which tells of this task: they move together."""
        shard_host.load()
        shard_host.serve(self._plan.steps, lambda *_: None)

    def _host(self, shard_host: ShardHost, others: Sequence[ShardHost]) -> None:
        is_ps = self._task.job == "ps"
        began, waited = time.monotonic(), 0.0
        step = shard_host.load()
        generation, _ = shard_host.read_tag()
        self._holds_state = True
        self._journal.write("load", generation=generation, step=step)
        is_recorded = self._config.summary.journal

        def on_update(updated: int, wait_secs: float) -> None:
            nonlocal waited
            if shard_host.executed is not None:
                self._prove(UPDATE, shard_host.executed)
                shard_host.executed = None
            waited += wait_secs
            if is_recorded:
                self._journal.write("update", generation=generation, step=updated)
            self._hosted_step = updated
            if is_ps:
                self._status.step = updated
                self._status.wait_fraction = waited / (time.monotonic() - began)

        self._hosted_step = step
        if is_ps:
            self._status.generation, self._status.step, self._status.state = generation, step, "serving"
            self._stop.stay()  # the workers decide when: they need this shard to save it

        def missing() -> list[int]:
            return sorted({worker for one in (shard_host, *others) for worker in one.missing()})

        self._watch_steps(lambda: self._hosted_step, missing)
        shard_host.is_tracing = self._config.device.log_placement
        if is_ps:
            _collect_from_now_on()
        if self._recorder:
            shard_host.record = partial(self._recorder.write, SHARD)
        shard_host.serve(self._plan.steps, on_update)

    def _prove(self, run: str, ran: Executed, engine: Engine | None = None) -> None:
        """Compares where a step ran with the plan; a task without a launcher's run directory writes nothing."""
        scopes, variables = (engine.scopes, engine.variables) if engine else (None, None)
        record = make_record(self._task.name, run, ran, scopes=scopes, variables=variables)
        verify(record, self._plan, self._directory.path if self._directory.plan.exists() else None)

    def _train(self) -> bool:
        """Trains this worker's replica; returns whether the run was stopped before its last step."""
        config, plan = self._config, self._plan
        model, data = open_workload(config)
        _check_planned(plan, parameters_of(model, config.train.precision.value))
        engine = make_engine(
            config,
            plan,
            self._task,
            model,
            data,
            memory=self._memory,
            strategy=self._strategy,
            rollbacks=self._rollbacks,
        )
        evaluator = None
        if self._task.is_chief and plan.trainers == plan.tasks:  # else an evaluator task does it
            evaluator = Evaluator(
                model,
                config.model.loss.value,
                data.evaluate,
                batch_size=config.evaluate.batch_size,
                device=compute_device(plan, self._task),
            )
        target = self._server.target if self._server else ""
        if plan.has_shard_hosts:
            self._roll_call(self._hosts(), until="is_ready")
        self._keep_open += [engine, evaluator]
        engine.connect(target, self._session_config(self._hosts()))
        if plan.has_shard_hosts and not self._shards:
            self._watch_hosts()
        if not self._task.is_chief:
            return self._run(engine, Pace(), engine.start(), chief=None)
        if evaluator is not None:
            evaluator.connect(target, self._session_config([]))
        adopts, found = engine.held() > 0, None
        if not adopts:
            if plan.has_shard_hosts:  # else they have seen each other already
                self._roll_call([task.name for task in plan.trainers], until="is_listening")
            found = self._load(engine, model)
        start = engine.start()
        if adopts:
            _log.info("continuing from step %d: shard hosts still hold the state", start)
            self._journal.write("adopt", generation=engine.generation, step=start)
        chief = Chief(
            config,
            plan,
            self._directory,
            engine=engine,
            evaluator=evaluator,
            status=self._status,
            start=start,
            generation=engine.generation,
            journal=self._journal,
            adopts=adopts,
            missed=engine.missed if adopts else missed_at(found, self._directory) if found else (),
            tells=config.job is not None or REPORTS_PROGRESS in os.environ,
        )
        resumed_from = str(found.path) if found else None
        pace = Pace()
        stopped = self._run(engine, pace, start, chief=chief)
        self._needs_hosts = False
        results = chief.finish(pace, stopped=stopped, resumed_from=resumed_from)
        if not stopped:
            self._status.state = "exporting"
            chief.export(model)
        chief.write_summary(results)
        return stopped

    def _load(self, engine: Engine, model: Any) -> Checkpoint | None:
        """Loads the state that the run (re)starts from; returns the checkpoint, if it comes from one."""
        state, found = first_snapshot(self._config, self._plan, self._directory, model)
        generation = self._directory.next_generation()
        failpoints.reach("generation", state.step)
        path = str(found.path) if found else None
        self._journal.write("reload", generation=generation, step=state.step, checkpoint=path)
        engine.load(state, generation=generation)
        if path:
            _log.info("resuming at step %d from %s", state.step, path)
        return found

    def _run(self, engine: Engine, pace: Pace, start: int, *, chief: Chief | None) -> bool:
        """Steps to the end; returns whether the run was stopped before."""
        status, plan = self._status, self._plan
        examples = plan.replica_batch * len(self._task.replicas)
        replicas = self._replicas()
        self._journal.write("join", step=start, replicas=replicas)
        if plan.effective_strategy.waits_for_one or not plan.has_shard_hosts:  # else its hosts know who is missing
            self._watch_steps(lambda: status.step, None)
        self._stop.let_step_finish()
        status.generation, status.step, status.state = engine.generation, start, "training"
        _collect_from_now_on()
        pace.began = time.monotonic()

        def tell(pulled: StepResult) -> None:
            pace.tick(pulled)
            status.generation, status.step = pulled.generation, pulled.step
            failpoints.reach("step", pulled.step)
            status.wait_fraction = pace.wait_fraction(RECENT_STEPS)
            status.examples_per_second = examples * pace.steps_per_second(RECENT_STEPS)
            if pulled.step > start:
                status.loss = pulled.loss
                status.first_step_at = status.first_step_at or time.time()

        def record(pulled: StepResult) -> None:
            if self._config.summary.journal and pulled.step < plan.steps:
                self._journal.write("push", generation=pulled.generation, step=pulled.step, replicas=replicas)

        def measure(pulled: StepResult) -> None:
            if self._recorder and pulled.stamps:
                self._recorder.write(REPLICA, pulled.step + 1, pulled.stamps)

        def check_placement(pulled: StepResult) -> None:
            if engine.executed is not None:
                self._prove(STEP, engine.executed, engine)
                if chief:
                    chief.show_graph({o.name: o.device for o in engine.executed.operations})
                engine.executed = None

        engine.is_tracing = self._config.device.log_placement
        if chief and not engine.is_tracing:
            chief.show_graph()
        try:
            _, stopped = train(
                engine,
                start=start,
                until=plan.steps,
                stop_requested=lambda: self._stop.requested,
                gradients_every=self._config.summary.histogram_every if chief else 0,
                between=[chief.between] if chief else [],
                after=[record, measure, check_placement, tell, *([chief.after] if chief else [])],
                on_bad=not_finite.reaction(self._config.train.on_not_finite, rollbacks=self._rollbacks),
            )
        except RollbackError as error:
            if chief:
                chief.roll_back(error.step)
            else:  # a save of the chief's may still be on its way: it leaves first, and all others are ended
                time.sleep(CHIEF_FIRST_SECS)
            raise
        except NotFiniteError:
            self._needs_hosts = False
            if (
                not plan.effective_strategy.waits_for_all
            ):  # else all replicas see it at the same step; here only who pulled just then
                engine.step(stop=True)
            engine.leave()
            raise
        if chief is None:
            self._needs_hosts = False
            engine.leave()
        return stopped

    def _replicas(self) -> list[int]:
        first = sum(len(other.replicas) for other in self._plan.workers[: self._task.index])
        return list(range(first, first + len(self._task.replicas)))

    def _watch_hosts(self) -> None:
        """Leaves when a shard host cannot be reached any more, or has lost what it held."""
        timeout = self._config.timeouts.heartbeat_secs
        hosts = [task for task in self._plan.tasks if task.name in self._hosts() and task != self._task]
        heartbeats = Heartbeats(self._task.name, hosts, timeout_secs=timeout, now=time.monotonic())
        may_start_again = bool(self._shards)  # as long as no state is loaded, none is lost

        def leave_for(code: int, why: str) -> None:
            _log.error("failed: %s", why)
            leave(code)

        watch(
            heartbeats,
            timeout_secs=timeout,
            is_over=lambda: not self._needs_hosts,
            loses=lambda: self._holds_state or not may_start_again,
            leave=leave_for,
        )

    def _watch_steps(self, step_of: Callable[[], int], missing: Callable[[], list[int]] | None) -> None:
        """Tells on the status page, and in the log, whom a stalled step waits for.

        Args:
            missing: asks the shard for the workers it waits for; none where the step is this task's own.
        """
        status, workers = self._status, [task.name for task in self._plan.workers]
        stall = Stall(limit_secs=self._config.timeouts.step_secs, now=time.monotonic())

        def look() -> None:
            now, step = time.monotonic(), step_of()
            secs = stall.poll(step, now)
            is_stalled = secs > STALL_SECS and status.state in ("training", "serving") and step < self._plan.steps
            names = []
            if is_stalled:
                names = [workers[i] for i in missing()] if missing else [self._task.name]
            if not is_stalled or step_of() != step:  # it moved meanwhile: who is missing now has only just begun
                status.missing, status.stuck, status.stalled_secs = [], [], 0.0
                return
            status.missing, status.stalled_secs = names, secs
            status.stuck = status.missing if stall.is_stuck(now) else []
            if missing and status.missing and stall.is_due(now):
                _log.warning(describe(step, secs, workers, status.missing, self._seen(status.missing)))

        def watch_on() -> None:
            while self._needs_hosts:
                look()
                time.sleep(LOOK_EVERY_SECS)

        threading.Thread(target=watch_on, name="stalls", daemon=True).start()

    def _seen(self, names: list[str]) -> dict[str, tuple[int, float]]:
        """The step that each task is at, of those that answer."""
        seen = {}
        for task in self._plan.tasks:
            if task.name in names:
                with contextlib.suppress(OSError, ValueError):
                    seen[task.name] = (read_status(task.control, timeout_secs=1.0)["step"], 0.0)
        return seen


def _check_planned(plan: Plan, parameters: Sequence[Parameter]) -> None:
    """Fails if the model that was built is not the one that was planned, e.g. because its data changed since."""
    planned = {piece.path: piece.shape for shard in plan.shards for piece in (*shard.trainable, *shard.state)}
    built = {p.path: p.shape for p in parameters}
    if built != planned:
        other = sorted(path for path in built.keys() | planned.keys() if built.get(path) != planned.get(path))
        raise RuntimeError(f"the model is not the one that was planned; different are {', '.join(other[:5])}")


def _collect_from_now_on() -> None:
    """Turns Python's collector of cycles on: until now nearly everything that was made is still of use."""
    gc.freeze()
    gc.enable()


def _wait_at_most(secs: float, work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(secs)


def _start_thread(name: str, work: Callable[[], None]) -> None:
    """Runs `work` beside the main thread; its failure ends the task, because nobody would come to join it."""

    def run() -> None:
        try:
            work()
        except Exception as error:
            leave(_log_failure(error))

    threading.Thread(target=run, name=name, daemon=True).start()
