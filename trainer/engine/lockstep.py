"""Exact synchronous training: an update waits for one gradient of every worker.

    host loop:  take one message of every worker -> average in their order -> update -> a token to each

A host takes only messages of its own generation and step, and drops others: a duplicate of a restarted worker counts
once. So no shard can pass step s without every worker's gradient of s, and what a replica reads between its token and
its push is consistent over all shards.
"""

from __future__ import annotations

import time
from typing import Any

import tensorflow as tf

from trainer.engine import packing
from trainer.engine.host import OnUpdate, ShardHost
from trainer.engine.shared import device_of, take


class LockstepHost(ShardHost):
    """A shard that all workers move together, step by step."""

    def __init__(self, **options: Any) -> None:
        """Builds the host's graph from the options of `ShardHost`."""
        super().__init__(**options)
        with self.graph.as_default(), tf.device(device_of(self.shard.host)):
            self._update = self._make_update()

    def serve(self, steps: int, on_update: OnUpdate) -> None:
        update = self.session.make_callable(self._update)
        step = self.read_tag()[1]
        while step < steps:
            began = time.time()
            step, taken_at = self.run_update(update, self._update)
            on_update(int(step), max(0.0, taken_at - began))

    def _make_update(self) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns (global step after the update, the time at which every worker's gradient was here)."""
        mine = packing.tags_of(self.shared.flat.read_value(), self.shard)

        def stale(message: tf.Tensor) -> tf.Tensor:
            # Not `!=`, which compares identities in a v1 graph.
            return tf.reduce_any(tf.not_equal(packing.tags_of(message, self.shard), mine))

        packed = [take(intake, stale) for intake in self.shared.intake]
        with tf.control_dependencies(packed):
            taken_at = tf.timestamp()
        step, assigned = self.update(packed, exchange=self.exchange(mine))
        with tf.control_dependencies(assigned):
            handed = self.hand_out_tokens()
        with tf.control_dependencies([handed]):
            return tf.identity(step), tf.identity(taken_at)
