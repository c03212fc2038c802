"""Lets a model's code do in a v1 graph what it does in TensorFlow's eager mode.

A graph uses what the layers computed when they were made: tensors, and lookup tables. `==` compares the elements of
tensors; in a v1 graph it would tell whether both are the same object, and `labels != 0` would be True.

A layer may keep both (`self.scale = ops.ones(...)`, `StringLookup(vocabulary=...)`). They belong to TensorFlow's eager
mode, and a v1 graph cannot refer to them, so tensors become constants of the graph, and a table becomes a call of
Python on a copy of its entries.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras.src.layers.preprocessing.index_lookup import IndexLookup
from tensorflow.python.framework.func_graph import FuncGraph
from tensorflow.python.framework.override_binary_operator import maybe_promote_tensors
from tensorflow.python.ops import gen_math_ops


class Table:
    """Stands in for the lookup table of a layer."""

    def __init__(self, table: Any) -> None:
        """Copies the entries; in eager mode."""
        keys, values = (one.numpy() for one in table.export())
        self._dtypes = table.key_dtype, table.value_dtype
        if self._dtypes[0] == tf.string:
            keys = keys.astype(np.bytes_)
        order = np.argsort(keys, kind="stable")
        self._keys, self._values = keys[order], values[order]
        self._default = np.asarray(table._default_value, self._dtypes[1].as_numpy_dtype)

    def lookup(self, keys: Any) -> Any:
        """The value of each key, or the default."""
        if isinstance(keys, tf.RaggedTensor):
            return tf.ragged.map_flat_values(self.lookup, keys)
        with tf.device("/cpu:0"):
            found = tf.numpy_function(self._find, [tf.cast(keys, self._dtypes[0])], self._dtypes[1])
        found.set_shape(keys.shape)
        return found

    def size(self) -> int:
        return len(self._keys)

    def _find(self, keys: np.ndarray) -> np.ndarray:
        keys = keys.astype(np.bytes_) if self._dtypes[0] == tf.string else keys
        if not len(self._keys):
            return np.broadcast_to(self._default, keys.shape).copy()
        at = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        return np.where(self._keys[at] == keys, self._values[at], self._default)


COMPARISONS = {"__eq__": gen_math_ops.equal, "__ne__": gen_math_ops.not_equal}


def _by_element(compare: Callable[..., Any], otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """An operator that compares the tensors of functions by element, as TensorFlow's does in eager mode."""

    def operator(tensor: Any, other: Any) -> Any:
        graph = None if isinstance(tensor, tf.__internal__.EagerTensor) else tensor.graph
        if other is None or graph is None or not graph.building_function:
            return otherwise(tensor, other)
        tensor, other = maybe_promote_tensors(tensor, other)
        return compare(tensor, other, incompatible_shape_error=False)

    return operator


def tables_of(model: keras.Model) -> list[tuple[IndexLookup, Table]]:
    """The layers of a model that look something up, with what stands in for their tables."""
    layers = [layer for layer in model._flatten_layers(include_self=False) if isinstance(layer, IndexLookup)]
    return [(layer, Table(layer.lookup_table)) for layer in layers]


@contextmanager
def in_graph(tables: Sequence[tuple[IndexLookup, Table]]) -> Iterator[None]:
    """Within, functions that are traced take tensors of eager mode as constants, and layers use these tables."""
    before, capture = [layer.lookup_table for layer, _ in tables], FuncGraph.capture
    comparisons = {name: getattr(tf.Tensor, name) for name in COMPARISONS}

    def capture_constants(graph: FuncGraph, tensor: Any, *args: Any, **options: Any) -> Any:
        if not isinstance(tensor, tf.__internal__.EagerTensor) or tensor.dtype in (tf.resource, tf.variant):
            return capture(graph, tensor, *args, **options)
        with graph.as_default(), tf.control_dependencies(None):
            return tf.constant(tensor.numpy())

    FuncGraph.capture = capture_constants
    for name, function in comparisons.items():
        setattr(tf.Tensor, name, _by_element(COMPARISONS[name], function))
    try:
        for layer, table in tables:
            layer.lookup_table = table
        yield
    finally:
        FuncGraph.capture = capture
        for name, function in comparisons.items():
            setattr(tf.Tensor, name, function)
        for (layer, _), table in zip(tables, before, strict=True):
            layer.lookup_table = table
