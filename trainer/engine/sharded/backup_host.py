"""The shard host of backup: an update waits for a quorum of the workers."""

from typing import Any

import numpy as np
import tensorflow as tf

from trainer.engine.devices import device_of
from trainer.engine.sharded import staleness
from trainer.engine.sharded.arrivals_host import Arrival, ArrivalsHost
from trainer.engine.sharded.resources import log_queue
from trainer.engine.vectors import packing

v1 = tf.compat.v1


class BackupHost(ArrivalsHost):
    """Updates when a quorum of gradients of the shard's step has arrived; later ones are dropped and counted."""

    def __init__(self, *, quorum: int, **options: Any) -> None:
        """Builds the host's graph; an update waits for `quorum` workers; the options are of `ShardHost`."""
        self._quorum = quorum
        self._chosen: list[int] = []
        self._chosen_feed: Any = None
        super().__init__(**options)
        with self.graph.as_default(), tf.device(device_of(self.shard.host)):
            self._keep = [
                inbox.assign(pushes.dequeue(), read_value=False)
                for inbox, pushes in zip(self._inbox, self.shared.pushes.values(), strict=True)
            ]

    def missing(self) -> list[int]:
        return [worker for worker in range(self.workers) if worker not in self._chosen]

    def owes(self, worker: int) -> bool:
        return worker in self._chosen

    def take(self, arrival: Arrival) -> bool:
        if arrival.step != self.step or arrival.worker in self._chosen:
            self.drop(arrival.worker)
            return False
        self._chosen.append(arrival.worker)
        if len(self._chosen) < self._quorum:
            self._run_keep[arrival.worker]()
            return False
        for worker in self._chosen:
            staleness.add_applied(self.counts, worker, 0)
        self.apply(arrival.worker, self._chosen, {self._chosen_feed: np.isin(np.arange(self.workers), self._chosen)})
        self._chosen.clear()
        return True

    def let_go(self) -> None:
        for worker in self._chosen:
            self.give_token(worker)
        self._chosen.clear()

    def apply_feeds(self) -> list[tf.Tensor]:
        return [self._chosen_feed]

    def _prepare(self) -> None:
        super()._prepare()
        self._run_keep = [self.session.make_callable(op) for op in self._keep]

    def next_arrival(self) -> tf.Tensor:
        """The first shard's host takes what arrives and passes it on; the others take it in the same order."""
        if self.shard.index > 0:
            return self.log.order.dequeue()
        arrival = self.log.arrivals.dequeue()
        passed = [log_queue(shard, "order", self.workers).enqueue(arrival) for shard in self.shards[1:]]
        with tf.control_dependencies(passed):
            return tf.identity(arrival)

    def _make_apply(self, worker: int) -> tf.Operation:
        """The last push of a quorum makes the update; the others wait in their inboxes."""
        if self._chosen_feed is None:
            self._chosen_feed = v1.placeholder(tf.bool, [self.workers])
            self._inbox = [self._make_inbox(other) for other in range(self.workers)]
        messages = [inbox.read_value() for inbox in self._inbox]
        messages[worker] = self.shared.pushes[worker].dequeue()
        packed = [self.wire.read_gradients(message, self.shard, other) for other, message in enumerate(messages)]
        mine = packing.tags_of(self.shared.flat.read_value(), self.shard)
        _, assigned = self.update(packed, chosen=self._chosen_feed, exchange=self.exchange(mine))
        with tf.control_dependencies(assigned):
            given = [self._give_if_chosen(other) for other in range(self.workers)]
            return tf.group(*given, self.write_counts())

    def _make_inbox(self, worker: int) -> Any:
        return v1.get_variable(
            f"inbox{worker}", self.wire.shape(self.shard), self.wire.dtype, v1.zeros_initializer(), use_resource=True
        )

    def _give_if_chosen(self, worker: int) -> tf.Operation:
        def give() -> tf.Tensor:
            with tf.control_dependencies([self.give(worker)]):
                return tf.constant(True)

        return tf.cond(self._chosen_feed[worker], give, lambda: tf.constant(False)).op
