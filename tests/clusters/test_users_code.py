"""Code of the user's that waits, never ends, ends its process, or leaves processes behind."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
from runs import Run, has_ended, wait_until

pytestmark = pytest.mark.cluster

WAITS = """
import itertools, time
import keras, numpy as np

def batches(context):
    for number in itertools.count():
        if context.is_training and number == 6:
            if context.replica == 1:
                time.sleep(5)
            return
        features = np.random.default_rng([context.epoch, number]).normal(size=(context.batch, 4)).astype("float32")
        yield features, features.sum(1, keepdims=True)

def data():
    return {"train": batches, "evaluate": batches}

def model(spec):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model
"""


def states(run: Run) -> dict[str, str]:
    try:
        tasks = json.loads((run.directory / "status.json").read_text())["tasks"]
    except (OSError, ValueError):
        return {}
    return {name: task.get("state", "") for name, task in tasks.items()}


def test_a_pause_of_the_data_is_shown_and_an_evaluation_without_an_end_can_be_stopped(start, tmp_path: Path):
    (tmp_path / "waits.py").write_text(WAITS)
    words = ["user=waits.py", "cluster=1ps2w", "train.batch_size=8", "train.steps=10", "evaluate.every=8"]
    words += ["timeouts.step_secs=1", "evaluate.batch_size=4", "checkpoint.every=3"]
    run = start(*words)
    wait_until(lambda: states(run).get("worker:1") == "waiting for data", progress=run.progress)
    wait_until(lambda: states(run).get("worker:0") == "evaluating", progress=run.progress)
    stopped_at = time.monotonic()
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130, run.output
    assert time.monotonic() - stopped_at < 10  # the grace before it would be killed is 30 s
    summary = run.summary()
    assert (summary["steps"], summary["restarts"]) == (8, 0)
    assert not (run.directory / "evaluations.jsonl").read_text()
    run = start(*words, "evaluate.steps=3")
    assert run.wait() == 0, run.output
    lines = (run.directory / "evaluations.jsonl").read_text().splitlines()
    assert [json.loads(text)["step"] for text in lines] == [8, 10]


@pytest.mark.long
def test_a_task_that_the_users_code_ends_has_failed_and_what_it_started_ends(start, tmp_path: Path):
    ends = WAITS.replace("if context.is_training and number == 6:", "if number == 20: os._exit(0)\n        if False:")
    child = "    subprocess.Popen(['sleep', '600'])\n    if not os.fork(): write(); time.sleep(600)\n"
    write = "def write(): open(f'child-{os.getpid()}', 'w').close()\n"
    text = f"import os, subprocess\n{write}{ends}".replace("def model(spec):\n", f"def model(spec):\n{child}")
    (tmp_path / "ends.py").write_text(text)
    run = start("user=ends.py", "cluster=1ps2w", "train.batch_size=8", "train.steps=60", "evaluate.steps=2")
    assert run.wait() == 65, run.output
    children = [int(path.name.partition("-")[2]) for path in tmp_path.glob("child-*")]
    assert len(children) >= 3  # of the plan, and of two workers
    assert all(map(has_ended, children))
    assert not run.pids()
    assert os.getpid() not in children
