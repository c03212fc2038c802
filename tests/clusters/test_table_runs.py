"""Runs with sparse layers: the same bits on every cluster, after every kill, unbroken, resumed and exported.

One of the layers grows: its ids are any int64, and its rows come and go.
"""

from __future__ import annotations

import json
import re
import runpy
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest
from clients import served
from runs import Run
from test_faults import signal_tasks

pytestmark = pytest.mark.cluster

USER_FILE = """
import keras
import numpy as np


def ratings():
    drawn = np.random.default_rng(0)
    ids = {"user": drawn.integers(0, 3000, 6000), "item": drawn.integers(0, 500, (6000, 3))}
    ids["tag"] = drawn.geometric(0.01, 6000) * np.int64(0x5851F42D4C957F2D)  # it wraps around
    likes = (ids["user"] + ids["item"][:, 0]) % 2
    return {"train": ({name: one[:5000] for name, one in ids.items()}, likes[:5000]),
            "evaluate": ({name: one[5000:] for name, one in ids.items()}, likes[5000:])}


def factors():
    user = keras.Input((), dtype="int64", name="user")
    item = keras.Input((3,), dtype="int64", name="item")
    tag = keras.Input((), dtype="int64", name="tag")
    of_user = keras.layers.Embedding(3000, 8, name="user_table")(user)
    of_items = keras.layers.Flatten()(keras.layers.Embedding(500, 8, name="item_table")(item))
    of_tag = keras.layers.Embedding(1, 8, name="tag_names")(tag)
    parts = keras.layers.Concatenate()([of_user, of_items, of_tag])
    hidden = keras.layers.Dense(16, activation="relu", name="hidden")(parts)
    return keras.Model({"user": user, "item": item, "tag": tag}, keras.layers.Dense(2, name="logits")(hidden))
"""
RUN = ["user=mine.py", "model=factors", "data=ratings", "placement.sparse=['*_table']", "train.batch_size=32"]
RUN += ["placement.growing={tag_names:300}", "placement.min_count={tag_names:2}", "placement.max_age={tag_names:15}"]
RUN += ["optimizer=adagrad", "optimizer.learning_rate=0.1", "seed=3", "checkpoint.every=40", "history.every=1"]
STEPS = 400


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Run:
    folder = tmp_path_factory.mktemp("tables")
    (folder / "mine.py").write_text(USER_FILE)
    run = Run([*RUN, "cluster=1ps2w1e", f"train.steps={STEPS}"], folder, {})
    assert run.wait() == 0, run.output
    return run


@pytest.mark.long(but=["float32"])
@pytest.mark.parametrize("wire", ["memory", "float32"])
def test_kills_of_every_task_change_nothing(unbroken: Run, start, tmp_path: Path, wire: str):
    (tmp_path / "mine.py").write_text(USER_FILE)
    run = start(*RUN, "cluster=2ps2w", f"train.steps={STEPS}", f"strategy.wire={wire}", "evaluate.every=100")
    for task, step in (("worker:1", 60), ("worker:0", 140), ("ps:1", 230)):
        run.wait_for_step(step)
        signal_tasks(run, signal.SIGKILL, task)
    assert run.wait() == 0, run.output
    assert run.summary()["params_sha256"] == unbroken.summary()["params_sha256"]
    assert set(run.summary()["restarts_of"]) >= {"worker:0", "worker:1", "ps:1"}


@pytest.mark.long
@pytest.mark.parametrize(("size", "wire"), [("2w", "float32"), ("3ps2w", "memory")], ids=["2w", "3ps2w"])
def test_a_run_resumes_on_another_cluster_with_the_same_bits(
    unbroken: Run, finish, tmp_path: Path, size: str, wire: str
):
    (tmp_path / "mine.py").write_text(USER_FILE)
    *_, last = sorted((unbroken.directory / "checkpoints").iterdir())
    shutil.copytree(unbroken.directory, tmp_path / "first", ignore=lambda folder, names: {last.name} & set(names))
    run = finish(*RUN, f"cluster={size}", f"train.steps={STEPS}", f"strategy.wire={wire}", "resume=first", "run=other")
    assert "resumes at step 360" in run.output
    assert run.summary()["params_sha256"] == unbroken.summary()["params_sha256"]


