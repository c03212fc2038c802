"""The workload `clicks` for peers: 26 tables, a multilayer perceptron, and batches of ids.

As written, every table is a variable and tf.data batches examples one by one. Tuned, all tables are one variable, whole
batches are gathered, and their distinct ids are found ahead of the step, on one thread.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from bench.contestants import CLICKS_ROWS, CLICKS_WIDTH
from trainer.workload.build import build_model, open_data_set

FIELDS, NUMBERS, HIDDEN = 26, 13, (256, 128)  # as the trainer's model ctr and data set clicks have them
RATE, FIRST_ACCUMULATOR, EPSILON = 0.02, 0.1, 1e-7  # of Adagrad
SEED = 0


class Batch(NamedTuple):
    """Examples; `ids` as drawn, or of the one variable: each once, and which of them each position has."""

    numbers: Any  # [B, NUMBERS]
    labels: Any  # [B, 1]
    ids: Any  # [B, FIELDS], or [n]
    which: Any  # [B * FIELDS]; as written empty


def tables(*, tuned: bool) -> list[tuple[int, int]]:
    """Returns the shapes of the tables."""
    return [(FIELDS * CLICKS_ROWS, CLICKS_WIDTH)] if tuned else [(CLICKS_ROWS, CLICKS_WIDTH)] * FIELDS


def dense_shapes() -> list[tuple[int, ...]]:
    """Returns the shapes of kernels and biases, layer by layer."""
    sizes = (NUMBERS + FIELDS * CLICKS_WIDTH, *HIDDEN, 1)
    return [shape for a, b in itertools.pairwise(sizes) for shape in ((a, b), (b,))]


def batches(*, batch: int, index: int = 0, workers: int = 1, tuned: bool) -> tf.data.Dataset:
    """Yields one worker's share of the examples, repeatedly, as `Batch`es."""
    options = {"rows": CLICKS_ROWS}
    numbers, ids, labels = _arrays(open_data_set("clicks", options, seed=SEED, user_file=None).train, index, workers)
    if not tuned:
        examples = tf.data.Dataset.from_tensor_slices((numbers, ids, labels)).repeat().shuffle(1000, seed=SEED)

        def as_drawn(numbers: Any, ids: Any, labels: Any) -> Batch:
            return Batch(numbers, labels, ids, tf.zeros([0], tf.int32))

        return examples.batch(batch, drop_remainder=True).map(as_drawn).prefetch(tf.data.AUTOTUNE)
    packed = ids + np.arange(FIELDS) * CLICKS_ROWS
    arrays = [tf.constant(one) for one in (numbers, packed, labels)]

    def gathered(step: Any) -> Batch:
        at = (step * batch + tf.range(batch, dtype=tf.int64)) % len(labels)
        numbers, ids, labels_ = (tf.gather(one, at) for one in arrays)
        distinct, which = tf.unique(tf.reshape(ids, [-1]))
        return Batch(numbers, labels_, distinct, which)

    fetched = tf.data.Dataset.range(2**62).map(gathered).prefetch(2)
    threads = tf.data.Options()
    threads.autotune.enabled = False
    threads.threading.private_threadpool_size = 1
    threads.threading.max_intra_op_parallelism = 1
    return fetched.with_options(threads)


def loss_of(dense: Sequence[Any], rows: Sequence[Any], batch: Batch, *, tuned: bool) -> Any:
    """Returns the mean loss [] over a batch.

    Args:
        rows: looked up in each table: [B, width] for each field, or [n, width] of the one variable.
    """
    size = tf.shape(batch.labels)[0]
    x = tf.reshape(tf.gather(rows[0], batch.which), [size, -1]) if tuned else tf.concat(rows, 1)
    x = tf.ensure_shape(tf.concat([batch.numbers, x], 1), [None, NUMBERS + FIELDS * CLICKS_WIDTH])
    for kernel, bias in zip(dense[::2], dense[1::2], strict=True):
        x = tf.matmul(x, kernel) + bias
        if kernel.shape[1] > 1:
            x = tf.nn.relu(x)
    return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels=batch.labels, logits=x))


def ids_of(batch: Batch, *, tuned: bool) -> list[Any]:
    """Returns the ids to look up in each table."""
    return [batch.ids] if tuned else [batch.ids[:, field] for field in range(FIELDS)]


def keras_model() -> Any:
    """Returns the trainer's model, with ordinary embeddings."""
    data = open_data_set(
        "clicks", {"rows": CLICKS_ROWS, "train_examples": 2, "evaluate_examples": 1}, seed=SEED, user_file=None
    )
    return build_model("ctr", {"width": CLICKS_WIDTH}, data, seed=SEED, user_file=None)


def keras_batches(*, batch: int) -> tf.data.Dataset:
    def named(one: Batch) -> tuple[dict[str, Any], Any]:
        return {"numbers": one.numbers, "ids": one.ids}, one.labels

    return batches(batch=batch, tuned=False).map(named)


def _arrays(examples: Any, index: int, workers: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    by_kind = {(one.dtype.kind, one.shape[1]): one[index::workers] for one in map(np.asarray, examples.arrays)}
    return by_kind["f", NUMBERS], by_kind["i", FIELDS], by_kind["f", 1]
