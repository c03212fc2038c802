"""Chooses the default accuracy by the loss."""

from collections.abc import Callable, Mapping
from typing import Any

import keras
import tensorflow as tf

from trainer.workload.keras_names import LOGITS
from trainer.workload.output_checks import IGNORE

ACCURACY = "accuracy"


def accuracy_of(loss: Any) -> keras.metrics.Metric | None:
    """Returns the metric for a classification loss; None for any other loss."""
    for kind, make in ACCURACIES.items():
        if isinstance(loss, kind):
            if (ignored := getattr(loss, IGNORE, None)) is not None:
                return _AccuracyOfLabelled(ignored)
            is_binary = kind is keras.losses.BinaryCrossentropy and not is_of_logits(loss)
            return keras.metrics.BinaryAccuracy(name=ACCURACY) if is_binary else make()
    return None


def is_of_logits(loss: Any) -> bool:
    return bool(getattr(loss, LOGITS, False))


def _binary_accuracy(labels: tf.Tensor, logits: tf.Tensor) -> tf.Tensor:
    logits, labels = (tf.reshape(tf.cast(one, tf.float32), [-1]) for one in (logits, labels))
    return tf.cast(tf.equal(logits > 0, labels > 0.5), tf.float32)


class _AccuracyOfLabelled(keras.metrics.SparseCategoricalAccuracy):  # type: ignore[misc]
    """The accuracy on examples that have a label."""

    def __init__(self, ignored: int) -> None:
        super().__init__(name=ACCURACY)
        self._ignored = ignored

    def update_state(self, labels: tf.Tensor, logits: tf.Tensor, sample_weight: tf.Tensor | None = None) -> None:
        labels = tf.reshape(labels, tf.shape(logits)[:-1])
        weights = tf.cast(tf.not_equal(labels, tf.cast(self._ignored, labels.dtype)), tf.float32)
        if sample_weight is not None:
            more = tf.cast(sample_weight, tf.float32)
            ones = [1] * (weights.shape.rank - more.shape.rank)
            weights *= tf.reshape(more, [*tf.unstack(tf.shape(more)), *ones])
        super().update_state(labels, logits, weights)


ACCURACIES: Mapping[type, Callable[[], keras.metrics.Metric]] = {  # of logits, by loss
    keras.losses.SparseCategoricalCrossentropy: lambda: keras.metrics.SparseCategoricalAccuracy(name=ACCURACY),
    keras.losses.CategoricalCrossentropy: lambda: keras.metrics.CategoricalAccuracy(name=ACCURACY),
    keras.losses.BinaryCrossentropy: lambda: keras.metrics.MeanMetricWrapper(_binary_accuracy, name=ACCURACY),
}
