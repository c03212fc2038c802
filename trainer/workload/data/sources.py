"""Turns what a function of the user's file returned, a source, into examples or a stream."""

from __future__ import annotations

import contextlib
import inspect
import itertools
import random
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from trainer.workload.data.arrays import check_alike, from_arrays, open_arrays
from trainer.workload.data.convert import refuse_not_dense, spec_of, to_batch
from trainer.workload.data.examples import (
    ArraySpec,
    Batch,
    DataError,
    DataSet,
    Examples,
    Spec,
    Stream,
    StreamContext,
    leaves_of,
    read_rows,
    users_code,
)
from trainer.workload.data.streams import ENDS, check_batch_finite, check_like, resized, rows, split, to_elements

if TYPE_CHECKING:
    import tensorflow as tf

FIRST = StreamContext(
    replica=0, replicas=1, batch=8, seed=0, epoch=0, is_training=False
)  # to see a stream's first batch
KINDS = (
    "(x, y[, weights]) of arrays, a tf.data.Dataset, an object with __len__ and __getitem__, an iterable of batches, "
    "or a function (context) that returns batches"
)


class Opened(NamedTuple):
    """A source, and what its examples look like."""

    examples: Examples | Stream
    spec: Batch  # nests of `ArraySpec`


def open_parts(opened: Any, source: str, *, seed: int) -> DataSet:
    """What a user's function returned, as a data set.

    Args:
        opened: {"train": SOURCE, "evaluate": SOURCE}, and if need be "classes".
        source: its origin, for messages.
        seed: of the run.

    Raises:
        DataError: if it is something else, or cannot be trained on.
    """
    if not isinstance(opened, dict) or not {"train", "evaluate"} <= opened.keys():
        given = f"a dict of {sorted(opened)}" if isinstance(opened, dict) else f"a {type(opened).__name__}"
        remedy = 'return {"train": (x, y), "evaluate": (x, y)}; weights may follow: (x, y, weights)'
        raise DataError(f"{source}: its function returned {given}; {remedy}")
    parts = {part: opened[part] for part in ("train", "evaluate")}
    parts = {part: (given,) if isinstance(given, np.ndarray | dict) else given for part, given in parts.items()}
    classes = opened.get("classes")
    if all(map(is_arrays, parts.values())):
        return from_arrays(*parts.values(), source=source, classes=classes)
    sources = {
        part: open_source(given, f"{source}, {part}", seed=seed, must_end=part == "evaluate")
        for part, given in parts.items()
    }
    check_alike(sources["train"].spec, sources["evaluate"].spec, source)
    spec = min((one.spec for one in sources.values()), key=_known_sizes)  # open sizes are open in both
    if classes is None and isinstance(spec.labels, ArraySpec) and spec.labels.dtype.startswith("float"):
        classes = (spec.labels.shape or (1,))[-1]
    return DataSet(sources["train"].examples, sources["evaluate"].examples, Spec(*spec, classes=classes or 0))


def _known_sizes(spec: Batch) -> int:
    return sum(size is not None for _, one in leaves_of(spec) for size in one.shape)


def is_arrays(source: Any) -> bool:
    """Whether it is (x, y[, weights]) with nests of arrays."""
    if not isinstance(source, tuple | list) or not 1 <= len(source) <= len(Batch._fields):
        return False
    return not any(_is_dataset(one) for one in source)


def open_source(source: Any, name: str, *, seed: int, must_end: bool = False) -> Opened:
    """Opens a source.

    Args:
        name: for messages.
        seed: of the run.
        must_end: whether all of it is read, as in an evaluation.

    Raises:
        DataError: if it is no source, or has no examples.
    """
    if is_arrays(source):
        return Opened(*open_arrays(source, name))
    if isinstance(source, Examples):
        return Opened(source, _spec_of_examples(source))
    if _is_dataset(source):
        _check_dataset(source, name, must_end=must_end)
        return _open_stream(_batches_of_dataset(source, name), name, known=source.element_spec, is_divided=True)
    if _is_py_dataset(source):
        return _open_stream(_batches_of_py_dataset(source, name, seed), name)
    if hasattr(source, "__len__") and hasattr(source, "__getitem__") and not isinstance(source, str | dict):
        return _open_random_access(source, name)
    if callable(source):
        return _open_stream(_batches_of_function(source, name, must_end=must_end), name)
    if isinstance(source, Iterable) and iter(source) is not source and not isinstance(source, str | dict):
        return _open_stream(_batches_of_iterable(source, name), name, is_divided=True)
    hint = (
        "; an iterator can be read only once: return the function that makes it" if hasattr(source, "__next__") else ""
    )
    raise DataError(f"{name}: is a {type(source).__name__}; return {KINDS}{hint}")


def _spec_of_examples(examples: Examples) -> Batch:
    import tensorflow as tf

    arrays = tuple(tf.constant(array) for array in examples.arrays)
    batch = Batch(*examples.fetch(tf.range(1, dtype=tf.int64), arrays))
    return batch.map(lambda one: ArraySpec(tuple(one.shape[1:]), one.dtype.name))


# Random access


def _open_random_access(source: Any, name: str) -> Opened:
    with users_code(name):
        count = len(source)
    if count == 0:
        raise DataError(f"{name}: has no examples; at least one is needed")

    def read(indices: np.ndarray) -> Batch:
        with users_code(name):
            items = [split(item) for item in _items(source, indices.tolist())]
        batch = to_batch(_stacked(items, name), name)
        check_batch_finite(batch, name, indices)
        return batch

    first = read(np.zeros(1, np.int64))
    spec = spec_of(first)

    def read_arrays(indices: np.ndarray) -> list[np.ndarray]:
        batch = read(indices)
        check_like(batch, spec, name)
        return [array for _, array in leaves_of(batch)]

    def fetch(indices: tf.Tensor, _: tuple[tf.Tensor, ...]) -> Batch:
        rest = iter(read_rows(read_arrays, indices, [one for _, one in leaves_of(spec)]))
        return spec.map(lambda _: next(rest))

    return Opened(Examples(count, (), fetch), spec)


