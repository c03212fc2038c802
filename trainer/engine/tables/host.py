"""A host's side of tables: it updates the rows that were pushed to it, in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import tensorflow as tf

from trainer.config.schema import OptimizerConfig
from trainer.engine import optimizers
from trainer.engine.tables.memory import BlockMemory, Pushed, sum_pushed

# All rows that an update changes make one vector, whose size is a power of two from this on: each is compiled once.
LEAST_SIZE = 2**12

Read = Callable[[str, Sequence[BlockMemory], int], None]  # the rows of a host from the checkpoint at a path


class TableHost:
    """Updates the rows of one host."""

    def __init__(
        self,
        memory: Sequence[BlockMemory],
        host: int,
        pushes: int,
        optimizer: OptimizerConfig,
        *,
        seed: int,
        read: Read | None = None,
    ) -> None:
        """Begins without values.

        Args:
            pushes: gradients that an update averages.
            read: reads checkpoints.
        """
        self._memory, self._host, self._pushes, self._seed, self._read = memory, host, pushes, seed, read
        self._fills = optimizer.slots()
        self._changed: list[Pushed] = []  # by block, in the update that is under way: places, and values before
        self._apply = tf.function(
            lambda *inputs: optimizers.apply(optimizer, *inputs), jit_compile=True, autograph=False
        )

    def load(self, checkpoint: tf.Tensor) -> tf.Operation:
        """Adds what gives the rows their first values, then those in a checkpoint [] string, if it is not empty."""
        return tf.numpy_function(self._load, [checkpoint], [])

    def _load(self, checkpoint: bytes) -> None:
        for block in self._memory:
            block.begin(self._host, self._fills, seed=self._seed)
        if path := np.asarray(checkpoint).item().decode():
            assert self._read is not None
            self._read(path, self._memory, self._host)

    def update(
        self,
        tag: tf.Tensor,
        step: tf.Tensor,
        is_bad: tf.Tensor,
        reductions: tf.Tensor,
        after: Sequence[tf.Tensor | tf.Operation],
    ) -> tf.Operation:
        """Adds the update of the rows that were pushed for the step with this tag [] int64, in place.

        Args:
            step: [] int64, updates applied so far.
            is_bad: [] bool, whether the update is left out.
            reductions: [] float32, of the learning rate.
            after: all pushes are there once these are.
        """
        names = list(self._fills)
        with tf.control_dependencies(after):
            tag, is_bad = tf.identity(tag), tf.identity(is_bad)
        kinds = [tf.float32] * (2 + len(names))
        values, gradient, *slots = tf.numpy_function(self._collect, [tag, is_bad], kinds)
        for one in (values, gradient, *slots):
            one.set_shape([None])
        moved, updated = self._apply(values, dict(zip(names, slots, strict=True)), gradient, step, reductions)
        return tf.numpy_function(self._store, [step, moved, *(updated[name] for name in names)], [])

    def _collect(self, tag: np.ndarray, is_bad: np.ndarray) -> list[np.ndarray]:
        """The values, the mean gradient and the slots of the rows to be changed, all as vectors of the same size."""
        self._changed = []
        parts: list[list[np.ndarray]] = []
        for block in self._memory:
            pushed = [] if is_bad else [block.pushed(worker, self._host) for worker in range(self._pushes)]
            empty = (np.zeros(0, np.int64), np.zeros((0, block.block.width), np.float32))
            places, total = sum_pushed(pushed) if pushed else empty
            values = np.take(block.rows, places, axis=0)
            block.keep(self._host, int(tag), places, values)
            self._changed.append((places, values))
            slots = [np.take(block.slots[name], places, axis=0) for name in self._fills]
            parts.append([values, total / np.float32(self._pushes), *slots])
        count = sum(values.size for _, values in self._changed)
        size = max(LEAST_SIZE, 1 << (count - 1).bit_length())
        vectors = [np.zeros(size, np.float32) for _ in parts[0]]
        at = 0
        for of_block in parts:
            end = at + of_block[0].size
            for vector, one in zip(vectors, of_block, strict=True):
                vector[at:end] = one.ravel()
            at = end
        return vectors

    def _store(self, step: np.ndarray, moved: np.ndarray, *slots: np.ndarray) -> None:
        at = 0
        for block, (places, values) in zip(self._memory, self._changed, strict=True):
            end = at + values.size
            updated = {name: slot[at:end].reshape(values.shape) for name, slot in zip(self._fills, slots, strict=True)}
            block.put(places, moved[at:end].reshape(values.shape), updated, int(step) + 1)
            at = end
