"""Small clusters for tests: every task on a real TensorFlow server, as threads of this process.

TensorFlow cannot stop a server, and each keeps some 40 MiB and 25 threads. So servers of a cluster that has trained to
its end are emptied after the test, and serve the next cluster of that size.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import accumulate, pairwise
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from objectives import objective_of
from runs import wait_until

from trainer.config.schema import OptimizerConfig, OptimizerName
from trainer.engine.compute import Replica
from trainer.engine.devices import device_of
from trainer.engine.frozen import Copy
from trainer.engine.local import LocalEngine
from trainer.engine.sharded.host import OnUpdate, ShardHost
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
from trainer.engine.vectors.snapshot import Snapshot
from trainer.engine.vectors.wire import MESSAGE_WIRES, VectorWire
from trainer.launch.processes.ports import HeldPorts
from trainer.plan.placement import place
from trainer.plan.plan import Plan, Task
from trainer.plan.shared_memory import lay_out, tables_offset
from trainer.plan.spans import Span, pushes_of
from trainer.plan.strategy import STRATEGIES
from trainer.plan.table_layout import TableLayout
from trainer.plan.tables import Table, blocks_of
from trainer.task import table_files
from trainer.task.assemble import HOSTS
from trainer.task.request_ids import make_unique
from trainer.task.server import session_config, start_server
from trainer.workload import step as replica
from trainer.workload import tracing
from trainer.workload.data.arrays import from_arrays
from trainer.workload.data.pipeline import nothing, training_batches
from trainer.workload.workload import Workload

SEED, BATCH, STEPS = 7, 24, 8

make_unique()  # as in every task, or now and then a request of a long session of tests is refused

Servers = tuple[tuple[Task, ...], dict[str, Any]]  # tasks, and the server of each by its name
_idle: defaultdict[tuple[int, int, tuple[str, ...]], list[Servers]] = defaultdict(list)  # by ps, workers, devices
_trained: list[Cluster] = []


def with_everything() -> keras.Model:
    """Convolution, BatchNorm, Dropout and an L2 term."""
    inputs = keras.Input((8, 8, 1))
    hidden = keras.layers.Conv2D(4, 3, activation="relu", name="conv")(inputs)
    hidden = keras.layers.BatchNormalization(name="norm")(hidden)
    hidden = keras.layers.Flatten(name="flatten")(hidden)
    hidden = keras.layers.Dense(16, activation="relu", kernel_regularizer=keras.regularizers.L2(1e-3), name="dense")(
        hidden
    )
    hidden = keras.layers.Dropout(0.2, name="dropout")(hidden)
    return keras.Model(inputs, keras.layers.Dense(10, name="logits")(hidden))


def plain() -> keras.Model:
    inputs = keras.Input((8, 8, 1))
    hidden = keras.layers.Conv2D(4, 3, activation="relu", name="conv")(inputs)
    hidden = keras.layers.Flatten(name="flatten")(hidden)
    return keras.Model(inputs, keras.layers.Dense(10, name="logits")(hidden))


def digits(count: int = 96) -> Any:
    random = np.random.default_rng(SEED)
    features = random.random((count, 8, 8, 1), np.float32)
    return from_arrays(
        (features, random.integers(0, 10, count)), (features, random.integers(0, 10, count)), source="test"
    )


class Cluster:
    """`ps` parameter servers (none: shards on the workers) and `workers`, each with a real server."""

    def __init__(
        self,
        build: Callable[[], keras.Model] | Workload,
        *,
        ps: int,
        workers: int,
        clip_norm: float | None = None,
        optimizer: OptimizerName | OptimizerConfig = OptimizerName.adam,
        strategy: str = "sync",
        quorum: int = 0,
        max_staleness: int | None = None,
        devices: Sequence[str] = ("/cpu:0",),
        shares: Sequence[int] | None = None,
        parameters_on: str = "/cpu:0",
        max_part_mib: float | None = None,
        wire: str = "float32",
        buckets: int = 1,
        steps: int = STEPS,
        start: Snapshot | None = None,
        rewrites: bool = True,
        **options: Any,
    ) -> None:
        """Builds it; a model with sparse layers needs the wire `memory`.

        Args:
            build: makes the model; it learns `digits`. Or a workload of other data and with another objective.
            devices: of each worker, which its replicas take in turn.
            shares: of each worker, how many replicas it computes; by default one on each device.
            start: the state to begin with; None: the model's first values.
            rewrites: whether TensorFlow optimizes graphs, a seventh of the time of tests of who waits for whom.
        """
        self.workload = build if isinstance(build, Workload) else workload_of(build)
        self.model, self.data = self.workload.model, self.workload.data
        is_counted = options.get("is_counted", False)
        is_name = isinstance(optimizer, OptimizerName)
        self.optimizer = OptimizerConfig(name=optimizer, clip_norm=clip_norm) if is_name else optimizer
        self.parameters = replica.parameters_of(self.model, self.workload.frozen)
        self.steps, self._start, self._rewrites = steps, start, rewrites
        hosts = [f"ps:{i}" for i in range(ps)] or [f"worker:{i}" for i in range(workers)]
        sums = self.workload.objective.size if isinstance(build, Workload) else 0
        shards = place(self.parameters, hosts, pins={}, max_part_mib=max_part_mib, buckets=buckets, sums=sums)
        self.shards = tuple(replace(shard, is_counted=is_counted) for shard in shards)
        self.strategy = STRATEGIES[strategy]
        self.shares = list(shares or [len(devices)] * workers)
        self.spans = spans_of(self.shares) if self.strategy.waits_for_all else None
        pushes = pushes_of(self.spans, workers)[-1].stop
        examples = BATCH // sum(self.shares) * max(self.shares)
        self.layout = layout_of(self.workload, self.optimizer, len(hosts), pushes, examples)
        self.devices, self.parameters_on, self.options = devices, parameters_on, options
        self._size = (ps, workers, tuple(devices))
        idle = _idle[self._size]
        self.tasks, self.servers = idle.pop() if idle else _start_servers(*self._size)
        self._serving: list[threading.Thread] = []
        self._has_ended = False
        self._updates = 0
        self.workers = workers
        self.quorum = quorum
        self.sends_rows = bool(self.layout.blocks) and not (wire == "memory" and self.strategy.waits_for_all)
        self._open = contextlib.ExitStack()  # as long as the cluster is
        if wire == "memory":
            sizes, file = (self.shards, self.strategy, pushes), os.memfd_create("test")
            self._open.callback(os.close, file)
            path = self._open.enter_context(lay_out(file, *sizes, self.layout))
            self.wire: VectorWire = MemoryWire(path, *sizes)
            offset = tables_offset(*sizes)
            self.tables = [] if self.sends_rows else mapped(path, self.layout, offset)
            boxes = Mailboxes(path, self.layout, offset) if self.sends_rows else None
        else:
            self.tables, boxes = [], None  # each host has its rows for itself
            self.wire = MESSAGE_WIRES[wire]
        self.payloads = Payloads.of(self.layout.blocks, self.wire, boxes) if self.sends_rows else None
        self.engines = [self._engine(index) for index in range(workers)]
        common = {"shards": self.shards, "workers": workers, "optimizer": self.optimizer, "parameters": parameters_on}
        common |= {"wire": self.wire, "payloads": self.payloads, "spans": self.spans}
        common |= {"async": {"max_staleness": max_staleness}, "backup": {"quorum": quorum}}.get(strategy, {})
        self.hosts = [HOSTS[strategy](index=i, tables=self._table_host(i), **common) for i in range(len(self.shards))]
        self._connected: list[ShardHost | ShardedEngine] = []
        for host, shard in zip(self.hosts, self.shards, strict=True):
            self._connect(host, shard.host)
        for index, engine in enumerate(self.engines):
            self._connect(engine, f"worker:{index}")

    def first(self) -> Snapshot:
        return self._start or first_snapshot(self.workload)

    def train(self, replicas: Sequence[Callable[[ShardedEngine], Any]]) -> list[Any]:
        """Serves the shards and runs each replica's function in a thread of its own; returns what they return."""
        results: list[Any] = [None] * len(replicas)
        errors: list[BaseException] = []

        def work(index: int) -> None:
            try:
                results[index] = replicas[index](self.engines[index])
            except BaseException as error:  # the others would wait for this replica
                errors.append(error)
                raise

        threads = [threading.Thread(target=self.serve, args=(host,), daemon=True) for host in self.hosts]
        threads += [threading.Thread(target=work, args=(index,), daemon=True) for index in range(len(replicas))]
        for thread in threads:
            thread.start()
        self.engines[0].load(self.first(), generation=1)
        wait_until(lambda: errors or not any(thread.is_alive() for thread in threads), progress=lambda: self._updates)
        if errors:
            raise errors[0]
        _trained.append(self)
        return results

    def successor(self, worker: int, task: int | None = None) -> ShardedEngine:
        """The engine of a worker that was started again, or of another task that stands in for it."""
        task = worker if task is None else task
        self._connect(engine := self._engine(worker, f"worker:{task}"), f"worker:{task}")
        return engine

    def serve(self, host: ShardHost, on_update: OnUpdate | None = None) -> None:
        """Serves beside this thread, because a host whose workers do not wait for each other serves for ever."""

        def serve_rows() -> None:
            with contextlib.suppress(tf.errors.CancelledError):
                host.rows.serve(host.session)

        def until_its_end() -> None:
            with self._may_be_ended():
                host.serve(self.steps, on_update or self._count)

        with self._may_be_ended():
            host.load()
            if host.rows is not None:
                threading.Thread(target=serve_rows, daemon=True).start()
            self._serving.append(threading.Thread(target=until_its_end, daemon=True))
            self._serving[-1].start()
            host.wait_for_goodbyes()

    def _count(self, _step: int, _waited: float) -> None:
        self._updates += 1

    @contextlib.contextmanager
    def _may_be_ended(self) -> Iterator[None]:
        try:
            yield
        except tf.errors.CancelledError:
            if not self._has_ended:
                raise

    def end(self) -> None:
        """Closes all its sessions and empties its servers for others."""
        self._has_ended = True
        for one in self._connected:
            one.session.close()
        for thread in self._serving:
            thread.join(10)
            assert not thread.is_alive()
        for server in self.servers.values():
            tf.compat.v1.Session.reset(server.target)
        _idle[self._size].append((self.tasks, self.servers))

    def _table_host(self, index: int) -> TableHost:
        return TableHost(self.tables or private(self.layout), index, self.optimizer, seed=SEED)

    def _engine(self, index: int, task: str = "") -> ShardedEngine:
        task, first, share = task or f"worker:{index}", sum(self.shares[:index]), self.shares[index]
        averaged = {"all": sum(self.shares) / share, "quorum": self.quorum, "one": 1}[self.strategy.waits_for]
        touches = touches_of(self.workload, self.layout)
        mine = [
            make_replica(
                self.workload,
                first + number,
                sum(self.shares),
                device=device_of(task, self.devices[number % len(self.devices)]),
                stop=self.steps if self.strategy.waits_for_all else 2**62,
                touches=touches,
                announces=self.sends_rows,
                **self.options,
            )
            for number in range(share)
        ]
        return ShardedEngine(
            WorkerSpec(
                task=task,
                worker=index,
                workers=self.workers,
                averaged=averaged,
                spans=self.spans,
                shards=self.shards,
                optimizer=self.optimizer,
                replicas=mine,
                strategy=self.strategy,
                parameters=self.parameters_on,
                wire=self.wire,
                tables=self._table_worker(touches, index),
            )
        )

    def _table_worker(self, touches: Touches, index: int) -> Tables:
        if not self.sends_rows:
            return TableWorker(self.tables, touches, pushes_of(self.spans, self.workers)[index].start)
        return SentTables(self.payloads, self.layout.slots, self.shards, touches, worker=index)

    def _connect(self, one: ShardHost | ShardedEngine, name: str) -> None:
        one.connect(self.servers[name].target, self._config(name))
        self._connected.append(one)

    def _config(self, name: str) -> Any:
        task = next(task for task in self.tasks if task.name == name)
        peers = [shard.host for shard in self.shards]
        is_rounded = any(layer.compute_dtype == "bfloat16" for layer in self.model.layers)
        config = session_config(task, peers=peers, fuses=not (is_rounded or self.options.get("jit", False)))
        config.graph_options.rewrite_options.disable_meta_optimizer = not self._rewrites
        return config


