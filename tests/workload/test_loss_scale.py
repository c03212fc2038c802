"""The loss scale against Keras's LossScaleOptimizer."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import keras
import numpy as np
import pytest
import tensorflow as tf

from trainer.workload import loss_scale

GOOD, BAD = False, True


def after(scale: Sequence[float], *overflows: bool) -> list[float]:
    """The [2] scale after that many updates."""
    state = tf.constant(scale, tf.float32)
    for overflow in overflows:
        state = loss_scale.moved(state, tf.constant(overflow), state[0])
    return state.numpy().tolist()


def test_a_run_begins_with_two_to_the_fifteen():
    assert loss_scale.FIRST == (32768.0, 0.0)


def test_a_good_update_is_counted():
    assert after([8.0, 3.0], GOOD) == [8.0, 4.0]


def test_an_overflow_halves_the_scale_and_resets_the_count():
    assert after([8.0, 3.0], BAD) == [4.0, 0.0]


def test_every_overflow_halves_the_scale():
    assert after([8.0, 3.0], BAD, BAD, GOOD) == [2.0, 1.0]


@pytest.mark.parametrize("scale", [1.0, 1.5])
def test_the_scale_does_not_fall_below_one(scale):
    assert after([scale, 3.0], BAD) == [1.0, 0.0]


def test_the_two_thousandth_good_update_doubles_the_scale():
    assert after([8.0, 1998.0], GOOD) == [8.0, 1999.0]
    assert after([8.0, 1999.0], GOOD) == [16.0, 0.0]


def test_an_overflow_at_the_two_thousandth_update_halves_the_scale():
    assert after([8.0, 1999.0], BAD) == [4.0, 0.0]


@pytest.mark.parametrize(("used", "expected"), [(16.0, 8.0), (8.0, 4.0), (4.0, 4.0)])
def test_workers_that_overflow_by_the_same_scale_halve_it_once(used, expected):
    """Under async several gradients may have been computed with a scale that was halved since."""
    moved = loss_scale.moved(tf.constant([8.0, 3.0]), tf.constant(BAD), tf.constant(used))
    assert moved.numpy().tolist() == [expected, 0.0]


def ours(overflows: Sequence[bool], *, start: float) -> list[float]:
    """The scale after each update."""

    @tf.function(autograph=False)
    def scan() -> tf.Tensor:
        return tf.scan(
            lambda scale, overflow: loss_scale.moved(scale, overflow, scale[0]),
            tf.constant(overflows),
            tf.constant([start, 0.0]),
        )

    return scan()[:, 0].numpy().tolist()


def keras_s(overflows: Sequence[bool], *, start: float) -> list[float]:
    """The same from Keras's optimizer, whose gradient is infinite at each overflow."""
    weight = keras.Variable([1.0])
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=start)
    optimizer.build([weight])

    def update(_: tf.Tensor, gradient: tf.Tensor) -> tf.Tensor:
        optimizer.apply([tf.expand_dims(gradient, 0)], [weight])
        return tf.identity(optimizer.dynamic_scale.value)

    @tf.function(autograph=False)
    def scan() -> tf.Tensor:
        return tf.scan(update, tf.constant(np.where(overflows, np.inf, 1.0), tf.float32), tf.constant(start))

    return scan().numpy().tolist()


# Overflows at the start, just before the scale would grow, and in the middle of a count; and it grows three times.
SCRIPT = [*[BAD] * 2, *[GOOD] * 1999, BAD, *[GOOD] * 4001, BAD, GOOD, BAD, *[GOOD] * 2000, *[BAD] * 13]


def test_the_scale_moves_as_in_keras_down_to_one():
    assert ours(SCRIPT, start=32768.0) == keras_s(SCRIPT, start=32768.0)


def test_the_scale_of_a_script_of_overflows():
    assert [(scale, len(list(same))) for scale, same in itertools.groupby(ours(SCRIPT[:-13], start=32768.0))] == [
        (16384.0, 1),
        (8192.0, 2000),
        (4096.0, 2000),
        (8192.0, 2000),
        (16384.0, 2),
        (8192.0, 2),
        (4096.0, 2000),
        (8192.0, 1),
    ]


def test_keras_s_scale_falls_below_one_where_ours_stays():
    assert ours([BAD, BAD], start=2.0) == [1.0, 1.0]
    assert keras_s([BAD, BAD], start=2.0) == [1.0, 0.5]
