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
from typing import Any, NamedTuple

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

    __getitem__ = lookup

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


class Held(NamedTuple):
    """A table of a layer, and what stands in for it."""

    layer: keras.Layer
    attribute: str
    table: Any
    copy: Table

    def use(self, table: Any) -> None:
        self.layer.__dict__[self.attribute] = table  # Keras would track another attribute


def tables_of(model: keras.Model) -> list[Held]:
    """The tables of a model's layers: those of Keras's, and a `tf.lookup.StaticHashTable` of the user's."""
    return [
        Held(layer, name, value, Table(value))
        for layer in model._flatten_layers()
        for name, value in vars(layer).items()
        if isinstance(value, tf.lookup.StaticHashTable) or (name == "lookup_table" and isinstance(layer, IndexLookup))
    ]


@contextmanager
def in_graph(tables: Sequence[Held]) -> Iterator[None]:
    """Within, functions that are traced take tensors of eager mode as constants, and layers use copies of tables."""
    capture = FuncGraph.capture
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
        for held in tables:
            held.use(held.copy)
        yield
    finally:
        FuncGraph.capture = capture
        for name, function in comparisons.items():
            setattr(tf.Tensor, name, function)
        for held in tables:
            held.use(held.table)
