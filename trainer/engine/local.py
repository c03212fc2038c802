"""Trains in one process: the same replica steps and the same update on one shard, in one graph without a cluster."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from trainer.config.schema import OptimizerConfig
from trainer.engine.compute import Packed, Replica, Requests, compute, in_step, in_turn
from trainer.engine.data_wait import BatchCount
from trainer.engine.instruments import GraphClock, now
from trainer.engine.session_engine import SessionEngine
from trainer.engine.step_result import StepResult
from trainer.engine.tables.host import TableHost
from trainer.engine.tables.worker import TableWorker
from trainer.engine.update import divided, is_scaled, judge, make_update, squares_order
from trainer.engine.vectors import packing
from trainer.engine.vectors.snapshot import Snapshot
from trainer.engine.vectors.wire import FLOAT32
from trainer.plan.layout import Shard
from trainer.plan.spans import each_alone

v1 = tf.compat.v1


class LocalEngine(SessionEngine):
    """Trains on one shard in this process; the methods are those of `engine.Engine`."""

    def __init__(
        self,
        *,
        shard: Shard,
        optimizer: OptimizerConfig,
        replicas: Sequence[Replica],
        tables: TableWorker,
        table_host: TableHost,
        parameters: str = "/cpu:0",
        profiles: bool = False,
    ) -> None:
        """Builds the graph.

        Args:
            replicas: each computes its part of the global batch, on its own device.
            tables: reads rows.
            table_host: updates them.
            parameters: the device that holds the shard's vectors and updates them.
            profiles: whether steps are stamped: input, compute, apply.
        """
        self.replicas, self.scopes = replicas, replicas[0].scopes
        self._shard, self._fills = shard, optimizer.slots()
        self._tables, self._table_host = tables, table_host
        self._clock = GraphClock(is_wanted=profiles)
        with tf.Graph().as_default() as self.graph:
            zeros = v1.zeros_initializer()
            with tf.device(parameters):
                self._flat = v1.get_variable("flat", [shard.size], initializer=zeros, use_resource=True)
                self._slots = {
                    name: v1.get_variable(
                        f"slots/{name}", [shard.slot_size(name)], initializer=zeros, use_resource=True
                    )
                    for name in self._fills
                }
            self._batches = [replica.batches() for replica in replicas]
            self._batch_count = BatchCount("/cpu:0")
            self._requests = Requests.placeholders()
            self._step, self._gradients = self._make_step(optimizer, replicas, parameters)
            flat = self._flat.read_value()
            self._peek = [tf.expand_dims(packing.tags_of(flat, shard), 0), packing.metrics_of(flat, shard)]
            tags = packing.tags_of(flat, shard)
            self._snapshot = [tags, flat, {name: slot.read_value() for name, slot in self._slots.items()}]
            variables = (self._flat, *self._slots.values())
            self._feeds = [v1.placeholder(tf.float32, v.shape) for v in variables]
            self._load = [v.assign(feed, read_value=False) for v, feed in zip(variables, self._feeds, strict=True)]
            self._feeds.append(v1.placeholder(tf.string, []))
            self._load += table_host.load(self._feeds[-1])

    def load(self, snapshot: Snapshot, *, generation: int) -> None:
        values = [*snapshot.to_flats(self._shard, self._fills, generation=generation), snapshot.tables]
        self.session.run(self._load, dict(zip(self._feeds, values, strict=True)))

    def start(self) -> int:
        loaded = self.peek()
        self.generation = loaded.generation
        for batches in self._batches:
            self.session.run(batches.initializer, batches.feed_from(loaded.step))
        return loaded.step

    def peek(self) -> StepResult:
        return StepResult.read(*self.session.run(self._peek))

    def snapshot(self) -> Snapshot:
        tags, flat, slots = self.session.run(self._snapshot)
        return Snapshot.from_flats(int(tags[1]), [self._shard], [flat], [slots])

    def contributions(self) -> None:
        """Returns None: every replica is in every update."""

    def leave(self) -> None:
        """Does nothing: no other task waits for this one."""

    def _name(self, packed: np.ndarray) -> dict[str, np.ndarray]:
        return packing.from_flat(self._shard.trainable, packed)

    def _make_step(
        self, optimizer: OptimizerConfig, replicas: Sequence[Replica], parameters: str
    ) -> tuple[list[Any], tf.Tensor]:
        """Returns ([tags, metrics, time of the batches, time when computed, [no pushes, *stamps]], mean gradient)."""
        shard = self._shard
        tensors = [tensor for batches in self._batches for tensor in batches.batch.tensors]
        began_at = now([*tensors, self._batch_count.count(tensors)])
        self._clock.end_at("input", began_at)
        with tf.control_dependencies([began_at]):  # not before, so that waiting for a batch is timed alone
            flat = self._flat.read_value()
        slots = {name: slot.read_value() for name, slot in self._slots.items()}
        tags, header = packing.tags_of(flat, shard), packing.header_of(flat, shard)
        generation, step = tf.unstack(tf.cast(tags, tf.int64))
        tag = generation * packing.GENERATION_STRIDE + step

        def run(index: int) -> Packed:
            batches = self._batches[index]
            (rows,) = self._tables.rows_of_step([batches.derived], tag, ())
            halves, batch = [packing.halves(flat, shard)], in_step(batches, step)
            return compute(halves, [header], [shard], replicas[index], batch, self._requests, rows=rows)

        computed = in_turn(replicas, run)
        packed = [one.vectors[0] for one in computed]
        derived = [batches.derived for batches in self._batches]
        sums = self._tables.sum_gradients(derived, [one.rows for one in computed], each_alone(len(replicas)))
        left = self._tables.leave(sums, ())
        computed_at = now([*packed, *left])
        self._clock.end_at("compute", computed_at)
        order, scaled = squares_order([shard]), is_scaled([shard])
        decide = partial(judge, flat, packed, shard, FLOAT32, scaled=scaled)
        moved_rows = self._table_host.begin(tag, decide, [*packed, *left], pushes=list(range(len(replicas))))
        exchange = moved_rows.extend(lambda own: tf.gather(own, order), self._table_host.square_sum)
        update = make_update(shard, optimizer, exchange, scaled=scaled)
        with tf.device(parameters):
            new, moved = update(flat, slots, packed, generation, step, None)
            with tf.control_dependencies(moved_rows.finish(step)):
                assigned = [self._flat.assign(new, read_value=False)]
            assigned += [slot.assign(moved[name], read_value=False) for name, slot in self._slots.items()]
        self._clock.end("apply", assigned)
        with tf.control_dependencies(assigned):
            metrics = packing.metrics_of(flat, shard)
            ends = [[], *self._clock.fetches]
            mean = divided(packing.halves(packing.mean_of(packed), shard), shard)
            return [tf.expand_dims(tags, 0), metrics, began_at, computed_at, ends], mean.trainable
