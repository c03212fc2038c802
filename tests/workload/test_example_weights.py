"""Weights of examples in one part of the data only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from trainer.workload import step, trial
from trainer.workload.compiling import Wanted, make_objective
from trainer.workload.data import DataError, open_data
from trainer.workload.data.pipeline import evaluation_batches
from trainer.workload.data.sources import open_parts


def batches(arrays: tuple[np.ndarray, ...]) -> Callable[[Any], Any]:
    return lambda context: [tuple(array[:8] for array in arrays)]


def parts_with(kind: str, *, is_trained: bool) -> dict[str, Any]:
    x = np.random.default_rng(0).normal(size=(16, 3)).astype("float32")
    y, w = (x[:, 0] > 0).astype("float32"), np.where(x[:, 0] > 0, 4, 1).astype("float32")
    weighted: Any = (x, y, w)
    plain: Any = (x, y)
    if kind == "dataset":
        weighted, plain = (tf.data.Dataset.from_tensor_slices(one).batch(8) for one in (weighted, plain))
    elif kind == "arrays and a dataset":
        plain = tf.data.Dataset.from_tensor_slices(plain).batch(8)
    elif kind == "batches":
        weighted, plain = batches(weighted), batches(plain)
    return {"train": weighted, "evaluate": plain} if is_trained else {"train": plain, "evaluate": weighted}


@pytest.mark.long(but=["in training-arrays", "in the evaluation-dataset", "in training-batches"])
@pytest.mark.parametrize("kind", ["arrays", "dataset", "arrays and a dataset", "batches"])
@pytest.mark.parametrize("is_trained", [True, False], ids=["in training", "in the evaluation"])
def test_one_part_may_have_weights(kind, is_trained):
    """Without weights all examples count alike, as in Keras."""
    data = open_parts(parts_with(kind, is_trained=is_trained), "mine", seed=0)
    assert (data.spec.weights is not None) == is_trained
    inputs = keras.Input((3,))
    model = keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid")(inputs))
    model.compile("sgd", "binary_crossentropy", weighted_metrics=["accuracy"])
    objective = make_objective(model, data.spec, Wanted())
    trial.run(objective, data, has_values=True)
    initial = step.initial_values(model)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        evaluated = evaluation_batches(data.evaluate, batch_size=8)
        values = {path: tf.constant(value) for path, value in initial.items()}
        loss = tf.function(step.make_evaluation(objective))(values, values, evaluated.batch)[0]
        session.run(evaluated.initializer, evaluated.feed_dict)
        found = session.run(loss)
    x, y, w = parts_with("arrays", is_trained=True)["train"]
    plain = keras.models.clone_model(model)
    plain.set_weights(model.get_weights())
    plain.compile("sgd", "binary_crossentropy")
    of_keras = plain.evaluate(x[:8], y[:8], sample_weight=None if is_trained else w[:8], verbose=0, return_dict=True)
    np.testing.assert_allclose(found, of_keras["loss"], rtol=1e-6)


@pytest.mark.parametrize("other", [np.ones((16, 2), "float32"), np.ones(16, "int32")], ids=["shape", "type"])
def test_weights_of_both_parts_look_the_same(other):
    parts = parts_with("arrays", is_trained=True)
    parts["evaluate"] = (*parts["evaluate"], other)
    with pytest.raises(DataError, match="weights"):
        open_parts(parts, "mine", seed=0)


def test_a_file_may_have_weights_of_one_part(tmp_path):
    x, y = np.ones((4, 2), "float32"), np.arange(4)
    np.savez(tmp_path / "a.npz", x_train=x, y_train=y, x_test=x, y_test=y, w_train=np.ones(4))
    data = open_data("npz", {"path": str(tmp_path / "a.npz")}, seed=0)
    assert data.spec.weights is not None
    assert data.evaluate.whole.weights is None
