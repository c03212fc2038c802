"""One process: the same replica step and the same update on one shard, in one graph without a cluster."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import tensorflow as tf

from trainer import optimizers
from trainer.config import OptimizerConfig
from trainer.engine import packing
from trainer.engine.compute import Replica, compute
from trainer.engine.pulled import Pulled
from trainer.engine.snapshot import Snapshot
from trainer.engine.update import make_update, squares_order
from trainer.placement import Shard

v1 = tf.compat.v1


class LocalEngine:
    """Trains on one shard that lives in this process; the same calls as `ShardsEngine`."""

    def __init__(
        self,
        *,
        shard: Shard,
        optimizer: OptimizerConfig,
        replica: Replica,
    ) -> None:
        self._shard, self._fills = shard, optimizers.slots(optimizer)
        with tf.Graph().as_default() as self.graph:
            self._flat = v1.get_variable("flat", [shard.size], initializer=v1.zeros_initializer(), use_resource=True)
            self._slots = {
                name: v1.get_variable(
                    f"slots/{name}", [shard.trainable_size], initializer=v1.zeros_initializer(), use_resource=True
                )
                for name in self._fills
            }
            self._batches = replica.batches()
            self._stop = v1.placeholder(tf.float32, [])
            self._step, self._gradients = self._make_step(optimizer, replica)
            flat = self._flat.read_value()
            self._peek = [tf.expand_dims(packing.tags_of(flat, shard), 0), packing.metrics_of(flat, shard)]
            self._snapshot = [
                packing.tags_of(flat, shard),
                flat,
                {name: slot.read_value() for name, slot in self._slots.items()},
            ]
            self._feeds = [v1.placeholder(tf.float32, v.shape) for v in (self._flat, *self._slots.values())]
            self._load = [
                v.assign(feed, read_value=False)
                for v, feed in zip((self._flat, *self._slots.values()), self._feeds, strict=True)
            ]

    def connect(self, target: str, session_config: Any) -> None:
        """Opens the session; there is no server, so the target is the empty one."""
        self.session = v1.Session(target, graph=self.graph, config=session_config)
        self._run_step = self.session.make_callable(self._step, feed_list=[self._stop])
        self._run_step_and_fetch = self.session.make_callable([*self._step, self._gradients], feed_list=[self._stop])

    def load(self, snapshot: Snapshot, *, generation: int) -> None:
        """Sets parameters, state and slots."""
        values = [snapshot.flat(self._shard, generation=generation)]
        values += [snapshot.slot(self._shard, name, fill) for name, fill in self._fills.items()]
        self.session.run(self._load, dict(zip(self._feeds, values, strict=True)))

    def start(self) -> int:
        """Sets the input to the global step of what was loaded, and returns it."""
        step = self.peek().step
        self.session.run(self._batches.initializer, self._batches.feed_from(step))
        return step

    def step(self, *, stop: bool = False, fetch_gradients: bool = False) -> Pulled:
        """Computes on the next batch and updates; the metrics are the previous update's, as behind shard hosts.

        Args:
            stop: asks all replicas to stop after the next step.
            fetch_gradients: also returns what this replica pushed.
        """
        began = time.time()
        run = self._run_step_and_fetch if fetch_gradients else self._run_step
        tags, metrics, pulled_at, computed_at, *gradients = run(float(stop))
        pulled = Pulled.read(tags, metrics, wait_secs=pulled_at - began, compute_secs=computed_at - pulled_at)
        return pulled._replace(gradients=self._name(gradients[0])) if gradients else pulled

    def peek(self) -> Pulled:
        """Where the run stands."""
        return Pulled.read(*self.session.run(self._peek))

    def snapshot(self) -> Snapshot:
        """Everything a checkpoint holds."""
        tags, flat, slots = self.session.run(self._snapshot)
        return Snapshot.from_flats(int(tags[1]), [self._shard], [flat], [slots])

    def leave(self) -> None:
        """Nobody waits for this process."""

    def _name(self, packed: list[np.ndarray]) -> dict[str, np.ndarray]:
        return packing.from_flat(self._shard.trainable, packed[0])

    def _make_step(self, optimizer: OptimizerConfig, replica: Replica) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Returns ([tags, metrics, time when the batch was here, time when computed], packed gradients)."""
        flat = self._flat.read_value()
        slots = {name: slot.read_value() for name, slot in self._slots.items()}
        tags = packing.tags_of(flat, self._shard)
        generation, step = tf.unstack(tf.cast(tags, tf.int64))
        with tf.control_dependencies([self._batches.features]):
            began_at = tf.timestamp()
        packed, computed_at = compute([flat], [self._shard], replica, self._batches, self._stop)
        order = squares_order([self._shard])
        update = make_update(self._shard, optimizer, lambda squares: tf.gather(squares, order))
        new, moved = update(flat, slots, packed, generation, step)
        assigned = [self._flat.assign(new, read_value=False)]
        assigned += [slot.assign(moved[name], read_value=False) for name, slot in self._slots.items()]
        with tf.control_dependencies(assigned):
            metrics = packing.metrics_of(flat, self._shard)
            return [tf.expand_dims(tags, 0), metrics, began_at, computed_at], packed
