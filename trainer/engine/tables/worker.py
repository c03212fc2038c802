"""A worker's side of tables: it reads rows where they lie, and leaves its gradients of them for the hosts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import tensorflow as tf

from trainer.engine.tables.memory import BlockMemory, Pushed, sum_pushed
from trainer.engine.tables.touches import Derived, Touches

NO_TAG = np.int64(-2)  # of no step: rows are read as they are


class TableWorker:
    """Adds to a worker's graph what a step does with tables."""

    def __init__(self, memory: Sequence[BlockMemory], touches: Touches, worker: int = 0) -> None:
        self._memory, self.touches, self._worker = memory, touches, worker

    def read(self, derived: Derived, tag: tf.Tensor) -> list[tf.Tensor]:
        """What each lookup is given, of the step with this tag [] int64; once the tag is known."""

        def values(block: BlockMemory, places: tf.Tensor) -> tf.Tensor:
            rows = tf.numpy_function(lambda at, tag: block.read(at, int(tag)), [places, tag], tf.float32)
            return tf.ensure_shape(rows, [*places.shape, block.block.width])

        pairs = zip(self._memory, derived.blocks, strict=True)
        return self.touches.cut(derived, [values(block, touched.places) for block, touched in pairs])

    def leave(
        self, derived: Sequence[Derived], gradients: Sequence[Sequence[tf.Tensor]], tag: tf.Tensor
    ) -> list[tf.Operation]:
        """Leaves the mean over this worker's replicas for the hosts.

        Args:
            derived, gradients: of each replica; the gradients of its lookups.
            tag: [] int64, of the step.
        """

        def write(*flat: np.ndarray) -> None:
            for block, of_replicas in zip(self._memory, self._of_blocks(flat), strict=True):
                places, rows = sum_pushed(of_replicas)
                block.write_push(self._worker, places, rows / np.float32(len(derived)) if len(derived) > 1 else rows)

        return [tf.numpy_function(write, self._sums(derived, gradients), [])]

    def leave_each(self, derived: Sequence[Derived], gradients: Sequence[Sequence[tf.Tensor]]) -> tf.Operation:
        """The same, of each replica as that of a worker, where all replicas are in one process."""

        def write(*flat: np.ndarray) -> None:
            for block, of_replicas in zip(self._memory, self._of_blocks(flat), strict=True):
                for replica, (places, rows) in enumerate(of_replicas):
                    block.write_push(replica, places, rows)

        return tf.numpy_function(write, self._sums(derived, gradients), [])

    def _sums(self, derived: Sequence[Derived], gradients: Sequence[Sequence[tf.Tensor]]) -> list[tf.Tensor]:
        """By replica and block: the distinct places, and the gradients of their rows."""
        flat = []
        for one, of_lookups in zip(derived, gradients, strict=True):
            sums = self.touches.sum_gradients(one, of_lookups)
            for touched, total in zip(one.blocks, sums, strict=True):
                flat += [touched.distinct, total]
        return flat

    def _of_blocks(self, flat: Sequence[np.ndarray]) -> list[list[Pushed]]:
        """What `_sums` lists, by block and replica."""
        pairs = list(zip(flat[::2], flat[1::2], strict=True))
        return [pairs[number :: len(self._memory)] for number in range(len(self._memory))]
