"""The types of a data set: examples that can be fetched at any index, in any order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import tensorflow as tf

Nest = Any  # an array, or dicts, tuples and lists of them


class SeveralInputsError(ValueError):
    """The model takes one array, but the data has several."""


def map_nest(function: Callable[[Any], Any], nest: Nest) -> Nest:
    """Returns the nest with a function applied to every leaf except None."""
    if isinstance(nest, dict):
        return {name: map_nest(function, one) for name, one in nest.items()}
    if isinstance(nest, Batch):
        return Batch(*(map_nest(function, one) for one in nest))
    if isinstance(nest, list | tuple) and not isinstance(nest, ArraySpec):
        values = [map_nest(function, one) for one in nest]
        return type(nest)(*values) if hasattr(nest, "_fields") else type(nest)(values)
    return None if nest is None else function(nest)


def filled(nest: Nest, leaves: Iterable[Any]) -> Nest:
    """Returns the nest with other leaves, in the order of `leaves_of`."""
    rest = iter(leaves)
    return map_nest(lambda _: next(rest), nest)


def leaves_of(nest: Nest, name: str = "") -> list[tuple[str, Any]]:
    """Returns the leaves of a nest except None, in the order of `map_nest`, with names: features/age."""
    if isinstance(nest, Batch):
        nest = nest._asdict()
    if isinstance(nest, list | tuple) and not isinstance(nest, ArraySpec):
        nest = dict(enumerate(nest))
    if isinstance(nest, dict):
        return [leaf for key, one in nest.items() for leaf in leaves_of(one, f"{name}/{key}" if name else str(key))]
    return [] if nest is None else [(name, nest)]


class Batch(NamedTuple):
    """A batch of examples; each field is a tensor [B, ...], or a nest of tensors."""

    features: Nest
    labels: Nest = None
    weights: Nest = None  # of each example in the loss, and in weighted metrics

    @property
    def tensors(self) -> list[tf.Tensor]:
        """Returns all tensors, one after the other."""
        import tensorflow as tf

        return [tensor for tensor in tf.nest.flatten(self) if tensor is not None]

    def map(self, function: Callable[[Any], Any]) -> Batch:
        return Batch(*(map_nest(function, nest) for nest in self))


class ArraySpec(NamedTuple):
    """One array of an example."""

    shape: tuple[int | None, ...]  # without the examples' dimension
    dtype: str
    ids: int | None = None  # how many there are, from 0, if the values are known to be ids


@dataclass(frozen=True)
class Spec:
    """The structure of an example: nests of `ArraySpec`."""

    features: Nest
    labels: Nest
    weights: Nest
    classes: int  # of integer labels; of float labels the last size

    @property
    def input_shape(self) -> tuple[int | None, ...]:
        """Returns the shape of one example's features; (1,) for single numbers, as layers take them.

        Raises:
            ValueError: if the features are several arrays.
        """
        if isinstance(self.features, ArraySpec):
            return self.features.shape or (1,)
        raise SeveralInputsError(f"the data has several inputs: {describe_nest(self.features)}; this model takes one")


def describe_nest(specs: Nest) -> str:
    """Formats a nest of specs for messages: {age: float32 [1], city: string []}."""
    if isinstance(specs, ArraySpec):
        return f"{specs.dtype} {list(specs.shape)}".replace("None", "?")
    if isinstance(specs, dict):
        return "{" + ", ".join(f"{name}: {describe_nest(one)}" for name, one in specs.items()) + "}"
    if isinstance(specs, list | tuple):
        return "(" + ", ".join(map(describe_nest, specs)) + ")"
    return "none"


class LabelFault(NamedTuple):
    """Labels that only some losses accept: numbers that are not finite, or integers that are not classes."""

    part: str  # train or evaluate
    example: int  # the first with such a label
    values: frozenset[int]  # the integers; empty: labels that are not finite
    message: str


@dataclass(frozen=True)
class Examples:
    """Examples with random access.

    `fetch` takes indices [B] of int64 in 0..count-1 and `arrays` as tensors, and returns a `Batch`, or its fields as a
    tuple. It is traced once, in graph mode.
    """

    count: int
    arrays: tuple[np.ndarray, ...]  # from which `fetch` gathers; fed to the graph once
    fetch: Callable[..., Any]
    whole: Batch | None = None  # all examples as arrays [count, ...], in memory or mapped, if they are arrays
    fetch_any_labels: Callable[..., Any] | None = None  # like `fetch`, if that refuses labels that are not finite


@dataclass(frozen=True)
class StreamContext:
    """The batches to read from a stream."""

    replica: int  # among all of the run
    replicas: int
    batch: int  # examples in each batch of this replica
    seed: int  # of the run
    epoch: int  # from 0
    is_training: bool = True


@dataclass(frozen=True)
class Stream:
    """A source of batches in their own order.

    `open` takes a `StreamContext` and returns the batches of one replica in one epoch, as numpy arrays [context.batch,
    ...]; smaller ones are left out in training. Each epoch may have other batches.
    """

    open: Callable[[StreamContext], Iterable[Batch]]
    spec: Batch  # nests of `ArraySpec`
    source: str  # its origin, for messages
    is_divided: bool = False  # one pass is for all replicas; passes may differ, so no process may need two at once
    takes_any_labels: bool = False  # including those that are not finite
    first: Batch | None = None  # batch of a pass, from which `spec` was read


class Opened(NamedTuple):
    """A source, and the structure of its examples."""

    examples: Examples | Stream
    spec: Batch  # nests of `ArraySpec`
    fault: LabelFault | None = None


@dataclass(frozen=True)
class Preprocessing:
    """Makes features from raw inputs, inside an exported model."""

    spec: Nest  # of `ArraySpec`: raw inputs
    apply: Callable[[Nest], Nest]  # tensors [N, ...]; traced in a graph
    tables: Sequence[Any] = ()  # lookup tables of TensorFlow that it uses


@dataclass(frozen=True)
class DataSet:
    """The training and evaluation examples, and their structure."""

    train: Examples | Stream
    evaluate: Examples | Stream
    spec: Spec
    preprocessing: Callable[[], Preprocessing] | None = None  # makes its tables; None: a client has the features
    class_names: tuple[str, ...] = ()  # of integer labels
    doubts: tuple[tuple[str, str], ...] = ()  # (message, remedy) of warnings
    faults: tuple[LabelFault, ...] = ()  # which the loss may accept
    shares_order: bool = False  # an evaluation changes the training examples, or their order

    def with_any_labels(self) -> DataSet:
        """Returns a data set that also reads labels that are not finite, for a loss that ignores them."""
        return replace(self, train=_with_any_labels(self.train), evaluate=_with_any_labels(self.evaluate))


def _with_any_labels(examples: Examples | Stream) -> Examples | Stream:
    if isinstance(examples, Stream):
        return replace(examples, takes_any_labels=True)
    return replace(examples, fetch=examples.fetch_any_labels or examples.fetch)


def read_rows(
    read: Callable[[np.ndarray], Sequence[np.ndarray]], indices: tf.Tensor, specs: Sequence[ArraySpec]
) -> list[tf.Tensor]:
    """Returns the arrays [B, ...] that Python reads for the examples with these indices [B], by their specs."""
    import tensorflow as tf

    tensors = tf.nest.flatten(tf.numpy_function(read, [indices], [one.dtype for one in specs]))  # of one: no list
    for tensor, one in zip(tensors, specs, strict=True):
        tensor.set_shape([indices.shape[0], *one.shape])
    return tensors


def count_of(examples: Examples | Stream) -> int:
    """Returns the number of examples; 0 if unknown."""
    return examples.count if isinstance(examples, Examples) else 0
