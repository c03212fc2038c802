"""Reads streams: batches in the order of the user's pipeline, so a restart reads the earlier ones again."""

import itertools
import logging
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from trainer.workload.data.convert import LEAVE_OUT, check_finite, spec_of, to_batch
from trainer.workload.data.errors import DataError, users_code
from trainer.workload.data.examples import ArraySpec, Batch, Stream, StreamContext, describe_nest, filled, leaves_of

MANY = 1000  # batches that are too small or empty, one after the other, in data that may have no end
WARN_EVERY_SECS = 60.0
ENDS = "type evaluate.steps=100 to evaluate on that many batches, or return data that ends, e.g. dataset.take(100)"

_log = logging.getLogger(__name__)

SHAPES_AT_MOST = 64  # of batches that wait for more examples of their shape

Arrays = list[np.ndarray]  # of a batch, one after the other
Shapes = tuple[tuple[tuple[int, ...], str], ...]  # and types, of the arrays of an example


def training_arrays(
    stream: Stream, *, seed: int, replica: int, replicas: int, batch: int, start: int
) -> Iterator[Arrays]:
    """Yields the batches of one replica from number `start` on, epoch after epoch, each of `batch` examples.

    Raises:
        DataError: if an epoch has no such batch, or a batch does not look like the others.
    """
    left = start
    for epoch in itertools.count():
        is_empty, small, left_out = True, 0, 0
        for arrays in _read(stream, StreamContext(replica, replicas, batch, seed, epoch)):
            if len(arrays[0]) < batch:
                small, left_out = small + 1, left_out + len(arrays[0])
                if small == MANY:
                    raise DataError(
                        f"{stream.source}: yields batches of {len(arrays[0])} examples, which are left out: replica "
                        f"{replica} of {replicas} needs {batch}; make batches of context.batch examples"
                    )
                continue
            is_empty, small = False, 0
            if left > 0:
                left -= 1
                continue
            yield arrays
        if epoch == 0 and left_out >= batch:
            _log.warning(
                "%s: %d examples of a pass are left out: there are too few of their shapes for a batch of %d",
                stream.source,
                left_out,
                batch,
            )
        if is_empty:
            raise DataError(
                f"{stream.source}: replica {replica} of {replicas} got no batch of {batch} examples in epoch {epoch}; "
                "more examples, a smaller train.batch_size or fewer workers are needed"
            )


def evaluation_arrays(stream: Stream, *, batch: int) -> Iterator[Arrays]:
    """Yields all examples, once.

    Raises:
        DataError: if there are none.
    """
    count, began = 0, time.monotonic()
    warned = began
    for arrays in _read(stream, StreamContext(0, 1, batch, 0, 0, is_training=False)):
        count += len(arrays[0])
        if time.monotonic() - warned > WARN_EVERY_SECS:
            warned = time.monotonic()
            _log.warning("%s: has read %d examples in %.0f s; %s", stream.source, count, warned - began, ENDS)
        yield arrays
    if count == 0:
        raise DataError(f"{stream.source}: had no examples this time; every evaluation reads the source again")


def _read(stream: Stream, context: StreamContext) -> Iterator[Arrays]:
    for given in _each(stream, context):
        arrays = [array for _, array in leaves_of(given)]
        if len(arrays[0]) > context.batch:
            raise DataError(
                f"{stream.source}: a batch has {len(arrays[0])} examples, but replica {context.replica} of "
                f"{context.replicas} needs {context.batch}; make batches of context.batch examples"
            )
        check_like(given, stream.spec, stream.source)
        check_batch_finite(given, stream.source, checks_labels=not stream.takes_any_labels)
        yield arrays


def _each(stream: Stream, context: StreamContext) -> Iterator[Batch]:
    with users_code(stream.source):
        yield from stream.open(context)


def check_like(batch: Batch, spec: Batch, source: str) -> None:
    """Raises DataError unless the examples of a batch look like those of the first one."""
    found = spec_of(batch)
    pairs = zip(leaves_of(found), leaves_of(spec), strict=False)
    if len(leaves_of(found)) != len(leaves_of(spec)) or not all(_fits(one, other) for (_, one), (_, other) in pairs):
        raise DataError(
            f"{source}: an example is {_describe(found)}, but the first is {_describe(spec)}; all must be the same: "
            "pad or cut what has different sizes"
        )


