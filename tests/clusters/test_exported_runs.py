"""What runs export gives other programs the run's own evaluation, from raw inputs."""

from __future__ import annotations

import csv
import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest
from clients import served
from runs import Run

from trainer.commands.runs import checkpoints
from trainer.config.schema import DataConfig
from trainer.storage.run_directory import RunDirectory
from trainer.task.evaluator import offline
from trainer.workload.data.errors import DataError
from trainer.workload.data.idx import SHIPPED, read_idx

pytestmark = pytest.mark.cluster

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def evaluated(probabilities: np.ndarray, labels: np.ndarray) -> tuple[float, float]:
    """The cross-entropy and the accuracy."""
    own = probabilities[np.arange(len(labels)), labels]
    return float(-np.log(own).mean()), float((probabilities.argmax(1) == labels).mean())


@pytest.mark.long
def test_digits_are_served_from_bytes_and_every_checkpoint_can_be_exported(
    finish: Callable[..., Run], python, tmp_path
):
    formats = "export.formats=[keras,saved_model,litert,weights]"
    small = ["model=mlp", "train.steps=20", "checkpoint.every=10", "evaluate.every=10"]
    run = finish("cluster=local", *small, formats)
    folder = run.directory / "export"
    names = {"README.md", "model.keras", "model.tflite", "model.weights.h5", "params.npz", "saved_model"}
    assert {path.name for path in folder.iterdir()} == names
    images = read_idx(SHIPPED / "t10k-images-idx3-ubyte.gz", dimensions=3)[4::5][..., None]
    labels = read_idx(SHIPPED / "t10k-labels-idx1-ubyte.gz", dimensions=1)[4::5]
    summary = run.summary()
    answers = served(tmp_path, folder, inputs=images)
    for kind, margin in (("saved_model", 1e-5), ("litert", 1e-4)):
        loss, accuracy = evaluated(np.array(answers[kind]["probabilities"]), labels)
        assert abs(loss - summary["eval_loss"]) < margin
        assert accuracy == pytest.approx(summary["eval_accuracy"], abs=1e-6)
    assert f"`{summary['params_sha256']}`" in (folder / "README.md").read_text()

    directory, log = RunDirectory(run.directory), run.directory / "evaluations.jsonl"
    command = ["-m", "trainer", "evaluate", f"run={run.directory}", "--json"]
    scores = json.loads(python.run(*command, cwd=tmp_path).stdout)  # the same bits
    assert (scores["eval_loss"], scores["eval_accuracy"]) == (summary["eval_loss"], summary["eval_accuracy"])
    assert (scores["step"], scores["examples"], scores["data"]) == (20, 2000, "mnist_10k")
    np.savez(
        tmp_path / "new.npz",
        x_train=images[:1] / np.float32(255),
        y_train=labels[:1].astype(np.int64),
        **{"x_test": images[:7] / np.float32(255), "y_test": labels[:7].astype(np.int64)},
    )
    other = offline.OtherData(DataConfig("npz", {"path": str(tmp_path / "new.npz")}), None)
    outputs = list(offline.predict(directory, checkpoints.named(directory, "last"), offline.Selection(other, 4)))
    assert [len(one["probabilities"]) for one in outputs] == [4, 3]
    predicted = np.concatenate([one["probabilities"] for one in outputs])
    assert np.abs(predicted - np.array(answers["saved_model"]["probabilities"])[:7]).max() < 1e-5
    assert offline.evaluate(directory, checkpoints.named(directory, "last"), offline.Selection(other))[1] == 7
    assert offline.evaluate(directory, checkpoints.named(directory, "last"), offline.Selection(other, 2, 2))[1] == 4
    wrong = offline.OtherData(DataConfig("synthetic", {"shape": [4]}), None)
    with pytest.raises(DataError):
        offline.evaluate(directory, checkpoints.named(directory, "10"), offline.Selection(wrong))

    command = ["-m", "trainer", "export", f"run={run.directory}", "export.checkpoint=10", f"export.to={tmp_path}/at-10"]
    assert "at-10/saved_model\n" in python.run(*command, cwd=tmp_path).stdout
    lines = log.read_text().splitlines()
    before = next(line for line in map(json.loads, lines) if line["step"] == 10)
    answer = served(tmp_path, tmp_path / "at-10", inputs=images)["saved_model"]
    assert evaluated(np.array(answer["probabilities"]), labels)[0] == pytest.approx(before["loss"], abs=1e-5)


