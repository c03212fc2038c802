"""The same model and data for every peer."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import tensorflow as tf

from bench.contestants import ROOT, SHIPPED, USER_FILE
from trainer.workload.build import build_model, open_data_set
from trainer.workload.data import DataSet, Examples

SEED = 0


def open_workload(name: str) -> tuple[keras.Model, DataSet]:
    """Returns the model of a workload, with the first weights of our runs, and the data they train on."""
    data = open_data_set("mnist_10k", {}, seed=SEED, user_file=None)
    user_file = None if name in SHIPPED else str(ROOT / USER_FILE)
    return build_model(name, {}, data, seed=SEED, user_file=user_file), data


def dataset(data: DataSet, *, batch: int, index: int = 0, workers: int = 1, tuned: bool = False) -> tf.data.Dataset:
    """Returns one worker's share of the examples, shuffled and repeated: features [B, ...] in 0..1, labels [B].

    Args:
        batch: examples of one worker.
        tuned: one thread, for the cores belong to the model; as written, tf.data takes what it likes.
    """
    assert isinstance(data.train, Examples)
    features, labels = (np.asarray(array)[index::workers] for array in data.train.arrays)
    examples = tf.data.Dataset.from_tensor_slices((features, labels)).repeat().shuffle(1000, seed=SEED)
    batches = examples.batch(batch, drop_remainder=True).map(_scaled).prefetch(2 if tuned else tf.data.AUTOTUNE)
    if tuned:
        options = tf.data.Options()
        options.autotune.enabled = False
        options.threading.private_threadpool_size = 1
        options.threading.max_intra_op_parallelism = 1
        batches = batches.with_options(options)
    return batches


def _scaled(features: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
    return tf.cast(features, tf.float32) / 255.0, tf.cast(labels, tf.int64)


def loss_of(labels: tf.Tensor, logits: tf.Tensor) -> Any:
    """Returns the mean loss [] over a batch."""
    return tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits))