def _start_servers(ps: int, workers: int, devices: tuple[str, ...]) -> Servers:
    with HeldPorts(ps + workers) as held:
        ports = iter(held.ports)
    tasks = tuple(
        Task(job, i, f"127.0.0.1:{next(ports)}", "", (), None, 1, 2, cpus=4, replicas=devices)
        for job, count in (("ps", ps), ("worker", workers))
        for i in range(count)
    )
    plan = Plan("test", "sync", STEPS, BATCH, tasks, (), 96, ())
    return tasks, {task.name: start_server(plan, task) for task in tasks}


def spans_of(shares: Sequence[int]) -> list[list[Span]]:
    """Returns the spans of workers that compute so many replicas each."""
    ends = [0, *accumulate(shares)]
    return [Span(0, sum(shares)).within(range(*pair)) for pair in pairwise(ends)]


def end_trained() -> None:
    """Ends the clusters that have trained to their end."""
    while _trained:
        _trained.pop().end()


def workload_of(build: Callable[[], keras.Model]) -> Workload:
    """A model that learns digits."""
    keras.utils.set_random_seed(SEED)
    model = build()
    return Workload(model, digits(), objective_of(model), {})


def first_snapshot(workload: Workload) -> Snapshot:
    values = replica.initial_values(workload.model, workload.frozen)
    trainable = {p.path for p in replica.parameters_of(workload.model, workload.frozen) if p.trainable}
    return Snapshot(
        0,
        {path: value for path, value in values.items() if path in trainable},
        {path: value for path, value in values.items() if path not in trainable},
        {},
    )


