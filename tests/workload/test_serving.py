"""What is exported for other programs takes what a client has, and gives the model's probabilities."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from clients import served
from extras import optional

from trainer.config.schema import ModelConfig
from trainer.engine.tables.first_values import first_values
from trainer.plan.description import ModelProbe
from trainer.plan.tables import Growing, SparsePattern
from trainer.workload import describe, lookups, served_tables, serving, tracing
from trainer.workload.compiling import Wanted, make_objective
from trainer.workload.data import open_data
from trainer.workload.data.arrays import from_arrays
from trainer.workload.data.examples import DataSet
from trainer.workload.objective import Objective
from trainer.workload.served_tables import TableValues
from trainer.workload.serving import ExportError

pytestmark = pytest.mark.slow  # most start a process that imports TensorFlow

SEED = 7


def objective_for(model: keras.Model, data: DataSet, loss: str = "sparse_categorical_crossentropy") -> Objective:
    made = make_objective(model, data.spec, Wanted(loss))
    tracing.trace(made, data.spec)
    return made


@pytest.fixture
def digits() -> DataSet:
    random = np.random.default_rng(SEED)
    images = random.integers(0, 256, (20, 4, 4), np.uint8)
    labels = random.integers(0, 3, 20)
    return from_arrays((images, labels), (images, labels), source="digits", scale=1 / 255)


def classifier() -> keras.Model:
    keras.utils.set_random_seed(SEED)
    inputs = keras.Input((4, 4))
    return keras.Model(inputs, keras.layers.Dense(3)(keras.layers.Flatten()(inputs)))


@pytest.mark.long
def test_pictures_are_scaled_and_logits_become_probabilities(digits, tmp_path):
    model = classifier()
    found = serving.write(objective_for(model, digits), digits, tmp_path, ["saved_model", "litert"], {}).served
    images = np.random.default_rng(1).integers(0, 256, (5, 4, 4), np.uint8)
    wanted = tf.nn.softmax(model(images / np.float32(255))).numpy()
    answers = served(tmp_path, tmp_path, inputs=images)
    assert set(answers) == {"saved_model", "litert"}
    np.testing.assert_allclose(answers["saved_model"]["probabilities"], wanted, atol=1e-5)
    np.testing.assert_allclose(answers["litert"]["probabilities"], wanted, atol=1e-4)
    assert (found.names, found.outputs) == ({"": "inputs"}, {"probabilities": "probabilities"})


PEOPLE = "town,job,age,income\n" + "".join(
    f"{town},{job},{20 + 7 * number},{'>50K' if number % 3 else '<=50K'}\n"
    for number, (town, job) in enumerate((t, j) for t in ("Bern", "Oslo", "Rome") for j in ("cook", "smith"))
)


def by_columns(data: DataSet) -> keras.Model:
    """A model of ids and numbers, with two tables of one width."""
    keras.utils.set_random_seed(SEED)
    inputs = {name: keras.Input(one.shape, dtype=one.dtype, name=name) for name, one in data.spec.features.items()}
    deep = [keras.layers.Rescaling(0.01)(inputs["age"])]
    for name in ("town", "job"):
        table = keras.layers.Embedding(data.spec.features[name].ids, 4, name=f"embed-{name}")
        deep.append(keras.layers.Flatten()(table(inputs[name])))
    return keras.Model(inputs, keras.layers.Dense(2, name="logits")(keras.layers.Concatenate()(deep)))


@pytest.fixture
def people(tmp_path: Path) -> DataSet:
    (tmp_path / "people.csv").write_text(PEOPLE)
    options = {"path": str(tmp_path / "people.csv"), "label": "income", "ids": {"town": "vocabulary", "job": 50}}
    return open_data("csv", options | {"evaluate": options["path"]}, seed=0)


def test_texts_become_ids_and_classes_have_their_names(people, tmp_path):
    model = by_columns(people)
    serving.write(objective_for(model, people), people, tmp_path, ["saved_model"], {})
    raw = {"town": [["Rome"], ["Atlantis"]], "job": [["cook"], ["smith"]], "age": [[40], [50]]}
    given = {name: np.array(one) for name, one in raw.items()}
    ids = people.preprocessing().apply({name: tf.constant(one) for name, one in raw.items()})
    assert ids["town"].numpy().tolist() == [[3], [0]]
    wanted = tf.nn.softmax(model(ids | {"age": tf.constant(raw["age"], tf.int64)})).numpy()
    answer = served(tmp_path, tmp_path, **given)["saved_model"]
    np.testing.assert_allclose(answer["probabilities"], wanted, atol=1e-5)
    assert answer["label"] == [("<=50K", ">50K")[row.argmax()] for row in wanted]


@pytest.mark.long
@pytest.mark.parametrize("grows", [False, True])
def test_tables_are_in_pieces_and_never_a_variable_of_the_model(people, tmp_path, monkeypatch, grows):
    """Rows of a table that grows are found by their ids; others have the values that they would begin with."""
    dense = by_columns(people)
    pattern = SparsePattern("embed-*", 10**6, Growing(1, None)) if grows else SparsePattern("embed-*")
    with lookups.building([pattern]):
        sparse = by_columns(people)
    for variable, value in zip(sparse.trainable_variables, dense.trainable_variables[-2:], strict=True):
        variable.assign(value)
    objective, tables = objective_for(sparse, people), []
    variables = {one.path: one for one in dense.trainable_variables[:-2]}
    for table in tracing.tables_of(objective, people.spec):
        values = variables[table.path].numpy()
        if grows:
            known = np.arange(0, len(values), 2)
            others = np.arange(1, len(values), 2)
            tables.append(TableValues(table, values[known], known, SEED))
            values[others] = first_values(table, others, seed=SEED)
            variables[table.path].assign(values)
        else:
            tables.append(TableValues(table, values))
    monkeypatch.setattr(served_tables, "PIECE_NBYTES", 3 * 4 * 4)  # three rows
    serving.write(objective, people, tmp_path, ["saved_model"], tables)
    loaded = tf.train.list_variables(str(tmp_path / "saved_model/1/variables/variables"))
    assert sum(shape == [3, 4] for _, shape in loaded) == sum(len(one.values) // 3 for one in tables)
    raw = {"town": [["Rome"], ["Bern"], ["Oslo"]], "job": [["cook"], ["smith"], ["none"]], "age": [[40], [50], [3]]}
    ids = people.preprocessing().apply({name: tf.constant(one) for name, one in raw.items()})
    wanted = tf.nn.softmax(dense(ids | {"age": tf.constant(raw["age"], tf.int64)})).numpy()
    answer = served(tmp_path, tmp_path, **{name: np.array(one) for name, one in raw.items()})
    np.testing.assert_allclose(answer["saved_model"]["probabilities"], wanted, atol=1e-5)


@pytest.mark.long
def test_several_outputs_keep_their_names(digits, tmp_path):
    keras.utils.set_random_seed(SEED)
    inputs = keras.Input((4, 4))
    flat = keras.layers.Flatten()(inputs)
    outputs = {"digit": keras.layers.Dense(3)(flat), "ink": keras.layers.Dense(1)(flat)}
    model = keras.Model(inputs, outputs)
    labels = {"digit": np.arange(20) % 3, "ink": np.ones((20, 1), np.float32)}
    images = np.ones((20, 4, 4), np.float32)
    data = from_arrays((images, labels), (images, labels), source="two")
    losses = {"digit": "sparse_categorical_crossentropy", "ink": "mse"}
    made = make_objective(model, data.spec, Wanted(losses))
    tracing.trace(made, data.spec)
    serving.write(made, data, tmp_path, ["saved_model"], {})
    answer = served(tmp_path, tmp_path, inputs=images[:2])["saved_model"]
    np.testing.assert_allclose(answer["digit"], tf.nn.softmax(model(images[:2])["digit"]), atol=1e-5)
    np.testing.assert_allclose(answer["ink"], model(images[:2])["ink"], atol=1e-5)


class InPython(keras.layers.Layer):
    def call(self, x):
        return tf.ensure_shape(tf.numpy_function(lambda one: one, [x], tf.float32), x.shape)


def test_a_model_that_cannot_be_exported_is_refused(digits, people, raises):
    inputs = keras.Input((4, 4))
    model = keras.Model(inputs, keras.layers.Dense(3)(keras.layers.Flatten()(InPython()(inputs))))
    with raises(ExportError):
        serving.check(objective_for(model, digits), digits, ["saved_model"])
    with raises(ExportError):
        serving.check(objective_for(by_columns(people), people), people, ["litert"])


@pytest.mark.long
def test_formats_that_are_possible_pass_the_check(digits):
    serving.check(objective_for(classifier(), digits), digits, ["keras", "saved_model", "litert"])


@pytest.mark.long
def test_onnx_gives_the_same(digits, tmp_path):
    optional("tf2onnx", "ONNX")
    runtime = optional("onnxruntime", "ONNX")
    model = classifier()
    serving.write(objective_for(model, digits), digits, tmp_path, ["onnx"], {})
    session = runtime.InferenceSession(tmp_path / "model.onnx")
    images = np.random.default_rng(1).integers(0, 256, (5, 4, 4), np.uint8)
    (given,), (wanted,) = session.get_inputs(), session.get_outputs()
    assert (given.name, wanted.name) == ("inputs", "probabilities")
    (found,) = session.run(None, {"inputs": images})
    np.testing.assert_allclose(found, tf.nn.softmax(model(images / np.float32(255))), atol=1e-5)


def test_a_pattern_of_layers_is_checked_before_anything_is_computed(tmp_path, snapshot):
    (tmp_path / "people.csv").write_text(PEOPLE)
    options = {"path": str(tmp_path / "people.csv"), "label": "income", "ids": {"town": 2**63 - 1, "job": 9}}
    grows = (SparsePattern("town", 100, Growing(1, None)),)
    asked = ModelProbe(asdict(ModelConfig("ctr")), {"name": "csv", "options": options}, None, SEED, sparse=grows)
    problem = describe.answer(asked)["problem"]
    assert problem["message"] == snapshot
    assert problem["remedy"] == "e.g. 'placement.growing={field-town:100}'"


def test_an_export_that_would_fail_is_refused_before_anything_starts(tmp_path, snapshot):
    (tmp_path / "people.csv").write_text(PEOPLE)
    options = {"path": str(tmp_path / "people.csv"), "label": "income", "ids": {"town": 9, "job": 9}}
    asked = ModelProbe(asdict(ModelConfig("ctr")), {"name": "csv", "options": options}, None, SEED, formats=("litert",))
    problem = describe.answer(asked)["problem"]
    assert problem["key"] == "export.formats"
    assert problem["message"] == snapshot
