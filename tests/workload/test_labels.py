"""Labels that are no numbers or no classes are taken where the loss says which are none, and refused elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import losses, ops

from trainer.workload import step, trial
from trainer.workload.compiling import Wanted, make_objective
from trainer.workload.data import DataError
from trainer.workload.data.examples import Batch, DataSet
from trainer.workload.data.sources import open_parts
from trainer.workload.labels import for_loss
from trainer.workload.objective import Objective
from trainer.workload.output_checks import Mismatch

X = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
CLASSES = np.arange(32) % 3
TARGETS = X[:, :3] + 1


def some(labels: np.ndarray, value: Any, dtype: str) -> np.ndarray:
    """Labels of which the 20th example and some after it have a value."""
    changed = labels.astype(dtype)
    changed[20::4] = value
    return changed


def masked(y: Any, outputs: Any) -> Any:
    known = ops.logical_not(ops.isnan(y))
    return ops.mean(ops.square(ops.where(known, y, outputs) - outputs), -1)


def masked_too_late(y: Any, outputs: Any) -> Any:
    """Its gradient is not finite, though the loss is: where() takes it of both."""
    squares = ops.square(y - outputs)
    return ops.mean(ops.where(ops.isnan(y), 0.0, squares), -1)


def masked_classes(y: Any, outputs: Any) -> Any:
    one_hot = ops.one_hot(ops.cast(y, "int32"), 3)  # of -1 zeros
    return -ops.sum(one_hot * ops.log_softmax(outputs), -1)


class Masked(losses.Loss):
    def call(self, y: Any, outputs: Any) -> Any:
        return masked(y, outputs)


def sparse(**options: Any) -> losses.Loss:
    return losses.SparseCategoricalCrossentropy(from_logits=True, **options)


IOU_WITHOUT = {"metrics": [keras.metrics.MeanIoU(3, ignore_class=255, sparse_y_pred=False)]}

# Labels, the loss, what else the model is compiled with, the number of classes that the data names.
TAKEN: dict[str, tuple[np.ndarray, Any, dict[str, Any], int | None]] = {
    "-1 left out": (some(CLASSES, -1, "int32"), sparse(ignore_class=-1), {}, None),
    "-1 of int8": (some(CLASSES, -1, "int8"), sparse(ignore_class=-1), {}, None),
    "-100 left out": (some(CLASSES, -100, "int64"), sparse(ignore_class=-100), {}, None),
    "255 of uint8": (some(CLASSES, 255, "uint8"), sparse(ignore_class=255), {}, None),
    "255, and 3 classes": (some(CLASSES, 255, "uint8"), sparse(ignore_class=255), IOU_WITHOUT, 3),
    "0 left out": (CLASSES.astype("int32"), sparse(ignore_class=0), {}, None),
    "-1 masked by the user": (some(CLASSES, -1, "int32"), masked_classes, {}, None),
    "-1 and 1 of a hinge": (np.where(CLASSES > 0, 1, -1)[:, None] * np.ones((1, 3), "int32"), "hinge", {}, None),
    "integers as numbers": (np.arange(-48, 48).reshape(32, 3), "mse", {}, 2),
    "nan masked by a function": (some(TARGETS, np.nan, "float32"), masked, {}, None),
    "nan masked by a class": (some(TARGETS, np.nan, "float64"), Masked(), {}, None),
    "no nan": (TARGETS, "mse", {}, None),
}
REFUSED: dict[str, tuple[np.ndarray, Any, dict[str, Any], int | None]] = {
    "-1": (some(CLASSES, -1, "int32"), sparse(), {}, None),
    "-1 by name": (some(CLASSES, -1, "int32"), "sparse_categorical_crossentropy", {}, None),
    "above": (some(CLASSES, 3, "int32"), sparse(), {}, 3),
    "another than is left out": (some(CLASSES, -2, "int32"), sparse(ignore_class=-1), {}, None),
    "two of which one is left out": (
        some(some(CLASSES, -1, "int32")[::-1], -2, "int32"),
        sparse(ignore_class=-1),
        {},
        None,
    ),
    "-1 of a crossentropy of two": (np.where(CLASSES > 0, 1, -1)[:, None], "binary_crossentropy", {}, None),
    "nan": (some(TARGETS, np.nan, "float32"), "mse", {}, None),
    "infinite": (some(TARGETS, np.inf, "float32"), losses.Huber(), {}, None),
    "beyond float32": (some(TARGETS, 1e39, "float64"), "mae", {}, None),
    "nan of a function without a mask": (
        some(TARGETS, np.nan, "float32"),
        lambda y, p: ops.mean((y - p) ** 2, -1),
        {},
        None,
    ),
    "nan whose gradient is not": (some(TARGETS, np.nan, "float32"), masked_too_late, {}, None),
}


def opened(labels: np.ndarray, loss: Any, options: dict[str, Any], classes: int | None) -> tuple[Objective, DataSet]:
    data = open_parts({"train": (X, labels), "evaluate": (X, labels), "classes": classes}, "mine", seed=0)
    inputs = keras.Input((4,))
    width = 1 if loss == "binary_crossentropy" else 3
    model = keras.Model(inputs, keras.layers.Dense(width, name="out")(inputs))
    model.compile("sgd", loss, **options)
    return make_objective(model, data.spec, Wanted()), data


@pytest.mark.parametrize("case", TAKEN)
def test_labels_that_the_loss_leaves_out_are_taken(case):
    objective, data = opened(*TAKEN[case])
    trial.run(objective, data, has_values=True)
    labels = TAKEN[case][0]
    train = for_loss(objective, data).train
    batch = Batch(*train.fetch(tf.range(32, dtype=tf.int64), tuple(map(tf.constant, train.arrays))))
    outputs = step.make_evaluation(objective)
    values = {path: tf.constant(value) for path, value in step.initial_values(objective.model).items()}
    expected = objective.model.evaluate(X, labels, batch_size=32, verbose=0, return_dict=True)["loss"]
    np.testing.assert_allclose(float(tf.function(outputs)(values, values, batch)[0]), expected, rtol=1e-6)


@pytest.mark.parametrize("case", REFUSED)
def test_other_labels_are_refused_before_the_start(case):
    objective, data = opened(*REFUSED[case])
    with pytest.raises(DataError) as caught:
        trial.run(objective, data, has_values=True)
    assert "mine, train labels: example " in str(caught.value)
    assert "nan_to_num" not in str(caught.value)


def test_classes_that_the_model_does_not_tell_apart_are_refused_though_others_are_left_out():
    objective, data = opened(some(CLASSES, 255, "uint8"), sparse(ignore_class=7), {}, None)
    with pytest.raises(Mismatch):
        trial.run(objective, data, has_values=True)


class Rows:
    def __init__(self, labels: np.ndarray) -> None:
        self._labels = labels

    def __len__(self) -> int:
        return len(X)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return X[index], self._labels[index]


def batches(labels: np.ndarray) -> Callable[[Any], Any]:
    return lambda context: [(X[row : row + 8], labels[row : row + 8]) for row in range(0, 32, 8)]


SOURCES = {"rows": Rows, "batches": batches, "dataset": lambda y: tf.data.Dataset.from_tensor_slices((X, y)).batch(8)}


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("loss", [masked, "mse"], ids=["masked", "mse"])
def test_labels_that_are_read_later_are_judged_with_the_loss_too(source, loss):
    labels = TARGETS.copy()
    labels[:4] = np.nan
    parts = {part: SOURCES[source](labels) for part in ("train", "evaluate")}
    data = open_parts(parts, "mine", seed=0)
    inputs = keras.Input((4,))
    model = keras.Model(inputs, keras.layers.Dense(3)(inputs))
    model.compile("sgd", loss)
    objective = make_objective(model, data.spec, Wanted())
    if loss == "mse":
        with pytest.raises(DataError, match="labels"):
            trial.run(objective, data, has_values=True)
    else:
        assert trial.run(objective, data, has_values=True) == 0


def test_the_accuracy_by_default_counts_what_has_a_label():
    labels = some(CLASSES, -1, "int32")
    data = open_parts({"train": (X, labels), "evaluate": (X, labels)}, "mine", seed=0)
    inputs = keras.Input((4,))
    model = keras.Model(inputs, keras.layers.Dense(3)(inputs))
    wanted = Wanted("sparse_categorical_crossentropy", {"ignore_class": -1})
    objective = make_objective(model, data.spec, wanted)
    trial.run(objective, data, has_values=True)
    evaluate = tf.function(step.make_evaluation(objective))
    values = {path: tf.constant(value) for path, value in step.initial_values(model).items()}
    accuracy = objective.results(evaluate(values, values, Batch(tf.constant(X), tf.constant(labels)))[1])["accuracy"]
    known = labels >= 0
    right = model(X).numpy().argmax(1)[known] == labels[known]
    np.testing.assert_allclose(accuracy, right.mean(), rtol=1e-6)


def test_classes_have_weights_beside_labels_that_are_left_out():
    objective, data = opened(some(CLASSES, -1, "int32"), sparse(ignore_class=-1), {}, None)
    weighted = make_objective(objective.model, data.spec, Wanted(class_weight={0: 2.0}))
    trial.run(weighted, data, has_values=True)
