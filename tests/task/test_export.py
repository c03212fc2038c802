"""The results of a run: scores, the digest of its parameters, and a model that plain Keras loads."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from objectives import objective_of

from trainer.config.schema import OptimizerConfig, OptimizerName
from trainer.engine.vectors.snapshot import Snapshot
from trainer.task.evaluator.score import Evaluator, evaluated
from trainer.task.export import export, params_sha256
from trainer.workload import compiled_optimizer
from trainer.workload.data.arrays import from_arrays
from trainer.workload.keras_file import check_loads, needs_of
from trainer.workload.workload import Workload

CROSSENTROPY = "sparse_categorical_crossentropy"


def linear() -> keras.Model:
    """features [N, 2] -> logits [N, 3]"""
    inputs = keras.Input((2,))
    return keras.Model(inputs, keras.layers.Dense(3, name="logits")(inputs), name="linear")


def normed() -> keras.Model:
    inputs = keras.Input((2,))
    hidden = keras.layers.BatchNormalization(epsilon=1e-3, name="norm")(inputs)
    hidden = keras.layers.Dropout(0.5, name="dropout")(hidden)
    return keras.Model(inputs, keras.layers.Dense(3, name="logits")(hidden), name="normed")


def linear_values(scale: float) -> dict[str, np.ndarray]:
    return {
        "logits/kernel": scale * np.float32([[1, 0, -1], [0.5, 2, 0]]),
        "logits/bias": scale * np.float32([0.1, -0.2, 0.3]),
    }


NORM = {"norm/gamma": np.float32([2, 0.5]), "norm/beta": np.float32([1, -1])}
STATE = {"norm/moving_mean": np.float32([0.5, 0.25]), "norm/moving_variance": np.float32([4, 0.25])}
LINEAR = Snapshot(10, linear_values(1), {}, {})
AVERAGED = Snapshot(10, linear_values(1), {}, {"momentum": linear_values(9), "ema": linear_values(-2)})
NORMED = Snapshot(10, linear_values(1) | NORM, STATE, {})


# Digest


def test_the_digest_is_over_the_bytes_of_the_arrays_in_the_order_of_their_paths():
    snapshot = Snapshot(1, {"b/bias": np.float32([3]), "a/kernel": np.float32([[1, 2]])}, {}, {})
    assert params_sha256(snapshot) == hashlib.sha256(struct.pack("<3f", 1, 2, 3)).hexdigest()


def test_the_digest_counts_state_among_the_parameters():
    snapshot = Snapshot(1, {"b": np.float32([2]), "d": np.float32([4])}, {"a": np.float32([1]), "c": np.float32(3)}, {})
    assert params_sha256(snapshot) == hashlib.sha256(struct.pack("<4f", 1, 2, 3, 4)).hexdigest()


def test_the_digest_does_not_depend_on_the_order_of_a_dict():
    backwards = Snapshot(10, dict(reversed(LINEAR.parameters.items())), {}, {})
    assert params_sha256(backwards) == params_sha256(LINEAR)


def test_the_digest_does_not_depend_on_the_layout_in_memory():
    transposed = {path: np.asfortranarray(value) for path, value in LINEAR.parameters.items()}
    assert params_sha256(Snapshot(10, transposed, {}, {})) == params_sha256(LINEAR)


def test_the_digest_sees_one_bit():
    bias = np.nextafter(LINEAR.parameters["logits/bias"], np.float32(9))
    assert params_sha256(Snapshot(10, LINEAR.parameters | {"logits/bias": bias}, {}, {})) != params_sha256(LINEAR)


def test_the_digest_is_of_the_raw_parameters():
    assert params_sha256(AVERAGED) == params_sha256(LINEAR)


# Export


def weights_in(folder: Path) -> dict[str, Any]:
    loaded = keras.models.load_model(folder / "model.keras")
    return {v.path: v.numpy().tolist() for v in loaded.variables if "seed" not in v.path}


def as_lists(values: dict[str, np.ndarray]) -> dict[str, Any]:
    return {path: value.tolist() for path, value in values.items()}


def test_plain_keras_loads_the_model_with_its_weights_and_statistics(tmp_path):
    export(NORMED, normed(), tmp_path)
    assert weights_in(tmp_path) == as_lists(NORMED.parameters | STATE)


def test_the_loaded_model_predicts_as_the_snapshot_does(tmp_path):
    export(LINEAR, linear(), tmp_path)
    features = np.float32([[1, 2], [-1, 0.5]])
    expected = features @ LINEAR.parameters["logits/kernel"] + LINEAR.parameters["logits/bias"]
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_allclose(loaded.predict(features, verbose=0), expected, rtol=1e-6)


def test_a_model_that_cannot_be_loaded_again_is_saved_as_weights(tmp_path):
    class Scaled(keras.layers.Layer):
        def __init__(self) -> None:  # takes no name, as many examples of Keras
            super().__init__()

        def call(self, x):
            return 2 * x

    inputs = keras.Input((2,))
    export(LINEAR, keras.Model(inputs, Scaled()(keras.layers.Dense(3, name="logits")(inputs))), tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["model.weights.h5", "params.npz"]


FACTOR = 3.0
FREE = keras.layers.Lambda(lambda x: x * FACTOR, output_shape=(3,))  # needs a global of this file
CLOSED = keras.layers.Lambda(lambda x: x * 3.0)


def tripled(x):
    return 3.0 * x


@keras.saving.register_keras_serializable("mine")
class Tripled(keras.layers.Layer):
    def call(self, x):
        return 3.0 * x


class Unlucky(keras.layers.Layer):
    def call(self, x):
        return x

    def get_config(self):
        return {} if self.built is None else {"words": Path("/no/such/vocabulary").read_text()}


class Leaving(keras.layers.Layer):
    def call(self, x):
        return x

    def get_config(self):
        raise SystemExit(0)


def mean_of_squares(labels, outputs):
    return keras.ops.mean(keras.ops.square(labels - outputs), -1)


# The end of a model, its loss, and what the file needs to be loaded; None: it is not written.
ENDS: dict[str, tuple[keras.layers.Layer, Any, tuple[tuple[str, ...], bool] | None]] = {
    "of Keras": (keras.layers.Activation("relu"), "mse", ((), False)),
    "lambda with a global": (FREE, "mse", None),
    "lambda alone": (CLOSED, "mse", ((), True)),
    "named function in a Lambda": (keras.layers.Lambda(tripled), "mse", (("tripled",), False)),
    "own activation": (keras.layers.Activation(tripled), "mse", (("tripled",), False)),
    "registered class": (Tripled(), "mse", (("mine>Tripled",), False)),
    "own loss": (keras.layers.Activation("relu"), mean_of_squares, (("mean_of_squares",), False)),
    "reads a file that is gone": (Unlucky(), "mse", None),
    "leaves": (Leaving(), "mse", None),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_model_is_written_whole_if_it_loads_with_what_its_card_names(end, tmp_path):
    layer, loss, needs = ENDS[end]
    inputs = keras.Input((2,))
    model = keras.Model(inputs, layer(keras.layers.Dense(3, name="logits")(inputs)))
    model.compile("sgd", loss)
    _, why_not = export(LINEAR, model, tmp_path, objects={"tripled": tripled, "mean_of_squares": mean_of_squares})
    assert bool(why_not) == (tmp_path / "model.weights.h5").exists() == (needs is None)
    assert (tuple(needs_of(tmp_path / "model.keras")) if (tmp_path / "model.keras").exists() else None) == needs
    assert "mine>Tripled" in keras.saving.get_custom_objects()


def test_a_model_of_open_sizes_is_tried_with_some_that_are_large_enough(tmp_path):
    pictures = keras.Input((None, None, 3))
    model = keras.Model(pictures, keras.layers.MaxPooling2D()(keras.layers.Conv2D(4, 3)(Tripled()(pictures))))
    model.save(tmp_path / "model.keras")
    assert not check_loads(tmp_path / "model.keras", model, {})


class PickyLayer(keras.layers.Layer):
    """Cannot be called eagerly."""

    def build(self, shape):
        self.scale = self.add_weight(name="scale", shape=(shape[-1],))

    def call(self, inputs):
        if tf.executing_eagerly():
            raise ValueError("ones")
        return inputs * self.scale


def test_a_file_whose_outputs_cannot_be_compared_is_compared_by_its_weights(tmp_path):
    inputs = keras.Input((2,))
    model = keras.Model(inputs, PickyLayer()(inputs))
    model.save(tmp_path / "model.keras")
    assert "ones" in check_loads(tmp_path / "model.keras", model, {})
    model.set_weights([np.float32([3, 4])])
    with pytest.raises(AssertionError):
        check_loads(tmp_path / "model.keras", model, {})


def test_a_model_that_was_compiled_keeps_its_loss_and_the_optimizer_that_trained_it(tmp_path):
    model = linear()
    model.compile("sgd", "mse")
    section = OptimizerConfig(OptimizerName.adamw, learning_rate=0.25, weight_decay=0.5, clip_norm=2.0, beta_1=0.75)
    export(LINEAR, objective_of(model, loss="mse").model_to_save(compiled_optimizer.make(section)), tmp_path)
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert (loaded.compiled, type(loaded.optimizer)) == (True, keras.optimizers.AdamW)
    kept = {name: loaded.optimizer.get_config()[name] for name in ("weight_decay", "global_clipnorm", "beta_1")}
    assert kept == {"weight_decay": 0.5, "global_clipnorm": 2.0, "beta_1": 0.75}
    assert float(loaded.optimizer.learning_rate) == 0.25


def test_the_arrays_are_saved_under_their_paths(tmp_path):
    export(NORMED, normed(), tmp_path)
    with np.load(tmp_path / "params.npz", allow_pickle=False) as arrays:
        assert as_lists(dict(arrays)) == as_lists(NORMED.parameters | STATE)


def test_the_model_has_the_averaged_weights_if_there_are_any(tmp_path):
    export(AVERAGED, linear(), tmp_path)
    assert weights_in(tmp_path) == as_lists(linear_values(-2))


def test_the_arrays_are_the_raw_parameters_even_with_an_average(tmp_path):
    export(AVERAGED, linear(), tmp_path)
    with np.load(tmp_path / "params.npz", allow_pickle=False) as arrays:
        assert as_lists(dict(arrays)) == as_lists(linear_values(1))


def test_the_same_snapshot_is_exported_to_the_same_arrays(tmp_path):
    backwards = Snapshot(10, dict(reversed(LINEAR.parameters.items())), {}, {})
    export(LINEAR, linear(), tmp_path / "one")
    export(backwards, linear(), tmp_path / "other")
    with np.load(tmp_path / "one/params.npz") as one, np.load(tmp_path / "other/params.npz") as other:
        assert list(one) == list(other)


# Scores


def scores(model: keras.Model, snapshot: Snapshot, x: Any, y: Any, *, loss: str = CROSSENTROPY) -> tuple[float, ...]:
    data = from_arrays((x, y), (x, y), source="test", classes=3)
    labels = () if loss == CROSSENTROPY else data.spec.labels.shape
    evaluator = Evaluator(
        Workload(model, data, objective_of(model, loss, labels=labels), {}), batch_size=4, device="/cpu:0"
    )
    evaluator.connect("", None)
    return tuple(evaluator.score(snapshot).values())


def examples(count: int) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(2)
    return random.normal(size=(count, 2)).astype(np.float32), random.integers(0, 3, count)


def in_numpy(x: np.ndarray, y: np.ndarray, values: dict[str, np.ndarray]) -> tuple[float, float]:
    """(cross-entropy, accuracy) of a linear model, in float64."""
    logits = x.astype(np.float64) @ values["logits/kernel"] + values["logits/bias"]
    losses = np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(y)), y]
    return float(losses.mean()), float((logits.argmax(-1) == y).mean())


@pytest.mark.parametrize("count", [4, 8, 10, 3], ids=["one batch", "two", "a smaller one last", "a smaller one only"])
def test_scores_are_means_over_all_examples(count):
    x, y = examples(count)
    assert scores(linear(), LINEAR, x, y) == pytest.approx(in_numpy(x, y, LINEAR.parameters), rel=1e-5)


def test_scores_use_the_averaged_parameters_if_there_are_any():
    x, y = examples(10)
    assert scores(linear(), AVERAGED, x, y) == pytest.approx(in_numpy(x, y, linear_values(-2)), rel=1e-5)


def test_scores_use_the_moving_statistics_and_no_dropout():
    x, y = examples(10)
    normal = (x - [0.5, 0.25]) / np.sqrt(np.float32([4, 0.25]) + 1e-3) * [2, 0.5] + [1, -1]
    assert scores(normed(), NORMED, x, y) == pytest.approx(in_numpy(normal, y, NORMED.parameters), rel=1e-5)


def test_squared_errors_are_scored_without_an_accuracy():
    x, _ = examples(10)
    targets = np.zeros((10, 3), np.float32)
    outputs = x @ LINEAR.parameters["logits/kernel"] + LINEAR.parameters["logits/bias"]
    score = scores(linear(), LINEAR, x, targets, loss="mean_squared_error")
    assert score == pytest.approx((np.square(outputs).mean(),), rel=1e-5)


def test_an_evaluator_scores_one_snapshot_after_another():
    x, y = examples(10)
    data = from_arrays((x, y), (x, y), source="test", classes=3)
    model = linear()
    evaluator = Evaluator(Workload(model, data, objective_of(model), {}), batch_size=4, device="/cpu:0")
    evaluator.connect("", None)
    results = [tuple(evaluator.score(snapshot).values()) for snapshot in (LINEAR, AVERAGED, LINEAR)]
    expected = [in_numpy(x, y, evaluated(snapshot)) for snapshot in (LINEAR, AVERAGED, LINEAR)]
    np.testing.assert_allclose(results, expected, rtol=1e-5)


def test_a_layer_may_have_a_name_that_plain_keras_trains():
    inputs = keras.Input((2,))
    model = keras.Model(inputs, keras.layers.Dense(3, name="_logits")(inputs))
    values = {path.replace("logits", "_logits"): value for path, value in linear_values(1).items()}
    x, y = examples(10)
    expected = in_numpy(x, y, linear_values(1))
    assert scores(model, Snapshot(10, values, {}, {}), x, y) == pytest.approx(expected, rel=1e-5)
