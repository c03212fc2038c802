"""Makes batches for a v1 session: a tf.data pipeline that can start at any step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from trainer.workload.data.examples import Batch, DataError, Examples
from trainer.workload.data.order import batch_indices

AHEAD = 2  # batches to prepare while the step runs


@dataclass(frozen=True)
class Batches:
    """The next batch, as tensors of a v1 graph; each Session.run that fetches any of them takes one batch.

    Run `initializer` with `feed_dict` first. After the last batch, tf.errors.OutOfRangeError.
    """

    step: tf.Tensor  # scalar int64: the step this batch is for, from 0
    batch: Batch
    initializer: tf.Operation
    feed_dict: dict[tf.Tensor, Any]
    start: tf.Tensor  # scalar int64 placeholder, in feed_dict: the first step

    def feed_from(self, step: int) -> dict[tf.Tensor, Any]:
        """What to feed the initializer so that the next batch is the one of `step`."""
        return {**self.feed_dict, self.start: step}


def training_batches(
    examples: Examples, *, seed: int, start: int, stop: int, batch_size: int, replica: int, replicas: int
) -> Batches:
    """One replica's batches of the steps start..stop-1, each of batch_size / replicas examples.

    Raises:
        DataError: if one global batch holds more examples than there are.
    """
    indices = _training_indices(examples, seed=seed, batch_size=batch_size, replica=replica, replicas=replicas)
    return _batches(examples, indices, start=start, stop=stop)


def training_iterator(
    examples: Examples, *, seed: int, start: int, stop: int, batch_size: int, replica: int, replicas: int
) -> Any:
    """The same batches for TensorFlow's eager mode: an iterator of (step, batch)."""
    indices = _training_indices(examples, seed=seed, batch_size=batch_size, replica=replica, replicas=replicas)
    with tf.device("/cpu:0"):
        arrays = tuple(tf.constant(array) for array in examples.arrays)
        return iter(_dataset(examples, indices, arrays, start, stop))


def _training_indices(
    examples: Examples, *, seed: int, batch_size: int, replica: int, replicas: int
) -> Callable[[tf.Tensor], tf.Tensor]:
    """Which examples a replica sees at a step."""
    if examples.count < batch_size:
        most = examples.count // replicas * replicas
        raise DataError(
            f"the data set has {examples.count} examples to train on, one global batch takes {batch_size}; "
            + (f"type train.batch_size={most}" if most else f"{replicas} replicas need at least as many examples")
        )
    return lambda step: batch_indices(
        seed, step, batch_size=batch_size, replica=replica, replicas=replicas, count=examples.count
    )


def evaluation_batches(examples: Examples, *, batch_size: int) -> Batches:
    """All examples in their own order, `batch_size` at a time; the last batch may be smaller."""

    def indices(step: tf.Tensor) -> tf.Tensor:
        return tf.range(step * batch_size, tf.minimum((step + 1) * batch_size, examples.count))

    return _batches(examples, indices, start=0, stop=-(-examples.count // batch_size))


def _batches(examples: Examples, indices: Callable[[tf.Tensor], tf.Tensor], *, start: int, stop: int) -> Batches:
    with tf.device("/cpu:0"):  # of the task that an enclosing scope names
        # Placeholders, because a graph definition with its constants is limited to 2 GB and is sent to every task.
        arrays = tuple(tf.compat.v1.placeholder(array.dtype, array.shape) for array in examples.arrays)
        first = tf.compat.v1.placeholder(tf.int64, [], name="start")
        dataset = _dataset(examples, indices, arrays, first, stop)
        iterator = tf.compat.v1.data.make_initializable_iterator(dataset)
        step, batch = iterator.get_next()
    feed_dict = {**dict(zip(arrays, examples.arrays, strict=True)), first: start}
    return Batches(step, batch, iterator.initializer, feed_dict, first)


def _dataset(
    examples: Examples, indices: Callable[[tf.Tensor], tf.Tensor], arrays: tuple[tf.Tensor, ...], start: Any, stop: int
) -> tf.data.Dataset:
    """The batches of the steps, always in the same order, on one thread: the cores belong to the replica."""
    # AutoGraph would write a temporary file for each function, which a killed task leaves behind.
    fetch = tf.autograph.experimental.do_not_convert(lambda step: (step, Batch(*examples.fetch(indices(step), arrays))))
    options = tf.data.Options()
    # The default optimizations copy every array that is gathered from into a graph definition, twice.
    options.experimental_optimization.apply_default_optimizations = False
    options.deterministic = True
    options.autotune.enabled = False
    options.threading.private_threadpool_size = 1
    options.threading.max_intra_op_parallelism = 1
    return tf.data.Dataset.range(start, stop).map(fetch).prefetch(AHEAD).with_options(options)
