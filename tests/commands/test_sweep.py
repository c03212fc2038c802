"""Sweeps: what is tried, what is remembered, and that a sweep that is killed ends as if it had not been."""

from __future__ import annotations

import csv
import itertools
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from extras import optional

from trainer.commands.sweep import results, runner, space
from trainer.commands.sweep.shares import TrialShare, check, shares
from trainer.commands.sweep.space import Range
from trainer.commands.sweep.trials import DONE, WAITING, OtherSweepError, Sweep, SweepSettings, Trial, rungs, survivors
from trainer.config import arguments
from trainer.config.schema import DeviceConfig, Launch, LaunchConfig
from trainer.config.typed import SweepConfig
from trainer.plan.devices import Machine

SEED = 3
SMALL = ("model=mlp", "train.batch_size=64")


def sweep(path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """The command, run to its end."""
    command = [sys.executable, "-m", "trainer", *words]
    return subprocess.run(command, cwd=path, capture_output=True, text=True, timeout=280, check=False)


def table(path: Path) -> list[dict[str, str]]:
    with (path / "results.csv").open(newline="") as file:
        return list(csv.DictReader(file))


# Spaces


def test_a_space_has_lists_and_ranges():
    given = {"a": [1, 2], "b": "log(1e-4, 1)", "c": "integer(2,8)", "d": "linear(0, 0.5)"}
    found, problems = space.parse(given)
    assert problems == []
    assert found == {
        "a": [1, 2],
        "b": Range(1e-4, 1, is_log=True),
        "c": Range(2, 8, is_integer=True),
        "d": Range(0, 0.5),
    }
    assert not space.is_grid(found)
    assert list(space.grid({"a": [1, 2], "b": ["x", "y"]})) == [
        {"a": a, "b": b} for a, b in itertools.product([1, 2], ["x", "y"])
    ]


@pytest.mark.parametrize(
    ("value", "codes"),
    [
        ("log(0, 1)", "sweep.space.optimizer.learning_rate/malformed"),
        ("linear(1, 1)", "sweep.space.optimizer.learning_rate/malformed"),
        ("integer(0.5, 2)", "sweep.space.optimizer.learning_rate/malformed"),
        ("log(a, b)", "sweep.space.optimizer.learning_rate/malformed"),
        ("often", "sweep.space.optimizer.learning_rate/malformed"),
        ([], "sweep.space.optimizer.learning_rate/malformed"),
        ([1, 1], "sweep.space.optimizer.learning_rate/malformed"),
    ],
)
def test_a_space_that_makes_no_sense_is_a_problem(refused, value, codes):
    refused(codes, lambda: space.parse({"optimizer.learning_rate": value})[1])


def test_ranges_need_no_quotes_on_the_command_line():
    typed = "sweep.space={optimizer.learning_rate: log(1e-4,1), model.options.width: [32,64]}"
    (override,) = arguments.sort([typed]).overrides
    assert override == 'sweep.space={optimizer.learning_rate: "log(1e-4,1)", model.options.width: [32,64]}'
    assert arguments.sort([override]).overrides == (override,)


def test_halving_trains_fewer_trials_for_more_steps():
    assert rungs(300, 20, 3) == [(34, 20), (100, 7), (300, 3)]
    assert rungs(300, 9, 3) == [(34, 9), (100, 3), (300, 1)]
    assert rungs(300, 5, None) == [(300, 5)]
    assert rungs(300, 1, 2) == [(300, 1)]


# What is remembered


def settings(**changes: object) -> SweepSettings:
    given = {"command": [], "space": {"a": [1, 2]}, "metric": "eval_loss", "is_lowest": True, "steps": 9, "trials": 4}
    return SweepSettings(**{**given, **changes})  # type: ignore[arg-type]


def test_the_best_are_those_that_were_trained_longest_and_failures_are_last(tmp_path):
    made = Sweep(tmp_path, settings(), {"a": [1, 2]})
    for scores, state in (({3: 0.1}, DONE), ({3: 0.3, 9: 0.2}, DONE), ({}, "ended with 65: NaN"), ({3: 0.2}, DONE)):
        made.add({"a": 1})
        made.trials[-1].scores.update(scores)
        made.trials[-1].state = state
    made.remember()
    again = Sweep(tmp_path, settings(), {"a": [1, 2]})
    assert [one.number for one in again.ranked()] == [1, 0, 3, 2]
    assert [one.number for one in survivors(again, 3, 2)] == [0, 3]
    results.write(again)
    assert [row["eval_loss"] for row in table(tmp_path)] == ["0.1", "0.2", "", "0.2"]
    assert again.best() is again.trials[1]
    assert math.isnan(again.trials[2].score)


def test_a_folder_holds_one_sweep_but_a_wrong_metric_can_be_corrected(tmp_path, raises):
    made = Sweep(tmp_path, settings(metric="eval_los"), {"a": [1, 2]})
    made.add({"a": 1})
    made.trials[0].state = "has no eval_los; its scores: eval_loss"
    made.remember()
    with raises(OtherSweepError):
        Sweep(tmp_path, settings(trials=5, metric="eval_los"), {"a": [1, 2]})
    for _ in range(2):  # a sweep that is killed before a trial has a score does not forget it
        corrected = Sweep(tmp_path, settings(), {"a": [1, 2]})
        assert [one.state for one in corrected.trials] == [WAITING]
    corrected.trials[0].scores[9] = 0.5
    corrected.remember()
    with raises(OtherSweepError):
        Sweep(tmp_path, settings(metric="eval_accuracy", is_lowest=False), {"a": [1, 2]})


# Shares of the machine


def test_trials_at_the_same_time_have_shares_that_do_not_overlap(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 4, 5, 6})
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    machine = Machine(cores=5, gpus=4)

    def given(**asked: int) -> list[TrialShare]:
        return shares(SweepConfig(**asked), machine)

    assert given() == [TrialShare()]
    assert given(parallel=2, cores_per_trial=2) == [
        TrialShare(frozenset({2, 3}), ()),
        TrialShare(frozenset({4, 5}), ()),
    ]
    assert given(parallel=2, gpus_per_trial=2) == [
        TrialShare(frozenset({2, 3}), ("0", "1")),
        TrialShare(frozenset({4, 5}), ("2", "3")),
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "5,7")
    assert [one.environment() for one in given(parallel=2, gpus_per_trial=1)] == [
        {"CUDA_VISIBLE_DEVICES": "5"},
        {"CUDA_VISIBLE_DEVICES": "7"},
    ]
    assert TrialShare(frozenset({0}), ()).environment() == {"CUDA_VISIBLE_DEVICES": "-1"}
    assert TrialShare(frozenset({3, 2}), ("7",)).prefix() == ["env", "CUDA_VISIBLE_DEVICES=7", "taskset", "-c", "2,3"]


