"""Trains without shards: every worker holds all parameters, and gradients are summed between the workers.

`tf.distribute.MultiWorkerMirroredStrategy` starts the cluster and computes the sums (a ring over gRPC, or NCCL between
GPUs). The replica step, its batches and the update are those of the other engines, so the result is the same up to
rounding: a ring adds in another order.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from trainer.config.schema import OptimizerConfig
from trainer.engine.combine import mean_computed
from trainer.engine.compute import Replica, Requests, in_step, run_step
from trainer.engine.data_wait import DataWait
from trainer.engine.instruments import now
from trainer.engine.step_result import StepResult
from trainer.engine.update import divided, is_scaled, make_update, squares_order
from trainer.engine.vectors import packing
from trainer.engine.vectors.snapshot import Snapshot
from trainer.observe.placement.executed import Executed, executed
from trainer.observe.profile.stamps import Stamps
from trainer.plan.layout import Shard
from trainer.workload.data.examples import Batch
from trainer.workload.tensorflow_internals import context


@dataclass(frozen=True)
class _Batch:
    """An element of `data.pipeline.training_iterator`."""

    step: tf.Tensor
    batch: Batch
    derived: Any = ()


class AllReduceEngine:
    """Trains one worker's copy of everything; the methods are those of `engine.Engine`."""

    is_tracing = False  # works at the first step only
    executed: Executed | None = None
    generation: int
    missed: Sequence[StepResult] = ()  # the state ends with the cluster
    variables: Mapping[str, str]

    def __init__(
        self,
        *,
        strategy: Any,
        shard: Shard,
        index: int,
        optimizer: OptimizerConfig,
        replicas: Sequence[Replica],
        parameters: str = "/cpu:0",
        profiles: bool = False,
    ) -> None:
        """Keeps the parts from which `connect` builds the engine.

        Args:
            strategy: from server.start_strategy.
            shard: all parameters.
            index: of this worker; 0 has the state.
            replicas: of this worker; their `batches` take the first step and return an iterator.
            parameters: the device that holds the vectors.
            profiles: whether steps are stamped: input, compute, and sum, which includes the update.
        """
        self.scopes, self._profiles = replicas[0].scopes, profiles
        self._strategy, self._shard, self._index, self._optimizer = strategy, shard, index, optimizer
        self._replicas, self._device, self._fills = replicas, parameters, optimizer.slots()

    def connect(self, target: str, session_config: Any) -> None:
        """Makes this worker's copy; the strategy has connected the cluster, so the arguments are unused."""
        with tf.device("/cpu:0"):
            self._taken = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._data_wait = DataWait(lambda: int(self._taken.numpy()))
        with tf.device(self._device):
            self._flat = tf.Variable(tf.zeros([self._shard.size]), trainable=False)
            self._slots = {
                name: tf.Variable(tf.zeros([self._shard.slot_size(name)]), trainable=False) for name in self._fills
            }
        self.variables = {"flat": self._flat.device} | {f"slots/{n}": slot.device for n, slot in self._slots.items()}
        self._run_broadcast = tf.function(self._broadcast, autograph=False)
        self._run_step = tf.function(self._make_step, autograph=False)
        self._iterators = [replica.batches(0) for replica in self._replicas]
        self.graph = self._run_step.get_concrete_function(self._iterators, self._asking(False, 0)).graph

    def load(self, snapshot: Snapshot, *, generation: int) -> None:
        self._receive([tf.constant(v) for v in snapshot.to_flats(self._shard, self._fills, generation=generation)])

    def held(self) -> int:
        """Returns 0: the state ends with the cluster."""
        return 0

    def start(self) -> int:
        if self._index > 0:  # the chief has sent it
            self._receive([tf.zeros_like(variable) for variable in (self._flat, *self._slots.values())])
        loaded = self.peek()
        self.generation = loaded.generation
        self._iterators = [replica.batches(loaded.step) for replica in self._replicas]
        return loaded.step

    def step(self, *, stop: bool = False, reductions: int = 0, fetch_gradients: bool = False) -> StepResult:
        called_at = time.time()
        self._data_wait.begin_step()
        if self.is_tracing:
            context.context().enable_graph_collection()
        outputs = self._run_step(self._iterators, self._asking(stop, reductions))
        if self.is_tracing:
            self.is_tracing = False
            self.executed = executed(context.context().export_run_metadata(), self.graph.as_graph_def().library)
            context.context().disable_graph_collection()
        tags, metrics, began, computed, ended, gradients = outputs
        self._data_wait.end_step()
        returned_at = time.time()
        result = StepResult.read(
            tags.numpy(), metrics.numpy(), wait_secs=float(ended - computed), compute_secs=float(computed - began)
        )
        if self._profiles:
            ends = {"input": float(began), "compute": float(computed), "sum": float(ended)}
            result = result._replace(stamps=Stamps(called_at, returned_at, ends))
        if not fetch_gradients:
            return result
        return result._replace(gradients=packing.from_flat(self._shard.trainable, gradients.numpy()))

    def data_wait_secs(self) -> float:
        return self._data_wait.secs()

    def peek(self) -> StepResult:
        flat = self._flat.read_value()
        tags, metrics = packing.tags_of(flat, self._shard), packing.metrics_of(flat, self._shard)
        return StepResult.read(tags.numpy()[None], metrics.numpy())

    def snapshot(self) -> Snapshot:
        slots = {name: slot.numpy() for name, slot in self._slots.items()}
        return Snapshot.from_flats(self.peek().step, [self._shard], [self._flat.numpy()], [slots])

    def release(self) -> None:
        """Does nothing: a snapshot is complete."""

    def contributions(self) -> None:
        """Returns None: every replica is in every update."""

    def leave(self) -> None:
        """Waits for all workers, because a worker that left earlier would look like a failed one."""
        self._run_broadcast([tf.zeros([1])])  # an empty sum would not wait for the others

    def _asking(self, stop: bool, reductions: int) -> Requests:
        return Requests(tf.constant(float(stop)), tf.constant(float(reductions * self._strategy.num_replicas_in_sync)))

    def _receive(self, vectors: Sequence[tf.Tensor]) -> None:
        received = self._run_broadcast(list(vectors))
        for variable, value in zip((self._flat, *self._slots.values()), received, strict=True):
            variable.assign(value)

    def _broadcast(self, vectors: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Broadcasts by a sum over the workers, of which one has the values and the others zeros; no bit changes.

        A sum of floats would turn -0.0 into 0.0, so the halves of their bits are summed as integers.
        """

        def on_worker(*vectors: tf.Tensor) -> list[tf.Tensor]:
            halves = [tf.cast(tf.bitcast(vector, tf.uint16), tf.float32) for vector in vectors]
            return [tf.bitcast(tf.cast(half, tf.uint16), tf.float32) for half in self._sum(halves)]

        return list(self._strategy.run(on_worker, vectors))

    def _sum(self, values: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        return list(tf.distribute.get_replica_context().all_reduce(tf.distribute.ReduceOp.SUM, list(values)))

    def _make_step(self, iterators: Sequence[Any], requests: Requests) -> Any:
        """Returns (tags, metrics, times when the batches arrived, when computed and when updated, mean gradient)."""
        shard = self._shard
        with tf.device("/cpu:0"):
            batches = [_Batch(*iterator.get_next()) for iterator in iterators]
            with tf.control_dependencies([tensor for one in batches for tensor in one.batch.tensors]):
                began = now([self._taken.assign_add(1, read_value=False)])
        flat = self._flat.read_value()
        tags = packing.tags_of(flat, shard)
        generation, step = tf.unstack(tf.cast(tags, tf.int64))
        # Outside the strategy scope, or a loss that divides by its replicas would be divided twice.
        outcome = mean_computed(
            [
                run_step([packing.halves(flat, shard)], [shard], replica, in_step(batch, step), requests)
                for replica, batch in zip(self._replicas, batches, strict=True)
            ]
        )
        values = tf.nest.flatten(outcome)
        with tf.device("/cpu:0"):
            computed = now(values)

        def on_worker(values: Sequence[tf.Tensor]) -> Any:
            # TensorFlow sends the last first, which is the order in which the backward pass finishes.
            means = tf.nest.pack_sequence_as(
                outcome, [total / self._strategy.num_replicas_in_sync for total in self._sum(values)]
            )
            packed = packing.pack(shard, means.gradients, means.state, means.metrics, packing.header_of(flat, shard))
            updated = self._update(flat, packed, generation, step)
            with tf.device("/cpu:0"):
                ended = now(updated)
            return ended, divided(packing.halves(packed, shard), shard).trainable

        ended, gradients = self._strategy.run(on_worker, (values,))
        return tf.expand_dims(tags, 0), packing.metrics_of(flat, shard), began, computed, ended, gradients

    def _update(
        self, flat: tf.Tensor, packed: tf.Tensor, generation: tf.Tensor, step: tf.Tensor
    ) -> list[tf.Operation | tf.Tensor]:
        order = squares_order([self._shard])
        update = make_update(
            self._shard, self._optimizer, lambda squares: tf.gather(squares, order), scaled=is_scaled([self._shard])
        )
        slots = {name: slot.read_value() for name, slot in self._slots.items()}
        with tf.device(self._device):
            new, moved = update(flat, slots, [packed], generation, step, None)
            assigned = [self._flat.assign(new, read_value=False)]
            return assigned + [slot.assign(moved[name], read_value=False) for name, slot in self._slots.items()]
