"""Real clusters whose evaluations reduce the learning rate and end the run, with tasks killed at the worst moments."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from runs import Run

pytestmark = pytest.mark.cluster

USER_FILE = """
import os, pathlib, re, signal
import keras, numpy as np
from keras import layers

HERE = pathlib.Path(__file__).parent
X = np.random.default_rng(0).normal(3, 2, (1000, 6)).astype("float32")
Y = (X[:, 0] > 3).astype("int64")
passes = 0


def kill_once(name, task="worker-0"):
    if name in os.environ.get("KILLS", "").split() and not (HERE / name).exists():
        (HERE / name).touch()
        log = (HERE / "run" / "logs" / f"{task}.log").read_text()
        os.kill(int(re.findall(r", pid (\\d+):", log)[-1]), signal.SIGKILL)


class Held:
    def __len__(self):
        return 200

    def __getitem__(self, index):
        global passes
        passes += index == 199
        if passes == 2:
            kill_once("in-evaluation")
        return X[index], 1 - Y[index] if "FLIPPED" in os.environ else Y[index]


def rows():
    return {"train": (X, Y), "evaluate": Held(), "classes": 2}


def net():
    return keras.Sequential([keras.Input((6,)), layers.Dense(8, "relu"), layers.Dense(2)])


def fail_in(name):
    if os.environ.get("FAILS_IN") == name:
        raise ValueError(f"{name} is broken")


def on_step(step, logs):
    print("step", step)
    fail_in("on_step")
    if step == 44:
        kill_once("ps", "ps-0")
    return "stop" if step >= int(os.environ.get("STOP_AT", 10**9)) else None


def on_evaluation(step, logs):
    print("evaluated", step)
    fail_in("on_evaluation")
    if step == 30:
        kill_once("after-evaluation")


def on_end(step, logs):
    print("ended", step)
    fail_in("on_end")
    kill_once("at-the-end")
