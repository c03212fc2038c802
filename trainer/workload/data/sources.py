"""Turns what a function of the user's file returned, a source, into examples or a stream."""

from __future__ import annotations

import operator
import zlib
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.workload.data.arrays import check_alike, from_arrays, label_fault, open_arrays
from trainer.workload.data.convert import spec_of, to_batch
from trainer.workload.data.dataset_steps import is_dataset, share_order, share_state
from trainer.workload.data.draws import drawn_from, generators_of
from trainer.workload.data.errors import DataError, users_code
from trainer.workload.data.examples import (
    ArraySpec,
    Batch,
    DataSet,
    Examples,
    Opened,
    Spec,
    filled,
    leaves_of,
    read_rows,
)
from trainer.workload.data.py_dataset import batches_of_py_dataset, has_end, is_py_dataset
from trainer.workload.data.returned import parts_of
from trainer.workload.data.stream_sources import (
    batches_of_dataset,
    batches_of_function,
    batches_of_iterable,
    check_dataset,
    open_stream,
)
from trainer.workload.data.streams import ENDS, check_batch_finite, check_like, split

if TYPE_CHECKING:
    import tensorflow as tf

SPLIT = (
    "the training and evaluation data share a shuffle(), which reorders every pass: evaluation examples may be among "
    "those that were trained on",
    "give the shuffle() before the split reshuffle_each_iteration=False, and shuffle the training data after it",
)
KINDS = (
    "(x, y[, weights]) of arrays, a tf.data.Dataset, an object with __len__ and __getitem__, an iterable of batches, "
    "or a function (context) that returns batches"
)


def open_parts(opened: Any, source: str, *, seed: int, must_end: bool = True) -> DataSet:
    """Turns the value that a user's function returned into a data set.

    Args:
        opened: {"train": SOURCE, "evaluate": SOURCE}, and, if needed, "classes"; returned.py lists other forms.
        source: its origin, for messages.
        seed: of the run.
        must_end: whether an evaluation reads all examples.

    Raises:
        DataError: if it is something else, or cannot be trained on.
    """
    returned = parts_of(opened, source)
    parts = {"train": returned.train, "evaluate": returned.evaluate}
    parts = {part: (given,) if isinstance(given, np.ndarray | dict) else given for part, given in parts.items()}
    for part, given in parts.items():
        _check_is_not_batches(given, f"{source}, {part}")
    classes = _count_of_classes(returned.classes, source)
    if all(map(is_arrays, parts.values())):
        made = from_arrays(*parts.values(), source=source, classes=classes)
        return replace(made, doubts=returned.doubts)
    sources = {
        part: open_source(given, f"{source}, {part}", seed=seed, must_end=must_end and part == "evaluate")
        for part, given in parts.items()
    }
    check_alike(sources["train"].spec, sources["evaluate"].spec, source)
    spec = min((one.spec for one in sources.values()), key=_known_sizes)  # open sizes are open in both
    if classes is None and isinstance(spec.labels, ArraySpec) and spec.labels.dtype.startswith("float"):
        classes = (spec.labels.shape or (1,))[-1]
    faults = tuple(one.fault._replace(part=part) for part, one in sources.items() if one.fault)
    spec = spec._replace(weights=sources["train"].spec.weights)  # the weights for evaluation may differ, or be missing
    train, evaluate = sources["train"].examples, sources["evaluate"].examples
    is_split = returned.train is not returned.evaluate and share_order(returned.train, returned.evaluate)
    doubts = (*returned.doubts, *([SPLIT] if is_split else []))
    named = Spec(*spec, classes=classes or 0)
    shares = share_state(returned.train, returned.evaluate)
    return DataSet(train, evaluate, named, faults=faults, doubts=doubts, shares_order=shares)


def _known_sizes(spec: Batch) -> int:
    return sum(size is not None for _, one in leaves_of(spec) for size in one.shape)


def is_arrays(source: Any) -> bool:
    """Whether a value is (x, y[, weights]) with nests of arrays."""
    if not isinstance(source, tuple | list) or not 1 <= len(source) <= len(Batch._fields):
        return False
    return not any(is_dataset(one) for one in source)


def _check_is_not_batches(source: Any, name: str) -> None:
    """Refuses a list of batches, which would be read as a list of examples, or as [x, y].

    Raises:
        DataError: for a list of lists or tuples of arrays, each of them with rows for the same number of examples.
    """
    is_listed = isinstance(source, list) or (isinstance(source, tuple) and len(source) > len(Batch._fields))
    if not is_listed or not source or not all(isinstance(one, list | tuple) for one in source[:2]):
        return
    shapes = [np.shape(leaf) for _, leaf in leaves_of(split(source[0]))]
    if shapes and all(shape and shape[0] == shapes[0][0] for shape in shapes):
        listed = ", ".join(map(str, map(list, shapes)))
        raise DataError(
            f"{name}: is a list of lists or tuples with arrays {listed}; if each is a batch, return a function "
            "(context) that returns the list; if each is one example, or the list is [x, y], return the tuple (x, y) "
            "of all examples"
        )


