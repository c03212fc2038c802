"""Loggers get the history of a run, and whatever they do, the run does not change."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from extras import optional
from runs import Run

pytestmark = pytest.mark.cluster

SMALL = ("cluster=local", "model=mlp", "history.every=2", "evaluate.every=4", "checkpoint.every=4")


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """plugin(methods) installs a package whose entry point names a logger with them, as `mine`."""

    def install(methods: str) -> None:
        folder = tmp_path / "site"
        (folder / "mine-1.0.dist-info").mkdir(parents=True)
        (folder / "mine-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
        (folder / "mine-1.0.dist-info" / "entry_points.txt").write_text("[trainer.loggers]\nmine = mine:Mine\n")
        nothing = "def start(self, run): pass\ndef log(self, step, values): pass\ndef finish(self, summary): pass\n"
        body = textwrap.indent(nothing + methods, "    ")
        (folder / "mine.py").write_text(f"import time\n\nclass Mine:\n{body}")
        monkeypatch.setenv("PYTHONPATH", str(folder))

    return install


def values(path: Path, name: str) -> dict[int, float]:
    """A column of the file by step."""
    with (path / "loggers/history.csv").open(newline="") as file:
        return {int(row["step"]): float(row[name]) for row in csv.DictReader(file) if row[name]}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_run_is_logged_and_logged_on_when_it_is_continued(start: Callable[..., Run], tmp_path: Path):
    for steps in (8, 12):
        run = start(*SMALL, f"run={tmp_path}/run", f"train.steps={steps}", "loggers=[csv]")
        assert run.wait() == 0, run.output
        assert "\nlogger " not in run.output
    for file, name in (("history", "loss"), ("evaluations", "eval_loss")):
        expected = {line["step"]: line["loss"] for line in lines(tmp_path / f"run/{file}.jsonl")}
        assert values(tmp_path / "run", name) == expected
    assert (tmp_path / "run/loggers/history.csv").read_text().count("step,") == 1


BAD = {
    "hangs": ("def start(self, run): time.sleep(600)", "logger mine was"),
    "fails": ("def log(self, step, values): raise ValueError('no quota')", "logger mine failed: ValueError: no quota;"),
}


@pytest.mark.long
@pytest.mark.parametrize("kind", BAD)
def test_a_logger_that_hangs_or_fails_changes_nothing_and_is_named(plugin, tmp_path, finish, kind):
    methods, message = BAD[kind]
    plain = finish(*SMALL, "train.steps=4", f"run={tmp_path}/plain")
    plugin(methods)
    run = finish(*SMALL, "train.steps=4", f"run={tmp_path}/logged", "loggers=[mine,csv]")
    (said,) = [line for line in run.output.splitlines() if line.startswith("logger ")]
    assert said.startswith(message)
    assert run.summary()["params_sha256"] == plain.summary()["params_sha256"]
    assert list(values(run.directory, "loss")) == [2, 4]


@pytest.mark.long
def test_a_run_is_logged_afterwards_from_where_a_logger_was(plugin, tmp_path, finish):
    run = finish(*SMALL, "train.steps=8", f"run={tmp_path}/run")
    plugin("def log(self, step, values): assert step < 4 or 'again' in open('how').read(), 'no quota'")
    command = [sys.executable, "-m", "trainer", "log", f"run={run.directory}", "loggers=[mine]"]
    (tmp_path / "how").write_text("first")
    first = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert first.returncode == 69, first.stderr
    assert "logger mine failed: AssertionError: no quota" in first.stdout
    (tmp_path / "how").write_text("again")
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert "logged by mine" in again.stdout
    assert json.loads((run.directory / "loggers/mine.json").read_text())["steps"]["history.jsonl"] == 8


@pytest.mark.long
def test_a_logger_whose_package_is_missing_is_named(tmp_path, finish):
    (tmp_path / "mlflow.py").write_text("raise ModuleNotFoundError(\"No module named 'mlflow'\")")
    overrides = [*SMALL, "train.steps=2", f"run={tmp_path}/run", "loggers=[mlflow]"]
    run = finish(*overrides, environment={"PYTHONPATH": str(tmp_path)})
    assert "logger mlflow failed: ModuleNotFoundError" in run.output


@pytest.mark.long
def test_mlflow_has_the_run(tmp_path, finish, monkeypatch):
    mlflow = optional("mlflow", "MLflow")
    store = f"file:{tmp_path}/store"
    environment = {"MLFLOW_TRACKING_URI": store, "MLFLOW_EXPERIMENT_NAME": "mine", "MLFLOW_ALLOW_FILE_STORE": "true"}
    for steps in (8, 12):
        overrides = [*SMALL, f"run={tmp_path}/run", f"train.steps={steps}", "loggers=[mlflow]"]
        run = finish(*overrides, environment=environment)
        assert "\nlogger " not in run.output, run.output
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    client = mlflow.MlflowClient(store)
    (found,) = client.search_runs([client.get_experiment_by_name("mine").experiment_id])
    assert (found.info.status, found.data.params["train.batch_size"]) == ("FINISHED", "256")
    assert found.data.tags["params_sha256"] == run.summary()["params_sha256"]
    losses = {one.step: one.value for one in client.get_metric_history(found.info.run_id, "loss")}
    assert losses == {line["step"]: line["loss"] for line in lines(run.directory / "history.jsonl")}


@pytest.mark.long
def test_wandb_has_the_run(tmp_path, finish):
    optional("wandb", "Weights & Biases")
    offline = {"WANDB_MODE": "offline"}
    run = finish(*SMALL, f"run={tmp_path}/run", "train.steps=4", "loggers=[wandb]", environment=offline)
    assert "\nlogger " not in run.output, run.output
    (kept,) = (run.directory / "loggers/wandb").glob("offline-run-*/*.wandb")
    assert kept.stat().st_size > 1000
