"""Implements a host's side of tables: it updates the rows that were pushed to it, in place."""

import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from trainer.config.schema import ROW_ACCUMULATOR, OptimizerConfig
from trainer.engine import optimizers
from trainer.engine.tables import exact_sum
from trainer.engine.tables.memory import BlockMemory, Pushed, sum_pushed
from trainer.engine.update import Exchange
from trainer.engine.vectors.packing import GENERATION_STRIDE
from trainer.plan.spans import Span, all_of
from trainer.plan.table_layout import HALVES, POWERS

# All rows that an update changes make one vector, whose size is a power of two from this on: each is compiled once.
LEAST_SIZE = 2**12

Read = Callable[[str, Sequence[BlockMemory], int], None]  # the rows of a host from the checkpoint at a path
Judge = Callable[[], tuple[tf.Tensor, tf.Tensor, tf.Tensor | float]]  # see engine/update.py
SquareSum = Callable[[], tf.Tensor]  # [] float32: the sum of the squares of all rows' gradients
Take = Callable[[int], Sequence[Pushed]]  # what was pushed, by block, of the push with this number


class Before(NamedTuple):
    """Rows of a block, before or after a change."""

    places: np.ndarray  # [n] int64
    values: np.ndarray  # [n, width]
    saved: dict[str, np.ndarray]  # what a checkpoint stores besides the values, [n, k] each


class Collected(NamedTuple):
    """The rows that an update changes, as vectors of equal size, padded with zeros."""

    values: tf.Tensor
    gradient: tf.Tensor  # the mean over all that were pushed
    slots: dict[str, tf.Tensor]


class RowUpdate:
    """An update of rows between its two parts; without tables, it has no rows."""

    def extend(self, exchange: Exchange, square_sum: SquareSum) -> Exchange:
        """Returns an exchange of squares that appends the sum over all rows to those of all shards."""
        return exchange

    def finish(self, step: tf.Tensor) -> list[tf.Operation]:
        """Adds the second part; `step` [] int64 is that of the state before it."""
        return []


