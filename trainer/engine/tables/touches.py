"""Finds the rows that a batch touches, in the input pipeline, ahead of the step."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from trainer.plan.tables import Block
from trainer.workload.data.errors import DataError
from trainer.workload.data.examples import Batch
from trainer.workload.lookups import Lookup


class Touched(NamedTuple):
    """The rows of one block that a batch touches."""

    places: tf.Tensor  # [positions] int64, of one lookup after the other
    distinct: tf.Tensor  # [n] int64: these places, sorted and each once
    which: tf.Tensor  # [positions] int32: which of the distinct places each position has


class Derived(NamedTuple):
    """The data derived from a batch."""

    ids: tuple[tf.Tensor, ...]  # of each lookup, in the order of the model's calls
    blocks: tuple[Touched, ...]


class Touches:
    """Finds the rows that batches touch, and cuts rows and gradients by lookup."""

    def __init__(self, blocks: Sequence[Block], record: Callable[[Any], list[Lookup]]) -> None:
        """Takes the lookups; finds nothing yet.

        Args:
            record: the lookups of a model for the features of a batch, in their order; traced in each pipeline.
        """
        self._blocks, self._record = blocks, record
        self._paths: list[str] = []  # of the table of each lookup

    def of(self, batch: Batch) -> Derived:
        """Adds the data derived from a batch to the graph of a pipeline; nothing without tables."""
        if not self._blocks:
            return Derived((), ())
        lookups = self._record(batch.features)
        self._paths = [one.path for one in lookups]
        ids = tuple(one.ids for one in lookups)
        return Derived(ids, self._find(ids))

    @staticmethod
    def places(derived: Derived) -> tuple[tf.Tensor, ...]:
        """Returns [n] of each block: the distinct places that a batch touches."""
        return tuple(touched.distinct for touched in derived.blocks)

    def cut(self, derived: Derived, rows: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns [*ids, width] for each lookup, from the rows [positions, width] of each block."""
        given: dict[int, tf.Tensor] = {}
        for block, values in zip(self._blocks, rows, strict=True):
            begin: Any = 0
            for number in self._own(block):
                ids = derived.ids[number]
                part = values[begin : begin + tf.size(ids)]
                shaped = tf.reshape(part, tf.concat([tf.shape(ids), [block.width]], 0))
                given[number] = tf.ensure_shape(shaped, [*ids.shape, block.width])
                begin += tf.size(ids)
        return [given[number] for number in range(len(self._paths))]

    def sum_gradients(self, derived: Derived, gradients: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns [n, width] of each block: the gradient of each distinct row, from those of the lookups.

        It sums in the order of the positions: the bits depend on nothing else.
        """
        sums = []
        for block, touched in zip(self._blocks, derived.blocks, strict=True):
            parts = [tf.reshape(gradients[number], [-1, block.width]) for number in self._own(block)]
            values = tf.concat(parts, 0) if len(parts) > 1 else parts[0]
            sums.append(tf.math.unsorted_segment_sum(values, touched.which, tf.size(touched.distinct)))
        return sums

    def _own(self, block: Block) -> list[int]:
        """Returns the numbers of the lookups of a block's tables, the last first, as a dense table sums gradients."""
        return [number for number, path in reversed(list(enumerate(self._paths))) if path in block.begins]

    def _find(self, ids: Sequence[tf.Tensor]) -> tuple[Touched, ...]:
        """Returns the rows of each block from the ids of each lookup, in one call of Python for all of them."""
        tables = {table.path: table for block in self._blocks for table in block.tables}

        def find(*given: np.ndarray) -> list[np.ndarray]:
            found = []
            for block in self._blocks:
                rows = []
                for number in self._own(block):
                    table, own = tables[self._paths[number]], given[number]
                    if table.growing is None:
                        check_ids(own, table.rows, table.path)
                    rows.append(own.ravel() + block.begins[table.path])
                places = block.place_of(np.concatenate(rows))
                distinct, which = np.unique(places, return_inverse=True)
                found += [places, distinct, which.ravel().astype(np.int32)]
            return found

        found = tf.numpy_function(find, ids, [tf.int64, tf.int64, tf.int32] * len(self._blocks))
        touched = []
        for number, block in enumerate(self._blocks):
            sizes = [ids[one].shape.num_elements() for one in self._own(block)]
            count = None if None in sizes else sum(size or 0 for size in sizes)
            own = found[3 * number : 3 * number + 3]
            touched.append(Touched(*map(tf.ensure_shape, own, [[count], [None], [count]])))
        return tuple(touched)


def check_ids(ids: np.ndarray, rows: int, path: str) -> None:
    """Raises a DataError for ids that the table at `path` has no rows for."""
    if ids.size and (ids.min() < 0 or ids.max() >= rows):
        at = np.unravel_index(int(np.argmax((ids < 0) | (ids >= rows))), ids.shape)
        raise DataError(
            f"{path}: example {at[0]} of a batch has the id {ids[at]}, but the table has the rows 0..{rows - 1}; "
            "correct the data, or input_dim of the layer"
        )
