"""The replica step against plain Keras: eagerly, compiled and in a v1 graph."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from objectives import objective_of

from trainer.workload import step as replica
from trainer.workload.build import build_model
from trainer.workload.data import DataSet
from trainer.workload.data.draws import generators_of
from trainer.workload.data.examples import ArraySpec, Batch, Spec

pytestmark = pytest.mark.slow

v1 = tf.compat.v1

CROSSENTROPY = "sparse_categorical_crossentropy"
FEATURES = np.random.default_rng(3).random((6, 4), np.float32)
LABELS = np.int64([0, 1, 2, 0, 1, 2])
SEED = np.int64([7, 1])
BATCH = Batch(FEATURES, LABELS)


def plain(l2: float = 0.0) -> keras.Model:
    keras.utils.set_random_seed(5)
    inputs = keras.Input((4,))
    regularizer = keras.regularizers.L2(l2) if l2 else None
    hidden = keras.layers.Dense(8, activation="relu", kernel_regularizer=regularizer, name="dense")(inputs)
    return keras.Model(inputs, keras.layers.Dense(3, name="logits")(hidden))


def with_norm() -> keras.Model:
    keras.utils.set_random_seed(5)
    inputs = keras.Input((4,))
    hidden = keras.layers.BatchNormalization(momentum=0.9, name="norm")(inputs)
    return keras.Model(inputs, keras.layers.Dense(3, name="logits")(hidden))


def with_dropout() -> keras.Model:
    keras.utils.set_random_seed(5)
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(64, activation="relu", name="dense")(inputs)
    hidden = keras.layers.Dropout(0.5, name="dropout")(hidden)
    return keras.Model(inputs, keras.layers.Dense(3, name="logits")(hidden))


# Of these models a step is traced and compiled once for several tests, which do not change them.
shared_plain, shared_with_dropout = functools.cache(plain), functools.cache(with_dropout)


def with_everything(dropout: float = 0.5) -> keras.Model:
    keras.utils.set_random_seed(5)
    inputs = keras.Input((4,))
    hidden = keras.layers.Dense(16, activation="relu", kernel_regularizer=keras.regularizers.L2(0.1), name="dense")(
        inputs
    )
    hidden = keras.layers.BatchNormalization(name="norm")(hidden)
    hidden = keras.layers.Dropout(dropout, name="dropout")(hidden)
    return keras.Model(inputs, keras.layers.Dense(3, name="logits")(hidden))


def values_of(model: keras.Model) -> tuple[dict[str, Any], dict[str, Any]]:
    """(parameters, state) of a model by path."""
    values = replica.initial_values(model)
    kinds = {p.path: p.trainable for p in replica.parameters_of(model)}
    return {p: v for p, v in values.items() if kinds[p]}, {p: v for p, v in values.items() if not kinds[p]}


@functools.cache
def make_step(model: keras.Model, loss: str = CROSSENTROPY, *shapes: tuple[int, ...], accumulate: int = 1) -> Any:
    of_examples = dict(zip(("features", "labels"), shapes, strict=False)) or {"features": (4,)}
    return replica.make_step(objective_of(model, loss, **of_examples), accumulate=accumulate)


def shapes_of(batch: Batch) -> list[tuple[int, ...]]:
    return [array.shape[1:] for array in (batch.features, batch.labels)]


def accuracy_of(sums: np.ndarray) -> float:
    """From the sums of the only metric: examples that are right, and all examples."""
    return float(sums[0] / sums[1])


def map_tensors(function: Callable[[Any], Any], nest: Any) -> Any:
    return tf.nest.map_structure(lambda value: None if value is None else function(value), nest)


function_of = functools.cache(functools.partial(tf.function, autograph=False))


def eagerly(step: Callable[..., Any], *inputs: Any) -> Any:
    return map_tensors(np.asarray, step(*map_tensors(tf.constant, inputs)))


def traced(step: Callable[..., Any], *inputs: Any) -> Any:
    return eagerly(function_of(step), *inputs)


def compiled(step: Callable[..., Any], *inputs: Any) -> Any:
    return eagerly(function_of(step, jit_compile=True), *inputs)


def in_a_v1_graph(step: Callable[..., Any], *inputs: Any) -> Any:
    with tf.Graph().as_default(), v1.Session() as session:
        fed = map_tensors(lambda value: v1.placeholder(value.dtype, value.shape), inputs)
        feeds = dict(zip(tf.nest.flatten(fed), tf.nest.flatten(inputs), strict=True))
        feeds.pop(None, None)  # there are no weights
        return session.run(tf.function(step, autograph=False)(*fed), feeds)


COMPILED = pytest.param(compiled, marks=pytest.mark.long)  # XLA takes seconds for each; `everything` is compiled always
HOW = [eagerly, traced, COMPILED, in_a_v1_graph]


def run(model: keras.Model, *, how: Callable[..., Any] = traced, seed: Any = SEED, loss: str = CROSSENTROPY) -> Any:
    """(gradients, state', loss, accuracy) of one step on FEATURES and LABELS."""
    gradients, state, value, sums, *_ = how(make_step(model, loss), *values_of(model), seed, Batch(FEATURES, LABELS))
    return gradients, state, value, accuracy_of(sums)


def check_equal(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert sorted(found) == sorted(expected)
    for path, value in expected.items():
        np.testing.assert_allclose(found[path], value, rtol=1e-5, atol=1e-6, err_msg=path)


@pytest.mark.parametrize("how", HOW)
def test_a_step_equals_a_plain_keras_step(how):
    model = plain()
    crossentropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    with tf.GradientTape() as tape:
        outputs = model(FEATURES, training=True)
        value = crossentropy(LABELS, outputs)
    expected = tape.gradient(value, [v.value for v in model.trainable_variables])
    gradients, _, loss, accuracy = run(model, how=how)
    check_equal(gradients, {v.path: g.numpy() for v, g in zip(model.trainable_variables, expected, strict=True)})
    assert loss == pytest.approx(float(value), rel=1e-6)
    assert accuracy == pytest.approx(np.mean(np.argmax(outputs, -1) == LABELS))


@pytest.mark.parametrize("how", HOW)
def test_the_moving_statistics_equal_those_of_plain_keras(how):
    model = with_norm()
    _, state, _, _ = run(model, how=how)
    model(FEATURES, training=True)  # moves the model's own
    check_equal(state, {v.path: v.numpy() for v in model.non_trainable_variables})


def test_the_moving_statistics_move_by_a_tenth_to_the_batchs():
    _, state, _, _ = run(with_norm())
    check_equal(
        state, {"norm/moving_mean": 0.1 * FEATURES.mean(0), "norm/moving_variance": 0.9 + 0.1 * FEATURES.var(0)}
    )


def test_a_step_changes_nothing_in_the_model():
    model = with_everything()
    before = replica.initial_values(model)
    run(model)
    check_equal(replica.initial_values(model), before)


@pytest.mark.parametrize("how", HOW)
def test_dropout_repeats_for_the_same_seed(how):
    first, again = (run(model, how=how)[0] for model in (shared_with_dropout(), with_dropout()))
    assert {path: value.tobytes() for path, value in first.items()} == {p: v.tobytes() for p, v in again.items()}


@pytest.mark.parametrize("seed", [np.int64([7, 2]), np.int64([8, 1])], ids=["another step", "another run"])
@pytest.mark.parametrize("how", HOW)
def test_dropout_differs_for_another_seed(how, seed):
    assert run(shared_with_dropout(), how=how)[2] != run(shared_with_dropout(), how=how, seed=seed)[2]


def test_every_layer_draws_for_itself():
    inputs = keras.Input((64,))
    first = keras.layers.Dropout(0.5, name="first")(inputs)
    second = keras.layers.Dropout(0.5, name="second")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(3, name="logits")(keras.layers.Concatenate()([first, second])))
    ones = np.ones((1, 64), np.float32)
    step = replica.make_step(objective_of(model, features=(64,)))
    gradients, *_ = traced(step, *values_of(model), SEED, Batch(ones, LABELS[:1]))
    kept = gradients["logits/kernel"][:, 0] != 0
    assert not (kept[:64] == kept[64:]).all()


def test_the_step_draws_nothing_from_the_global_generator():
    first = run(with_dropout())[2]
    keras.utils.set_random_seed(99)
    tf.random.normal([3])
    assert run(with_dropout())[2] == first


@pytest.mark.parametrize("how", HOW)
def test_a_regularizer_is_added_to_the_loss_and_to_its_gradient(how):
    model, without = shared_plain(l2=0.1), shared_plain()
    kernel = model.get_layer("dense").kernel.numpy()
    regularized, bare = run(model, how=how), run(without, how=how)
    assert regularized[2] - bare[2] == pytest.approx(0.1 * np.square(kernel).sum(), rel=1e-5)
    np.testing.assert_allclose(
        regularized[0]["dense/kernel"] - bare[0]["dense/kernel"], 0.2 * kernel, rtol=1e-4, atol=1e-6
    )


@pytest.mark.parametrize(
    ("how", "dropout"), [(traced, 0.5), (in_a_v1_graph, 0.5), (compiled, 0.0)]
)  # XLA draws other numbers from the same seed
def test_a_model_with_everything_gives_the_same_step_in_every_way(how, dropout):
    expected, found = run(with_everything(dropout), how=eagerly), run(with_everything(dropout), how=how)
    check_equal(found[0], expected[0])
    check_equal(found[1], expected[1])
    check_equal({"loss": found[2], "accuracy": found[3]}, {"loss": expected[2], "accuracy": expected[3]})


@pytest.mark.parametrize("how", HOW)
def test_a_layer_may_have_a_name_that_plain_keras_trains(how):
    inputs = keras.Input((4,))
    model = keras.Model(inputs, keras.layers.Dense(3, name="_logits")(inputs))
    assert sorted(run(model, how=how)[0]) == ["_logits/bias", "_logits/kernel"]


def test_a_parameter_that_the_loss_does_not_use_has_a_zero_gradient():
    inputs = keras.Input((4,))
    outputs = keras.layers.Dense(3, name="logits")(inputs)
    unused = keras.layers.Dense(2, name="unused")(inputs)
    model = keras.Model(inputs, [outputs, unused])

    class First(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        def call(self, features: Any, training: bool = False) -> Any:
            return self.inner(features, training=training)[0]

    first = First()
    first(FEATURES)
    gradients = run(first)[0]
    (path,) = [path for path in gradients if path.endswith("unused/kernel")]
    assert gradients[path].tolist() == np.zeros((4, 2)).tolist()


def test_an_embedding_has_a_dense_gradient():
    inputs = keras.Input((4,))
    embedded = keras.layers.Embedding(5, 2, name="table")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(3, name="logits")(keras.layers.Flatten()(embedded)))
    gradients = run(model)[0]  # all features truncate to row 0
    assert [bool(row.any()) for row in gradients["table/embeddings"]] == [True, False, False, False, False]


def test_a_parameter_that_is_not_trained_is_state():
    model = plain()
    model.get_layer("dense").trainable = False
    assert {p.path: p.trainable for p in replica.parameters_of(model)} == {
        "dense/kernel": False,
        "dense/bias": False,
        "logits/kernel": True,
        "logits/bias": True,
    }


def test_state_that_is_not_trained_is_returned_unchanged():
    model = plain()
    model.get_layer("dense").trainable = False
    gradients, state, _, _ = run(model)
    assert sorted(gradients) == ["logits/bias", "logits/kernel"]
    check_equal(state, {v.path: v.numpy() for v in model.get_layer("dense").variables})


def test_parameters_are_in_creation_order_without_seed_generators():
    assert [(p.path, p.shape, p.trainable) for p in replica.parameters_of(with_everything())] == [
        ("dense/kernel", (4, 16), True),
        ("dense/bias", (16,), True),
        ("norm/gamma", (16,), True),
        ("norm/beta", (16,), True),
        ("norm/moving_mean", (16,), False),
        ("norm/moving_variance", (16,), False),
        ("logits/kernel", (16, 3), True),
        ("logits/bias", (3,), True),
    ]


def test_a_variable_that_is_not_float32_is_refused(raises):
    inputs = keras.Input((4,))
    model = keras.Model(inputs, keras.layers.Dense(3, dtype="float64", name="wide")(inputs))
    with raises(ValueError):
        replica.parameters_of(model)


def test_an_evaluation_uses_the_moving_statistics_and_no_dropout():
    model = with_everything()
    evaluate = replica.make_evaluation(objective_of(model))
    loss, sums = traced(evaluate, *values_of(model), Batch(FEATURES, LABELS))
    outputs = model(FEATURES, training=False)
    expected = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(LABELS, outputs)
    regularization = float(sum(model.losses))
    assert loss == pytest.approx(float(expected) + regularization, rel=1e-6)
    assert accuracy_of(sums) == pytest.approx(np.mean(np.argmax(outputs, -1) == LABELS))


# The batch in parts


def parted(
    model: keras.Model,
    *,
    how: Callable[..., Any] = traced,
    accumulate: int = 2,
    loss: str = CROSSENTROPY,
    batch: Batch = BATCH,
    seed: Any = SEED,
    scale: Any = (),
) -> replica.StepOutput:
    """One step on a batch that is computed in parts; `scale` is () or a loss scale in a tuple."""
    step = make_step(model, loss, *shapes_of(batch), accumulate=accumulate)
    return how(step, *values_of(model), seed, batch, *scale)


def check_the_same(found: replica.StepOutput, expected: replica.StepOutput) -> None:
    check_equal(found.gradients, expected.gradients)
    check_equal(found.state, expected.state)
    check_equal({"loss": found.loss, "sums": found.sums}, {"loss": expected.loss, "sums": expected.sums})


@pytest.mark.parametrize("accumulate", [2, 3, 6])
@pytest.mark.parametrize("how", HOW)
def test_a_batch_in_parts_gives_what_the_whole_batch_gives(how, accumulate):
    model = shared_plain(l2=0.1)
    check_the_same(parted(model, how=how, accumulate=accumulate), parted(model, how=how, accumulate=1))


def convolution() -> keras.Model:
    keras.utils.set_random_seed(5)
    inputs = keras.Input((5, 4, 2))
    hidden = keras.layers.Flatten()(keras.layers.Conv2D(3, 2, activation="tanh", name="conv")(inputs))
    return keras.Model(inputs, keras.layers.Dense(3, name="values")(hidden))


@pytest.mark.parametrize("how", HOW)
def test_features_and_labels_of_any_shape_are_cut_into_parts(how):
    random = np.random.default_rng(8)
    batch = Batch(random.random((6, 5, 4, 2), np.float32), random.random((6, 3), np.float32))
    whole, parts = (
        parted(convolution(), how=how, accumulate=count, loss="mean_squared_error", batch=batch) for count in (1, 3)
    )
    check_the_same(parts, whole)


@pytest.mark.parametrize("how", HOW)
def test_a_parts_labels_may_be_numbers_without_a_shape(how):
    inputs = keras.Input((4,))
    model = keras.Model(inputs, keras.layers.Dense(1, name="logit")(inputs))
    batch = Batch(FEATURES, np.float32([0, 1, 1, 0, 1, 0]))
    whole, parts = (
        parted(model, how=how, accumulate=count, loss="binary_crossentropy", batch=batch) for count in (1, 2)
    )
    check_the_same(parts, whole)


@pytest.mark.parametrize("how", HOW)
def test_the_moving_statistics_move_part_by_part(how):
    first, second = FEATURES[:3], FEATURES[3:]
    check_equal(
        parted(with_norm(), how=how).state,
        {
            "norm/moving_mean": 0.9 * 0.1 * first.mean(0) + 0.1 * second.mean(0),
            "norm/moving_variance": 0.9 * (0.9 + 0.1 * first.var(0)) + 0.1 * second.var(0),
        },
    )


@pytest.mark.parametrize("how", HOW)
def test_every_part_draws_for_itself(how):
    inputs = keras.Input((64,))
    hidden = keras.layers.Dropout(0.5, name="dropout")(inputs)
    zeros = keras.layers.Dense(1, kernel_initializer="zeros", name="value")
    batch = Batch(np.ones((2, 64), np.float32), np.float32([[-1], [-1]]))
    outcome = parted(keras.Model(inputs, zeros(hidden)), how=how, loss="mean_squared_error", batch=batch)
    kept = outcome.gradients["value/kernel"][:, 0]  # 2 for each part that kept an input, for 2 * 1 * 2, halved
    assert sorted({float(value) for value in kept}) == [0.0, 2.0, 4.0]


@pytest.mark.parametrize("how", HOW)
def test_the_draws_of_parts_repeat_for_the_same_seed(how):
    first, again = (parted(model, how=how) for model in (shared_with_dropout(), with_dropout()))
    assert {p: v.tobytes() for p, v in first.gradients.items()} == {p: v.tobytes() for p, v in again.gradients.items()}


@pytest.mark.parametrize("how", HOW)
def test_the_draws_of_parts_differ_for_another_seed(how):
    model = shared_with_dropout()
    assert parted(model, how=how).loss != parted(model, how=how, seed=np.int64([7, 2])).loss


@pytest.mark.parametrize(("how", "dropout"), [(traced, 0.5), (in_a_v1_graph, 0.5), (compiled, 0.0)])
def test_a_model_with_everything_gives_the_same_parts_in_every_way(how, dropout):
    check_the_same(parted(with_everything(dropout), how=how), parted(with_everything(dropout), how=eagerly))


# Precision and the loss scale

MODELS = """
import keras


def normed(input_shape, classes):
    inputs = keras.Input(input_shape)
    hidden = keras.layers.Dense(16, activation="relu", name="dense")(inputs)
    hidden = keras.layers.BatchNormalization(momentum=0.9, name="norm")(hidden)
    return keras.Model(inputs, keras.layers.Dense(classes, name="logits")(hidden))


def line(input_shape, classes):
    inputs = keras.Input(input_shape)
    return keras.Model(inputs, keras.layers.Dense(1, kernel_initializer="zeros", name="line")(inputs))


def wrong(input_shape, classes):
    raise RuntimeError("no such model")
"""

MIXED = ["mixed_bfloat16", "mixed_float16"]


@pytest.fixture(scope="module")
def build(tmp_path_factory) -> Callable[..., keras.Model]:
    """build(name, precision) -> the model of MODELS."""
    models = tmp_path_factory.mktemp("models") / "models.py"
    models.write_text(MODELS)
    unread: Any = None

    @functools.cache
    def build_one(name: str, precision: str) -> keras.Model:
        data = DataSet(unread, unread, Spec(ArraySpec((4,), "float32"), ArraySpec((), "int64"), None, 3))
        return build_model(name, {}, data, seed=5, user_file=str(models), precision=precision)

    return build_one


def check_near(found: dict[str, Any], expected: dict[str, Any], *, share: float) -> None:
    """No value is off by more than a share of the largest of its parameter."""
    assert sorted(found) == sorted(expected)
    for path, value in expected.items():
        atol = share * np.abs(value).max() + 1e-3 * share
        np.testing.assert_allclose(found[path], value, rtol=0, atol=atol, err_msg=path)


@pytest.mark.parametrize("precision", MIXED)
def test_a_model_of_mixed_precision_computes_in_it_and_keeps_float32(build, precision):
    model = build("normed", precision)
    assert {layer.compute_dtype for layer in model.layers[1:]} == {precision.removeprefix("mixed_")}
    assert {v.dtype for v in model.variables} == {"float32"}


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("precision", MIXED)
@pytest.mark.parametrize("how", [eagerly, traced, COMPILED])
def test_the_results_of_a_mixed_precision_step_are_float32(build, how, precision, accumulate):
    outcome = parted(build("normed", precision), how=how, accumulate=accumulate)
    numbers = outcome._replace(finite=(), divisor=())
    assert {value.dtype for value in tf.nest.flatten(numbers)} == {np.dtype(np.float32)}


@pytest.mark.parametrize("precision", MIXED)
@pytest.mark.parametrize("how", [eagerly, traced, COMPILED])
def test_a_step_of_mixed_precision_is_close_to_one_of_float32(build, how, precision):
    expected = parted(build("normed", "float32"), how=how, accumulate=1)
    found = parted(build("normed", precision), how=how, accumulate=1)
    assert found.loss == pytest.approx(expected.loss, rel=0.02)
    check_near(found.gradients, expected.gradients, share=0.05)
    check_near(found.state, expected.state, share=0.02)


def test_the_precision_of_one_model_is_not_that_of_the_next(build):
    build("normed", "mixed_float16")
    assert keras.config.dtype_policy().name == "float32"


def test_a_model_that_cannot_be_built_leaves_no_precision_behind(build):
    with pytest.raises(RuntimeError, match="no such model"):
        build("wrong", "mixed_float16")
    assert keras.config.dtype_policy().name == "float32"


SCALE = (np.float32(1024),)
TOO_LARGE = (np.float32(1e30),)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("how", HOW)
def test_a_loss_scale_changes_no_gradient_but_in_its_rounding(build, how, accumulate):
    model = build("normed", "mixed_float16")
    plain, scaled = (parted(model, how=how, accumulate=accumulate, scale=scale) for scale in ((), SCALE))
    check_near(scaled.gradients, plain.gradients, share=0.002)


def test_the_loss_is_reported_without_its_scale(build):
    model = build("normed", "mixed_float16")
    assert parted(model, scale=SCALE).loss == parted(model).loss


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize(("scale", "expected"), [((), 0.0), (SCALE, 0.0), (TOO_LARGE, 1.0)])
@pytest.mark.parametrize("how", HOW)
def test_an_overflow_is_reported(build, how, scale, expected, accumulate):
    model = build("normed", "mixed_float16")
    assert parted(model, how=how, accumulate=accumulate, scale=scale).overflow == expected


@pytest.mark.parametrize("accumulate", [1, 2])
def test_an_overflow_of_one_gradient_in_one_part_is_reported(build, accumulate):
    batch = Batch(np.ones((4, 4), np.float32), np.ones((4, 1), np.float32))
    batch.features[0] = 60_000  # in float16 a number; times the scale it is none
    outcome = parted(
        build("line", "mixed_float16"), accumulate=accumulate, loss="mean_squared_error", batch=batch, scale=SCALE
    )
    assert [bool(np.isfinite(gradient).all()) for gradient in outcome.gradients.values()] == [False, True]
    assert (outcome.overflow, outcome.bad, outcome.finite.tolist()) == (1.0, 0.0, [True, False, True])


# What is not finite


@keras.saving.register_keras_serializable("tests")
class Root(keras.layers.Layer):
    """Adds sqrt(weight * x): at x = 0 its value is finite, and its gradient is not."""

    def build(self, shape: Any) -> None:
        self.weight = self.add_weight(shape=(), initializer="ones", name="weight")

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return inputs + tf.sqrt(self.weight * inputs[:, :1])


@functools.cache
def rooted() -> keras.Model:
    keras.utils.set_random_seed(5)
    inputs = keras.Input((4,))
    return keras.Model(inputs, keras.layers.Dense(3, name="logits")(Root(name="root")(inputs)))


def outcome_of(model: keras.Model, features: np.ndarray, *scale: Any, how: Any = traced, accumulate: int = 1) -> Any:
    step = make_step(model, accumulate=accumulate)
    return how(step, *values_of(model), SEED, Batch(features, LABELS), *scale)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("how", HOW)
def test_a_finite_step_is_not_bad(how, accumulate):
    outcome = outcome_of(rooted(), FEATURES + 1, how=how, accumulate=accumulate)
    assert (outcome.bad, outcome.finite.tolist()) == (0.0, [True, True, True, True])


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("how", HOW)
def test_a_gradient_that_is_not_finite_is_bad_although_the_loss_is_finite(how, accumulate):
    features = FEATURES + 1
    features[5, 0] = 0
    outcome = outcome_of(rooted(), features, how=how, accumulate=accumulate)
    assert list(outcome.gradients) == ["root/weight", "logits/kernel", "logits/bias"]
    assert (outcome.bad, outcome.finite.tolist(), np.isfinite(outcome.loss)) == (1.0, [True, False, True, True], True)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("how", HOW)
def test_a_loss_that_is_not_finite_is_bad(how, value):
    features = FEATURES + 1
    features[5, 1] = value
    outcome = outcome_of(rooted(), features, how=how)
    assert (outcome.bad, outcome.overflow, outcome.finite[0]) == (1.0, 0.0, False)


@pytest.mark.parametrize(("scale", "bad"), [(1024.0, 0.0), (2.0, 0.0), (1.0, 1.0)])
def test_a_gradient_that_overflows_is_bad_only_if_no_lower_scale_would_save_it(scale, bad):
    features = FEATURES + 1
    features[5, 0] = 0
    outcome = outcome_of(rooted(), features, np.float32(scale))
    assert (outcome.overflow, outcome.bad) == (1.0, bad)


def test_a_loss_that_is_not_finite_is_bad_under_a_loss_scale_too():
    assert outcome_of(rooted(), np.full_like(FEATURES, np.nan), np.float32(1024)).bad == 1.0


@pytest.mark.parametrize("how", HOW)
def test_a_small_gradient_vanishes_in_float16_without_a_scale_and_survives_with_it(build, how):
    model, batch = build("line", "mixed_float16"), Batch(np.ones((2, 4), np.float32), np.float32([[1e-9], [1e-9]]))
    vanished, survived = (
        parted(model, how=how, accumulate=1, loss="mean_squared_error", batch=batch, scale=scale)
        for scale in ((), (np.float32(2**15),))
    )
    assert vanished.gradients["line/kernel"].tolist() == [[0.0]] * 4
    np.testing.assert_allclose(survived.gradients["line/kernel"], np.full((4, 1), -2e-9), rtol=0.002)


class Drawing(keras.layers.Layer):
    """Adds numbers that its code draws while it is traced."""

    def call(self, inputs: Any) -> Any:
        return inputs + np.random.normal(size=4).astype("float32") + GENERATOR.normal(size=4).astype("float32")


GENERATOR = np.random.default_rng()


def test_numbers_that_a_models_code_draws_are_the_same_in_each_trace():
    keras.utils.set_random_seed(5)
    inputs = keras.Input((4,))
    model = keras.Model(inputs, keras.layers.Dense(3)(Drawing()(inputs)))
    values, seed = replica.initial_values(model), tf.constant(SEED)

    def loss(trace_seed: int) -> float:
        step = replica.make_step(objective_of(model, CROSSENTROPY, labels=()), trace_seed=trace_seed)
        return float(tf.function(step, autograph=False)(values, {}, seed, BATCH).loss)

    np.random.seed(1)
    first = loss(7)
    np.random.seed(2)
    state = GENERATOR.bit_generator.state
    assert (loss(7), GENERATOR.bit_generator.state) == (first, state)
    assert loss(8) != first


def test_a_generator_of_the_users_is_found_behind_any_number_of_layers():
    layers = [keras.layers.Conv2D(1, 1) for _ in range(200)]
    assert generators_of(*layers, Drawing()) == [GENERATOR]
