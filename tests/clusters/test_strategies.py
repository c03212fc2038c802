"""Every strategy on real clusters of processes: it learns, resumes after everything was killed, and ends cleanly."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from runs import Run

pytestmark = pytest.mark.cluster

Finish = Callable[..., Run]
SHORT = ["model=mlp", "seed=1", "train.steps=25", "train.batch_size=96", "history.every=1"]
FOUR_HERE = "device.replicas=[/cpu:0,/cpu:1,/cpu:2,/cpu:3]"
STRATEGIES = {
    # 256 examples an update, as in the others
    "async": ["cluster=2ps2w", "strategy=async", "train.batch_size=512"],
    "backup": ["cluster=2ps4w", "strategy=backup", "strategy.quorum=3"],
    "all_reduce": ["cluster=2w", "strategy=all_reduce"],
    "replicas in one process": [FOUR_HERE],
}


@pytest.mark.long
@pytest.mark.parametrize("name", ["async", "backup"])  # the others have the bits of the main job, or nearly
def test_every_strategy_learns_to_read_digits_through_a_kill_of_everything(start, name):
    """600 steps; at about the 300th the launcher and all its tasks are killed, and the same command goes on."""
    command = [*STRATEGIES[name], "model=mlp", "train.steps=600", "seed=1", "history.every=5", "checkpoint.every=60"]
    run = start(*command)
    run.wait_for_step(300)
    os.killpg(run.process.pid, signal.SIGKILL)
    run.process.wait(30)
    newest = max(path for path in (run.directory / "checkpoints").iterdir() if path.name.isdigit())
    assert 200 <= int(newest.name) < 600
    again = start(*command)
    assert again.wait() == 0, again.output
    summary = again.summary()
    assert summary["resumed_from"] == str(newest)
    assert summary["steps"] == 600
    assert summary["eval_accuracy"] >= 0.93  # 22 runs beside others: 0.9425 to 0.956
    assert again.pids() == []


@pytest.mark.long
@pytest.mark.parametrize("name", ["all_reduce", "replicas in one process"])
def test_a_run_that_is_resumed_has_the_bits_of_one_that_was_not(finish: Finish, name):
    common = [*STRATEGIES[name], "model=mlp", "seed=3", "history.every=1"]
    unbroken = finish("train.steps=30", "run=unbroken", *common).summary()
    finish("train.steps=15", "run=broken", *common)
    resumed = finish("train.steps=30", "run=broken", *common).summary()
    assert resumed["resumed_from"] is not None
    assert resumed["params_sha256"] == unbroken["params_sha256"]


@pytest.mark.long
def test_replicas_inside_one_process_have_the_bits_of_as_many_workers(finish: Finish):
    inside = finish("cluster=local", FOUR_HERE, "run=inside", *SHORT)
    between = finish("cluster=1ps4w", "run=between", *SHORT)
    assert inside.summary()["params_sha256"] == between.summary()["params_sha256"]
    assert _losses(inside) == _losses(between)


NORMED = """
import keras


def normed(input_shape, classes):
    hidden = keras.layers.Conv2D(8, 3, activation="relu")(inputs := keras.Input(input_shape))
    hidden = keras.layers.Flatten()(keras.layers.BatchNormalization()(hidden))
    return keras.Model(inputs, keras.layers.Dense(classes)(keras.layers.Dropout(0.3)(hidden)))
"""
MODELS = {
    "mlp": ["model=mlp"],
    "BatchNorm and Dropout": ["model=normed"],
    "tables": ["experiment=clicks"],
    "clipped": ["model=mlp", "optimizer.clip_norm=0.5"],
    "float16": ["model=mlp", "train.precision=mixed_float16"],
    "accumulated": ["model=mlp", "train.accumulate=4"],
}
SHAPES = [["cluster=local"], ["cluster=2ps3w", "strategy.wire=memory"], ["cluster=3w", "strategy.wire=float32"]]


@pytest.mark.long
@pytest.mark.timeout(900)  # the clusters take turns on two cores
@pytest.mark.parametrize("model", MODELS)
def test_no_bit_depends_on_which_workers_compute_the_replicas(model: str, finish: Finish, tmp_path: Path):
    (tmp_path / "mine.py").write_text(NORMED)
    given = ["train.replicas=8", "train.batch_size=64", "train.steps=25", "seed=7", *MODELS[model]]
    given += [f"user={tmp_path / 'mine.py'}"] if "normed" in given[-1] else []
    runs = [finish(*shape, *given, f"run=run{number}") for number, shape in enumerate(SHAPES)]
    assert len({run.summary()["params_sha256"] for run in runs}) == 1


def test_a_run_that_continues_on_other_workers_ends_with_the_bits_of_one_process(finish: Finish):
    given = ["train.replicas=5", *SHORT[:2], "train.batch_size=80"]
    unbroken = finish("cluster=local", "run=unbroken", "train.steps=24", *given)
    finish("cluster=1ps2w", "run=moved", "train.steps=12", *given)
    moved = finish("cluster=1ps3w", "run=moved", "train.steps=24", *given)
    assert moved.summary()["resumed_from"] is not None
    assert moved.summary()["params_sha256"] == unbroken.summary()["params_sha256"]


DIVIDED = """
import tensorflow as tf