def test_what_is_drawn_does_not_depend_on_which_trial_is_faster(tmp_path, monkeypatch):
    made, drawn = Sweep(tmp_path, settings(parallel=3), {}), []

    def suggest(number: int, known: Sequence[Trial]) -> dict[str, object]:
        drawn.append((number, [one.number for one in known]))
        return {}

    beside = runner._TrialRunner(made, [TrialShare()] * 3)
    monkeypatch.setattr(beside, "wait_for", lambda known: drawn.append([one.number for one in known]))
    assert [one.number for one in beside.first(5, suggest)] == [0, 1, 2, 3, 4]
    assert drawn == [[], (0, []), [], (1, []), [], (2, []), [0], (3, [0]), [0, 1], (4, [0, 1])]


@pytest.mark.parametrize(
    ("asked", "codes"),
    [
        ({"parallel": 2}, "sweep.parallel/not-set"),
        ({"parallel": 3, "cores_per_trial": 2}, "sweep.cores_per_trial/over-capacity"),
        ({"parallel": 2, "gpus_per_trial": 1}, "sweep.gpus_per_trial/over-capacity"),
        ({"parallel": 2, "cores_per_trial": 1, "launch": "ssh"}, "sweep.parallel/conflict"),
        ({"cores_per_trial": 1, "launch": "docker"}, "sweep.cores_per_trial/conflict"),
    ],
)
def test_a_machine_is_shared_out_only_as_far_as_it_reaches(refused, asked, codes):
    launch = LaunchConfig(name=Launch(asked.get("launch", "local")))
    asked = {name: value for name, value in asked.items() if name != "launch"}
    refused(codes, check, SweepConfig(**asked), launch, DeviceConfig(), Machine(cores=5, gpus=1))