@pytest.mark.long
def test_a_run_that_waits_for_some_survives_kills_and_learns(start, tmp_path: Path):
    (tmp_path / "mine.py").write_text(USER_FILE)
    options = [
        "strategy=backup",
        "strategy.quorum=1",
        "optimizer.learning_rate=0.2",
        "train.steps=900",
        "evaluate.every=300",
    ]
    run = start(*RUN, "cluster=2ps2w", *options)
    for task, step in (("worker:1", 100), ("worker:0", 250), ("ps:1", 450)):
        run.wait_for_step(step)
        signal_tasks(run, signal.SIGKILL, task)
    assert run.wait() == 0, run.output
    summary = run.summary()
    assert set(summary["restarts_of"]) >= {"worker:0", "worker:1", "ps:1"}
    assert summary["steps"] == 900
    assert sum(one["applied"] for one in summary["contributions"].values()) > 0
    losses = [json.loads(line)["loss"] for line in (run.directory / "history.jsonl").read_text().splitlines()]
    assert np.mean(losses[-100:]) < np.mean(losses[:100]) - 0.005  # four times the error of such a mean
    rows = np.load(run.directory / "export" / "tables" / "user_table.embeddings.npy")
    assert np.isfinite(rows).all()


def test_what_is_exported_has_the_rows(unbroken: Run, tmp_path: Path):
    export, summary = unbroken.directory / "export", unbroken.summary()
    tables = {path.name.removesuffix(".npy"): np.load(path) for path in (export / "tables").iterdir()}
    grown = summary["rows"]["tag_names/embeddings"]
    assert 50 < grown < 300
    assert {name: one.shape for name, one in tables.items()} == {
        "user_table.embeddings": (3000, 8),
        "item_table.embeddings": (500, 8),
        "tag_names.embeddings": (grown, 8),
        "tag_names.embeddings.ids": (grown,),
    }
    assert (np.diff(tables["tag_names.embeddings.ids"]) > 0).all()
    data, likes = runpy.run_path(str(unbroken.directory.parent / "mine.py"))["ratings"]()["evaluate"]
    assert not np.isin(data["tag"], tables["tag_names.embeddings.ids"]).all()
    answer = served(tmp_path, export, **data)["saved_model"]["probabilities"]
    lines = [json.loads(line) for line in (unbroken.directory / "evaluations.jsonl").read_text().splitlines()]
    assert lines[-1]["step"] == STEPS
    assert np.mean(np.argmax(answer, axis=1) == likes) == pytest.approx(lines[-1]["accuracy"], abs=1e-6)
    loss = -np.log(np.take_along_axis(np.array(answer), likes[:, None], 1)).mean()
    assert loss == pytest.approx(lines[-1]["loss"], abs=1e-6)
    assert len(lines) == STEPS // 40
    assert summary["steps"] == STEPS


@pytest.mark.parametrize(
    ("old", "new", "options", "says"),
    [
        (
            "Embedding(3000",
            "Embedding(2000",
            [],
            r"user_table/embeddings: example \d+ of a batch has the id \d+, but the "
            r"table has the rows 0..1999; correct the data, or input_dim of the layer",
        ),
        (
            "",
            "",
            ["placement.growing={tag_names:50}", "placement.max_age={}"],
            r"table tag_names/embeddings is full: all 50 rows.*placement.growing=\{tag_names:100\}, or evict",
        ),
    ],
    ids=["id", "room"],
)
def test_an_id_without_a_row_ends_the_run_with_a_sentence(start, tmp_path: Path, old, new, options, says):
    (tmp_path / "mine.py").write_text(USER_FILE.replace(old, new))
    run = start(*RUN, "cluster=1ps2w", "train.steps=40", *options)
    assert run.wait() == 65
    assert re.search(says, run.output), run.output


@pytest.mark.long
def test_rows_and_a_binary_crossentropy_have_the_same_bits_in_memory_and_in_messages(finish):
    small = [f"data.options.{key}={value}" for key, value in (("train_examples", 6000), ("evaluate_examples", 100))]
    clicks = ["experiment=clicks", *small, "cluster=1ps2w", "train.steps=3", "train.batch_size=512"]
    runs = [finish(*clicks, f"run={wire}", f"strategy.wire={wire}") for wire in ("memory", "float32")]
    assert len({run.summary()["params_sha256"] for run in runs}) == 1
