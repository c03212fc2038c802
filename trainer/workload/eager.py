"""Makes a model's code work in a v1 graph as in TensorFlow's eager mode.

A graph uses what the layers computed when they were made: tensors, and lookup tables. `==` compares the elements of
tensors; in a v1 graph it would tell whether both are the same object, and `labels != 0` would be True.

A layer may keep both (`self.scale = ops.ones(...)`, `StringLookup(vocabulary=...)`). They belong to TensorFlow's eager
mode, and a v1 graph cannot refer to them, so tensors become constants of the graph, and a lookup becomes a call to
Python on a copy of the table's entries. Anything else from eager mode, such as a `tf.Variable`, is refused.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import keras
import numpy as np
import tensorflow as tf

from trainer.workload.patches import Patch, patched
from trainer.workload.tensorflow_internals import FuncGraph, eager_mode, gen_math_ops, maybe_promote_tensors

TABLES = (tf.lookup.StaticHashTable, tf.lookup.experimental.MutableHashTable, tf.lookup.experimental.DenseHashTable)
# What a graph cannot refer to, and what to write instead.
RESOURCES: dict[tuple[type, ...], tuple[str, str]] = {
    (tf.random.Generator,): ("a tf.random.Generator", "draw with keras.random and a keras.random.SeedGenerator"),
    (keras.random.SeedGenerator,): ("a SeedGenerator that belongs to no layer", "make it an attribute of the layer"),
    (keras.Variable,): ("a variable that is not the model's", "create it with add_weight, or keep it in a layer"),
    TABLES: ("a table that it creates or writes to in a step", "create it in __init__, and count in a variable"),
    (tf.Variable,): ("a tf.Variable, which Keras neither trains nor saves", "create it with add_weight of a layer"),
}
UNKNOWN = ("a resource of TensorFlow's eager mode", "create it with add_weight of a layer, or in call")


class EagerTable:
    """Stands in for the lookup table of a layer."""

    def __init__(self, table: Any) -> None:
        """Copies the entries, even while a graph is being built."""
        with eager_mode():
            keys, values = (one.numpy() for one in table.export())
        self._dtypes = table.key_dtype, table.value_dtype
        if self._dtypes[0] == tf.string:
            keys = keys.astype(np.bytes_)
        self._default = np.asarray(table._default_value, self._dtypes[1].as_numpy_dtype)
        keys = keys.reshape(len(keys))  # a DenseHashTable has them in a column
        order = np.argsort(keys, kind="stable")
        self._keys, self._values = keys[order], values.reshape(len(keys), *self._default.shape)[order]

    def lookup(self, keys: Any) -> Any:
        """Returns the value of each key, or the default."""
        if isinstance(keys, tf.RaggedTensor):
            return tf.ragged.map_flat_values(self.lookup, keys)
        if isinstance(keys, tf.SparseTensor):
            return tf.SparseTensor(keys.indices, self.lookup(keys.values), keys.dense_shape)
        with tf.device("/cpu:0"):
            found = tf.numpy_function(self._find, [tf.cast(keys, self._dtypes[0])], self._dtypes[1])
        found.set_shape([*keys.shape, *self._default.shape])
        return found

    def size(self) -> int:
        return len(self._keys)

    def _find(self, keys: np.ndarray) -> np.ndarray:
        keys = keys.astype(np.bytes_) if self._dtypes[0] == tf.string else keys
        if not len(self._keys):
            return np.broadcast_to(self._default, keys.shape + self._default.shape).copy()
        at = np.minimum(np.searchsorted(self._keys, keys), len(self._keys) - 1)
        is_there = (self._keys[at] == keys).reshape(keys.shape + (1,) * self._default.ndim)
        return np.where(is_there, self._values[at], self._default)


COMPARISONS = {"__eq__": gen_math_ops.equal, "__ne__": gen_math_ops.not_equal}


def _by_element(compare: Callable[..., Any], otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an operator that compares the tensors of functions by element, as TensorFlow's does in eager mode."""

    def operator(tensor: Any, other: Any) -> Any:
        graph = None if isinstance(tensor, tf.__internal__.EagerTensor) else tensor.graph
        if other is None or graph is None or not graph.building_function:
            return otherwise(tensor, other)
        tensor, other = maybe_promote_tensors(tensor, other)
        return compare(tensor, other, incompatible_shape_error=False)

    return operator


_copies: WeakKeyDictionary[Any, EagerTable] = WeakKeyDictionary()


def _of_copy(method: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a method of tables: if a graph uses a table from eager mode, calls it on a copy."""

    def ask(table: Any, *arguments: Any, **options: Any) -> Any:
        is_of_graph = tf.executing_eagerly() or not isinstance(table.resource_handle, tf.__internal__.EagerTensor)
        if is_of_graph or len(arguments) > 1 or options.keys() - {"keys", "name"}:
            return method(table, *arguments, **options)
        if table not in _copies:
            _copies[table] = EagerTable(table)
        return getattr(_copies[table], method.__name__)(*arguments, *filter(None, [options.get("keys")]))

    return ask


def _trace_anew(function: Any, *arguments: Any, **options: Any) -> Any:
    """Traces a `tf.function` again in a graph, because its eager trace refers to tensors captured there."""
    return _call(function if tf.executing_eagerly() else function._clone(None), *arguments, **options)


def _capture_constants(graph: FuncGraph, tensor: Any, *arguments: Any, **options: Any) -> Any:
    if not isinstance(tensor, tf.__internal__.EagerTensor):
        return _capture(graph, tensor, *arguments, **options)
    if tensor.dtype in (tf.resource, tf.variant):
        raise ValueError(_refusal())
    with graph.as_default(), tf.control_dependencies(None):
        return tf.constant(tensor.numpy())


def _refusal() -> str:
    """Returns the error that names the layer, found in the running code, and its resource of eager mode."""
    user, used = caller(), set()
    frame = inspect.currentframe()
    while frame is not None and not isinstance(frame.f_locals.get("self"), keras.Layer):
        used |= {kinds for kinds in RESOURCES if isinstance(frame.f_locals.get("self"), kinds)}
        frame = frame.f_back
    what, remedy = next((RESOURCES[kinds] for kinds in RESOURCES if kinds in used), UNKNOWN)
    return f"{user} uses {what}; {remedy}"


def caller() -> str:
    """Returns the innermost layer, loss or metric that is being called."""
    frame = inspect.currentframe()
    while frame is not None:
        each = frame.f_locals.get("self")
        if isinstance(each, keras.Layer):
            return f"layer {each.path or each.name}"
        if isinstance(each, keras.losses.Loss | keras.metrics.Metric):
            return f"{type(each).__name__} {each.name}"
        frame = frame.f_back
    return "the model"


FUNCTION = type(tf.function(lambda: None))
_capture, _call = FuncGraph.capture, FUNCTION.__call__


@contextmanager
def in_graph() -> Iterator[None]:
    """Lets functions traced in this context use tensors of eager mode as constants, and copies of its tables."""
    patches: list[Patch] = [(FuncGraph, "capture", _capture_constants), (FUNCTION, "__call__", _trace_anew)]
    patches += [(tf.Tensor, name, _by_element(COMPARISONS[name], getattr(tf.Tensor, name))) for name in COMPARISONS]
    patches += [(kind, name, _of_copy(getattr(kind, name))) for kind in TABLES for name in ("lookup", "size")]
    with patched(*patches):
        yield
