"""Builds the parts of a task from its plan: the hosts of its shards, its engine and its replicas."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from typing import Any

from trainer.engine.all_reduce import AllReduceEngine
from trainer.engine.compute import Replica
from trainer.engine.devices import device_of
from trainer.engine.engine import Engine
from trainer.engine.frozen import Copy
from trainer.engine.local import LocalEngine
from trainer.engine.sharded.async_host import AsyncHost
from trainer.engine.sharded.backup_host import BackupHost
from trainer.engine.sharded.host import ShardHost
from trainer.engine.sharded.sync_host import SyncHost
from trainer.engine.sharded.worker import ShardedEngine
from trainer.engine.sharded.worker_graph import WorkerSpec
from trainer.engine.tables.host import TableHost
from trainer.engine.tables.mapping import mapped, private
from trainer.engine.tables.memory import BlockMemory
from trainer.engine.tables.messages import SentTables
from trainer.engine.tables.payloads import Mailboxes, Payloads
from trainer.engine.tables.touches import Touches
from trainer.engine.tables.worker import Tables, TableWorker
from trainer.engine.vectors.shared_memory import MemoryWire
from trainer.engine.vectors.wire import MESSAGE_WIRES, VectorWire
from trainer.faults.problems import ConfigError, Problem
from trainer.plan.environment import MEMORY
from trainer.plan.layout import Shard
from trainer.plan.plan import Plan, Task
from trainer.plan.shared_memory import tables_offset
from trainer.plan.spans import pushes_of
from trainer.task import table_files
from trainer.task.not_finite import order_seed
from trainer.task.spec import TaskSpec
from trainer.workload import step as replica
from trainer.workload import tracing
from trainer.workload.data.errors import users_code
from trainer.workload.data.pipeline import training_batches, training_iterator
from trainer.workload.workload import Workload

ENDLESS = 2**62  # steps; a worker that waits for no other cannot know how many it will make


def open_wire(plan: Plan) -> VectorWire:
    """Returns the wire of vectors; maps the shared memory if they stay there.

    Raises:
        ConfigError: if the memory cannot be mapped.
    """
    if not plan.wire_format.is_shared:
        return MESSAGE_WIRES[plan.wire]
    try:
        return MemoryWire(os.environ[MEMORY], plan.shards, plan.effective_strategy, plan.pushes)
    except OSError as error:
        remedy = f"type strategy={plan.strategy} strategy.wire=float32"
        message = f"memory cannot be mapped: {error.strerror}"
        raise ConfigError([Problem("strategy.wire", "not-available", message, remedy)]) from error


def open_tables(plan: Plan) -> list[BlockMemory]:
    """Returns the memory of all rows, if this process maps it, alone or with others."""
    if not plan.has_shard_hosts:
        return private(plan.table_layout)
    if plan.sends_rows or not plan.wire_format.is_shared:
        return []
    sizes = plan.shards, plan.effective_strategy, plan.pushes
    return mapped(os.environ[MEMORY], plan.table_layout, tables_offset(*sizes))


HOSTS: Mapping[str, Any] = {"sync": SyncHost, "async": AsyncHost, "backup": BackupHost}  # by strategy


@dataclass(frozen=True)
class Assembly:
    """Makes the hosts and the engine of a task, which share its memory."""

    spec: TaskSpec
    wire: VectorWire  # how vectors are sent
    tables: Sequence[BlockMemory]  # the memory of rows, where this task maps it

    @classmethod
    def of(cls, spec: TaskSpec) -> "Assembly":
        """Maps the memory, if tasks share it."""
        return cls(spec, open_wire(spec.plan), open_tables(spec.plan))

    def make_host(self, shard: Shard) -> ShardHost:
        """Returns the host of a shard, for the plan's strategy."""
        config, plan = self.spec.config, self.spec.plan
        own: Mapping[str, Mapping[str, int | None]] = {
            "async": {"max_staleness": config.strategy.max_staleness},
            "backup": {"quorum": plan.quorum_workers},
        }
        name = plan.effective_strategy.name
        return HOSTS[name](
            shards=plan.shards,
            index=shard.index,
            workers=len(plan.workers),
            spans=plan.spans,
            optimizer=config.optimizer,
            parameters=plan.parameters,
            wire=self.wire,
            profiles=config.profile,
            tables=self._table_host(shard.index),
            payloads=self._payloads(),
            **own.get(name, {}),
        )

    def make_engine(self, workload: Workload, strategy: Any = None, stands_in_for: Task | None = None) -> Engine:
        """Returns the engine of a worker.

        Args:
            strategy: comes from `server.start_strategy`, under all-reduce.
            stands_in_for: the worker whose replicas this task computes, on its own devices; by default it is itself.
        """
        plan, task = self.spec.plan, self.spec.task
        worker = stands_in_for or task
        tables = self.make_tables(workload, worker)
        common: dict[str, Any] = {
            "optimizer": self.spec.config.optimizer,
            "replicas": _make_replicas(self.spec, workload, tables, worker),
            "profiles": self.spec.config.profile,
        }
        with users_code("the training step", alone=False):
            if plan.effective_strategy.is_one_process:
                common |= {"tables": tables, "table_host": self._table_host(0)}
                return LocalEngine(shard=plan.shards[0], parameters=plan.parameters, **common)
            if plan.effective_strategy.has_ring:
                return AllReduceEngine(
                    strategy=strategy, shard=plan.shards[0], index=task.index, parameters=plan.parameters, **common
                )
            return ShardedEngine(
                WorkerSpec(
                    task=task.name,
                    worker=worker.index,
                    workers=len(plan.workers),
                    averaged=_averaged(plan, worker),
                    spans=plan.spans,
                    shards=plan.shards,
                    strategy=plan.effective_strategy,
                    parameters=plan.parameters,
                    wire=self.wire,
                    tables=tables,
                    **common,
                )
            )

    def make_tables(self, workload: Workload, worker: Task | None = None) -> Tables:
        """Returns a worker's side of tables, for one pipeline; by default this task is the worker."""
        plan, index, payloads = self.spec.plan, (worker or self.spec.task).index, self._payloads()
        touches = Touches(plan.table_layout.blocks, partial(tracing.lookups_of, workload.objective))
        if payloads is None:
            return TableWorker(self.tables, touches, first_push=pushes_of(plan.spans, len(plan.workers))[index].start)
        return SentTables(payloads, plan.slots, plan.shards, touches, worker=index)

    def _table_host(self, index: int) -> TableHost:
        config, layout = self.spec.config, self.spec.plan.table_layout
        memory = self.tables or private(layout)  # of which the rows of other hosts are never written to
        return TableHost(memory, index, config.optimizer, seed=config.seed, read=table_files.load)

    def _payloads(self) -> Payloads | None:
        """Returns the payloads that carry rows, if rows are sent."""
        plan = self.spec.plan
        if not plan.sends_rows:
            return None
        sizes, boxes = (plan.shards, plan.effective_strategy, plan.pushes), None
        if plan.wire_format.is_shared:
            boxes = Mailboxes(os.environ[MEMORY], plan.table_layout, tables_offset(*sizes))
        return Payloads.of(plan.table_layout.blocks, self.wire, boxes)


