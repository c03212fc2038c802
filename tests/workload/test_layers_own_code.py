"""What the code of a layer does in a step, in the graph of a session: as in TensorFlow's eager mode, and repeatably."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from objectives import make_step

from trainer.workload import step
from trainer.workload.data.examples import Batch

v1 = tf.compat.v1
X = np.random.default_rng(0).integers(0, 3, (8, 6)).astype("float32")
Y = np.arange(8) % 3


class Own(layers.Layer):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def call(self, x):
        return self.function(x)


def model_with(function: Callable[[Any], Any]) -> keras.Model:
    keras.utils.set_random_seed(1)
    return keras.Sequential([keras.Input((6,)), Own(function), layers.Dense(3)])


def losses(model: keras.Model, seeds: list[list[int]]) -> list[float]:
    """Of a step with each seed, in a graph and a session of its own."""
    values, made = step.initial_values(model), make_step(model)
    with tf.Graph().as_default(), v1.Session() as session:
        parameters = {path: tf.constant(value) for path, value in values.items()}
        seed = v1.placeholder(tf.int64, [2])
        run = tf.function(made, autograph=False)
        loss = run(parameters, {}, seed, Batch(tf.constant(X), tf.constant(Y), None)).loss
        return [float(session.run(loss, {seed: one})) for one in seeds]


def test_a_layer_may_look_up_a_table_of_its_own():
    keys, values = tf.constant([0, 1, 2], tf.int64), tf.constant([5, 7, 9])
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, values), default_value=-1)

    class Looks(layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.table = table

        def call(self, x):
            x = tf.cast(x, tf.int64)
            return tf.cast(self.table.lookup(x) + self.table[x], tf.float32)

    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((6,)), Looks(), layers.Dense(3)])
    expected = keras.losses.sparse_categorical_crossentropy(Y, model(X), from_logits=True)
    assert losses(model, [[1, 1]]) == pytest.approx([float(np.mean(expected))], rel=1e-6)
    assert model.layers[0].table is table


@pytest.mark.parametrize(
    "function",
    [
        pytest.param(lambda x: x * tf.cast(x != 0, tf.float32) + tf.cast(x == 2.0, tf.float32), id="TensorFlow"),
        pytest.param(lambda x: x + ops.cast(x == x[:, ::-1], "float32"), id="Keras"),
        pytest.param(lambda x: x * (1.0 if x is not None and x != None else 0.0), id="nothing"),  # noqa: E711
    ],
)
def test_tensors_are_compared_by_element(function):
    model = model_with(function)
    expected = keras.losses.sparse_categorical_crossentropy(Y, model(X), from_logits=True)
    assert losses(model, [[1, 1]]) == pytest.approx([float(np.mean(expected))], rel=1e-6)


DRAWS: dict[str, Callable[[Any], Any]] = {
    "normal": lambda x: x + tf.random.normal(tf.shape(x)),
    "normal with a seed": lambda x: x + tf.random.normal(tf.shape(x), seed=3),
    "truncated": lambda x: x + tf.random.truncated_normal([6]),
    "uniform": lambda x: x + tf.random.uniform(tf.shape(x), 1.0, 2.0),
    "integers": lambda x: x + tf.cast(tf.random.uniform([6], 0, 1000, tf.int32), tf.float32),
    "shuffle": lambda x: x * tf.random.shuffle(tf.range(6.0)),
    "categorical": lambda x: x + tf.cast(tf.random.categorical(tf.zeros([1, 1000]), 6), tf.float32),
    "gamma": lambda x: x + tf.random.gamma([6], 2.0),
    "dropout": lambda x: tf.nn.dropout(x, 0.5),
    "Keras": lambda x: x + keras.random.normal(ops.shape(x)),
    "Keras's dropout": lambda x: keras.random.dropout(x, 0.5),
}


@pytest.mark.slow(but=["normal", "Keras"])
@pytest.mark.parametrize("name", DRAWS)
def test_draws_without_a_seed_generator_depend_on_the_seed_alone(name):
    model = model_with(DRAWS[name])
    first, again, other = losses(model, [[1, 1], [1, 1], [2, 1]])
    assert first == again
    assert first != other
    assert losses(model, [[1, 1]]) == [first]


def test_each_draw_has_numbers_of_its_own():
    same = model_with(lambda x: x + tf.random.normal(tf.shape(x)) - tf.random.normal(tf.shape(x)))
    assert losses(same, [[1, 1]]) != losses(model_with(lambda x: x), [[1, 1]])


def test_other_threads_draw_as_before():
    drawn = []

    def draw_elsewhere(x: Any) -> Any:
        thread = threading.Thread(
            target=lambda: drawn.append(float(tf.random.normal([])) + float(keras.random.normal([])))
        )
        thread.start()
        thread.join()
        return x

    losses(model_with(draw_elsewhere), [[1, 1]])
    assert len(drawn) >= 1
