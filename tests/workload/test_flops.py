"""Floating-point operations, against counts by hand and in the literature."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from trainer.workload.data.examples import ArraySpec
from trainer.workload.models import MODELS
from trainer.workload.models.flops import flops_of

# 2 operations a multiply-add: of a convolution in every place, of a dense layer once.
CNN = 2 * (26 * 26 * 32 * 9 + 26 * 26 * 32 * 128 + 128 * 10)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("cnn", (28, 28, 1), CNN),
        ("mlp", (28, 28, 1), 2 * (784 * 128 + 128 * 128 + 128 * 10)),
        ("resnet20", (32, 32, 3), 81_102_080),  # He et al. report 41 million multiply-adds
    ],
)
def test_the_shipped_models_are_counted(name, shape, expected):
    assert flops_of(MODELS[name](shape, 10), ArraySpec(shape, "float32")) == (expected, ())


def test_layers_of_all_kinds_of_convolution_are_counted():
    layers = keras.layers
    model = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2DTranspose(4, 3, strides=2),  # 17 x 17
            layers.DepthwiseConv2D(3),  # 15 x 15
            layers.SeparableConv2D(6, 3),  # 13 x 13
            layers.BatchNormalization(),
            layers.Flatten(),
        ]
    )
    by_hand = 8 * 8 * 3 * 9 * 4 + 15 * 15 * 4 * 9 + 13 * 13 * (4 * 9 + 4 * 6)
    assert flops_of(model, ArraySpec((8, 8, 3), "float32")) == (2 * by_hand, ())


def test_a_subclassed_model_is_counted_by_its_calls():
    class Twice(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.inner = keras.layers.Dense(7, name="inner")

        def call(self, features):
            return self.inner(self.inner(features))

    model = Twice()
    model(np.zeros((1, 7), np.float32))
    assert flops_of(model, ArraySpec((7,), "float32")) == (2 * 2 * 49, ())


def test_a_model_inside_a_model_counts_as_often_as_it_is_called():
    inner = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4)])
    features = keras.Input((4,))
    assert flops_of(keras.Model(features, inner(inner(features))), ArraySpec((4,), "float32")) == (2 * 2 * 16, ())


def test_attention_is_counted_with_the_layers_inside_it():
    words = keras.Input((6, 16))
    model = keras.Model(words, keras.layers.MultiHeadAttention(2, 8)(words, words))
    projections, scores = 4 * 6 * 16 * 16, 6 * 6 * 2 * (8 + 8)
    assert flops_of(model, ArraySpec((6, 16), "float32")) == (2 * (projections + scores), ())


def test_layers_with_weights_and_without_a_rule_are_named():
    words = keras.Input((6, 16))
    model = keras.Model(words, keras.layers.Dense(2)(keras.layers.LSTM(4, name="memory")(words)))
    assert flops_of(model, ArraySpec((6, 16), "float32")) == (2 * 4 * 2, ("memory/lstm_cell",))


def test_what_cannot_be_called_with_one_example_is_uncounted():
    class Pairs(keras.Model):
        def __init__(self):
            super().__init__()
            self.out = keras.layers.Dense(2, name="out")

        def call(self, x):
            return self.out(keras.ops.reshape(x, (2, 4)))

    model = Pairs()
    model(np.zeros((2, 4), np.float32))
    assert flops_of(model, ArraySpec((4,), "float32")) == (0, ("pairs/out",))


def test_layers_inside_others_may_return_a_dict_or_nothing():
    class Inner(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.dense = keras.layers.Dense(4)

        def call(self, features):
            return {"outputs": self.dense(features["inputs"]), "mask": None}

    class Prints(keras.layers.Layer):
        def call(self, features):
            return None

    class Outer(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.prints = Inner(), Prints()

        def call(self, features):
            self.prints(features)
            return self.inner({"inputs": features})["outputs"]

    model = Outer()
    model(np.zeros((1, 3), np.float32))
    assert flops_of(model, ArraySpec((3,), "float32")) == (2 * 3 * 4, ())


def test_counting_leaves_the_layers_as_they_were():
    model = MODELS["cnn"]((28, 28, 1), 10)
    before = [vars(layer).get("call") for layer in model.layers]
    flops_of(model, ArraySpec((28, 28, 1), "float32"))
    assert [vars(layer).get("call") for layer in model.layers] == before
