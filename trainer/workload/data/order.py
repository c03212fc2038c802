"""Computes the order of examples: a pure function of seed and step, so there is nothing to save."""

import tensorflow as tf

STREAM = 0x0DE7  # separates this use of the seed from others
# Four rounds, TensorFlow's default, give successive epochs orders that resemble each other.
ROUNDS = 8


def batch_indices(
    seed: int, step: tf.Tensor | int, *, batch_size: int, replica: int, replicas: int, count: int
) -> tf.Tensor:
    """Returns the examples of one replica in one step.

    Row r of the global batch of step s has position p = s * batch_size + r in an endless sequence of epochs. It is the
    example at index p % count of the permutation of epoch p // count. So an epoch has each example once, a batch may
    span two epochs, and the parts of all replicas together are what one process would see.

    Args:
        seed: of the run.
        batch_size: of all replicas together.
        replica: its number, from 0; it takes the batch_size / replicas rows from replica * batch_size / replicas.
        count: of examples in the data set.

    Returns:
        [batch_size / replicas] of int64, each in 0..count-1.
    """
    if batch_size % replicas or not 0 <= replica < replicas:
        raise ValueError(
            f"batch_size={batch_size}, replica={replica}, replicas={replicas}: replicas must divide batch_size, and "
            "replica must be one of 0..replicas-1"
        )
    rows = batch_size // replicas
    positions = tf.cast(step, tf.int64) * batch_size + tf.range(replica * rows, (replica + 1) * rows, dtype=tf.int64)
    epochs = positions // count
    seeds = tf.stack(
        [tf.fill([rows], tf.constant(seed, tf.int64)), epochs, tf.fill([rows], tf.constant(STREAM, tf.int64))], 1
    )
    # The raw operation: tf.random.experimental.index_shuffle pads a matrix of seeds along the wrong axis.
    return tf.raw_ops.RandomIndexShuffle(
        index=positions % count, seed=seeds, max_index=tf.fill([rows], tf.constant(count - 1, tf.int64)), rounds=ROUNDS
    )
