"""The shard host of backup: an update waits for a quorum of the workers."""

from typing import Any

import numpy as np
import tensorflow as tf

from trainer.engine.devices import device_of
from trainer.engine.sharded import staleness
from trainer.engine.sharded.arrivals_host import Arrival, ArrivalsHost
from trainer.engine.sharded.resources import Resizable, log_queue
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
            self._keep = [self._keep_push(worker, inbox) for worker, inbox in enumerate(self._inbox)]

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
        """Takes the next arrival: the first shard's host passes its order on, which the others follow."""
        if self.shard.index > 0:
            return self.log.order.dequeue()
        arrival = self.log.arrivals.dequeue()
        passed = [log_queue(shard, "order").enqueue(arrival) for shard in self.shards[1:]]
        with tf.control_dependencies(passed):
            return tf.identity(arrival)

    def _keep_push(self, worker: int, inbox: Resizable) -> tf.Operation:
        message = self.shared.pushes[worker].dequeue()
        noted = [] if self.rows is None else self.read_push(message, worker)  # if no update comes it is answered, too
        return tf.group(inbox.assign(message), *noted)

    def _make_apply(self, worker: int) -> tf.Operation:
        """Adds the update that the last push of a quorum makes; earlier pushes wait in their inboxes."""
        if self._chosen_feed is None:
            self._chosen_feed = v1.placeholder(tf.bool, [self.workers])
            (numbers,), name = self.wire.shape(self.shard), f"shard{self.shard.index}/inbox"
            self._inbox = [Resizable(f"{name}{other}", self.wire.dtype, numbers) for other in range(self.workers)]
            self.resizable += self._inbox
        shape = self.wire.shape(self.shard) if self.rows is None else [None]
        messages = [tf.ensure_shape(inbox.read(), shape) for inbox in self._inbox]
        messages[worker] = self.shared.pushes[worker].dequeue()
        packed = [
            vector
            for other, message in enumerate(messages)
            for vector in self.read_push(message, other, counts=self._chosen_feed[other])
        ]
        mine = packing.tags_of(self.shared.flat.read_value(), self.shard)
        chosen = tf.reshape(tf.where(self._chosen_feed), [-1])
        _, assigned = self.update(packed, pushes=chosen, chosen=self._chosen_feed, exchange=self.exchange(mine))
        with tf.control_dependencies(assigned):
            given = [self._give_if_chosen(other) for other in range(self.workers)]
            return tf.group(*given, self.write_counts())

    def _give_if_chosen(self, worker: int) -> tf.Operation:
        def give() -> tf.Tensor:
            with tf.control_dependencies([self.give(worker)]):
                return tf.constant(True)

        return tf.cond(self._chosen_feed[worker], give, lambda: tf.constant(False)).op
