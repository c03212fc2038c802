"""BatchNorm on the fused kernel equals Keras's up to rounding; where it would not, Keras computes it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from objectives import make_step

from trainer.workload import step as replica
from trainer.workload.data.examples import Batch

pytestmark = pytest.mark.slow

CHANNELS, CLASSES = 5, 3
LABELS = np.int64([0, 1, 2, 0, 1, 2])
SEED = np.int64([7, 1])
KERNEL, ITS_GRADIENT = "FusedBatchNormV3", "FusedBatchNormGradV3"


def normalized(shape: tuple[int, ...], *, frozen: bool = False, **options: Any) -> keras.Model:
    """A model whose first layer is the norm of `shape`, and drawn so that no parameter is 0 or 1."""
    keras.utils.set_random_seed(11)
    inputs = keras.Input(shape)
    drawn = keras.initializers.RandomUniform(0.5, 1.5)
    norm = keras.layers.BatchNormalization(
        gamma_initializer=drawn, beta_initializer=drawn, moving_mean_initializer=drawn, name="norm", **options
    )
    norm.trainable = not frozen
    hidden = keras.layers.Activation("relu")(norm(keras.layers.Dense(shape[-1], name="dense")(inputs)))
    return keras.Model(inputs, keras.layers.Dense(CLASSES, name="logits")(keras.layers.Flatten()(hidden)))


def features(model: keras.Model, examples: int, mean: float = 2.0, deviation: float = 3.0) -> np.ndarray:
    drawn = np.random.default_rng(3).normal(mean, deviation, (examples, *model.input_shape[1:]))
    return drawn.astype(np.float32)


def traced(model: keras.Model, examples: int = 6, *, jit: bool = False, **of_features: float) -> tuple[Any, set[str]]:
    """(gradients, state', loss) of a step, and the types of its operations."""
    values, kinds = replica.initial_values(model), {p.path: p.trainable for p in replica.parameters_of(model)}
    parameters = {path: value for path, value in values.items() if kinds[path]}
    state = {path: value for path, value in values.items() if not kinds[path]}
    made = make_step(model, jit=jit)
    step = tf.function(made, autograph=False, jit_compile=jit or None)
    batch = Batch(tf.constant(features(model, examples, **of_features)), tf.constant(LABELS[:examples]))
    given = (*tf.nest.map_structure(tf.constant, (parameters, state, SEED)), batch)
    types = {operation.type for operation in step.get_concrete_function(*given).graph.get_operations()}
    return tf.nest.map_structure(np.asarray, step(*given)[:3]), types


def check_equal(found: Any, expected: Any) -> None:
    for of_found, of_expected in zip(found[:2], expected[:2], strict=True):
        assert sorted(of_found) == sorted(of_expected)
        for path, value in of_expected.items():
            np.testing.assert_allclose(of_found[path], value, rtol=2e-4, atol=2e-5, err_msg=path)
    np.testing.assert_allclose(found[2], expected[2], rtol=1e-5)


@pytest.fixture
def by_keras(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """by_keras(model) -> the result of `traced` with Keras's own BatchNorm."""

    def trace(model: keras.Model, examples: int = 6, **of_features: float) -> Any:
        with monkeypatch.context() as patch:
            patch.setattr(replica, "fused", lambda model: nullcontext())
            found, types = traced(model, examples, **of_features)
        assert KERNEL not in types
        return found

    return trace


@pytest.mark.parametrize("shape", [(CHANNELS,), (7, CHANNELS), (4, 3, CHANNELS), (2, 3, 2, CHANNELS)], ids=str)
def test_it_equals_keras_forward_backward_and_in_its_statistics(shape, by_keras):
    model = normalized(shape)
    found, types = traced(model)
    assert {KERNEL, ITS_GRADIENT} <= types
    check_equal(found, by_keras(model))


@pytest.mark.parametrize(
    "options",
    [
        {"scale": False},
        {"center": False},
        {"scale": False, "center": False},
        {"epsilon": 0.3},
        {"momentum": 0.5},
        {"axis": 3},
    ],
    ids=str,
)
def test_options_mean_what_they_mean_to_keras(options, by_keras):
    model = normalized((4, 3, CHANNELS), **options)
    found, types = traced(model)
    assert KERNEL in types
    check_equal(found, by_keras(model))


@pytest.mark.parametrize("options", [{"axis": 1}, {"axis": 2}, {"frozen": True}, {"synchronized": True}], ids=str)
def test_options_that_the_kernel_lacks_are_left_to_keras(options, by_keras):
    model = normalized((4, 3, CHANNELS), **options)
    found, types = traced(model)
    assert KERNEL not in types
    check_equal(found, by_keras(model))


def test_a_mask_is_left_to_keras(by_keras):
    inputs = keras.Input((7, CHANNELS))
    hidden = keras.layers.BatchNormalization(name="norm")(keras.layers.Masking()(inputs))
    model = keras.Model(inputs, keras.layers.Dense(CLASSES, name="logits")(hidden[:, -1]))
    found, types = traced(model)
    assert KERNEL not in types
    check_equal(found, by_keras(model))


@pytest.mark.parametrize("jit", [False, True])
def test_a_mean_far_above_the_deviation_costs_no_digits(jit):
    """For example years or prices: E[x^2] - E[x]^2 would lose all their digits."""
    inputs = keras.Input((CHANNELS,))
    hidden = keras.layers.BatchNormalization(momentum=0.0, name="norm")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(CLASSES, name="logits")(hidden))
    (_, state, _), types = traced(model, jit=jit, mean=2020.0, deviation=5.0)
    assert (KERNEL in types) == (not jit)
    expected = features(model, 6, mean=2020.0, deviation=5.0).astype(np.float64).var(0)
    np.testing.assert_allclose(state["norm/moving_variance"], expected, rtol=1e-5)


def test_channels_may_be_unknown_while_a_step_is_traced(by_keras):
    class Forgetful(keras.layers.Layer):
        def call(self, inputs: Any) -> Any:
            return tf.compat.v1.placeholder_with_default(inputs, [None] * len(inputs.shape))

        def compute_output_shape(self, shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
            return shape

    inputs = keras.Input((4, 3, CHANNELS))
    hidden = keras.layers.BatchNormalization(scale=False, name="norm")(Forgetful()(inputs))
    hidden = keras.layers.Reshape((4 * 3 * CHANNELS,))(hidden)
    model = keras.Model(inputs, keras.layers.Dense(CLASSES, name="logits")(hidden))
    found, types = traced(model)
    assert KERNEL in types
    check_equal(found, by_keras(model))


class Doubled(keras.layers.BatchNormalization):
    def call(self, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        return 2 * super().call(inputs, training=training, mask=mask)


def test_a_subclassed_layer_is_left_to_keras():
    inputs = keras.Input((4, 3, CHANNELS))
    hidden = keras.layers.Flatten()(Doubled(name="norm")(inputs))
    _, types = traced(keras.Model(inputs, keras.layers.Dense(CLASSES, name="logits")(hidden)))
    assert KERNEL not in types


def test_one_value_of_a_channel_has_no_variance(by_keras):
    model = normalized((CHANNELS,))
    found, _ = traced(model, examples=1)
    np.testing.assert_allclose(found[1]["norm/moving_variance"], 0.99)
    np.testing.assert_allclose(found[1]["norm/moving_mean"], by_keras(model, 1)[1]["norm/moving_mean"], rtol=1e-5)


@pytest.mark.parametrize("precision", ["mixed_bfloat16", "mixed_float16"])
def test_under_a_lower_precision_it_computes_in_float32_as_keras_does(precision, by_keras):
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(precision)
    try:
        model = normalized((4, 3, CHANNELS))
    finally:
        keras.config.set_dtype_policy(before)
    found, types = traced(model)
    assert KERNEL in types
    expected = by_keras(model)
    for path in ("norm/moving_mean", "norm/moving_variance"):
        np.testing.assert_allclose(found[1][path], expected[1][path], rtol=1e-4)
    np.testing.assert_allclose(found[2], expected[2], rtol=1e-2)


def test_the_model_is_as_it_was_when_the_step_is_traced():
    model = normalized((4, 3, CHANNELS))
    traced(model)
    assert "call" not in vars(model.get_layer("norm"))