class TableHost:
    """Updates the rows of one host."""

    def __init__(
        self,
        memory: Sequence[BlockMemory],
        host: int,
        optimizer: OptimizerConfig,
        *,
        seed: int,
        read: Read | None = None,
    ) -> None:
        """Takes the memory of tables; reads no values yet.

        Args:
            memory: of all tables; empty if there are none.
            read: reads checkpoints.
        """
        self.memory, self.config, self._host, self._seed, self._read = memory, optimizer, host, seed, read
        self.lock = threading.Lock()  # held while rows change, for those who read them meanwhile
        self._optimizer, self._fills, self._clips = (
            optimizer.of_rows(),
            optimizer.row_slots(),
            optimizer.clip_norm is not None,
        )
        self._is_rowwise = ROW_ACCUMULATOR in self._fills
        self._kept: list[list[Before]] | None = None  # by block: the rows that updates have changed since `hold`
        self._is_kept: list[np.ndarray] = []  # by block, [held] bool: those that are there, or did not exist at `hold`
        self._changed: list[Pushed] = []  # by block, in the update that is under way: rows, and values before
        self._apply = tf.function(
            lambda *inputs: optimizers.apply(self._optimizer, *inputs), jit_compile=True, autograph=False
        )

    def load(self, checkpoint: tf.Tensor) -> list[tf.Operation]:
        """Adds the load of initial values of rows, then of those in a checkpoint [] string, if it is not empty."""
        return [tf.numpy_function(self._load, [checkpoint], [])] if self.memory else []

    def _load(self, checkpoint: bytes) -> None:
        for block in self.memory:
            block.begin(self._host, self._fills, seed=self._seed)
        if path := np.asarray(checkpoint).item().decode():
            assert self._read is not None
            self._read(path, self.memory, self._host)

    def hold(self) -> None:
        """Keeps the current rows for `changed`, until `release`; called between two updates."""
        with self.lock:
            self._kept = [[] for _ in self.memory]
            self._is_kept = [np.zeros(block.block.held, bool) for block in self.memory]

    def release(self) -> None:
        with self.lock:
            self._kept, self._is_kept = None, []

    def changed(self, step: int) -> list[Before]:
        """Returns, by block, the rows that changed after a step, as they were at `hold`, or else as they are."""
        with self.lock:
            return [self._changed_in(number, step) for number in range(len(self.memory))]

    def _changed_in(self, number: int, step: int) -> Before:
        block = self.memory[number]
        rows = block.changed_after(step, self._host)
        if self._kept is None:
            return _copied(block, rows)
        is_new = self._is_kept[number][rows - self._host * block.block.held]
        parts = [_copied(block, rows[~is_new]), *self._kept[number]]
        places, values = (np.concatenate(arrays) for arrays in list(zip(*parts, strict=True))[:2])
        saved = {name: np.concatenate([part.saved[name] for part in parts]) for name in parts[0].saved}
        return Before(places, values, saved)

    def _keep(self, number: int, rows: np.ndarray) -> None:
        """Keeps rows before they change for the first time since `hold`."""
        block, is_kept = self.memory[number], self._is_kept[number]
        first = self._host * block.block.held
        rows = rows[~is_kept[rows - first]]
        assert self._kept is not None
        self._kept[number].append(_copied(block, rows))
        is_kept[rows - first] = True

    def begin(
        self,
        tag: tf.Tensor,
        judge: Judge,
        after: Sequence[Any],
        *,
        pushes: Any,
        spans: Sequence[Span] | None = None,
        take: Take | None = None,
    ) -> RowUpdate:
        """Begins an update of the rows that were pushed for the step with this tag [] int64; see `collect`."""
        if not self.memory:
            return RowUpdate()
        is_bad, reductions, divisor = judge()
        collected = self.collect(tag, is_bad, after, pushes=pushes, spans=spans, divisor=divisor, take=take)
        return CollectedUpdate(self, collected, reductions)

    def collect(
        self,
        tag: tf.Tensor,
        is_bad: tf.Tensor,
        after: Sequence[tf.Tensor | tf.Operation],
        *,
        pushes: Any,
        spans: Sequence[Span] | None = None,
        divisor: tf.Tensor | float = 1.0,
        take: Take | None = None,
    ) -> Collected:
        """Adds the first part of an update.

        Args:
            is_bad: [] bool, whether the update is left out.
            after: all pushes are there once these are.
            pushes: [n] the numbers of those that are averaged.
            spans: the replicas that each of them is the sum of; by default one each.
            divisor: [] float32, divides their mean.
            take: gives what was pushed, where that is not in memory which they share with this host.
        """
        with tf.control_dependencies(after):
            tag, is_bad, divisor = tf.identity(tag), tf.identity(is_bad), tf.identity(divisor)
        kinds = [tf.float32] * (2 + len(self._slots))
        collect = partial(self._collect, take or self._take, spans)
        values, gradient, *slots = tf.numpy_function(collect, [tag, is_bad, pushes, divisor], kinds)
        for one in (values, gradient, *slots):
            one.set_shape([None])
        return Collected(values, gradient, dict(zip(self._slots, slots, strict=True)))

    def own_square_sums(self) -> tf.Tensor:
        """Returns [blocks, HALVES, POWERS] int64 of the rows that this host has collected, to be sent to others."""
        shape = [len(self.memory), HALVES, POWERS]
        return tf.ensure_shape(tf.numpy_function(self._own_square_sums, [], tf.int64), shape)

    def square_sum(self, of_hosts: Sequence[tf.Tensor] = ()) -> tf.Tensor:
        """Returns [] float32: the sum of the squares of all rows' gradients, once all hosts have collected theirs.

        Args:
            of_hosts: the values that each has sent, if they share no memory.
        """
        sums = tf.numpy_function(self._square_sum, list(of_hosts), tf.float32)
        return tf.ensure_shape(sums, [])

    def finish(
        self, collected: Collected, step: tf.Tensor, reductions: tf.Tensor, scale: tf.Tensor | None = None
    ) -> tf.Operation:
        """Adds the second part: the update of these rows, in place.

        Args:
            step: [] int64, updates applied so far.
            reductions: [] float32, of the learning rate.
            scale: [] float32, what gradients are multiplied by.
        """
        gradient = collected.gradient if scale is None else collected.gradient * scale
        if self._is_rowwise:
            rate = optimizers.learning_rate(self._optimizer, step, reductions)
            return tf.numpy_function(self._update_rowwise, [step, rate, gradient], [])
        moved, updated = self._apply(collected.values, collected.slots, gradient, step, reductions)
        return tf.numpy_function(self._store, [step, moved, *(updated[name] for name in self._slots)], [])

    @property
    def _slots(self) -> list[str]:
        """Returns the slots that are vectors beside the values."""
        return [] if self._is_rowwise else list(self._fills)

    def _take(self, push: int) -> list[Pushed]:
        return [block.pushed(push, self._host) for block in self.memory]

    def _collect(
        self,
        take: Take,
        spans: Sequence[Span] | None,
        tag: np.ndarray,
        is_bad: np.ndarray,
        pushes: np.ndarray,
        divisor: np.ndarray,
    ) -> list[np.ndarray]:
        """Returns values, mean gradient and slots of the rows to change, as vectors of equal size."""
        self._changed = []
        parts: list[list[np.ndarray]] = []
        taken = [] if is_bad else [take(int(push)) for push in pushes]
        replicas = len(pushes) if spans is None else all_of(spans).size
        for number, block in enumerate(self.memory):
            pushed = [of_blocks[number] for of_blocks in taken]
            empty = (np.zeros(0, np.int64), np.zeros((0, block.block.width), np.float32))
            places, total = sum_pushed(pushed, spans) if pushed else empty
            values = block.values(places, int(tag))
            block.keep(self._host, int(tag), places, values)
            with self.lock:
                rows, is_trained = self._take_up(number, places, int(tag % GENERATION_STRIDE))
            rows, values, total = rows[is_trained], values[is_trained], total[is_trained]
            self._changed.append((rows, values))
            slots = [np.take(block.slots[name], rows, axis=0) for name in self._slots]
            gradient = total / np.float32(replicas) if replicas > 1 else total
            gradient = gradient if divisor == 1 else gradient / divisor
            parts.append([values, gradient, *slots])
            if self._clips:
                block.arrays["squares"][self._host] = exact_sum.square_sums(gradient)
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

    def _take_up(self, number: int, places: np.ndarray, step: int) -> tuple[np.ndarray, np.ndarray | slice]:
        """Returns the rows at places that an update changes, and which of them are trained."""
        block = self.memory[number]
        if self._kept is None:
            return block.take_up(self._host, places, step, self._fills, lambda _: None)
        self._keep(number, block.find(places))
        rows, is_trained = block.take_up(self._host, places, step, self._fills, partial(self._keep, number))
        self._is_kept[number][rows - self._host * block.block.held] = True
        return rows, is_trained

    def _own_square_sums(self) -> np.ndarray:
        return np.stack([block.arrays["squares"][self._host] for block in self.memory])

    def _square_sum(self, *of_hosts: np.ndarray) -> np.float32:
        return exact_sum.total(np.concatenate(of_hosts or [block.arrays["squares"] for block in self.memory]))

    def _store(self, step: np.ndarray, moved: np.ndarray, *slots: np.ndarray) -> None:
        at = 0
        for number, (_, values) in enumerate(self._changed):
            end = at + values.size
            updated = {name: slot[at:end].reshape(values.shape) for name, slot in zip(self._slots, slots, strict=True)}
            self._put(number, moved[at:end].reshape(values.shape), updated, int(step) + 1)
            at = end

    def _update_rowwise(self, step: np.ndarray, rate: np.ndarray, gradients: np.ndarray) -> None:
        """Updates by adagrad with one accumulator per row, to which it adds the mean of the row's squares."""
        config, at = self._optimizer, 0
        for number, (rows, values) in enumerate(self._changed):
            block, end = self.memory[number], at + values.size
            gradient = gradients[at:end].reshape(values.shape)
            accumulator = np.take(block.slots[ROW_ACCUMULATOR], rows, axis=0)
            squares = gradient * gradient
            total = np.zeros(len(rows), np.float32)
            for column in range(values.shape[1]):  # each row alone, in this order
                total += squares[:, column]
            accumulator += (total / np.float32(values.shape[1]))[:, None]
            decayed = values - values * np.float32(config.weight_decay) * np.float32(rate)
            moved = decayed - np.float32(rate) * gradient / np.sqrt(accumulator + np.float32(config.epsilon))
            self._put(number, moved, {ROW_ACCUMULATOR: accumulator}, int(step) + 1)
            at = end

    def _put(self, number: int, moved: np.ndarray, slots: dict[str, np.ndarray], step: int) -> None:
        """Writes the changed rows of the block with this number."""
        block, (rows, _) = self.memory[number], self._changed[number]
        with self.lock:
            block.put(rows, moved, slots, step)
            block.arrays["steps"][self._host] = step


class CollectedUpdate(RowUpdate):
    """An update of the rows that were pushed."""

    def __init__(self, tables: TableHost, collected: Collected, reductions: tf.Tensor) -> None:
        self._tables, self._collected, self._reductions = tables, collected, reductions
        self._squares: tf.Tensor | None = None  # of all gradients, where they are clipped

    def extend(self, exchange: Exchange, square_sum: SquareSum) -> Exchange:
        def extended(squares: tf.Tensor) -> tf.Tensor:
            with tf.control_dependencies([self._collected.gradient]):  # before other hosts get the sums
                of_shards = exchange(tf.identity(squares))
            with tf.control_dependencies([of_shards]):
                self._squares = tf.concat([of_shards, [square_sum()]], 0)
            return self._squares

        return extended

    def finish(self, step: tf.Tensor) -> list[tf.Operation]:
        scale = None if self._squares is None else optimizers.clip_scale(self._tables.config, self._squares)
        return [self._tables.finish(self._collected, step, self._reductions, scale)]


def _copied(block: BlockMemory, rows: np.ndarray) -> Before:
    return Before(block.places_at(rows), np.take(block.rows, rows, axis=0), block.saved_at(rows))