def loss(labels, outputs):
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(tf.cast(labels, tf.int32), outputs)
    return tf.nn.compute_average_loss(losses)
"""


@pytest.mark.long
def test_all_reduce_is_one_process_to_rounding(finish: Finish, tmp_path: Path):
    """Also with a loss that divides by the replicas of a tf.distribute strategy."""
    (tmp_path / "divided.py").write_text(DIVIDED)
    given = [*SHORT, f"user={tmp_path / 'divided.py'}"]
    one = finish("cluster=local", "run=one", *given)
    four = finish("cluster=4w", "strategy=all_reduce", "run=four", *given)
    np.testing.assert_allclose(_losses(four), _losses(one), rtol=1e-4)
    expected, params = (np.load(run.directory / "export/params.npz") for run in (one, four))
    for path in expected.files:
        assert np.linalg.norm(params[path] - expected[path]) <= 1e-5 * np.linalg.norm(expected[path]), path


def test_async_reports_how_stale_each_workers_gradients_were(finish: Finish):
    summary = finish("cluster=1ps3w", "strategy=async", *SHORT).summary()
    contributions = summary["contributions"]
    assert sorted(contributions) == ["worker:0", "worker:1", "worker:2"]
    assert sum(worker["applied"] for worker in contributions.values()) == 25
    for worker in contributions.values():
        assert sum(worker["staleness_histogram"]) == worker["applied"]
        assert worker["dropped"] == 0


def test_backup_counts_what_came_too_late(finish: Finish):
    summary = finish("cluster=1ps3w", "strategy=backup", "strategy.quorum=1", *SHORT).summary()
    contributions = summary["contributions"].values()
    assert sum(worker["applied"] for worker in contributions) == 25
    assert sum(worker["dropped"] for worker in contributions) > 0


@pytest.mark.long
def test_a_quorum_of_all_is_sync(finish: Finish):
    backup = finish("cluster=1ps2w", "strategy=backup", "strategy.quorum=2", "run=backup", *SHORT).summary()
    sync = finish("cluster=1ps2w", "run=sync", *SHORT).summary()
    assert backup["params_sha256"] == sync["params_sha256"]


KNOBS = {
    "bfloat16": ["model=cnn", "train.precision=mixed_bfloat16"],
    "all at once": ["model=mlp", "train.jit=true", "train.precision=mixed_float16", "train.accumulate=2"],
}
EVERYWHERE = {
    "local": ["cluster=local"],
    "sync": ["cluster=1ps2w"],
    "all_reduce": ["cluster=2w", "strategy=all_reduce"],
    "async": ["cluster=2ps2w", "strategy=async"],
    "backup": ["cluster=1ps2w", "strategy=backup", "strategy.quorum=1"],
}


@pytest.mark.long
@pytest.mark.parametrize("knob", KNOBS)
def test_how_a_replica_computes_is_its_own_affair(finish: Finish, knob):
    """Each knob trains under each strategy; those that wait for all agree to the knob's rounding."""
    strategies = EVERYWHERE if knob == "all at once" else ("local", "sync", "all_reduce")
    common = ["train.steps=12", "train.batch_size=64", "seed=1", "history.every=1", *KNOBS[knob]]
    losses = {name: _losses(finish(*EVERYWHERE[name], f"run={name}", *common)) for name in strategies}
    assert all(series[-1] < 2.0 for series in losses.values()), losses  # 2.3 before the first update
    for name in ("sync", "all_reduce"):
        np.testing.assert_allclose(losses[name][:5], losses["local"][:5], rtol=2e-2)


def _losses(run: Run) -> list[float]:
    return [line["loss"] for line in run.history()]
