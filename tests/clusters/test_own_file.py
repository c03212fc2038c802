"""Real clusters on a user's own model, data and hooks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import Run

pytestmark = pytest.mark.cluster

USER_FILE = """
import keras
import numpy as np
import tensorflow as tf
from keras import layers

X = np.random.default_rng(0).normal(3, 2, (1000, 6)).astype("float32")
NUMBERS = {name: number for number, name in enumerate({"large", "small"})}  # in the order of a set
Y = np.where(X[:, 0] > 3, NUMBERS["large"], NUMBERS["small"])


class Rows:
    def __len__(self):
        return len(X)

    def __getitem__(self, index):
        return X[index], Y[index]


def arrays():
    return {"train": (X, Y), "evaluate": (X[:200], Y[:200])}


def rows():
    return {"train": Rows(), "evaluate": Rows(), "classes": 2}


def stream():
    lookup = layers.StringLookup(vocabulary=list(NUMBERS), num_oov_indices=0)  # in each task
    sizes = np.array(list(NUMBERS))[Y]
    train = tf.data.Dataset.from_tensor_slices((X, sizes)).shuffle(1000).batch(50).map(lambda x, y: (x, lookup(y)))
    return {"train": train, "evaluate": (X[:200], Y[:200])}


def fine_tuned():
    normalization = layers.Normalization()
    normalization.adapt(X)
    backbone = keras.Sequential([layers.Dense(64, "relu")], name="backbone")
    backbone.trainable = False
    x = keras.Input((6,))
    hidden = layers.BatchNormalization(name="norm")(backbone(normalization(x)))
    model = keras.Model(x, layers.Dense(2, name="head")(hidden))
    model.compile(keras.optimizers.Lamb(0.01, weight_decay=0.01))
    return model


def on_step(step, logs):
    assert logs["loss"] > 0
    return "stop" if step >= 30 else None


def on_evaluation(step, logs):
    print("evaluated", step, sorted(logs))


def on_end(step, logs):
    print("ended", step, sorted(logs))
"""
WITHOUT_STOP = USER_FILE.replace("step >= 30", "step >= 10**9")
GROUPS = "optimizer.groups=[{match:[*/bias,norm/*],weight_decay:0,learning_rate:0.02},{match:head/bias,frozen:true}]"
OWN = ["model=fine_tuned", "train.batch_size=64", "seed=1", "checkpoint.every=20", GROUPS]


@pytest.fixture
def user(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        file = tmp_path / "own.py"
        file.write_text(text)
        return f"user={file}"

    return write


def test_a_hook_ends_a_run_and_the_same_command_finds_it_finished(start, finish, user):
    given = [user(USER_FILE), *OWN, "data=stream", "cluster=1ps2w", "train.steps=500", "evaluate.every=10"]
    run = finish(*given)
    summary = run.summary()
    assert summary["steps"] < 40
    assert summary["ended_early"].endswith("returned 'stop'")
    assert "ended early: on_step of " in run.output
    assert {task["code"] for task in summary["tasks"].values()} == {0}
    assert (run.directory / "export" / "model.keras").exists()
    log = (run.directory / "logs" / "worker-0.log").read_text()
    assert "evaluated 10 ['accuracy', 'loss']" in log
    assert f"ended {summary['steps']} ['eval_accuracy', 'eval_loss', 'loss']" in log
    plan = run.plan()
    assert plan["is_stream"]
    assert len(plan["frozen"]["paths"]) == 6
    assert plan["optimizer"] == "optimizer: lamb, learning rate 0.01, weight decay 0.01, from compile()"
    assert [(group["settings"], group["parameters"]) for group in plan["groups"]] == [
        ("learning rate 0.02, weight decay 0", ["norm/gamma", "norm/beta"]),
        ("learning rate 0.01, weight decay 0.01", ["head/kernel"]),
        ("frozen", ["head/bias"]),
    ]
    assert not [p["path"] for shard in plan["shards"] for p in shard["trainable"] if p["path"].startswith("backbone")]
    before = {file: file.stat().st_mtime_ns for file in run.directory.rglob("*") if file.is_file()}
    again = start(*given, f"run={run.directory}")
    assert again.wait() == 0, again.output
    assert f"already finished: {summary['steps']} of 500 steps, eval_loss " in again.output
    assert {file: file.stat().st_mtime_ns for file in run.directory.rglob("*") if file.is_file()} == before


def test_data_that_differ_between_processes_end_a_run_before_its_first_step(start, user):
    file = USER_FILE.replace("default_rng(0)", "default_rng()")
    run = start(user(file), *OWN, "data=arrays", "train.steps=5")
    assert run.wait() == 65, run.output
    line = file[: file.index("default_rng()")].count("\n") + 1
    assert f"line {line}: np.random.default_rng(...)" in run.output
    assert not list(run.directory.glob("checkpoints/0*"))


@pytest.mark.long
def test_random_access_gives_the_bits_of_arrays(finish, user, tmp_path):
    """Whoever holds the shards."""
    given = [user(WITHOUT_STOP), *OWN, "train.steps=40"]
    runs: list[Run] = [
        finish(*given, f"data={data}", f"cluster={cluster}", f"run={tmp_path / data}{cluster}")
        for data, cluster in (("arrays", "1ps2w"), ("rows", "2ps2w"), ("rows", "2w"))
    ]
    assert len({run.summary()["params_sha256"] for run in runs}) == 1


@pytest.mark.long
def test_a_stream_continues_with_the_same_bits(start, finish, user, tmp_path):
    given = [user(WITHOUT_STOP), *OWN, "data=stream", "cluster=1ps2w"]
    unbroken = finish(*given, "train.steps=60", f"run={tmp_path / 'unbroken'}")
    first = finish(*given, "train.steps=40")
    resumed = start(*given, "train.steps=60", f"run={first.directory}")
    assert resumed.wait() == 0, resumed.output
    assert "resumes at step 40" in resumed.output
    assert resumed.summary()["params_sha256"] == unbroken.summary()["params_sha256"]


@pytest.mark.long
@pytest.mark.parametrize("cluster", ["1ps2w", "1ps2w1e"])
def test_a_run_that_no_longer_improves_ends_early_and_can_go_on(start, finish, user, cluster):
    more = ["evaluate.every=10", "evaluate.patience=2", "evaluate.best_metric=loss", "evaluate.min_delta=10"]
    size, *strategy = cluster.split()
    given = [user(WITHOUT_STOP), *OWN, "data=arrays", f"cluster={size}", *strategy]
    run = finish(*given, "train.steps=3000", *more)
    summary = run.summary()
    assert summary["steps"] < 3000
    assert " in 2 evaluations; it was " in summary["ended_early"]
    lines = [json.loads(line) for line in (run.directory / "evaluations.jsonl").read_text().splitlines()]
    assert len(lines) >= 3
    assert {task["code"] for task in summary["tasks"].values()} == {0}
    longer = start(*given, f"train.steps={summary['steps'] + 20}", f"run={run.directory}")
    assert longer.wait() == 0, longer.output
    assert longer.summary()["steps"] >= summary["steps"] + 20


def test_patience_without_evaluations_is_refused(start):
    run = start("cluster=local", "evaluate.patience=3")
    assert run.wait() == 2
    assert "evaluate.patience: nothing is evaluated" in run.output
    assert "type evaluate.every=100 too" in run.output
