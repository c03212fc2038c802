"""Opens sources whose batches have their own order, as streams."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from trainer.workload.data.arrays import label_fault
from trainer.workload.data.convert import refuse_not_dense, spec_of
from trainer.workload.data.dataset_steps import (
    has_unordered_step,
    in_sequence,
    is_cache,
    is_dataset,
    python_in,
    steps_of,
)
from trainer.workload.data.draws import drawn_from, generators_of, noticed_draws, seeded
from trainer.workload.data.errors import DataError, users_code
from trainer.workload.data.examples import ArraySpec, Batch, Opened, Stream, StreamContext, leaves_of
from trainer.workload.data.streams import ENDS, in_order, resized, rows, split, to_elements

if TYPE_CHECKING:
    import tensorflow as tf

FIRST = StreamContext(
    replica=0, replicas=1, batch=8, seed=0, epoch=0, is_training=False
)  # to see a stream's first batch


def open_stream(
    batches: Callable[[StreamContext], Iterable[Batch]], name: str, *, known: Any = None, is_divided: bool = False
) -> Opened:
    """Reads a stream's first batch.

    Args:
        known: the specs of TensorFlow, if there are any: they have None for sizes that differ between batches.
        is_divided: as in `Stream`.
    """
    with users_code(name):
        first = next(iter(batches(FIRST)), None)
    if first is None:
        raise DataError(f"{name}: has no batches; at least one is needed")
    spec = spec_of(first)
    if known is not None:
        _check_ranks(known, spec, name)
        shapes = iter([tuple(one.shape[1:]) for _, one in leaves_of(split(known))])
        spec = spec.map(lambda one: _with_open_sizes(one, next(shapes)))
    fault = label_fault(first.labels, "", name)
    return Opened(Stream(batches, spec, name, is_divided, first=first), spec, fault)


def _check_ranks(known: Any, spec: Batch, name: str) -> None:
    """Refuses tensors whose rank TensorFlow does not know; `spec` is that of the first batch."""
    for (leaf, each), (_, seen) in zip(leaves_of(split(known)), leaves_of(spec), strict=True):
        if each.shape.rank is None:
            shape = [None, *seen.shape]
            raise DataError(
                f"{name}: TensorFlow does not know the shape of {leaf}, as after tf.py_function; the first batch has "
                f"{shape}: map the batches with tf.ensure_shape(x, {shape})"
            )


def _with_open_sizes(spec: ArraySpec, shape: tuple[int | None, ...]) -> ArraySpec:
    if len(shape) != len(spec.shape):
        return spec
    return spec._replace(
        shape=tuple(None if open is None else size for size, open in zip(spec.shape, shape, strict=True))
    )


def batches_of_function(
    function: Callable[..., Any], name: str, *, seed: int, must_end: bool
) -> Callable[[StreamContext], Iterable[Batch]]:
    try:
        inspect.signature(function).bind(FIRST)
    except TypeError as error:
        called = getattr(function, "__name__", "")
        remedy = f"write def {called if called.isidentifier() else 'batches'}(context)"
        raise DataError(f"{name}: the function is called with one argument, the context ({error}); {remedy}") from error

    own = generators_of(function)

    def open_batches(context: StreamContext) -> Iterator[Batch]:
        with drawn_from(seed, context.epoch, own=own):
            batches = function(context)
        if context is FIRST and hasattr(batches, "__next__") and function(context) is batches:
            raise DataError(
                f"{name}: the function returns the same iterator again, which can be read once; make one at each call"
            )
        if is_dataset(batches):
            check_dataset(batches, name, must_end=must_end)
            batches = _Iterators(batches, seed).begin(context.epoch)
        if not isinstance(batches, Iterable):
            raise DataError(f"{name}: the function must return the batches of an epoch, not {type(batches).__name__}")
        return to_elements(seeded(batches, seed, context.epoch, own=own), name)

    return open_batches


def check_dataset(dataset: tf.data.Dataset, name: str, *, must_end: bool) -> None:
    import tensorflow as tf

    for spec in tf.nest.flatten(dataset.element_spec):
        refuse_not_dense(spec, name)
    if must_end and dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise DataError(f"{name}: has no end, as after repeat(); {ENDS}")
    if dataset.options().deterministic is False or has_unordered_step(dataset):
        raise DataError(
            f"{name}: deterministic=False lets threads decide the order of its elements, which then differs between "
            "tasks and runs; leave it out"
        )


def batches_of_dataset(source: Any, name: str, seed: int) -> Callable[[StreamContext], Iterable[Batch]]:
    return shared_out(_passes(_Iterators(source, seed).begin, any(map(is_cache, steps_of(source)))), name)


class _Iterators:
    """Begins passes over a dataset; draws of its Python code depend only on the seed, epoch and position."""

    def __init__(self, source: tf.data.Dataset, seed: int) -> None:
        self._given, self._seed = source, seed
        python = python_in(steps_of(source))
        self._own = generators_of(*python)
        self._draws: bool | None = bool(self._own) or (None if python else False)  # None: the first pass shows it
        self._source = in_sequence(source, always=bool(self._own))

    def begin(self, epoch: int) -> Iterator[Any]:
        if self._draws is None:
            iterator = self._source.as_numpy_iterator()
            with noticed_draws() as drawn:
                begun = list(itertools.islice(iterator, 1))
            self._draws = bool(drawn)
            if not drawn:
                return itertools.chain(begun, iterator)
            self._source = in_sequence(self._given, always=True)
        if not self._draws:
            return self._source.as_numpy_iterator()
        return seeded(self._source.as_numpy_iterator(), self._seed, epoch, own=self._own)


def _passes(begin: Callable[[int], Iterator[Any]], keeps: bool = False) -> Callable[[int], Iterator[Any]]:
    """Makes passes over a source; a pass that read only the beginning of an epoch is continued by the next one.

    So no example is lost of a source that can be read only once.

    Args:
        begin: makes the iterator of an epoch.
        keeps: whether none is given up on the way, as where something is cached: as TensorFlow stops the threads of an
            iterator, a `cache()` after a `prefetch()` may take what has come so far for all of the data, and later
            passes are short.
    """
    begun: dict[int, tuple[list[Any], Any]] = {}  # by epoch: elements that were read, the iterator
    left: list[Any] = []  # iterators that were read further

    def read(epoch: int) -> Iterator[Any]:
        seen, iterator = begun.pop(epoch, None) or ([], begin(epoch))
        is_beginning = True
        try:
            yield from list(seen)
            for element in iterator:
                is_beginning = is_beginning and len(seen) < FIRST.batch
                if is_beginning:
                    seen.append(element)
                else:
                    seen.clear()
                yield element
        except GeneratorExit:
            if is_beginning:
                begun[epoch] = seen, iterator
            elif keeps:
                left.append(iterator)
            raise

    return read


def batches_of_iterable(source: Iterable[Any], name: str, seed: int) -> Callable[[StreamContext], Iterable[Batch]]:
    own = generators_of(source)
    return shared_out(_passes(lambda epoch: seeded(source, seed, epoch, own=own)), name)


def shared_out(batches: Callable[[int], Iterable[Any]], name: str) -> Callable[[StreamContext], Iterable[Batch]]:
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

        return resized(own(), context.batch, name) if context.is_training else in_order(own(), context.batch)

    return open_batches
