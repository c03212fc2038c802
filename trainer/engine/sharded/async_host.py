"""The shard host of async: every gradient is an update."""

import dataclasses
from typing import Any

import tensorflow as tf

from trainer.engine.sharded import staleness
from trainer.engine.sharded.arrivals_host import Arrival, ArrivalsHost


class AsyncHost(ArrivalsHost):
    """Updates with every gradient; shards do not wait for each other either."""

    def __init__(self, *, max_staleness: int | None = None, **options: Any) -> None:
        """Builds the host's graph from the options of `ShardHost`; workers clip: only they have whole gradients.

        Args:
            max_staleness: steps; older gradients are dropped and counted.
        """
        self._max_staleness = max_staleness
        super().__init__(**options | {"optimizer": dataclasses.replace(options["optimizer"], clip_norm=None)})

    def take(self, arrival: Arrival) -> bool:
        steps = self.step - arrival.step
        if self._max_staleness is not None and steps > self._max_staleness:
            self.drop(arrival.worker)
            return False
        staleness.add_applied(self.counts, arrival.worker, steps)
        self.apply(arrival.worker, [arrival.worker])
        return True

    def _make_apply(self, worker: int) -> tf.Operation:
        _, assigned = self.update(self.read_push(self.shared.pushes[worker].dequeue(), worker), pushes=[worker])
        with tf.control_dependencies(assigned):
            return tf.group(self.give(worker), self.write_counts())