def check_batch_finite(
    batch: Batch, source: str, numbers: np.ndarray | None = None, *, checks_labels: bool = True
) -> None:
    """Raises DataError if an array holds a value that is not finite."""
    for name, array in leaves_of(batch._replace(labels=None)):
        check_finite(array, f"{source} {name}", numbers)
    for name, array in leaves_of(Batch(None, batch.labels)) if checks_labels else ():
        check_finite(array, f"{source} {name}", numbers, remedy=LEAVE_OUT)


def _fits(found: ArraySpec, spec: ArraySpec) -> bool:
    sizes = zip(found.shape, spec.shape, strict=False)
    is_same = len(found.shape) == len(spec.shape) and all(other in (None, one) for one, other in sizes)
    return is_same and found.dtype == spec.dtype


def _describe(spec: Batch) -> str:
    return ", ".join(f"{name} {describe_nest(nest)}" for name, nest in spec._asdict().items() if nest is not None)


def to_elements(given: Iterable[Any], source: str) -> Iterator[Batch]:
    """Yields the batches of a pipeline, (x, y[, weights]) or x alone, leaving out empty ones."""
    empty = 0
    for one in given:
        batch = split(one).map(lambda value: value.numpy() if hasattr(value, "numpy") else value)
        leaves = leaves_of(batch)
        if not leaves:
            raise DataError(f"{source}: must yield batches, not {type(one).__name__}")
        if any(np.ndim(leaf) == 0 for _, leaf in leaves):
            raise DataError(f"{source}: yields single examples; make batches of them, e.g. dataset.batch(32)")
        empty = empty + 1 if all(len(leaf) == 0 for _, leaf in leaves) else 0
        if empty == MANY:
            raise DataError(f"{source}: yielded {MANY} empty batches in a row")
        if empty:
            continue
        made = to_batch(batch, source)
        if len({len(leaf) for _, leaf in leaves_of(made)}) > 1:
            sizes = ", ".join(f"{name} {list(array.shape)}" for name, array in leaves_of(made))
            raise DataError(f"{source}: a batch has arrays of different numbers of examples: {sizes}")
        yield made


def split(given: Any) -> Batch:
    """Returns the fields of one example or of a batch."""
    is_fields = isinstance(given, tuple | list) and 1 <= len(given) <= len(Batch._fields)
    return Batch(*given) if is_fields else Batch(given)


def rows(batch: Batch, chosen: Any) -> Batch:
    return batch.map(lambda array: array[chosen])


def resized(batches: Iterable[Batch], size: int, source: str) -> Iterator[Batch]:
    """Yields the same examples in batches of another size; different shapes, as from buckets, are not mixed.

    The last batch of each shape may be smaller.

    Args:
        source: their origin, for messages.
    """
    held: dict[Shapes, Batch] = {}
    for batch in batches:
        shapes = _shapes(batch)
        whole = _joined(held.pop(shapes), batch) if shapes in held else batch
        count = len(leaves_of(whole)[0][1])
        for first in range(0, count - size + 1, size):
            yield rows(whole, slice(first, first + size))
        if count % size:
            held[shapes] = rows(whole, slice(count - count % size, None))
        if len(held) > SHAPES_AT_MOST:
            raise DataError(
                f"{source}: batches have more than {SHAPES_AT_MOST} different shapes, the latest "
                f"{_describe(spec_of(batch))}, so they cannot be made into batches of another size; make batches of "
                "train.batch_size examples, pad to fewer lengths, e.g. in buckets, or return a function (context) that "
                "makes batches of context.batch examples"
            )
    yield from held.values()


def in_order(batches: Iterable[Batch], size: int) -> Iterator[Batch]:
    """Yields the same examples in their order, in batches of at most `size`; no batch has two shapes."""
    held: Batch | None = None
    for batch in batches:
        if held is not None and _shapes(held) != _shapes(batch):
            yield held
            held = None
        held = batch if held is None else _joined(held, batch)
        count = len(leaves_of(held)[0][1])
        for first in range(0, count - size + 1, size):
            yield rows(held, slice(first, first + size))
        held = rows(held, slice(count - count % size, None)) if count % size else None
    if held is not None:
        yield held


def _shapes(batch: Batch) -> Shapes:
    return tuple((array.shape[1:], array.dtype.str) for _, array in leaves_of(batch))


def _joined(one: Batch, other: Batch) -> Batch:
    pairs = zip(leaves_of(one), leaves_of(other), strict=True)
    return filled(one, [np.concatenate([a, b]) for (_, a), (_, b) in pairs])
