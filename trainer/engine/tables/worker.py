"""Implements a worker's side of tables: what its steps read, and where they put gradients for the hosts."""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from trainer.engine.tables.memory import NO_TAG, BlockMemory, Pushed, sum_pushed
from trainer.engine.tables.touches import Derived, Touches
from trainer.plan.spans import Span

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
        self, sums: Sequence[tf.Tensor], upcoming: Sequence[Any], scale: tf.Tensor | None = None
    ) -> list[tf.Tensor | tf.Operation]:
        """Passes gradients to the hosts.

        Args:
            sums: from `sum_gradients`.
            upcoming: of each replica, the places of its next batch by block, where rows are sent.
            scale: [] what the gradients are multiplied by.

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

    def sum_gradients(
        self, derived: Sequence[Derived], gradients: Gradients, spans: Sequence[Span] | None
    ) -> list[tf.Tensor]:
        """Returns by span and block the distinct places [n], and the gradients of their rows [n, width].

        Args:
            spans: of this worker's replicas, whose gradients are summed; None: the mean over all of them is taken.
        """
        sums = self._sums(derived, gradients)
        if not sums or len(derived) == (1 if spans is None else len(spans)):
            return sums
        blocks = len(derived[0].blocks)
        wanted = spans or [Span(0, len(derived))]

        def add(*flat: np.ndarray) -> list[np.ndarray]:
            found = []
            for span, of_replicas in itertools.product(wanted, by_block(flat, blocks)):
                numbers = range(span.first, span.first + span.size)
                own = of_replicas[numbers[0] - wanted[0].first :][: span.size]
                places, rows = sum_pushed(own, [Span(number, 1) for number in numbers])
                found += [places, rows / np.float32(span.size) if spans is None else rows]
            return found

        like = sums[: 2 * blocks] * len(wanted)
        added = tf.numpy_function(add, sums, [one.dtype for one in like])
        return [tf.ensure_shape(one, [None, *other.shape[1:]]) for one, other in zip(added, like, strict=True)]

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

    def __init__(self, memory: Sequence[BlockMemory], touches: Touches, first_push: int = 0) -> None:
        """Starts with no rows read; this worker's pushes are numbered from `first_push`."""
        self._memory, self.touches, self._first_push = memory, touches, first_push

    def read(self, derived: Derived) -> list[tf.Tensor]:
        return self._read(derived, tf.constant(NO_TAG, tf.int64))

    def rows_of_step(
        self, derived: Sequence[Derived], tag: tf.Tensor, payloads: Sequence[tf.Tensor]
    ) -> list[list[tf.Tensor]]:
        return [self._read(one, tag) for one in derived]

    def leave(
        self, sums: Sequence[tf.Tensor], upcoming: Sequence[Any], scale: tf.Tensor | None = None
    ) -> list[tf.Tensor | tf.Operation]:
        if not self._memory:
            return []
        assert scale is None  # hosts clip

        def write(*flat: np.ndarray) -> None:
            for block, pushed in zip(self._memory, by_block(flat, len(self._memory)), strict=True):
                for push, (places, rows) in enumerate(pushed, self._first_push):
                    block.write_push(push, places, rows)

        return [tf.numpy_function(write, list(sums), [])]

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
    """Regroups the list of `_sums` by block and replica, or that of `sum_gradients` by block and span."""
    pairs = list(zip(flat[::2], flat[1::2], strict=True))
    return [pairs[number::blocks] for number in range(blocks)]