@pytest.mark.long
def test_people_are_served_as_they_are_in_the_file_also_with_sparse_layers(finish: Callable[..., Run], tmp_path):
    run = finish(str(EXAMPLES / "census_sparse.yaml"), "cluster=1ps2w", "train.steps=40", f"run={tmp_path}/run")
    with gzip.open(EXAMPLES / "data/census/test.csv.gz", "rt") as file:
        rows = list(csv.DictReader(file))
    numbers = {"age", "education-num", "capital-gain", "capital-loss", "hours-per-week"}
    left = {"fnlwgt", "income"}
    given = {
        name.replace("-", "_"): np.array([[row[name]] for row in rows], "float32" if name in numbers else str)
        for name in rows[0]
        if name not in left
    }
    earns = np.array([row["income"] == ">50K" for row in rows], np.float64)
    above = np.array(served(tmp_path, run.directory / "export", **given)["saved_model"]["probabilities"])[:, 0]
    loss = -np.where(earns, np.log(above), np.log1p(-above)).mean()
    assert run.summary()["eval_loss"] == pytest.approx(loss, abs=1e-5)
    assert run.summary()["eval_accuracy"] == pytest.approx(((above > 0.5) == earns).mean(), abs=1e-4)
    model = keras.models.load_model(run.directory / "export/model.keras")
    tables = {path.name: np.load(path) for path in (run.directory / "export/tables").iterdir()}
    for name, values in tables.items():
        assert np.array_equal(model.get_layer(name.partition(".")[0]).embeddings.numpy(), values)


BREAKS_AT_THE_END = """
from pathlib import Path

import keras

PATH = Path("{broken}")


@keras.saving.register_keras_serializable()
class Doubled(keras.layers.Layer):
    def call(self, inputs):
        if PATH.exists():
            raise RuntimeError("out of order")
        return 2 * inputs


def model():
    inputs = keras.Input((28, 28, 1))
    return keras.Model(inputs, keras.layers.Dense(10)(Doubled()(keras.layers.Flatten()(inputs))))


def on_step(step, logs):
    PATH.touch()
"""


CANNOT_BE_MADE_AGAIN = """
from pathlib import Path

import keras

PATH = Path("{broken}")


def model():
    if PATH.exists():
        raise RuntimeError("out of order")
    inputs = keras.Input((28, 28, 1))
    first = keras.ops.cast(keras.layers.Flatten()(inputs)[:, 0], "int32")
    return keras.Model(inputs, keras.layers.Dense(10)(keras.layers.Embedding(2, 4, name="pixel")(first)))


def on_step(step, logs):
    PATH.touch()
"""


@pytest.mark.long
def test_a_run_whose_model_cannot_be_made_again_in_the_end_keeps_its_results(start: Callable[..., Run], tmp_path):
    """A model with tables is, as a whole, for its export."""
    file, folder = tmp_path / "own.py", tmp_path / "run/export"
    file.write_text(CANNOT_BE_MADE_AGAIN.format(broken=tmp_path / "broken"))
    words = [f"user={file}", "model=model", "placement.sparse=[pixel]", "cluster=local", "train.steps=3"]
    run = start(*words, f"run={tmp_path}/run")
    assert run.wait() == 0, run.output
    assert re.search(r"^not exported +RuntimeError: out of order; to try again", run.output, re.MULTILINE), run.output
    assert run.summary()["steps"] == 3
    assert {path.name for path in folder.iterdir()} == {"README.md"}


@pytest.mark.long
def test_a_run_whose_model_cannot_be_exported_in_the_end_keeps_its_results(start: Callable[..., Run], tmp_path):
    """And the same command exports it once that is mended."""
    file, folder = tmp_path / "own.py", tmp_path / "run/export"
    file.write_text(BREAKS_AT_THE_END.format(broken=tmp_path / "broken"))
    words = [f"user={file}", "model=model", "cluster=local", "train.steps=3", "export.formats=[saved_model]"]
    run = start(*words, f"run={tmp_path}/run")
    assert run.wait() == 0, run.output
    said = r"^not exported +TensorFlow cannot write a SavedModel: .*; to try again: python -m trainer .*run="
    assert re.search(said, run.output, re.MULTILINE), run.output
    assert run.summary()["steps"] == 3
    assert {path.name for path in folder.iterdir()} == {"README.md", "params.npz"}

    (tmp_path / "broken").unlink()
    again = start(*words, f"run={tmp_path}/run")
    assert again.wait() == 0, again.output
    assert "not exported" not in again.output
    assert again.summary()["params_sha256"] == run.summary()["params_sha256"]
    assert {path.name for path in folder.iterdir()} == {"README.md", "params.npz", "saved_model"}
