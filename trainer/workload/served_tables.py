"""Exports the tables of a model: rows as variables, and initial values of other rows in TensorFlow."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import tensorflow as tf

from trainer.plan.scramble import GOLDEN, LAST_MIX, MIX
from trainer.plan.tables import Table, first_key

PIECE_NBYTES = 2**30  # of a table, in one variable
MANTISSA_BITS = 24


class TableValues(NamedTuple):
    """The rows of a table."""

    table: Table
    values: np.ndarray  # [n, width]
    ids: np.ndarray | None = None  # [n] int64, rising, whose rows these are, of a table that grows; else 0..n-1
    seed: int = 0  # from which the rows of other ids follow


class ServedTable:
    """Looks rows up in a graph that is exported."""

    def __init__(self, of: TableValues) -> None:
        """Copies the rows into variables of a limited size, each made before the next is read."""
        self._table, self._key = of.table, first_key(of.table.path, of.seed)
        rows = max(1, PIECE_NBYTES // (4 * of.table.width))
        cuts = range(0, len(of.values), rows)
        self._pieces = [tf.Variable(of.values[begin : begin + rows], trainable=False) for begin in cuts]
        self._ids = None if of.ids is None else tf.Variable(of.ids, trainable=False)

    @property
    def variables(self) -> list[tf.Variable]:
        return [*self._pieces, *([] if self._ids is None else [self._ids])]

    def look_up(self, ids: tf.Tensor) -> tf.Tensor:
        """Returns [*ids, width], the rows of ids [...] int64."""
        if self._ids is None:
            return _gather(self._pieces, ids)
        first = self._first_values(ids)
        if not self._pieces:
            return first
        at = tf.reshape(tf.searchsorted(self._ids, tf.reshape(ids, [-1]), out_type=tf.int64), tf.shape(ids))
        at = tf.minimum(at, self._ids.shape[0] - 1)
        return tf.where((tf.gather(self._ids, at) == ids)[..., None], _gather(self._pieces, at), first)

    def _first_values(self, ids: tf.Tensor) -> tf.Tensor:
        """Computes in TensorFlow what engine/tables/first_values.py does with NumPy."""
        low, high = (np.float32(one) for one in self._table.first)
        width = self._table.width
        if low == high:
            return tf.fill(tf.concat([tf.shape(ids), [width]], 0), low)
        numbers = tf.bitcast(ids, tf.uint64)[..., None] * _uint64(width)
        offsets = tf.constant([(self._key + column) % 2**64 for column in range(width)], tf.uint64)
        bits = _shifted(_scrambled(numbers + offsets), 64 - MANTISSA_BITS)
        drawn = tf.cast(tf.bitcast(bits, tf.int64), tf.float32) * np.float32(2.0**-MANTISSA_BITS)
        return low + drawn * (high - low)


def _gather(pieces: Sequence[tf.Variable], at: tf.Tensor) -> tf.Tensor:
    """Returns [*at, width], the rows with these numbers."""
    found, begin = None, 0
    for piece in pieces:
        rows = piece.shape[0]
        own = tf.gather(piece, tf.clip_by_value(at - begin, 0, rows - 1))
        found = own if found is None else tf.where((at >= begin)[..., None], own, found)
        begin += rows
    return found


def _scrambled(x: tf.Tensor) -> tf.Tensor:
    """Computes what plan/scramble.py does, in TensorFlow."""
    x = (x + _uint64(1)) * _uint64(GOLDEN)
    x = tf.bitwise.bitwise_xor(x, _shifted(x, 30)) * _uint64(MIX)
    x = tf.bitwise.bitwise_xor(x, _shifted(x, 27)) * _uint64(LAST_MIX)
    return tf.bitwise.bitwise_xor(x, _shifted(x, 31))


def _shifted(x: tf.Tensor, bits: int) -> tf.Tensor:
    return tf.bitwise.right_shift(x, _uint64(bits))


def _uint64(number: int) -> tf.Tensor:
    return tf.constant(number, tf.uint64)
