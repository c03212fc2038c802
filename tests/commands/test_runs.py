"""Commands about runs that have been started: runs, status, stop, save and continue."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from forks import Forks
from quick_config import invoke, load
from runs import wait_until

from trainer.commands import validation
from trainer.commands.runs import evaluate
from trainer.config import arguments
from trainer.engine.vectors.snapshot import Snapshot
from trainer.faults.problems import ConfigError
from trainer.observe import runs
from trainer.observe.live import NotRunningError, attach
from trainer.plan.description import Description
from trainer.plan.devices import Machine
from trainer.plan.layout import Parameter
from trainer.plan.make import make_plan
from trainer.storage import lease, questions, requests
from trainer.storage.lease import Lease
from trainer.storage.requests import Request
from trainer.storage.run_directory import RunDirectory
from trainer.task.chief.mailbox import Mailbox

MODEL = Description((Parameter("dense/kernel", (784, 128), True),), 10, 8000, 2000)
OVERRIDES = ["cluster=1ps2w", "model=mlp", "model.options.width=16", "train.batch_size=48", "history.every=1"]
SLOW = "import time\ndef on_step(step, logs): time.sleep(0.03)"  # else it makes thousands of steps meanwhile


def make_run(path: Path, *overrides: str, summary: dict | None = None, started_at: float | None = None) -> Path:
    config = load(["cluster=1ps2w", "train.batch_size=48", "train.steps=40", *overrides])
    directory = RunDirectory(path)
    directory.write_inputs(config, make_plan(config, MODEL, Machine(cores=4, gpus=())))
    if summary is not None:
        directory.summary.write_text(json.dumps({"steps": 40, "final_loss": 0.5, "failed": None} | summary))
    if started_at is not None:
        status = {"launcher": {"pid": 0}, "started_at": started_at, "time": started_at + 5.0, "tasks": {}}
        directory.status.write_text(json.dumps(status))
    return path


def trainer(python: Forks, cwd: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return python.run("-m", "trainer", *words, cwd=cwd)


@pytest.mark.parametrize(
    ("summary", "state"),
    [
        (None, "died"),
        ({}, "done"),
        ({"steps": 7}, "stopped"),
        ({"steps": 7, "ended_early": "enough"}, "done"),
        ({"failed": "worker:1"}, "failed"),
        ({"tasks": {"ps:0": {"code": 143}}}, "stopped"),
        ({"tasks": ["ps:0", "worker:0"]}, "done"),  # written by a chief that a scheduler started
    ],
)
def test_a_run_is_in_one_state(tmp_path, summary, state):
    path = make_run(tmp_path / "run", summary=summary)
    assert runs.read(path).state == state
    with Lease(RunDirectory(path)):
        facts = runs.read(path)
        assert (facts.state, facts.owner) == ("running", os.getpid())
        assert runs.read(path, is_over=True).state == state
    assert lease.owner(RunDirectory(path)) is None


def test_asking_who_uses_a_directory_does_not_keep_a_run_from_starting(tmp_path):
    directory = RunDirectory(tmp_path)
    code = """
import sys, time
from pathlib import Path
from trainer.storage import lease
from trainer.storage.run_directory import RunDirectory
until = time.monotonic() + 1
while time.monotonic() < until:
    lease.owner(RunDirectory(Path(sys.argv[1])))
    time.sleep(0.001)
