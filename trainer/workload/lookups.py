"""Keras Embedding layers whose rows lie on the shard hosts: `placement.sparse` and `placement.growing` name them.

Such a layer is an ordinary `keras.layers.Embedding` without a variable. A model with some is called twice in a step:
first on the features alone, to record which ids it looks up (TensorFlow prunes what these do not depend on), then with
the rows of these ids given, in the order of its lookups. The gradient of a row is that of each place it was given to.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from trainer.plan.tables import FirstValues, Growing, SparsePattern, Table
from trainer.workload.patches import patched
from trainer.workload.paths import Paths

VARIABLE = "embeddings"  # the name that Keras gives to the variable of the layer
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")


class Lookup(NamedTuple):
    """One call of a layer."""

    path: str  # of the table
    ids: tf.Tensor  # int64


class _Sparse(NamedTuple):
    """The facts about a layer without a variable."""

    path: str
    rows: int
    width: int
    first: FirstValues
    growing: Growing | None


_meet: ContextVar[Callable[[_Sparse, tf.Tensor], tf.Tensor] | None] = ContextVar("meet", default=None)


@contextmanager
def building(patterns: Sequence[SparsePattern]) -> Iterator[None]:
    """Builds Embedding layers whose paths a pattern matches without a variable.

    Raises:
        ValueError: inside the context, for a layer that cannot be sparse.
    """
    if not patterns:
        yield
        return
    build = keras.layers.Embedding.build

    def build_or_mark(layer: keras.layers.Embedding, input_shape: Any = None) -> None:
        own = next((one for one in patterns if fnmatchcase(layer.path, one.pattern)), None)
        if own is not None:
            _mark(layer, own)
        else:
            build(layer, input_shape)

    with patched((keras.layers.Embedding, "build", build_or_mark)):
        yield


def tables_of(model: keras.Model, lookups: Sequence[Lookup]) -> tuple[Table, ...]:
    """Returns the tables of a model's sparse layers.

    Args:
        lookups: of a batch whose size is not known, as `recorded` returns them.

    Raises:
        ValueError: if the number of ids that an example looks up is not fixed.
    """
    counts: dict[str, int] = {}
    for one in lookups:
        each = one.ids.shape[1:]
        if one.ids.shape.rank == 0 or not each.is_fully_defined():
            raise ValueError(
                f"{one.path} is looked up with ids of the shape {one.ids.shape}; it needs equally many ids "
                "for each example, e.g. padded ones with mask_zero=True"
            )
        counts[one.path] = counts.get(one.path, 0) + each.num_elements()
    return tuple(
        Table(one.path, one.rows, one.width, one.first, counts.get(one.path, 0), one.growing)
        for one in dict.fromkeys(_sparse_of(layer) for layer in _layers(model))
    )


def counted(model: keras.Model, call: Callable[[], Any]) -> dict[str, int]:
    """Counts the ids that an example looks up in a call, by path of any Embedding layer; 0: unknown."""
    layers, paths = _embeddings(model), Paths(model)
    counts = dict.fromkeys((paths[layer] for layer in layers), 0)

    def counting(layer: keras.layers.Embedding) -> Callable[[Any], Any]:
        look_up = layer.call

        def count(inputs: Any, *args: Any, **kwargs: Any) -> Any:
            each = tf.TensorShape(inputs.shape[1:])
            counts[paths[layer]] += (each.num_elements() or 0) if each.is_fully_defined() else 0
            return look_up(inputs, *args, **kwargs)

        return count

    with patched(*((layer, "call", counting(layer)) for layer in layers)):
        call()
    return counts


def embeddings(model: keras.Model) -> list[str]:
    """Returns the paths with which all Embedding layers, sparse and dense, are built; patterns match these."""
    return list(dict.fromkeys(layer.path for layer in _embeddings(model)))


def separate(model: keras.Model) -> None:
    """Gives tables of layers with the same path, in different nested models, unique paths."""
    paths = Counter(_sparse_of(layer).path for layer in _layers(model))
    unique = Paths(model) if len(paths) < paths.total() else None
    for layer in _layers(model):
        sparse = _sparse_of(layer)
        if unique and paths[sparse.path] > 1:
            object.__setattr__(layer, "_sparse_table", sparse._replace(path=f"{unique[layer]}/{VARIABLE}"))


def has_tables(model: keras.Model) -> bool:
    return any(_layers(model))


def recorded(call: Callable[[], Any], watch: Callable[[tf.Tensor], None] = lambda rows: None) -> list[Lookup]:
    """Returns the lookups of a call in their order; each gets rows of zeros, which are passed to `watch` first."""
    lookups: list[Lookup] = []

    def record(layer: _Sparse, ids: tf.Tensor) -> tf.Tensor:
        lookups.append(Lookup(layer.path, tf.cast(ids, tf.int64)))
        rows = _zeros(layer, ids)
        watch(rows)
        return rows

    token = _meet.set(record)
    try:
        call()
    finally:
        _meet.reset(token)
    return lookups


@contextmanager
def given(rows: Sequence[tf.Tensor]) -> Iterator[None]:
    """Gives lookups inside the context these rows [*ids, width], in their order; without rows, zeros."""
    if not rows:
        yield
        return
    rest = iter(rows)
    token = _meet.set(lambda layer, ids: next(rest))
    try:
        yield
    finally:
        _meet.reset(token)
    assert next(rest, None) is None, "fewer lookups than were recorded"


def _embeddings(model: keras.Model) -> list[keras.Layer]:
    return [layer for layer in model._flatten_layers(include_self=False) if isinstance(layer, keras.layers.Embedding)]


def _layers(model: keras.Model) -> list[keras.Layer]:
    return [layer for layer in model._flatten_layers(include_self=False) if hasattr(layer, "_sparse_table")]


def _sparse_of(layer: keras.Layer) -> _Sparse:
    return layer._sparse_table


def _mark(layer: keras.layers.Embedding, pattern: SparsePattern) -> None:
    """Removes a layer's need for a variable.

    Raises:
        ValueError: if it has a feature that rows on the hosts cannot have.
    """
    asked = {
        "embeddings_regularizer": layer.embeddings_regularizer is not None,
        "embeddings_constraint": layer.embeddings_constraint is not None,
        "lora_rank": layer.lora_rank is not None,
        "a quantization": layer.quantization_mode is not None,
        "trainable=False": not layer.trainable,
        "a call that does not use super().call": not _calls_super(type(layer)),
    }
    for what, is_asked in asked.items():
        if is_asked:
            key = "placement.growing" if pattern.growing else "placement.sparse"
            raise ValueError(f"sparse layers do not support {what} (layer {layer.path}); leave it out of {key}")
    path, rows = f"{layer.path}/{VARIABLE}", pattern.rows or layer.input_dim
    sparse = _Sparse(path, rows, layer.output_dim, _first_values(layer), pattern.growing)
    layer._embeddings = None
    layer.built = True
    object.__setattr__(layer, "_sparse_table", sparse)
    own = type(layer)
    layer.__class__ = _Hosted if own is keras.layers.Embedding else type(own.__name__, (own, _Hosted), {})


class _Hosted(keras.layers.Embedding):  # type: ignore[misc]
    """Implements the lookup of a layer without a variable; as a second base, `super().call` reaches it."""

    _sparse_table: _Sparse

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        if isinstance(inputs, keras.KerasTensor):
            return keras.KerasTensor((*inputs.shape, self._sparse_table.width), dtype=self.compute_dtype)
        inputs = tf.convert_to_tensor(inputs)
        if inputs.dtype.name not in INTEGERS:
            raise ValueError(f"layer {self.path} is given ids as {inputs.dtype.name}; give it int32 or int64")
        meet = _meet.get()
        rows = _zeros(self._sparse_table, inputs) if meet is None else meet(self._sparse_table, inputs)
        return tf.cast(rows, self.compute_dtype)


def _calls_super(kind: type[keras.layers.Embedding]) -> bool:
    """Whether the `call` of a class is that of Embedding, or uses `super()`, which a closure over its class shows."""
    return kind.call is keras.layers.Embedding.call or "__class__" in kind.call.__code__.co_freevars


def _zeros(layer: _Sparse, ids: tf.Tensor) -> tf.Tensor:
    rows = tf.zeros(tf.concat([tf.shape(ids), [layer.width]], 0))
    return tf.ensure_shape(rows, [*ids.shape, layer.width])


def _first_values(layer: keras.layers.Embedding) -> FirstValues:
    initializer = layer.embeddings_initializer
    if isinstance(initializer, keras.initializers.RandomUniform):
        return FirstValues(float(initializer.minval), float(initializer.maxval))
    constants = {keras.initializers.Zeros: 0.0, keras.initializers.Ones: 1.0}
    value = constants.get(type(initializer))
    if isinstance(initializer, keras.initializers.Constant) and isinstance(initializer.value, int | float):
        value = float(initializer.value)
    if value is None:
        raise ValueError(
            f"layer {layer.path} has the initializer {type(initializer).__name__}; rows of a sparse layer start "
            'uniformly distributed ("uniform", keras.initializers.RandomUniform) or at a constant'
        )
    return FirstValues(value, value)
