"""What computes an example with others of its batch is found; what computes each for itself is not named."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from trainer.workload import mixing
from trainer.workload.compiling import Wanted, make_objective
from trainer.workload.data.examples import ArraySpec, Batch, Spec

DRAWN = np.random.default_rng(0)
X = DRAWN.normal(size=(7, 4, 6)).astype("float32")
Y = DRAWN.normal(size=(7, 1)).astype("float32")
SPEC = Spec(ArraySpec((4, 6), "float32"), ArraySpec((1,), "float32"), None, 0)


class Centered(layers.Layer):
    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return inputs - ops.mean(inputs, axis=0, keepdims=True)


class CenteredInTraining(layers.Layer):
    def call(self, inputs: tf.Tensor, training: bool = False) -> tf.Tensor:
        return inputs - ops.mean(inputs, axis=0, keepdims=True) if training else inputs


class Counting(layers.Layer):
    """Keeps a number of steps and a mean, which parts have in common, and a number of examples, which they have not."""

    def build(self, shape: Any) -> None:
        self.steps, self.mean, self.seen = (
            self.add_weight(name=name, trainable=False, initializer="zeros") for name in ("steps", "mean", "seen")
        )

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        self.steps.assign_add(1.0)
        self.mean.assign(0.9 * self.mean + 0.1 * ops.mean(inputs))
        self.seen.assign_add(ops.cast(ops.shape(inputs)[0], "float32"))
        return inputs


class Compared(keras.losses.Loss):
    """The loss of an example has those of all others in it."""

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        losses = ops.mean(ops.square(y_true - y_pred), -1)
        return losses / (1.0 + ops.max(losses))


class Own(keras.losses.Loss):
    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        return ops.mean(ops.abs(y_true - y_pred), -1)


def batch_mean_of_operations(inputs: Any) -> Any:
    return inputs - ops.mean(inputs, axis=0, keepdims=True)


# What is between the inputs and the last layer, the loss, and the last words of what is found.
CASES: dict[str, tuple[Callable[[], Any], Any, tuple[str, ...]]] = {
    "a mean over the batch": (lambda: Centered(name="centered"), "mse", ("centered",)),
    "the same in training": (lambda: CenteredInTraining(name="centered"), "mse", ("centered",)),
    "the same in a Lambda layer": (
        lambda: layers.Lambda(lambda x: x - tf.reduce_mean(x, 0), name="lambda"),
        "mse",
        ("lambda",),
    ),
    "the same in operations": (lambda: batch_mean_of_operations, "mse", ("subtract",)),
    "a count of examples": (lambda: Counting(name="counting"), "mse", ("counting/seen",)),
    "a loss that compares": (layers.Flatten, Compared(), ("compile()",)),
    "a loss of one's own": (layers.Flatten, Own(), ()),
    "normalized": (lambda: keras.Sequential([layers.GroupNormalization(3), layers.LayerNormalization()]), "mse", ()),
    "normalized over the batch": (layers.BatchNormalization, "mse", ()),
    "the same in another layer": (lambda: layers.TimeDistributed(layers.BatchNormalization()), "mse", ()),
    "drawn": (lambda: keras.Sequential([layers.Dropout(0.5), layers.GaussianNoise(0.3)]), "mse", ()),
    "recurrent": (lambda: layers.Bidirectional(layers.GRU(3, return_sequences=True, dropout=0.2)), "mse", ()),
    "attention": (lambda: Attending(), "mse", ()),
}


class Attending(layers.Layer):
    def __init__(self) -> None:
        super().__init__()
        self.attention = layers.MultiHeadAttention(2, 3, dropout=0.2)

    def call(self, inputs: tf.Tensor, training: bool = False) -> tf.Tensor:
        return self.attention(inputs, inputs, training=training)


@pytest.mark.parametrize("case", CASES)
def test_what_mixes_the_examples_of_a_batch_is_found(case):
    make, loss, expected = CASES[case]
    keras.utils.set_random_seed(1)
    inputs = keras.Input((4, 6))
    model = keras.Model(inputs, layers.Dense(1, name="head")(layers.Flatten()(make()(inputs))))
    model.compile("sgd", loss)
    before = [v.numpy() for v in model.variables]
    found = mixing.find(make_objective(model, SPEC, Wanted()), Batch(tf.constant(X), tf.constant(Y)))
    assert tuple(next((one for one in expected if name.endswith(one)), name) for name in found) == expected
    assert all(np.array_equal(one, v.numpy()) for one, v in zip(before, model.variables, strict=True))