"""
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)]) as asking:
        while asking.poll() is None:
            with Lease(directory):
                (tmp_path / "kept").touch()
            time.sleep(0.001)
    assert asking.returncode == 0


def test_what_is_asked_is_taken_once(tmp_path):
    directory = RunDirectory(tmp_path)
    assert not requests.take(directory, Request.stop)
    requests.make(directory, Request.stop)
    assert requests.is_pending(directory, Request.stop)
    assert requests.take(directory, Request.stop)
    assert not requests.take(directory, Request.stop)
    assert not requests.is_pending(directory, Request.stop)


@pytest.mark.slow
def test_parameters_are_given_to_each_who_asks_and_to_nobody_twice(tmp_path, caplog):
    directory = RunDirectory(tmp_path)
    assert not Mailbox(directory).has_questions()
    values = {"dense/kernel": np.arange(6.0).reshape(2, 3), "dense/bias": np.zeros(3), "step": np.ones(1)}
    kernels, everything = (questions.ask(directory, patterns) for patterns in (["*/kernel", "none"], ["*", "slots/*"]))
    questions.withdraw(questions.ask(directory, ["*"]))
    for number, damaged in enumerate(("{", "5", "[[]]")):
        (directory.requests / f"parameters-damaged-{number}").write_text(damaged)
    (mailbox := Mailbox(directory)).answer(Snapshot(7, values, {}, {"momentum": {"dense/kernel": np.ones((2, 3))}}))
    assert "was not answered" in caplog.text
    step, answer = questions.read(kernels)
    assert (step, list(answer)) == (7, ["dense/kernel"])
    np.testing.assert_array_equal(answer["dense/kernel"], values["dense/kernel"])
    assert questions.read(everything)[1].keys() == {*values, "slots/momentum/dense/kernel"}
    assert not mailbox.has_questions()


def test_a_run_that_is_not_running_answers_nobody(tmp_path, raises):
    path = make_run(tmp_path / "run")
    with pytest.raises(NotRunningError, match="is not running: it is died"):
        attach(path).parameters()
    with Lease(RunDirectory(path)), raises(NotRunningError):
        attach(path).parameters(timeout_secs=0.1)
    assert list((path / "requests").iterdir()) == []
    with raises(FileNotFoundError):
        attach(tmp_path)


def test_runs_are_listed_filtered_and_sorted(python, tmp_path):
    make_run(tmp_path / "runs" / "slow", summary={"examples_per_second": 1.0, "final_loss": 0.1}, started_at=2e9)
    make_run(
        tmp_path / "runs" / "sweep" / "fast",
        summary={"examples_per_second": 9.0, "final_loss": math.nan},
        started_at=1e9,
    )
    make_run(tmp_path / "runs" / "dead [x]")
    (tmp_path / "runs" / "else").mkdir()

    def listed(*words: str) -> list[str]:
        done = trainer(python, tmp_path, "runs", "--json", *words)
        assert done.returncode == 0, done.stderr
        assert "NaN" not in done.stdout  # JSON has no such word; other parsers refuse it
        return [Path(one["path"]).name for one in json.loads(done.stdout)]

    assert listed() == ["dead [x]", "fast", "slow"]
    assert listed("runs.sort=rate", "runs.last=1") == ["fast"]
    assert listed("runs.sort=loss") == ["dead [x]", "slow", "fast"]
    assert listed("runs.state=died") == ["dead [x]"]
    assert listed("runs.name=s*") == ["slow"]
    assert listed("runs.folder=nowhere") == []
    table = trainer(python, tmp_path, "runs").stdout
    assert "runs/dead [x]" in table
    assert "no runs in" in trainer(python, tmp_path, "runs", "runs.folder=nowhere").stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["status"], 2),
        (["stop", "run=none"], 66),
        (["status", "run=runs"], 66),
        (["stop", "run=runs/x"], 69),
        (["save", "run=runs/x"], 69),
        (["report", "run=runs/x", "report.beside=[none]"], 66),
        (["continue", "run=runs/x", "train={steps: 3}"], 2),
        (["continue", "run=runs/x", "model=mlp"], 2),
    ],
)
def test_what_cannot_be_done_is_refused_with_what_to_type(python, tmp_path, snapshot, words, code):
    make_run(tmp_path / "runs" / "x", summary={})
    done = trainer(python, tmp_path, *words)
    assert (done.returncode, done.stdout) == (code, "")
    assert done.stderr == snapshot


TRAINED_ON = {"path": "a.csv", "label": "y", "evaluate": 0.1, "matrix": True}


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("", None),
        ("checkpoint=best evaluate.batch_size=3", None),
        ("data=csv", TRAINED_ON),
        ("data=csv data.options.path=a.csv", TRAINED_ON),
        ("data=csv data.options.path=b.csv", TRAINED_ON | {"evaluate": "b.csv"}),
        ("data=csv data.options.evaluate=b.csv", TRAINED_ON | {"evaluate": "b.csv"}),
        ("data=csv data.options.path=b.csv data.options.evaluate=0.5", TRAINED_ON | {"path": "b.csv", "evaluate": 0.5}),
        (
            "data=csv data.options.path=b.csv data.options.label=null",
            TRAINED_ON | {"path": "b.csv", "evaluate": "b.csv", "label": None},
        ),
        ("data=npz data.options.path=b.npz", {"path": "b.npz", "scale": None, "classes": None}),
    ],
)
def test_other_data_has_the_options_of_the_run_but_for_what_is_typed(tmp_path, monkeypatch, words, options):
    stored = [f"data.options.{name}={value}" for name, value in TRAINED_ON.items()]
    path = make_run(tmp_path / "run", "data=csv", *stored)
    typed = ["evaluate", f"run={path}", *words.split()]
    monkeypatch.setattr(sys, "argv", ["trainer", *typed])
    given = invoke(arguments.sort(typed).overrides, validation.complete)
    other = evaluate.other_data(given.config, RunDirectory(path))
    if options is None:
        assert other is None
    else:
        shown = other.data.options
        assert {name: shown[name] for name in options} == options
    assert given.typed.export.checkpoint == ("best" if "checkpoint=best" in words else "last")


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        ("evaluate", ["run"]),
        ("predict run=r", ["export.to"]),
        ("predict run=r to=out.parquet", ["export.to"]),
        ("predict run=r to=out.npz checkpoint=newest", ["export.checkpoint"]),
        ("evaluate run=r to=out.npz", ["export.to"]),
        ("mode=evaluate run=r checkpoint=newest", ["export.checkpoint"]),
        ("export run=r checkpoint=newest", ["export.checkpoint"]),
    ],
)
def test_a_checkpoint_and_a_file_are_named_in_words_that_the_command_knows(words, keys):
    with pytest.raises(ConfigError) as caught:
        load(arguments.sort(words.split()).overrides, validation.complete)
    assert [one.key for one in caught.value.problems] == keys


def test_a_run_without_a_launcher_is_stopped_where_it_was_started(python, tmp_path, monkeypatch, raises):
    from trainer.commands.runs import stop

    path = make_run(tmp_path / "run")
    monkeypatch.setattr(stop, "START_SECS", 0.1)
    with Lease(RunDirectory(path)), raises(NotRunningError):
        stop.run(RunDirectory(path), as_json=False)


@pytest.mark.cluster
def test_a_run_is_looked_at_saved_stopped_and_continued_to_the_bits_of_an_unbroken_one(start, finish, python, tmp_path):
    """Its events, and its report, tell of all that."""
    (tmp_path / "mine.py").write_text(SLOW)
    run = start(*OVERRIDES, "user=mine.py", "train.steps=1000000", "checkpoint.every=1000000")
    run.wait_for_step(20)
    facts = json.loads(trainer(python, tmp_path, "status", "run=run", "--json").stdout)
    assert (facts["state"], facts["phase"], facts["cluster"]) == ("running", "training", "1ps2w")
    assert facts["launcher"]["pid"] == run.process.pid
    assert {name: one["restarts"] for name, one in facts["status"]["attempts"].items()} == {
        "ps:0": 0,
        "worker:0": 0,
        "worker:1": 0,
    }
    assert all(one["metrics"] for one in facts["status"]["attempts"].values())
    assert "worker:1  training" in trainer(python, tmp_path, "status", "run=run").stdout
    read = json.loads(trainer(python, tmp_path, "attach", "run=run", "attach.parameters=['*/kernel']", "--json").stdout)
    assert read["step"] >= 20
    assert len(read["parameters"]) == 3
    assert all(name.endswith("/kernel") for name in read["parameters"])
    step, values = attach(run.directory).parameters("*", "slots/*")
    assert step > read["step"]
    assert {f"slots/momentum/{name}" for name in read["parameters"]} <= values.keys()
    saved = json.loads(trainer(python, tmp_path, "save", "run=run", "--json").stdout)
    assert Path(saved["path"], "manifest.json").exists()
    done = trainer(python, tmp_path, "stop", "run=run")
    assert done.returncode == 0, done.stderr
    assert "run: stopped, step" in done.stdout
    assert "trainer continue run=run\n" in done.stdout
    assert run.wait() == 143
    assert "Stopping: finishing this" in run.output
    steps = run.summary()["steps"]
    assert sorted(int(path.name) for path in (run.directory / "checkpoints").iterdir()) == [saved["step"], steps]

    end = f"train.steps={steps + 20}"
    continued = finish("continue", f"run={run.directory}", end)
    whole = finish(*OVERRIDES, end, f"run={tmp_path}/whole")
    assert continued.summary()["params_sha256"] == whole.summary()["params_sha256"]
    assert continued.history()[-1]["step"] == steps + 20
    assert "trainer continue run=run train.steps=" in continued.output

    events = [json.loads(line) for line in (run.directory / "events.jsonl").read_text().splitlines()]
    assert [event["event"] for event in events if event["event"] in ("launch", "end")] == ["launch", "end"] * 2
    assert sorted(event["task"] for event in events if event["event"] == "exit") == sorted(
        ["ps:0", "worker:0", "worker:1"] * 2
    )
    assert any("Stopping" in event.get("text", "") for event in events if event["event"] == "message")
    assert [event["time"] for event in events] == sorted(event["time"] for event in events)
    assert f"resumes at step {steps}" in (run.directory / "report.html").read_text()
    assert set(whole.summary()["waits"]) <= {"worker:0", "worker:1"}
    assert trainer(python, tmp_path, "check", "run=run").stdout.endswith("all checks passed\n")
    wait_until(lambda: lease.owner(RunDirectory(run.directory)) is None)
