"""Trains synchronously and exactly: an update waits for one gradient of every worker.

    host loop:  take one message of every worker -> average in their order -> update -> a token to each

A host takes only messages of its own generation and step, and drops others, so a duplicate from a restarted worker
counts once. No shard can pass step s without every worker's gradient of s, and what a replica reads between its token
and its push is consistent over all shards.

A worker that dies between its pushes leaves some shards at step s and others at s + 1, never further apart. Each keeps
the previous vector, so its successor computes the same bits of the gradient of s again and pushes them to all.
"""

import time
from typing import Any

import tensorflow as tf

from trainer.engine.devices import device_of
from trainer.engine.instruments import GraphClock, failpoint, now
from trainer.engine.queues import take
from trainer.engine.sharded.host import OnUpdate, ShardHost
from trainer.engine.vectors import packing
from trainer.observe.profile.stamps import Stamps

v1 = tf.compat.v1


class SyncHost(ShardHost):
    """Updates a shard once every worker has pushed its gradient."""

    def __init__(self, **options: Any) -> None:
        """Builds the host's graph from the options of `ShardHost`."""
        super().__init__(**options)
        with self.graph.as_default(), tf.device(device_of(self.shard.host)):
            first = v1.constant_initializer(-1)  # then the tag of the last update that contains a worker's gradient
            self._taken = [
                v1.get_variable(f"taken{worker}", [], tf.int64, first, use_resource=True)
                for worker in range(self.workers)
            ]
            self._waits = [tf.stack([one.read_value() for one in self._taken]), self._tag]
            self._update = self._make_update()

    def missing(self) -> list[int]:
        taken, tag = self.session.run(self._waits)
        return [worker for worker, last in enumerate(taken) if last < tag]

    def serve(self, steps: int, on_update: OnUpdate) -> None:
        update = self.session.make_callable(self._update)
        step = self.read_tag()[1]
        while step < steps:
            began = time.time()
            step, taken_at, *stamps = self.run_update(update, self._update)
            if stamps and self.record:
                self.record(int(step), Stamps(began, time.time(), *stamps))
            on_update(int(step), max(0.0, taken_at - began))

    def _make_update(self) -> list[Any]:
        """Returns [global step after the update, time when every worker's gradient had arrived, *stamps]."""
        clock = GraphClock(is_wanted=self.profiles)
        mine = packing.tags_of(self.shared.flat.read_value(), self.shard)

        def stale(message: tf.Tensor) -> tf.Tensor:
            # Not `!=`, which compares identities in a v1 graph.
            return tf.reduce_any(tf.not_equal(self.wire.tags_of(message, self.shard), mine))

        packed = [take(pushes, stale) for pushes in self.shared.pushes.values()]
        arrived = [at for worker, one in enumerate(packed) for at in clock.arrive(f"worker:{worker}", [one])]
        tag = self.tag()
        recorded = []
        for one, last in zip(packed, self._taken, strict=True):
            with tf.control_dependencies([one]):
                recorded.append(last.assign(tag, read_value=False))
        step = packing.tags_of(self.shared.flat.read_value(), self.shard)[1]
        with tf.control_dependencies([*packed, *arrived, *failpoint("take", step, packed)]):
            packed = [vector for worker, message in enumerate(packed) for vector in self.read_push(message, worker)]
            taken_at = now([])
        clock.end_at("wait", taken_at)
        step, assigned = self.update(packed, pushes=list(range(len(packed))), exchange=self.exchange(mine))
        applied = clock.end("apply", [*assigned, taken_at])
        with tf.control_dependencies([*assigned, *applied, *failpoint("apply", step, assigned)]):
            handed = self.hand_out_tokens()
        clock.end("tokens", [handed])
        with tf.control_dependencies([handed, *recorded]):
            return [tf.identity(step), tf.identity(taken_at), *clock.fetches]