# Commands


BAD = {
    "no space": (),
    "unknown key": ("sweep.space={optimizer.learning_rat: [1]}",),
    "bad value": ("sweep.space={train.batch_size: [8,0]}",),
    "two that set the steps": ("sweep.space={train.steps: [8,9]}", "sweep.halving=2"),
    "no share": ("sweep.space={train.batch_size: [8,16]}", "sweep.parallel=2"),
    "halving of combinations": ("-m", "train.batch_size=8,16", "sweep.halving=2"),
    "bad range": ("sweep.space={optimizer.learning_rate: log(1,1)}",),
}


@pytest.mark.long(but=["no share", "bad range"])
@pytest.mark.parametrize("kind", BAD)
def test_a_sweep_that_cannot_work_starts_nothing(python, tmp_path, snapshot, kind):
    words = BAD[kind]
    command = ["-m", "trainer", *([] if "-m" in words else ["sweep"]), "run=sweeps/a", *words]
    ended = python.run(*command, cwd=tmp_path)
    assert ended.returncode == 2
    assert ended.stderr == snapshot
    assert not (tmp_path / "sweeps").exists()


MEETS = """
import time
from pathlib import Path

import keras


def meets(input_shape, classes, *, width):
    here = [Path(__file__).with_name(f"built-{one}") for one in (8, 16)]
    diverges = width == 16
    here[diverges].touch()
    deadline = time.monotonic() + 120
    while not all(path.exists() for path in here):
        if time.monotonic() > deadline:
            raise TimeoutError("no trial with another width was started")
        time.sleep(0.05)
    first = keras.initializers.Constant(1e38 if diverges else 0.01)
    layers = [keras.layers.Flatten(), keras.layers.Dense(classes, kernel_initializer=first)]
    return keras.Sequential([keras.Input(input_shape), *layers])
"""


@pytest.mark.cluster
def test_every_combination_is_a_row_and_a_failure_is_a_result(tmp_path):
    """The second model diverges. Two trials train at a time, on a core each: they wait for each other."""
    (tmp_path / "meets.py").write_text(MEETS)
    small = ["user=meets.py", "model=meets", "train.batch_size=64", "train.steps=4"]
    words = ["-m", "model.options.width=8,16", *small]
    ended = sweep(tmp_path, *words, "optimizer=sgd", "run=sweeps/a", "sweep.parallel=2", "sweep.cores_per_trial=1")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    rows = table(tmp_path / "sweeps/a")
    assert [row["model.options.width"] for row in rows] == ["8", "16"]
    assert [row["state"].partition(":")[0] for row in rows] == ["done", "failed (exit code 65)"]
    best = rows[0]
    assert os.readlink(tmp_path / "sweeps/a/best") == best["trial"]
    (repeat,) = re.findall(r"^repeat +taskset -c \d+ python -m (trainer .*)$", ended.stdout, re.MULTILINE)
    assert "model.options.width=8" in repeat
    summary = json.loads((tmp_path / f"sweeps/a/{best['trial']}/summary.json").read_text())
    assert summary["params_sha256"].startswith(best["params_sha256"])
    (task,) = json.loads((tmp_path / "sweeps/a/0000/plan.json").read_text())["tasks"]
    assert task["intra_op_threads"] == 1


def drawn(*more: str) -> list[str]:
    range_of_rates = "sweep.space={optimizer.learning_rate: log(1e-4,1), model.options.width: [8,16]}"
    return ["sweep", range_of_rates, "sweep.metric=eval_accuracy", *SMALL, *more]


