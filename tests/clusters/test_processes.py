"""Real clusters of processes: the same bits everywhere, and a directory that tells what happened."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from runs import LONGEST_SECS, Run

pytestmark = pytest.mark.cluster

Finish = Callable[..., Run]
SHORT = ["seed=1", "train.steps=25", "train.batch_size=64", "history.every=1"]

USER_FILE = '''
import keras


def normed(input_shape, classes, *, width=24):
    """BatchNorm and Dropout."""
    inputs = keras.Input(input_shape)
    hidden = keras.layers.Conv2D(4, 5, strides=3, name="conv")(inputs)
    hidden = keras.layers.BatchNormalization(name="norm")(hidden)
    hidden = keras.layers.Flatten(name="flatten")(keras.layers.ReLU(name="relu")(hidden))
    hidden = keras.layers.Dropout(0.3, name="dropout")(keras.layers.Dense(width, name="dense")(hidden))
    return keras.Model(inputs, keras.layers.Dense(classes, name="logits")(hidden))
'''


@pytest.fixture(scope="module")
def main_job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """The run of the main job, which has ended; its temporary files were to be in the folder `scratch` beside it.

    The folder `trainer` there, as beside a checkout, hides nothing, though `python -m` finds it before an editable
    install and takes it for a package.
    """
    folder = tmp_path_factory.mktemp("main")
    for name in ("scratch", "trainer"):
        (folder / name).mkdir()
    overrides = ["cluster=2ps4w", "train.steps=160", "seed=1", "history.histogram_every=100"]
    run = Run(overrides, folder, {"TMPDIR": str(folder / "scratch")})
    assert run.wait() == 0, run.output
    yield run
    run.end()


def test_the_main_job_learns_to_read_digits_and_leaves_nothing_behind(main_job: Run):
    ended = time.monotonic()
    summary = main_job.summary()
    assert summary["eval_accuracy"] >= 0.95
    assert summary["steps"] == 160
    _assert_nothing_left(main_job)
    assert list((main_job.directory.parent / "scratch").iterdir()) == []
    assert time.monotonic() - ended < 10
    _assert_tells_everything(main_job, summary)


def _assert_nothing_left(run: Run) -> None:
    assert run.pids() == []
    assert not (run.directory / "pages").exists()
    for task in run.plan()["tasks"]:
        for address in (task["address"], task["control"]):
            if address.startswith("unix:"):  # in that folder
                continue
            host, _, port = address.rpartition(":")
            with socket.socket() as probe:
                assert probe.connect_ex((host, int(port))) != 0, f"{address} still listens"


def _assert_tells_everything(run: Run, summary: dict) -> None:
    expected = (
        "run_dir cluster strategy seed steps seconds time_to_first_step_secs examples_per_second step_ms_p50 "
        "step_ms_p99 final_loss eval_loss eval_accuracy params_sha256 restarts tasks"
    )
    assert set(expected.split()) <= set(summary)
    left = {path.name for path in run.directory.iterdir()}
    files = {"config.yaml", "generation.json", "plan.json", "report.html", "status.json", "summary.json"}
    files |= {"evaluations.jsonl", "events.jsonl", "history.jsonl"}
    assert left == files | {"checkpoints", "events", "export", "journal", "logs", "requests"}
    assert [line["step"] for line in run.history()] == list(range(10, 161, 10))
    assert sorted(path.name for path in (run.directory / "checkpoints").iterdir()) == ["000000100", "000000160"]
    (events,) = (run.directory / "events").iterdir()
    tags = {value.tag for event in tf.compat.v1.train.summary_iterator(str(events)) for value in event.summary.value}
    assert {"loss", "accuracy", "learning_rate", "examples_per_second", "evaluation/accuracy"} <= tags
    assert {"parameters/conv/kernel", "gradients/logits/bias"} <= tags
    status = json.loads((run.directory / "status.json").read_text())["tasks"]
    assert status["worker:0"]["metrics"]["accuracy"] > 0.9
    page = status["worker:1"]  # the last that was read
    assert page["step"] - 1 <= page["steps"] <= page["step"]
    assert page["examples"] // 64 in (page["steps"], page["step"])
    assert "\x1b" not in run.output
    assert re.search(
        r"^done: 160 steps in .*\nevaluation    eval_loss \d.*\nparams_sha256 \w{64}\n", run.output, re.MULTILINE
    )
    logs = "".join(log.read_text() for log in run.logs())
    assert "Cleanup partition error" not in logs
    assert all(re.match(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} \w+:\d ", line) for line in logs.splitlines())


@pytest.mark.long
def test_the_exported_model_scores_the_same_in_plain_keras(main_job: Run):
    code = f"""
import keras, numpy, sys
from trainer.workload.data import open_data
data = open_data("mnist_10k", {{}}, seed=0).evaluate
import tensorflow as tf
features, labels, _ = data.fetch(tf.range(data.count, dtype=tf.int64), tuple(map(tf.constant, data.arrays)))
logits = keras.models.load_model({str(main_job.directory / "export/model.keras")!r}).predict(features, verbose=0)
print(float(numpy.mean(numpy.argmax(logits, -1) == labels.numpy())))
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert float(ended.split()[-1]) == pytest.approx(main_job.summary()["eval_accuracy"], abs=1e-6)


