"""Implements a worker's side of tables: what its steps read, and where they put gradients for the hosts."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from trainer.engine.tables.memory import NO_TAG, BlockMemory, Pushed, sum_pushed
from trainer.engine.tables.touches import Derived, Touches

Gradients = Sequence[Sequence[tf.Tensor]]  # by replica and lookup


class RowQuery(NamedTuple):
    """A query of rows to all hosts: its feeds and its fetches."""

    tag: tf.Tensor
    questions: list[tf.Tensor]
    answers: list[tf.Tensor]


class ChangedQuery(NamedTuple):
    """A query to all hosts for the rows that changed after a step: its feeds and its fetches."""

    step: tf.Tensor
    answers: list[tf.Tensor]
    release: list[tf.Tensor]


class Tables(ABC):
    """Adds tables to a worker's graph; the defaults are for rows that are not sent."""

    touches: Touches
    announce: Callable[[Derived], Any] | None = None  # makes of a batch what is asked of hosts a step ahead

    @abstractmethod
    def read(self, derived: Derived) -> list[tf.Tensor]:
        """Returns the rows for each lookup outside training: the current ones."""

    @abstractmethod
    def rows_of_step(
        self, derived: Sequence[Derived], tag: tf.Tensor, payloads: Sequence[tf.Tensor]
    ) -> list[list[tf.Tensor]]:
        """Returns the rows for each lookup of each replica in the step with this tag [] int64.

        Args:
            payloads: what each host has sent behind its vector, if rows are sent.
        """

    @abstractmethod
    def leave(
        self, mean: Sequence[tf.Tensor], upcoming: Sequence[Any], scale: tf.Tensor | None = None
    ) -> list[tf.Tensor | tf.Operation]:
        """Passes gradients to the hosts.

        Args:
            mean: from `mean_gradients`.
            upcoming: of each replica, the places of its next batch by block, if rows are sent.
            scale: [] factor of the gradients.

        Returns:
            What to push behind the vector of each host, if rows are sent; else what must run before the push.
        """

    def split(self, messages: Sequence[tf.Tensor], sizes: Sequence[int]) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Returns the vectors [size] in the messages of each host, and the rows behind them."""
        return list(messages), []

    def join(self, messages: Sequence[tf.Tensor], left: Sequence[Any]) -> list[tf.Tensor]:
        """Returns what to push to each host: a message, and what `leave` returned behind it."""
        return list(messages)

    def query(self) -> RowQuery | None:
        """Adds a query to all hosts for the rows of a first step."""
        return None

    def changes(self) -> ChangedQuery | None:
        """Adds a query to all hosts for the rows that have changed."""
        return None

    def mean_gradients(self, derived: Sequence[Derived], gradients: Gradients) -> list[tf.Tensor]:
        """Returns by block the distinct places [n] of a worker's replicas, and their mean gradients [n, width]."""
        sums = self._sums(derived, gradients)
        if len(derived) == 1 or not sums:
            return sums
        blocks = len(derived[0].blocks)

        def mean(*flat: np.ndarray) -> list[np.ndarray]:
            found = []
            for of_replicas in by_block(flat, blocks):
                places, rows = sum_pushed(of_replicas)
                found += [places, rows / np.float32(len(of_replicas))]
            return found

        means = tf.numpy_function(mean, sums, [one.dtype for one in sums[: 2 * blocks]])
        return [tf.ensure_shape(one, [None, *like.shape[1:]]) for one, like in zip(means, sums, strict=False)]

    def _sums(self, derived: Sequence[Derived], gradients: Gradients) -> list[tf.Tensor]:
        """Returns by replica and block the distinct places, and the gradients of their rows."""
        flat = []
        for one, of_lookups in zip(derived, gradients, strict=True):
            sums = self.touches.sum_gradients(one, of_lookups)
            for touched, total in zip(one.blocks, sums, strict=True):
                flat += [touched.distinct, total]
        return flat


class TableWorker(Tables):
    """Reads rows in memory that it shares with the hosts; without tables it adds nothing."""

    def __init__(self, memory: Sequence[BlockMemory], touches: Touches, worker: int = 0) -> None:
        self._memory, self.touches, self._worker = memory, touches, worker

    def read(self, derived: Derived) -> list[tf.Tensor]:
        return self._read(derived, tf.constant(NO_TAG, tf.int64))

    def rows_of_step(
        self, derived: Sequence[Derived], tag: tf.Tensor, payloads: Sequence[tf.Tensor]
    ) -> list[list[tf.Tensor]]:
        return [self._read(one, tag) for one in derived]

    def leave(
        self, mean: Sequence[tf.Tensor], upcoming: Sequence[Any], scale: tf.Tensor | None = None
    ) -> list[tf.Tensor | tf.Operation]:
        if not self._memory:
            return []
        assert scale is None  # hosts clip

        def write(*flat: np.ndarray) -> None:
            for block, ((places, rows),) in zip(self._memory, by_block(flat, len(self._memory)), strict=True):
                block.write_push(self._worker, places, rows)

        return [tf.numpy_function(write, list(mean), [])]

    def leave_each(self, derived: Sequence[Derived], gradients: Gradients) -> list[tf.Operation]:
        """Passes the gradient of each replica as that of a worker, if all replicas are in one process."""
        if not self._memory:
            return []

        def write(*flat: np.ndarray) -> None:
            for block, of_replicas in zip(self._memory, by_block(flat, len(self._memory)), strict=True):
                for replica, (places, rows) in enumerate(of_replicas):
                    block.write_push(replica, places, rows)

        return [tf.numpy_function(write, self._sums(derived, gradients), [])]

    def _read(self, derived: Derived, tag: tf.Tensor) -> list[tf.Tensor]:
        if not self._memory:
            return []

        def read(tag: np.ndarray, *places: np.ndarray) -> list[np.ndarray]:
            return [block.read(own, int(tag)) for block, own in zip(self._memory, places, strict=True)]

        # Rows of tables that grow must be found, each once; of others every position copies its own.
        grow = [block.block.growing is not None for block in self._memory]
        wanted = [one.distinct if found else one.places for one, found in zip(derived.blocks, grow, strict=True)]
        rows = tensors_of(read, [tag, *wanted], [tf.float32] * len(wanted))
        for number, block in enumerate(self._memory):
            own = tf.ensure_shape(rows[number], [*wanted[number].shape, block.block.width])
            rows[number] = tf.gather(own, derived.blocks[number].which) if grow[number] else own
        return self.touches.cut(derived, rows)


NO_TABLES = TableWorker((), Touches((), lambda _: []))


def tensors_of(
    function: Callable[..., Sequence[Any]], inputs: Sequence[Any], kinds: Sequence[tf.DType]
) -> list[tf.Tensor]:
    """Returns the results of `tf.numpy_function` as a list, even if there is only one."""
    outputs = tf.numpy_function(function, inputs, kinds)
    found = outputs if isinstance(outputs, list) else [outputs]
    return [tf.ensure_shape(one, []) if one.dtype == tf.string else one for one in found]


def by_block(flat: Sequence[np.ndarray], blocks: int) -> list[list[Pushed]]:
    """Regroups the list of `_sums` by block and replica."""
    pairs = list(zip(flat[::2], flat[1::2], strict=True))
    return [pairs[number::blocks] for number in range(blocks)]