def open_source(source: Any, name: str, *, seed: int, must_end: bool = False) -> Opened:
    """Opens a source.

    Args:
        name: for messages.
        seed: of the run.
        must_end: whether all of it is read, as in an evaluation.

    Raises:
        DataError: if it is not a source, or has no examples.
    """
    if is_arrays(source):
        return open_arrays(source, name)
    if isinstance(source, Examples):
        return Opened(source, _spec_of_examples(source))
    if is_dataset(source):
        check_dataset(source, name, must_end=must_end)
        return open_stream(batches_of_dataset(source, name, seed), name, known=source.element_spec, is_divided=True)
    if is_py_dataset(source):
        with users_code(name):
            ends = has_end(source)
        if must_end and not ends:
            raise DataError(f"{name}: has no end, because its num_batches is {source.num_batches}; {ENDS}")
        return open_stream(batches_of_py_dataset(source, name, seed), name)
    if hasattr(source, "__len__") and hasattr(source, "__getitem__") and not isinstance(source, str | dict):
        return _open_random_access(source, name, seed)
    if callable(source):
        return open_stream(batches_of_function(source, name, seed=seed, must_end=must_end), name)
    if isinstance(source, Iterable) and iter(source) is not source and not isinstance(source, str | dict):
        return open_stream(batches_of_iterable(source, name, seed), name, is_divided=True)
    hint = (
        "; an iterator can be read only once: return a function (context) that makes it"
        if hasattr(source, "__next__")
        else ""
    )
    raise DataError(f"{name}: is an object of type {type(source).__name__}; return {KINDS}{hint}")


def _spec_of_examples(examples: Examples) -> Batch:
    import tensorflow as tf

    arrays = tuple(tf.constant(array) for array in examples.arrays)
    batch = Batch(*examples.fetch(tf.range(1, dtype=tf.int64), arrays))
    return batch.map(lambda one: ArraySpec(tuple(one.shape[1:]), one.dtype.name))


def _open_random_access(source: Any, name: str, seed: int) -> Opened:
    with users_code(name):
        count = len(source)
    if count == 0:
        raise DataError(f"{name}: has no examples; at least one is needed")
    own = generators_of(source)

    def read(indices: np.ndarray, *, checks_labels: bool) -> Batch:
        with users_code(name), drawn_from(seed, zlib.crc32(indices.tobytes()), own=own):
            items = [split(item) for item in _items(source, indices.tolist())]
        batch = to_batch(_stacked(items, name), name)
        check_batch_finite(batch, name, indices, checks_labels=checks_labels)
        return batch

    first = read(np.zeros(1, np.int64), checks_labels=False)
    spec = spec_of(first)

    def read_arrays(indices: np.ndarray, *, checks_labels: bool) -> list[np.ndarray]:
        batch = read(indices, checks_labels=checks_labels)
        check_like(batch, spec, name)
        return [array for _, array in leaves_of(batch)]

    def fetch(indices: tf.Tensor, _: tuple[tf.Tensor, ...], *, checks_labels: bool = True) -> Batch:
        read = partial(read_arrays, checks_labels=checks_labels)
        return filled(spec, read_rows(read, indices, [one for _, one in leaves_of(spec)]))

    examples = Examples(count, (), fetch, fetch_any_labels=partial(fetch, checks_labels=False))
    return Opened(examples, spec, label_fault(first.labels, "", name))


def _items(source: Any, indices: list[int]) -> Iterable[Any]:
    """Returns the examples with these indices; some objects read several faster than one by one."""
    if hasattr(source, "__getitems__"):
        return source.__getitems__(indices)
    return (source[index] for index in indices)


def _stacked(items: list[Batch], name: str) -> Batch:
    columns = zip(*([np.asarray(leaf) for _, leaf in leaves_of(item)] for item in items), strict=True)
    try:
        stacked: Batch = filled(items[0], [np.stack(column) for column in columns])
    except ValueError as error:
        shapes = [[list(np.shape(leaf)) for _, leaf in leaves_of(item)] for item in items]
        other = next((one for one in shapes if one != shapes[0]), shapes[0])
        message = f"examples have the shapes {shapes[0]} and {other}; pad or cut what has different sizes"
        raise DataError(f"{name}: {message}") from error
    return stacked


def _count_of_classes(given: Any, source: str) -> int | None:
    """Returns the number of classes, a whole number, also of numpy."""
    try:
        count = None if given is None else operator.index(given)
    except TypeError:
        count = 0
    if count is not None and count < 1:
        raise DataError(f'{source}: "classes" is {given!r}; return a whole number of at least 1')
    return count