def test_the_parameters_are_bit_identical_wherever_the_shards_live(finish: Finish, tmp_path: Path):
    """With BatchNorm and Dropout too."""
    (tmp_path / "mine.py").write_text(USER_FILE)
    runs = [
        finish(f"cluster={size}", f"run={size}", "user=mine.py", "model=normed", *SHORT)
        for size in ("1ps2w", "3ps2w", "2w")
    ]
    assert len({run.summary()["params_sha256"] for run in runs}) == 1
    assert len({tuple(line["loss"] for line in run.history()) for run in runs}) == 1


def test_a_cluster_computes_what_one_process_does(finish: Finish):
    one, two = (
        np.load(finish(f"cluster={size}", f"run={size}", "model=mlp", *SHORT).directory / "export/params.npz")
        for size in ("local", "1ps2w")
    )
    assert one.files == two.files
    for path in one.files:
        assert np.linalg.norm(one[path] - two[path]) <= 1e-5 * np.linalg.norm(one[path]), path


def test_a_checkpoint_resumes_on_another_cluster_and_in_one_process(finish: Finish):
    common = ["model=mlp", "seed=3", "history.every=1"]
    unbroken = finish("cluster=2ps2w", "train.steps=40", "run=unbroken", *common)
    finish("cluster=1ps2w", "train.steps=20", "run=first", *common)
    same = finish("cluster=2ps2w", "train.steps=40", "run=same", "resume=first", *common)
    assert same.summary()["params_sha256"] == unbroken.summary()["params_sha256"]
    assert _losses(same) == _losses(unbroken)[20:]
    other = finish("cluster=local", "train.steps=40", "run=other", "resume=first", *common)
    assert other.summary()["steps"] == 40
    np.testing.assert_allclose(_losses(other), _losses(unbroken)[20:], rtol=1e-3)


def _losses(run: Run) -> list[float]:
    return [line["loss"] for line in run.history()]


@pytest.mark.long
def test_every_optimizer_option_trains_the_same_on_one_shard_and_on_three(finish: Finish):
    options = [
        "model=mlp", "optimizer=adamw", "optimizer.clip_norm=0.5", "optimizer.ema=0.9", "train.steps=15", "seed=2",
        "optimizer.schedule.name=cosine", "optimizer.schedule.warmup_steps=5", "optimizer.schedule.decay_steps=15",
    ]  # fmt: skip
    one = finish("cluster=1ps2w", "run=one", *options).summary()
    three = finish("cluster=3ps2w", "run=three", *options).summary()
    assert one["params_sha256"] == three["params_sha256"]
    assert one["eval_accuracy"] == three["eval_accuracy"]


@pytest.mark.long
def test_tasks_that_cannot_be_forked_are_started_plainly(tmp_path: Path):
    code = "import sys; sys.platform = 'darwin'; from trainer.__main__ import console; console()"
    overrides = ["cluster=1ps1w", "model=mlp", "train.steps=5", "run=plain"]
    ended = subprocess.run(
        [sys.executable, "-c", code, *overrides],
        cwd=tmp_path,
        timeout=LONGEST_SECS,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert json.loads((tmp_path / "plain/summary.json").read_text())["steps"] == 5


@pytest.mark.parametrize(
    "overrides",
    [["--help"], ["cluster=2ps4w", "mode=plan"], ["cluster=2ps4w", "train.stepz=1"]],
    ids=["help", "plan of a cached model", "config error"],
)
def test_what_starts_nothing_answers_without_importing_tensorflow(overrides: list[str], tmp_path: Path):
    """The cost that a slow machine cannot blur: modules, not seconds."""
    code = (
        "import sys; from trainer.__main__ import console\n"
        "try: console()\n"
        "finally: print('imported:', *sorted({'tensorflow', 'keras', 'numpy'} & set(sys.modules)))"
    )
    for _ in range(2):  # the first plan of a model asks a child process, and remembers
        ended = subprocess.run([sys.executable, "-c", code, *overrides], cwd=tmp_path, capture_output=True, text=True)
    assert ended.stdout.splitlines()[-1] == "imported:"
    assert list(tmp_path.iterdir()) == []


def test_on_a_terminal_a_table_has_a_row_for_each_task(tmp_path: Path):
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "trainer", "cluster=1ps2w", "model=mlp", "train.steps=800"],
        cwd=tmp_path,
        env=os.environ | {"COLUMNS": "120", "TERM": "xterm", "CI": ""},
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", "".join(_read_all(ours)))  # without colours
    assert process.wait(60) == 0, shown
    assert "  800/800  100%  " in shown
    assert re.search(r"task +state +step +examples/s +wait +memory", shown)
    for row in ("ps:0", "worker:0", "worker:1"):
        assert re.search(rf"{row} +(serving|training|evaluating|exporting|done) +\d+ ", shown), row
    assert "done: 800 steps in " in shown


def _read_all(terminal: int) -> Iterator[str]:
    """What a program writes on a terminal, until it has closed it."""
    with contextlib.suppress(OSError):  # EIO: nobody has the other end open any more
        while chunk := os.read(terminal, 65536):
            yield chunk.decode(errors="replace")