def _averaged(plan: Plan, task: Task) -> float:
    """Returns the number by which an update divides a worker's requests, which each of its replicas makes."""
    of_all = plan.replicas / len(task.replicas)
    return {"all": of_all, "quorum": plan.quorum_workers, "one": 1}[plan.effective_strategy.waits_for]


def compute_device(plan: Plan, task: Task) -> str:
    """Returns the device for work that belongs to no replica: that of the task's first replica."""
    return _full(plan, task, task.replicas[0])


def _full(plan: Plan, task: Task, device: str) -> str:
    return device_of(task.name, device) if plan.has_shard_hosts else device


def _make_replicas(spec: TaskSpec, workload: Workload, tables: Tables, worker: Task) -> list[Replica]:
    """Returns the replicas of a worker, on the devices of this task."""
    config, plan, task = spec.config, spec.plan, spec.task
    scopes: dict[str, str] = {}
    step = replica.make_step(
        workload.objective,
        accumulate=config.train.accumulate,
        counts=plan.counts,
        is_counted=plan.shards[0].is_counted,
        layers={path: _full(plan, task, device) for path, device in plan.layers.items()},
        scopes=scopes,
        jit=config.train.jit,
        trace_seed=config.seed,
    )

    def make(index: int, device: str) -> Replica:
        def batches(start: int = 0) -> Any:
            pipeline = training_iterator
            if not plan.effective_strategy.has_ring:
                pipeline = partial(training_batches, derive=tables.touches.of, announce=tables.announce)
            return pipeline(
                workload.data.train,
                seed=order_seed(config.seed, spec.rollbacks),
                start=start,
                stop=plan.steps if plan.effective_strategy.waits_for_all else ENDLESS,
                batch_size=plan.global_batch,
                replica=index,
                replicas=plan.replicas,
            )

        device = _full(plan, task, device)
        return Replica(
            step,
            batches,
            config.seed,
            index,
            plan.replicas,
            device,
            jit=config.train.jit,
            scopes=scopes,
            frozen=Copy(workload.frozen),
        )

    return list(map(make, plan.replica_numbers(worker), cycle(task.replicas)))