def _items(source: Any, indices: list[int]) -> Iterable[Any]:
    """The examples with these indices; some objects read several faster than one by one."""
    if hasattr(source, "__getitems__"):
        items: Iterable[Any] = source.__getitems__(indices)
        return items
    return (source[index] for index in indices)


def _stacked(items: list[Batch], name: str) -> Batch:
    columns = zip(*([np.asarray(leaf) for _, leaf in leaves_of(item)] for item in items), strict=True)
    try:
        arrays = iter([np.stack(column) for column in columns])
    except ValueError as error:
        shapes = [[list(np.shape(leaf)) for _, leaf in leaves_of(item)] for item in items]
        other = next((one for one in shapes if one != shapes[0]), shapes[0])
        message = f"examples have the shapes {shapes[0]} and {other}; pad or cut what has different sizes"
        raise DataError(f"{name}: {message}") from error
    return items[0].map(lambda _: next(arrays))


# Streams


def _open_stream(
    batches: Callable[[StreamContext], Iterable[Batch]], name: str, *, known: Any = None, is_divided: bool = False
) -> Opened:
    """Reads a stream's first batch.

    Args:
        known: the specs of TensorFlow, where there are any: they have None for sizes that differ between batches.
        is_divided: as in `Stream`.
    """
    with users_code(name):
        first = next(iter(batches(FIRST)), None)
    if first is None:
        raise DataError(f"{name}: has no batches; at least one is needed")
    spec = spec_of(first)
    if known is not None:
        shapes = iter([tuple(one.shape[1:]) for _, one in leaves_of(split(known))])
        spec = spec.map(lambda one: _with_open_sizes(one, next(shapes)))
    return Opened(Stream(batches, spec, name, is_divided), spec)


def _with_open_sizes(spec: ArraySpec, shape: tuple[int | None, ...]) -> ArraySpec:
    if len(shape) != len(spec.shape):
        return spec
    return spec._replace(
        shape=tuple(None if open is None else size for size, open in zip(spec.shape, shape, strict=True))
    )


def _batches_of_function(
    function: Callable[..., Any], name: str, *, must_end: bool
) -> Callable[[StreamContext], Iterable[Batch]]:
    try:
        inspect.signature(function).bind(FIRST)
    except TypeError as error:
        raise DataError(f"{name}: the function must take one argument, the context ({error})") from error

    def open_batches(context: StreamContext) -> Iterator[Batch]:
        batches = function(context)
        if _is_dataset(batches):
            _check_dataset(batches, name, must_end=must_end)
            batches = batches.as_numpy_iterator()
        if not isinstance(batches, Iterable):
            raise DataError(f"{name}: the function returned a {type(batches).__name__}, not the batches of an epoch")
        return to_elements(batches, name)

    return open_batches


def _check_dataset(dataset: tf.data.Dataset, name: str, *, must_end: bool) -> None:
    import tensorflow as tf

    for spec in tf.nest.flatten(dataset.element_spec):
        refuse_not_dense(spec, name)
    if must_end and dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise DataError(f"{name}: has no end, as after repeat(); {ENDS}")


def _batches_of_dataset(source: Any, name: str) -> Callable[[StreamContext], Iterable[Batch]]:
    return _shared_out(lambda _: source.as_numpy_iterator(), name)


def _batches_of_iterable(source: Iterable[Any], name: str) -> Callable[[StreamContext], Iterable[Batch]]:
    return _shared_out(lambda _: source, name)


def _batches_of_py_dataset(source: Any, name: str, seed: int) -> Callable[[StreamContext], Iterable[Batch]]:
    def batches(epoch: int) -> Iterator[Any]:
        count = source.num_batches
        order: Iterable[int] = itertools.count()  # without an end
        if count is not None:
            order = np.random.default_rng([seed, epoch]).permutation(count).tolist()
        for index in order:
            with _drawn_from(seed, epoch, index):
                batch = source[index]
            yield batch
        with _drawn_from(seed, epoch):
            source.on_epoch_end()

    return _shared_out(batches, name)


@contextlib.contextmanager
def _drawn_from(*numbers: int) -> Iterator[None]:
    """Lets code that draws from the global generators draw the same in every task: each is elsewhere with its own."""
    states = random.getstate(), np.random.get_state()
    seed = int(np.random.SeedSequence(numbers).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


def _shared_out(batches: Callable[[int], Iterable[Any]], name: str) -> Callable[[StreamContext], Iterable[Batch]]:
    """Shares the examples of an epoch's batches among the replicas, one by one, in batches of the size they need."""

    def open_batches(context: StreamContext) -> Iterator[Batch]:
        def own() -> Iterator[Batch]:
            first = 0  # number of the batch's first example
            for batch in to_elements(batches(context.epoch), name):
                count = len(leaves_of(batch)[0][1])
                chosen = slice((context.replica - first) % context.replicas, None, context.replicas)
                if len(range(count)[chosen]) > 0:
                    yield rows(batch, chosen)
                first += count

        return resized(own(), context.batch, joins=context.is_training)

    return open_batches


def _is_dataset(source: Any) -> bool:
    import tensorflow as tf

    return isinstance(source, tf.data.Dataset)


def _is_py_dataset(source: Any) -> bool:
    import keras

    return isinstance(source, keras.utils.PyDataset)
