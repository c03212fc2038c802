"""Makes batches for a v1 session: a tf.data pipeline that can start at any step."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import tensorflow as tf

from trainer.workload.data.errors import DataError
from trainer.workload.data.examples import Batch, Examples, Nest, Stream, StreamContext, filled, leaves_of
from trainer.workload.data.order import batch_indices
from trainer.workload.data.streams import Arrays, evaluation_arrays, training_arrays

Feeds = dict[tf.Tensor, Any]
ENDLESS = 2**62  # batches

AHEAD = 2  # batches to prepare while the step runs

Derive = Callable[[Batch], Nest]  # tensors that are made of a batch, ahead of the step too
Announce = Callable[[Nest], Nest]  # what must be known one batch earlier


@dataclass(frozen=True)
class Batches:
    """The next batch as tensors of a v1 graph; each Session.run that fetches any of them takes one batch.

    Run `initializer` with `feed_dict` first. After the last batch, tf.errors.OutOfRangeError.
    """

    step: tf.Tensor  # scalar int64: the step this batch is for, from 0
    batch: Batch
    initializer: tf.Operation
    feed_dict: dict[tf.Tensor, Any]
    start: tf.Tensor  # scalar int64 placeholder, in feed_dict: the first step
    derived: Nest = ()
    upcoming: Nest = ()  # what is announced of the batch after this one

    def feed_from(self, step: int) -> dict[tf.Tensor, Any]:
        """Returns the feed of the initializer that makes the next batch that of `step`."""
        return {**self.feed_dict, self.start: step}


def nothing(batch: Batch) -> Nest:
    """Derives nothing."""
    return ()


def training_batches(
    examples: Examples | Stream,
    *,
    seed: int,
    start: int,
    stop: int,
    batch_size: int,
    replica: int,
    replicas: int,
    derive: Derive = nothing,
    announce: Announce | None = None,
) -> Batches:
    """Returns one replica's batches of the steps start..stop-1, each of batch_size / replicas examples.

    Args:
        announce: what each batch tells about the next one; then a batch without examples comes first.

    Raises:
        DataError: if one global batch holds more examples than there are.
    """
    if isinstance(examples, Stream):
        batch = batch_size // replicas
        arrays = partial(training_arrays, examples, seed=seed, replica=replica, replicas=replicas, batch=batch)
        return _initializable(partial(_stream, examples, arrays, batch), {}, derive, announce, start=start, stop=stop)
    indices = _training_indices(examples, seed=seed, batch_size=batch_size, replica=replica, replicas=replicas)
    return _batches(examples, indices, derive, announce, start=start, stop=stop)


def training_iterator(
    examples: Examples | Stream, *, seed: int, start: int, stop: int, batch_size: int, replica: int, replicas: int
) -> Any:
    """Returns the same batches for eager mode: an iterator of (step, batch, derived)."""
    if isinstance(examples, Stream):
        batch = batch_size // replicas
        of_stream = partial(training_arrays, examples, seed=seed, replica=replica, replicas=replicas, batch=batch)
        with tf.device("/cpu:0"):
            return iter(_stream(examples, of_stream, batch, tf.constant(start, tf.int64), stop))
    indices = _training_indices(examples, seed=seed, batch_size=batch_size, replica=replica, replicas=replicas)
    with tf.device("/cpu:0"):
        arrays = tuple(tf.constant(array) for array in examples.arrays)
        return iter(_dataset(examples, indices, arrays, start, stop))


def _training_indices(
    examples: Examples, *, seed: int, batch_size: int, replica: int, replicas: int
) -> Callable[[tf.Tensor], tf.Tensor]:
    """Returns the function from a step to a replica's examples."""
    if examples.count < batch_size:
        most = examples.count // replicas * replicas
        raise DataError(
            f"the data set has {examples.count} training examples, but one global batch takes {batch_size}; "
            + (f"type train.batch_size={most}" if most else f"{replicas} replicas need at least as many examples")
        )
    return lambda step: batch_indices(
        seed, step, batch_size=batch_size, replica=replica, replicas=replicas, count=examples.count
    )


