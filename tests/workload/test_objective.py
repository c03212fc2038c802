"""Losses and metrics of many kinds of models against Keras itself, and what is refused before anything starts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from kinds import KINDS, ZOO, for_keras, workload

from trainer.config.schema import ModelConfig
from trainer.engine.vectors.snapshot import Snapshot
from trainer.plan.description import ModelProbe
from trainer.task.evaluator.score import Evaluator
from trainer.workload import build, describe, step, trial
from trainer.workload.compiling import Wanted
from trainer.workload.data.examples import Batch
from trainer.workload.objective import Objective, _weighted_by_class
from trainer.workload.paths import Paths
from trainer.workload.workload import Workload

pytestmark = pytest.mark.slow

BATCH = 32


def examples(one: Workload, count: int) -> Batch:
    """The first examples to train on."""
    arrays = tuple(map(tf.constant, one.data.train.arrays))
    return Batch(*one.data.train.fetch(tf.range(count, dtype=tf.int64), arrays))


def values(model: keras.Model) -> tuple[dict[str, Any], dict[str, Any]]:
    named = {path: tf.convert_to_tensor(v.value) for path, v in Paths(model).named(model.variables).items()}
    kinds = {p.path: p.trainable for p in step.parameters_of(model)}
    return {p: v for p, v in named.items() if kinds[p]}, {p: v for p, v in named.items() if not kinds[p]}


def keras_results(model: keras.Model) -> dict[str, float]:
    return {name: float(value) for name, value in model.get_metrics_result().items()}


@pytest.mark.long(
    but=[
        *("softmax", "dicts and texts", "two outputs", "labels by name, outputs in a list", "compute_loss", "masks"),
        *("frozen weights", "weights", "binary, of logits"),
    ]
)
@pytest.mark.parametrize("kind", KINDS)
def test_an_evaluation_equals_keras_s(kind):
    one = workload(kind)
    evaluator = Evaluator(one, batch_size=BATCH, device="/cpu:0")
    evaluator.connect("", None)
    initial = step.initial_values(one.model, one.frozen)
    trainable = {p.path for p in step.parameters_of(one.model) if p.trainable}
    state = {path: value for path, value in initial.items() if path not in trainable}
    found = evaluator.score(Snapshot(0, {p: v for p, v in initial.items() if p in trainable}, state, {}))
    arrays = tuple(map(tf.constant, one.data.evaluate.arrays))
    x, y, weights = one.data.evaluate.fetch(tf.range(one.data.evaluate.count, dtype=tf.int64), arrays)
    expected = for_keras(kind, one).evaluate(x, y, sample_weight=weights, batch_size=BATCH, verbose=0, return_dict=True)
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_step_equals_keras_s(kind):
    one = workload(kind)
    model, batch = for_keras(kind, one), examples(one, BATCH)
    made = tf.function(step.make_step(one.objective), autograph=False)
    output = made(*values(one.model), tf.constant([7, 1], tf.int64), batch)
    options = {"training": True} if step.takes_training(model) else {}
    with tf.GradientTape() as tape:
        outputs = model(batch.features, **options)
        loss = model._compute_loss(batch.features, batch.labels, outputs, batch.weights, training=True)
    expected = tape.gradient(loss, [v.value for v in model.trainable_variables])
    model.compute_metrics(batch.features, batch.labels, outputs, batch.weights)
    assert float(output.loss) == pytest.approx(float(loss), rel=1e-6)
    paths = Paths(one.model).named(one.model.trainable_variables)
    for (path, variable), gradient in zip(paths.items(), expected, strict=True):
        given = np.zeros(variable.shape) if gradient is None else tf.convert_to_tensor(gradient)
        np.testing.assert_allclose(output.gradients[path], given, rtol=1e-4, atol=1e-6, err_msg=path)
    results = {name: float(value) for name, value in one.objective.results(output.sums).items()}
    found = {name: value for name, value in keras_results(model).items() if name != "loss"}
    assert results == pytest.approx(found, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("kind", ["dicts and texts", "two outputs", "masked steps", "weights"])
def test_the_sums_of_two_halves_are_the_metrics_of_the_whole(kind):
    one = workload(kind)
    evaluate = step.make_evaluation(one.objective)
    whole = examples(one, BATCH)
    halves = [whole.map(lambda values, rows=rows: values[rows]) for rows in (slice(0, 11), slice(11, None))]
    sums = [evaluate(*values(one.model), batch)[1] for batch in (whole, *halves)]
    expected, found = (
        {name: float(value) for name, value in one.objective.results(total).items()}
        for total in (sums[0], sums[1] + sums[2])
    )
    no_loss = {name for name in expected if name.endswith("loss")}  # of an output: a mean of batches, as in Keras
    assert {n: v for n, v in found.items() if n not in no_loss} == pytest.approx(
        {n: v for n, v in expected.items() if n not in no_loss}, rel=1e-5
    )


@pytest.mark.parametrize(
    ("model", "data"), [("small", "weighted"), ("smoothed", "one_hot"), ("recurrent", "sentences")]
)
def test_class_weights_are_weights_of_examples(model, data):
    weights = {0: 0.5, 1: 3.0}
    opened = build.open_data_set(data, {}, seed=1, user_file=ZOO)
    losses = []
    for named in ({"class_weight": weights}, {}):
        made = build.build_model(model, {}, opened, seed=1, user_file=ZOO)
        objective = build.open_objective(made, opened, Wanted(**named), user_file=ZOO)
        trial.run(objective, opened, has_values=True)
        batch = examples(Workload(made, opened, objective, {}), BATCH)
        if not named:
            classes = np.asarray(batch.labels) if np.ndim(batch.labels) == 1 else np.argmax(batch.labels, -1)
            of_class = np.array([weights.get(int(one), 1.0) for one in classes], np.float32)
            given = 1 if batch.weights is None else np.asarray(batch.weights)
            batch = batch._replace(weights=tf.constant(of_class * given, tf.float32))
        losses.append(float(step.make_step(objective)(*values(made), tf.constant([7, 1], tf.int64), batch).loss))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.parametrize("shape", ["classes", "a column", "one-hot"])
@pytest.mark.parametrize("dtype", ["int64", "float32"])
def test_class_weights_are_those_of_the_classes_in_every_form_of_labels(shape, dtype):
    classes = np.array([0, 1, 1, 0, 1, 0, 0])
    forms = {"classes": classes, "a column": classes[:, None], "one-hot": np.eye(2)[classes]}
    labels = tf.constant(forms[shape].astype(dtype))
    outputs = tf.zeros([7, 2] if shape == "one-hot" else [7, 1])
    weights = _weighted_by_class(labels, outputs, None, (1.0, 5.0))
    assert weights.numpy().tolist() == [1, 5, 5, 1, 5, 1, 1]


def test_numbers_that_are_classes_may_have_any_weights():
    weigh = tf.function(lambda labels: _weighted_by_class(labels, tf.zeros([4, 10]), None, (1.0, 5.0, 2.0)))
    weights = weigh(tf.constant([0.0, 2.0, 9.0, 3.0]))
    assert weights.numpy().tolist() == [1, 2, 1, 1]  # as in Keras, those without one have 1


def test_metrics_that_make_their_variables_late_or_return_several_numbers_count():
    class Two(keras.metrics.Mean):
        def update_state(self, y: Any, outputs: Any, sample_weight: Any = None) -> None:
            super().update_state(outputs)

        def result(self) -> Any:
            return {"mean": super().result(), "twice": 2 * super().result()}

    late = keras.metrics.F1Score(average="macro")
    made = objective_of("smoothed", "one_hot", {"metrics": lambda: {"late": late}}, loss="categorical_crossentropy")
    assert made.size > 0
    assert made.metric_names() == ("late",)
    made = objective_of("small", "weighted", {"metrics": lambda: {"two": Two()}})
    assert made.metric_names() == ("mean", "twice")


# Frozen weights


def test_weights_that_training_never_changes_are_found():
    one = workload("frozen weights")
    assert tuple(re.sub(r"_\d+", "", path) for path in one.objective.frozen) == (
        "normalization/mean",
        "normalization/variance",
        "normalization/count",
        "backbone/dense/kernel",
        "backbone/dense/bias",
        "backbone/batch_normalization/gamma",
        "backbone/batch_normalization/beta",
        "backbone/batch_normalization/moving_mean",
        "backbone/batch_normalization/moving_variance",
    )
    left = [p.path for p in step.parameters_of(one.model, one.objective.frozen)]
    assert set(left) == {
        *("norm/gamma", "norm/beta", "norm/moving_mean", "norm/moving_variance"),
        *("counter/calls", "head/kernel", "head/bias"),
    }


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_step_moves_state_of_any_type_and_no_frozen_weight(accumulate):
    one = workload("frozen weights")
    made = tf.function(step.make_step(one.objective, accumulate=accumulate), autograph=False)
    parameters, state = values(one.model)
    state = {path: tf.cast(value, tf.float32) if path == "counter/calls" else value for path, value in state.items()}
    output = made(parameters, state, tf.constant([7, 1], tf.int64), examples(one, BATCH))
    assert set(output.state) == {"norm/moving_mean", "norm/moving_variance", "counter/calls"}
    assert float(output.state["counter/calls"]) == accumulate
    assert set(output.gradients) == {"norm/gamma", "norm/beta", "head/kernel", "head/bias"}


# Where loss and metrics come from


@pytest.mark.parametrize("kind", ["softmax", "two outputs", "a named loss", "compute_loss", "weights"])
def test_it_is_said_where_loss_and_metrics_come_from(kind, snapshot):
    assert workload(kind).objective.text == snapshot


def objective_of(model: str, data: str, functions: Mapping[str, Any] | None = None, **named: Any) -> Objective:
    opened = build.open_data_set(data, {}, seed=1, user_file=ZOO)
    made = build.build_model(model, {}, opened, seed=1, user_file=ZOO)
    from trainer.workload.compiling import make_objective

    objective = make_objective(made, opened.spec, Wanted(**named), functions=functions)
    trial.run(objective, opened, has_values=True)
    return objective


def test_a_loss_of_the_user_gets_all_labels_and_outputs(snapshot):
    seen = []

    def loss(y: Any, outputs: Any, weight: Any = None) -> Any:
        seen.append((tf.nest.map_structure(lambda one: tuple(one.shape), (y, outputs)), weight is None))
        return tf.reduce_mean(outputs["b"])

    made = objective_of("two_outputs", "two_targets", {"loss": loss})
    assert made.text == snapshot
    assert seen == [(({"a": (7, 1), "b": (7, 1)}, {"a": (7, 1), "b": (7, 1)}), True)] * len(seen)


def test_options_reach_functions_of_the_user():
    def loss(y: Any, outputs: Any, *, power: int = 1) -> Any:
        return tf.reduce_mean(tf.abs(outputs) ** power, -1)

    def near(y: Any, outputs: Any, k: float = 1.0) -> Any:
        return tf.fill(tf.shape(y), k)

    options = {"loss_options": {"power": 0}, "metrics": [{"near": {"k": 0.25}}]}
    made = objective_of("small", "weighted", {"loss": loss, "near": near}, **options)
    opened = build.open_data_set("weighted", {}, seed=1, user_file=ZOO)
    batch = examples(Workload(made.model, opened, made, {}), 4)._replace(weights=None)
    value, sums = step.make_evaluation(made)(*values(made.model), batch)
    assert float(value) == 1.0
    assert {name: float(result) for name, result in made.results(sums).items()} == {"near": 0.25}


@pytest.mark.parametrize("weights_shape", [(7,), (7, 1), (7, 2)])
def test_weights_are_those_of_the_parts_that_a_loss_is_returned_for(weights_shape):
    def loss(y: Any, outputs: Any) -> Any:
        return tf.one_hot(y, 2) + 1.0  # [N, 2]

    made = objective_of("small", "weighted", {"loss": loss}, metrics=[])
    opened = build.open_data_set("weighted", {}, seed=1, user_file=ZOO)
    batch = examples(Workload(made.model, opened, made, {}), 7)
    weights = np.random.default_rng(3).random(weights_shape).astype("float32")
    value, _ = step.make_evaluation(made)(*values(made.model), batch._replace(weights=tf.constant(weights)))
    expected = (np.eye(2)[batch.labels] + 1) * (weights if weights.ndim == 2 else weights[:, None])
    assert float(value) == pytest.approx(float(np.mean(expected)), rel=1e-6)


def test_numbers_have_the_shape_of_outputs_without_a_last_axis():
    shapes = []

    def loss(y: Any, outputs: Any) -> Any:
        shapes.append((tuple(y.shape), tuple(outputs.shape)))
        return tf.abs(y - outputs)

    metrics = {"error": keras.metrics.MeanMetricWrapper(loss)}
    objective_of("one_number", "numbers", {"loss": loss, "metrics": lambda: metrics})
    assert {(len(labels), labels == outputs) for labels, outputs in shapes} == {(1, True)}


def test_a_loss_that_combines_each_label_with_every_output_is_refused(raises):
    def loss(y: Any, outputs: Any) -> Any:
        return tf.abs(y[:, None] - outputs)

    with raises(trial.Mismatch):
        objective_of("one_number", "numbers", {"loss": loss})


@pytest.mark.parametrize(
    ("model", "batch", "size"), [("one_sized", 16, 4), ("one_sized_within", 4, 4), ("built_later", 16, 0)]
)
def test_a_model_that_takes_batches_of_one_size_is_tried_on_such_a_batch(model, batch, size):
    data = {"name": "numbers", "options": {}}
    answer = describe.answer(ModelProbe(asdict(ModelConfig(model)), data, ZOO, seed=1, batch=batch))
    assert answer["description"]["model_batch"] == size


def test_a_loss_that_is_a_sum_is_known():
    assert objective_of("built_later", "numbers", loss="mse", loss_options={"reduction": "sum"}).is_summed
    assert not objective_of("built_later", "numbers", loss="mse").is_summed


def test_a_metric_may_return_its_variable():
    class Count(keras.metrics.Metric):
        def __init__(self) -> None:
            super().__init__()
            self.total = self.add_weight(initializer="zeros")

        def update_state(self, y: Any, outputs: Any, sample_weight: Any = None) -> None:
            self.total.assign_add(tf.cast(tf.shape(y)[0], tf.float32))

        def result(self) -> Any:
            return self.total

    made = objective_of("built_later", "numbers", {"metrics": lambda: {"mine": Count()}}, loss="mse")
    results = tf.function(made.results, autograph=False)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        assert session.run(results(tf.constant([3.0]))) == {"mine": 3.0}


def test_a_model_made_with_a_list_of_inputs_gets_one(recwarn, snapshot):
    from zoo import cosine

    made = objective_of("towers", "pairs", {"loss": cosine})
    assert made.text == snapshot
    assert not [one for one in recwarn if "structure of `inputs`" in str(one.message)]


def test_metrics_of_the_user_have_their_names():
    made = objective_of("small", "weighted", {"metrics": lambda: {"mine": keras.metrics.SparseCategoricalAccuracy()}})
    assert list(made.results(tf.constant([6.0, 8.0]))) == ["mine"]


# What is refused


@pytest.mark.parametrize(
    ("model", "data", "named"),
    [
        ("softmax_not_compiled", "pictures", {}),
        ("small", "weighted", {"loss_options": {"from_logits": False}}),
        ("small", "one_hot", {}),
        ("small", "weighted", {"loss": "mean_sqared_error"}),
        ("small", "weighted", {"metrics": ["AUCC"]}),
        ("small", "weighted", {"metrics": [{"AUC": {"bins": 3}}]}),
        ("small", "weighted", {"loss": "huber", "loss_options": {"sigma": 3}}),
        ("Trains", "weighted", {}),
        ("constrained", "weighted", {}),
        ("spectral", "weighted", {}),
        ("small", "weighted", {"class_weight": {2: 1.0}}),
        ("small", "weighted", {"class_weight": {"a": "b"}}),
        ("two_outputs", "two_targets", {"class_weight": {1: 2.0}}),
        ("mlp", "two_targets", {}),
        ("autoencoder", "weighted", {"loss": "mse"}),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_starts(model, data, named, snapshot):
    question = ModelProbe(asdict(ModelConfig(model)) | named, {"name": data, "options": {}}, ZOO, seed=1)
    result = describe.answer(question)
    text = result.get("problem", {}).get("message") or result["failure"]
    # What Keras numbers, and the values that depend on it, come from the models that tests before made.
    text = re.sub(r"(dense|sequential|spectral_normalization)_\d+", r"\1", text)
    assert re.sub(r"range from \S+ to [-\d.]+", "range from LOW to HIGH", text) == snapshot


def test_an_error_of_the_users_code_names_its_line():
    question = ModelProbe(asdict(ModelConfig("fails")), {"name": "weighted", "options": {}}, ZOO, seed=1)
    result = describe.answer(question)
    assert result["exit_code"] == 65
    assert f"{ZOO}, line " in result["failure"]
    assert result["failure"].endswith("in fails: RuntimeError: no such width")