@functools.cache
def unbroken(
    build: Callable[[], keras.Model], *, clip_norm: float | None = None, wire: str = "float32"
) -> tuple[list[float], Snapshot]:
    """(losses, last state) of two workers that train to the end undisturbed; the same for any number of ps."""
    return Cluster(build, ps=1, workers=2, clip_norm=clip_norm, wire=wire).train([to_the_end] * 2)[0]


def make_replica(
    workload: Workload,
    index: int,
    count: int,
    *,
    device: str | None = None,
    stop: int = STEPS,
    jit: bool = False,
    touches: Touches | None = None,
    announces: bool = False,
    **options: Any,
) -> Replica:
    def batches() -> Any:
        return training_batches(
            workload.data.train,
            seed=SEED,
            start=0,
            stop=stop,
            batch_size=BATCH,
            replica=index,
            replicas=count,
            derive=touches.of if touches else nothing,
            announce=Touches.places if announces else None,
        )

    step = replica.make_step(workload.objective, jit=jit, **options)
    return Replica(step, batches, SEED, index, count, device, jit, Copy(workload.frozen))


def make_local(
    workload: Workload, optimizer: OptimizerConfig, *, count: int = 1, parameters_on: str = "/cpu:0", steps: int = STEPS
) -> LocalEngine:
    """One process with so many replicas, on logical CPUs of their own, loaded with the model's first values."""
    layout = layout_of(workload, optimizer, 1, count, BATCH // count)
    touches, memory = touches_of(workload, layout), private(layout)
    replicas = [
        make_replica(workload, index, count, device=f"/cpu:{index}", stop=steps, touches=touches)
        for index in range(count)
    ]
    shard = place(replica.parameters_of(workload.model, workload.frozen), ["worker:0"], pins={})[0]
    tables = {"tables": TableWorker(memory, touches), "table_host": TableHost(memory, 0, optimizer, seed=SEED)}
    engine = LocalEngine(shard=shard, optimizer=optimizer, replicas=replicas, parameters=parameters_on, **tables)
    engine.table_memory = memory
    engine.connect("", tf.compat.v1.ConfigProto(device_count={"CPU": count}))
    engine.load(first_snapshot(workload), generation=1)
    return engine


def layout_of(workload: Workload, optimizer: OptimizerConfig, hosts: int, pushes: int, examples: int) -> TableLayout:
    """Of the tables of a workload's model; those of models without sparse layers are empty."""
    found = tracing.tables_of(workload.objective, workload.data.spec)
    return TableLayout(blocks_of(found, hosts), tuple(optimizer.row_slots()), pushes, examples)


def touches_of(workload: Workload, layout: TableLayout) -> Touches:
    return Touches(layout.blocks, functools.partial(tracing.lookups_of, workload.objective))


def to_the_end(engine: ShardedEngine | LocalEngine, steps: int = STEPS) -> tuple[list[float], Snapshot]:
    """Trains; returns the losses of all updates and the last state."""
    losses, step = [], engine.start()
    while step < steps:
        pulled = engine.step()
        losses.append(pulled.loss)
        step = pulled.step + 1
    losses.append(engine.peek().loss)
    last = engine.snapshot()
    engine.leave()
    return losses[1:], last


def digest(snapshot: Snapshot) -> str:
    sha = hashlib.sha256()
    for _, value in sorted(snapshot.to_tensors().items()):
        sha.update(value.tobytes())
    return sha.hexdigest()


def values_of(memory: Sequence[BlockMemory], table: Table) -> np.ndarray:
    """All rows of a table, [rows, width]."""
    return np.concatenate(list(table_files.rows_of(memory, table)[1]))