def evaluation_batches(
    examples: Examples | Stream, *, batch_size: int, steps: int | None = None, derive: Derive = nothing
) -> Batches:
    """Returns all examples in their own order, `batch_size` at a time; the last batch may be smaller.

    If it is not, the batches have a static shape, as in Keras, on which a user's code may depend.

    Args:
        steps: number of batches; None: all.
    """
    if isinstance(examples, Stream):
        stream = examples

        def all_of(*, start: int) -> Iterator[Arrays]:
            return evaluation_arrays(stream, batch=batch_size)

        return _initializable(partial(_stream, stream, all_of, None), {}, derive, None, start=0, stop=steps or ENDLESS)

    batch_size = min(batch_size, examples.count)
    is_even = examples.count % batch_size == 0

    def indices(step: tf.Tensor) -> tf.Tensor:
        chosen = tf.range(step * batch_size, tf.minimum((step + 1) * batch_size, examples.count))
        return tf.ensure_shape(chosen, [batch_size if is_even else None])

    count = -(-examples.count // batch_size)
    return _batches(examples, indices, derive, None, start=0, stop=min(count, steps or count))


def feature_batches(examples: Examples | Stream, specs: Nest, *, seed: int, batch_size: int = 128) -> tf.data.Dataset:
    """Returns only features, for a layer's `adapt`: all examples in their own order, or one epoch of a stream.

    Nothing is read before the first batch is requested.

    Args:
        specs: of the features.
    """

    def generate() -> Iterator[tuple[Any, ...]]:
        if isinstance(examples, Stream):
            batches: Iterable[Batch] = examples.open(StreamContext(0, 1, batch_size, seed, 0))
        else:
            arrays = tuple(map(tf.constant, examples.arrays))
            rows = (
                tf.range(first, min(first + batch_size, examples.count), dtype=tf.int64)
                for first in range(0, examples.count, batch_size)
            )
            batches = (Batch(*examples.fetch(indices, arrays)) for indices in rows)
        for batch in batches:
            yield tuple(one for _, one in leaves_of(batch.features))

    def nest(*arrays: tf.Tensor) -> Nest:
        return filled(specs, arrays)

    signature = tuple(tf.TensorSpec([None, *one.shape], one.dtype) for _, one in leaves_of(specs))
    flat = tf.data.Dataset.from_generator(generate, output_signature=signature)
    return flat.map(tf.autograph.experimental.do_not_convert(nest)).with_options(_options())


def _batches(
    examples: Examples,
    indices: Callable[[tf.Tensor], tf.Tensor],
    derive: Derive,
    announce: Announce | None,
    *,
    start: int,
    stop: int,
) -> Batches:
    with tf.device("/cpu:0"):  # of the task that an enclosing scope names
        # Placeholders, because a graph definition with its constants is limited to 2 GB and is sent to every task.
        arrays = tuple(tf.compat.v1.placeholder(array.dtype, array.shape) for array in examples.arrays)
    feed_dict = dict(zip(arrays, examples.arrays, strict=True))
    made = partial(_dataset, examples, indices, arrays)
    return _initializable(made, feed_dict, derive, announce, start=start, stop=stop)


def _initializable(
    make: Callable[..., tf.data.Dataset],
    feed_dict: Feeds,
    derive: Derive,
    announce: Announce | None,
    *,
    start: int,
    stop: int,
) -> Batches:
    """Returns the batches of make(start, stop), a dataset whose initializer sets where it begins."""
    with tf.device("/cpu:0"):
        first = tf.compat.v1.placeholder(tf.int64, [], name="start")
        dataset = make(first, stop, derive)
        iterator = tf.compat.v1.data.make_initializable_iterator(_announced(dataset, announce) if announce else dataset)
        step, batch, derived, *upcoming = iterator.get_next()
    return Batches(step, batch, iterator.initializer, {**feed_dict, first: start}, first, derived, *upcoming)


def _announced(dataset: tf.data.Dataset, announce: Announce) -> tf.data.Dataset:
    """Pairs each element with the announcement of the next one; before the first and after the last are zeros."""

    specs = dataset.element_spec
    is_given = [isinstance(spec, tf.TensorSpec) for spec in tf.nest.flatten(specs)]  # weights may be missing

    def given(*element: Nest) -> tuple[tf.Tensor, ...]:
        return tuple(one for one, has in zip(tf.nest.flatten(element), is_given, strict=True) if has)

    def whole(flat: tuple[tf.Tensor, ...]) -> Nest:
        rest = iter(flat)
        return tf.nest.pack_sequence_as(specs, [next(rest) if has else None for has in is_given])

    def with_next(before: tuple[tf.Tensor, ...], now: tuple[tf.Tensor, ...]) -> tuple[Nest, Nest]:
        return now, (*whole(before), announce(whole(now)[2]))

    flat = dataset.map(tf.autograph.experimental.do_not_convert(given))
    zeros = tuple(tf.zeros([size or 0 for size in spec.shape], spec.dtype) for spec in flat.element_spec)
    until_last = flat.concatenate(tf.data.Dataset.from_tensors(zeros))
    announced = until_last.scan(zeros, tf.autograph.experimental.do_not_convert(with_next))
    return announced.with_options(_options())


def _dataset(
    examples: Examples,
    indices: Callable[[tf.Tensor], tf.Tensor],
    arrays: tuple[tf.Tensor, ...],
    start: Any,
    stop: int,
    derive: Derive = nothing,
) -> tf.data.Dataset:
    """Returns the batches of the steps in a fixed order, on one thread: the cores belong to the replica."""

    def fetch(step: tf.Tensor) -> tuple[tf.Tensor, Batch, Nest]:
        batch = Batch(*examples.fetch(indices(step), arrays))
        return step, batch, derive(batch)

    # AutoGraph would write a temporary file for each function, which a killed task leaves behind.
    fetched = tf.data.Dataset.range(start, stop).map(tf.autograph.experimental.do_not_convert(fetch))
    return fetched.prefetch(AHEAD).with_options(_options())


def _stream(
    stream: Stream,
    open_arrays: Callable[..., Iterator[Arrays]],
    batch: int | None,
    start: Any,
    stop: int,
    derive: Derive = nothing,
) -> tf.data.Dataset:
    """Returns the batches of a stream, read by Python.

    Args:
        open_arrays: from the keyword `start`.
        batch: examples in each, if constant.
    """
    specs = [tf.TensorSpec([batch, *one.shape], one.dtype) for _, one in leaves_of(stream.spec)]

    def generate(start: int) -> Iterator[tuple[Any, ...]]:
        for step, arrays in zip(range(int(start), stop), open_arrays(start=int(start))):  # noqa: B905 - ends with either
            yield (step, *arrays)

    def nest(step: tf.Tensor, *arrays: tf.Tensor) -> tuple[tf.Tensor, Batch, Nest]:
        batch: Batch = filled(stream.spec, arrays)
        return step, batch, derive(batch)

    signature = (tf.TensorSpec([], tf.int64), *specs)
    dataset = tf.data.Dataset.from_generator(generate, output_signature=signature, args=(start,))
    nested = dataset.map(tf.autograph.experimental.do_not_convert(nest))
    return nested.prefetch(AHEAD).with_options(_options())


def _options() -> tf.data.Options:
    options = tf.data.Options()
    # The default optimizations copy every array that is gathered from into a graph definition, twice.
    options.experimental_optimization.apply_default_optimizations = False
    options.deterministic = True
    options.autotune.enabled = False
    options.threading.private_threadpool_size = 1
    options.threading.max_intra_op_parallelism = 1
    return options