@pytest.mark.cluster
@pytest.mark.long
def test_a_sweep_that_is_killed_again_and_again_ends_with_the_same_table(tmp_path):
    """Three times, at random moments; and the winner of the halving has the bits of an unbroken run."""
    optional("optuna", "SWEEP THAT DRAWS VALUES")
    at_a_time = ["sweep.parallel=2", "sweep.cores_per_trial=1"]
    words = drawn("sweep.trials=4", "sweep.halving=2", "train.steps=40", "checkpoint.every=5", *at_a_time)
    whole = sweep(tmp_path, *words, "run=sweeps/whole")
    assert whole.returncode == 0, whole.stdout + whole.stderr
    moments = random.Random(SEED)
    for _ in range(3):
        command = [sys.executable, "-m", "trainer", *words, "run=sweeps/killed"]
        with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as killed:
            time.sleep(moments.uniform(0.5, 5.0))
            killed.send_signal(signal.SIGKILL)
    ended = sweep(tmp_path, *words, "run=sweeps/killed")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert table(tmp_path / "sweeps/killed") == table(tmp_path / "sweeps/whole")
    ((core, repeat),) = re.findall(r"^repeat +taskset -c (\d+) python -m trainer (.*)$", ended.stdout, re.MULTILINE)
    with TrialShare(frozenset({int(core)})).inherited():
        assert sweep(tmp_path, *repeat.split(), "run=alone").returncode == 0
    sha256 = json.loads((tmp_path / "alone/summary.json").read_text())["params_sha256"]
    best = json.loads((tmp_path / "sweeps/killed/best/summary.json").read_text())
    assert (best["params_sha256"], best["steps"]) == (sha256, 40)


@pytest.mark.cluster
@pytest.mark.long
def test_ctrl_c_saves_the_trial_and_the_same_command_continues(tmp_path):
    words = ["-m", "optimizer.learning_rate=0.001,0.01", *SMALL, "train.steps=400", "history.every=1", "run=sweeps/a"]
    command = [sys.executable, "-m", "trainer", *words]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True, start_new_session=True) as stopped:
        history = tmp_path / "sweeps/a/0000/history.jsonl"
        while not (history.exists() and history.read_text()):
            assert stopped.poll() is None
            time.sleep(0.05)
        os.killpg(stopped.pid, signal.SIGINT)
        assert "sweeps/a was stopped" in stopped.stdout.read()
    assert stopped.returncode == 130
    ended = sweep(tmp_path, *words)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "resumes at step" in (tmp_path / "sweeps/a/logs/0000.log").read_text()
    assert [row["steps"] for row in table(tmp_path / "sweeps/a")] == ["400", "400"]


@pytest.mark.long
def test_values_are_drawn_from_the_seed_and_the_results_before_alone(tmp_path):
    optional("optuna", "SWEEP THAT DRAWS VALUES")
    from trainer.commands.sweep import sampler

    found, _ = space.parse({"rate": "log(1e-4, 1)", "width": [8, 16], "depth": "integer(1,3)"})

    def draw(seed: int, forget: bool) -> Sequence[dict[str, object]]:
        made = Sweep(tmp_path / f"{seed}-{forget}", settings(space={}), found)
        for _ in range(14):
            if forget:  # as a command that is typed again
                made = Sweep(made.path, made.settings, found)
            made.add(sampler.suggest(found, len(made.trials), made.trials, is_lowest=True, seed=seed))
            trial = made.trials[-1]
            trial.scores[9], trial.state = abs(math.log10(trial.values["rate"]) + 2), DONE
            made.remember()
        return [one.values for one in made.trials]

    assert draw(1, forget=False) == draw(1, forget=True) != draw(2, forget=False)
    values = draw(1, forget=False)
    assert {type(one["depth"]) for one in values} == {int}
    assert all(1e-4 <= one["rate"] <= 1 and one["width"] in (8, 16) for one in values)


@pytest.mark.long
def test_tensorboard_has_the_values_and_the_score_of_each_trial(tmp_path):
    accumulator = optional("tensorboard.backend.event_processing.event_accumulator", "PAGE OF TensorBoard")
    from trainer.commands.sweep import results

    made = Sweep(tmp_path, settings(space={"rate": [0.5, 1.0]}), {"rate": [0.5, 1.0]})
    made.add({"rate": 0.5}, {"rate": 1.0})
    made.trials[0].scores[9], made.trials[1].state = 0.25, "ended with 65: NaN"
    results.write_hparams(made)
    read = accumulator.EventAccumulator(str(tmp_path / "hparams/0000"))
    read.Reload()
    (score,) = read.Scalars("eval_loss")
    assert (score.step, score.value) == (9, 0.25)
    assert "hparams" in read.summary_metadata["_hparams_/session_start_info"].plugin_data.plugin_name
    assert (tmp_path / "hparams/0001").is_dir()