"""
OWN = ["user=own.py", "model=net", "data=rows", "train.batch_size=64", "train.steps=3000", "seed=1", "history.every=1"]
OWN += ["checkpoint.every=10", "restart.max=9", "restart.delay_secs=0.1", "optimizer=sgd", "optimizer.momentum=0.9"]
# No evaluation improves by as much as that.
DECIDED = ["evaluate.every=10", "evaluate.best_metric=loss", "evaluate.patience=4", "evaluate.min_delta=10"]
DECIDED += ["optimizer.learning_rate=0.01", "optimizer.plateau.patience=1", "optimizer.plateau.min_delta=10"]
DECIDED += ["optimizer.plateau.factor=0.5", "optimizer.plateau.min_rate=0.002"]
LAST = 52  # what is asked with the gradient of step 50 all replicas see with that of 51
RATES = [0.01] * 20 + [0.005] * 10 + [0.0025] * 10 + [0.002] * 12  # of each update

Make = Callable[..., Run]


@pytest.fixture
def begin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Make]:
    """begin(*overrides, kills=..., again=...) -> a run in a folder of its own, or in that of another, with the file."""
    runs: list[Run] = []

    def make(*overrides: str, kills: str = "", again: Run | None = None, **environment: str) -> Run:
        folder = again.directory.parent if again else tmp_path_factory.mktemp("run")
        (folder / "own.py").write_text(USER_FILE)
        runs.append(Run([*OWN, *overrides], folder, {"KILLS": kills, **environment}))
        return runs[-1]

    yield make
    for run in runs:
        run.end()


def done(run: Run) -> Run:
    assert run.wait() == 0, run.output + "\n".join(log.read_text() for log in run.logs())
    return run


def evaluations(run: Run) -> list[tuple[int, float]]:
    lines = map(json.loads, (run.directory / "evaluations.jsonl").read_text().splitlines())
    return [(line["step"], line["loss"]) for line in lines]


def told(run: Run, word: str) -> list[int]:
    """The steps with which hooks were called, in the lives of the chief."""
    log = (run.directory / "logs" / "worker-0.log").read_text().splitlines()
    return [int(line.split()[1]) for line in log if line.startswith(f"{word} ")]


def outcome(run: Run) -> dict[str, Any]:
    summary = run.summary()
    found: dict[str, Any] = {name: summary[name] for name in ("params_sha256", "steps", "ended_early", "eval_loss")}
    found["history"] = [(line["step"], line["loss"], line["learning_rate"]) for line in run.history()]
    return found | {"evaluations": evaluations(run), "codes": {task["code"] for task in summary["tasks"].values()}}


@pytest.mark.long
@pytest.mark.parametrize("cluster", ["2ps2w", "local", "2w strategy=all_reduce"])
def test_kills_at_the_worst_moments_change_neither_a_rate_nor_the_end(begin: Make, cluster: str):
    words = f"cluster={cluster}".split()
    expected = done(begin(*words, *DECIDED))
    assert (expected.summary()["steps"], evaluations(expected)[-1][0]) == (LAST, LAST)
    assert [line["learning_rate"] for line in expected.history()] == pytest.approx(RATES)
    assert " in 4 evaluations; it was " in expected.summary()["ended_early"]
    kills = "in-evaluation after-evaluation at-the-end" + (" ps" if "ps" in cluster else "")
    broken = done(begin(*words, *DECIDED, kills=kills))
    assert {*kills.split()} <= {path.name for path in broken.directory.parent.iterdir()}  # each has happened
    assert outcome(broken) == outcome(expected)
    for run in (expected, broken):
        assert sorted(set(told(run, "evaluated"))) == [10, 20, 30, 40, 50]
        assert set(told(run, "ended")) == {LAST}
    if "ps" not in kills:  # else all steps since the checkpoint are made again; that of 30 may not be on disk yet
        assert told(broken, "evaluated") in ([10, 20, 30, 40, 50], [10, 20, 30, 30, 40, 50])


@pytest.mark.long
def test_a_run_that_is_continued_on_another_cluster_reduces_the_rate_at_the_same_steps(begin: Make):
    """By its last step, which is then put off."""
    expected = done(begin("cluster=2w", *DECIDED))
    first = done(begin("cluster=2w", *DECIDED, "train.steps=25"))
    assert evaluations(first)[-1][0] == 25
    longer = done(begin("cluster=2ps2w", *DECIDED, again=first))
    assert outcome(longer) | {"evaluations": ()} == outcome(expected) | {"evaluations": ()}


def test_a_run_continues_with_other_metrics(begin: Make):
    """Evaluations are compared by the accuracy, and then by the loss, which those before have too."""
    first = done(begin("cluster=local", "evaluate.every=10", "train.steps=20", "evaluate.patience=9"))
    other = ["evaluate.every=10", "evaluate.patience=3", "evaluate.min_delta=10", "model.metrics=[]"]
    longer = done(begin("cluster=local", *other, again=first))
    assert [step for step, _ in evaluations(longer)][:4] == [10, 20, 30, 40]
    assert " in 3 evaluations; it was " in longer.summary()["ended_early"]


@pytest.mark.long
@pytest.mark.parametrize(
    "cluster", ["local", "2ps3w strategy=backup strategy.quorum=2", "2w strategy=all_reduce", "1ps2w1e"]
)
def test_a_hook_ends_a_run_under_any_strategy_and_a_rate_falls(begin: Make, cluster: str):
    """One replica more may be a step ahead where nobody waits."""
    more = [
        "evaluate.every=10",
        "train.batch_size=48",
        "optimizer.plateau.patience=1",
        "optimizer.plateau.min_delta=10",
    ]
    run = done(begin(*f"cluster={cluster}".split(), *more, STOP_AT="500"))
    summary = run.summary()
    assert 500 < summary["steps"] < 700
    assert summary["ended_early"].endswith("returned 'stop'")
    assert {task["code"] for task in summary["tasks"].values()} == {0}
    rates = [line["learning_rate"] for line in run.history()]
    assert rates == sorted(rates, reverse=True)
    assert rates[-1] < 0.1 * rates[0]


@pytest.mark.long
def test_the_best_state_is_exported_and_another_run_can_export_it_too(begin: Make):
    """Its labels are those of the training turned round, so that its loss rises."""
    more = ["cluster=1ps2w", "evaluate.every=10", "evaluate.best_metric=loss", "train.steps=40"]
    run = done(begin(*more, kills="in-evaluation after-evaluation", FLIPPED="yes"))
    step, loss = min(evaluations(run), key=lambda one: one[1])
    assert step < 40
    best = run.summary()["best"]
    assert (best["step"], best["loss"]) == (step, loss)
    assert [path.name for path in (run.directory / "best").iterdir()] == [f"{step:09d}"]
    anew = ["cluster=local", "evaluate.best_metric=loss", f"train.steps={step}", f"resume={run.directory / 'best'}"]
    other = done(begin(*anew, FLIPPED="yes"))
    assert other.summary()["eval_loss"] == pytest.approx(loss, rel=1e-6)
    mine, theirs = (np.load(one.directory / "export" / "params.npz") for one in (run, other))
    assert {name: value.tobytes() for name, value in mine.items()} == {n: v.tobytes() for n, v in theirs.items()}


@pytest.mark.long(but=["on_step"])
@pytest.mark.parametrize("hook", ["on_step", "on_evaluation", "on_end"])
def test_an_error_in_a_hook_names_its_line(begin: Make, hook: str):
    run = begin("cluster=1ps2w", "evaluate.every=10", "train.steps=20", FAILS_IN=hook)
    assert run.wait() == 65
    line = USER_FILE.splitlines().index('        raise ValueError(f"{name} is broken")') + 1
    assert f"{hook}: {run.directory.parent / 'own.py'}, line {line}: ValueError: {hook} is broken" in run.output
    assert run.pids() == []
