"""Computes for workers that are away: their replicas' gradients, on this task's devices, with the same bits.

A gradient is a function of the state, the seed and the replica's number. So another worker can push it, as a worker's
successor does. Its engine is built while the run trains: building one takes as long as a worker's start.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from functools import partial

import tensorflow as tf

from trainer.config.schema import RestartConfig
from trainer.engine.sharded.worker import ShardedEngine
from trainer.engine.step_result import StepResult
from trainer.faults.exit_codes import NotFiniteError, RollbackError
from trainer.observe.peers import try_status
from trainer.observe.task_page import TaskPage
from trainer.plan.plan import Plan, Task
from trainer.storage import journal
from trainer.task import not_finite
from trainer.task.assemble import Assembly
from trainer.task.chief.initial_state import state_of
from trainer.task.chief.places import POLL_SECS, STARTING_POLL_SECS
from trainer.task.leave import leave, log_failure
from trainer.task.loop import train
from trainer.task.runtime import TaskRuntime
from trainer.workload.workload import Workload

READ_SECS = 2.0
ENDED_EVERY_SECS = 1.0  # between two questions to the hosts whether the run has ended

_log = logging.getLogger(__name__)


class LetGo(Exception):
    """The chief has given this task's place, or one that it stood in for, to another."""


def can_stand_in(restart: RestartConfig, plan: Plan) -> bool:
    """Whether workers of a run compute for each other.

    They must wait for each other, hold no part of the state, and have devices of the same kind with as many threads. A
    GPU may have no memory for a second engine; data that is read in order has one reader.
    """
    strategy, workers = plan.effective_strategy, plan.workers
    if restart.stand_in_secs is None:
        return False
    if not (strategy.waits_for_all and plan.has_shard_hosts) or plan.is_stream or len(workers) < 2:
        return False
    are_alike = len({(task.intra_op_threads, task.inter_op_threads) for task in workers}) == 1
    on_cpus = all("cpu" in device for task in workers for device in (*task.replicas, *plan.layers.values()))
    has_buckets = len(set(plan.hosts)) < len(plan.shards)  # which are requested one step ahead
    return are_alike and on_cpus and not has_buckets and not any(task.name in plan.hosts for task in workers)


def wait_for_place(chief: Task, status: TaskPage, has_ended: Callable[[], bool]) -> None:
    """Waits until nobody else computes for this worker.

    Args:
        has_ended: whether the run has made its last step: then nobody computes, and the chief may have left.
    """
    status.waits_for_place, asked_at = True, time.monotonic()
    while True:
        page = try_status(chief.control, READ_SECS)
        is_mine = page is not None and page.places is not None and page.places.get(status.name) == status.name
        if not is_mine and time.monotonic() - asked_at > ENDED_EVERY_SECS:
            asked_at, is_mine = time.monotonic(), has_ended()
        if is_mine:
            status.computes_for, status.waits_for_place = [status.name], False
            return
        time.sleep(STARTING_POLL_SECS)


class StandIns:
    """What this task computes beside its own replicas: it is asked to on the chief's page."""

    def __init__(self, assembly: Assembly, runtime: TaskRuntime, workload: Workload) -> None:
        """Does nothing until `watch`."""
        self._assembly, self._spec, self._runtime, self._workload = assembly, assembly.spec, runtime, workload
        self._engines: dict[str, ShardedEngine] = {}  # by worker that this task can stand in for
        self._threads: dict[str, threading.Thread] = {}  # by worker that it stands in for, or did until the run ended
        self._places: dict[str, str] | None = None  # as the chief's page had them last
        self._is_over, self._lock = threading.Event(), threading.Lock()
        self._watcher: threading.Thread | None = None

    def watch(self) -> None:
        """Prepares to stand in for the next worker once training has lasted, and follows the chief's page from then.

        Does nothing in a run whose workers cannot stand in for each other.
        """
        if can_stand_in(self._spec.config.restart, self._spec.plan):
            self._watcher = threading.Thread(target=self._watch, name="stand-ins", daemon=True)
            self._watcher.start()

    def give_up(self, worker: str, _step: int) -> None:
        """Raises LetGo between two steps if this task no longer has the place of a worker, or its own."""
        status = self._runtime.status
        if self._places is not None and self._places.get(worker) != status.name:
            with self._lock:
                status.computes_for = [other for other in status.computes_for if other != worker]
            raise LetGo

    def finish(self, timeout_secs: float | None = None) -> None:
        """Waits until what this task computes for others is done, or for this long each."""
        self._is_over.set()
        if self._watcher:
            self._watcher.join(timeout_secs)
        for thread in list(self._threads.values()):
            thread.join(timeout_secs)

    def _watch(self) -> None:
        if self._is_over.wait(self._spec.config.restart.stand_in_secs):
            return
        workers, me = self._spec.plan.workers, self._spec.task.index
        if me + 1 < len(workers):
            self._prepare(workers[me + 1])
        while not self._is_over.wait(POLL_SECS):
            if (page := self._chiefs_page()) is None or page.places is None:
                continue
            self._places = page.places
            for worker, engine in self._engines.items():
                if page.places.get(worker) == self._runtime.status.name and worker not in self._threads:
                    self._threads[worker] = threading.Thread(
                        target=self._stand_in, args=[worker, engine], name=f"for {worker}", daemon=True
                    )
                    self._threads[worker].start()

    def _chiefs_page(self) -> TaskPage | None:
        if self._spec.task.is_chief:
            return self._runtime.status
        return try_status(self._spec.chief.control, READ_SECS)

    def _prepare(self, worker: Task) -> None:
        """Builds and connects the engine that computes for another worker."""
        spec = self._spec
        try:
            engine = self._assembly.make_engine(self._workload, stands_in_for=worker)
            assert isinstance(engine, ShardedEngine)
            engine.connect(self._runtime.target, spec.session_config(spec.plan.hosts))
            engine.prepare()
        except (Exception, SystemExit):  # of the user's code, too
            _log.warning("cannot stand in for %s", worker.name, exc_info=True)
            return
        self._runtime.keep_open.append(engine)
        self._engines[worker.name] = engine
        self._runtime.status.can_stand_in_for = [worker.name]

    def _stand_in(self, worker: str, engine: ShardedEngine) -> None:
        """Computes for a worker until the run ends, or the chief's page no longer says so."""
        config, plan, status = self._spec.config, self._spec.plan, self._runtime.status
        replicas = plan.replica_numbers(plan.task_named(worker))
        with self._lock:
            status.computes_for = [*status.computes_for, worker]

        def write_journal(result: StepResult) -> None:
            if config.history.journal and result.step < plan.steps:
                self._runtime.journal.write(journal.Push(result.generation, result.step, replicas))

        try:
            start = engine.start()
            self._runtime.journal.write(journal.Join(start, replicas))
            until = start if state_of(engine).is_last else plan.steps
            train(
                engine,
                start=start,
                until=until,
                stop_requested=lambda: False,
                between=[partial(self.give_up, worker)],
                after=[write_journal],
                on_bad=not_finite.reaction(config.train.on_not_finite, rollbacks=self._spec.rollbacks),
            )
        except LetGo:
            del self._threads[worker]  # so that it can stand in again
            return
        except RollbackError:  # this task's own step meets it too
            return
        except NotFiniteError:
            pass
        except Exception as error:
            leave(log_failure(error))
        with contextlib.suppress(tf.errors.OpError):
            engine.leave()
