"""What is printed when a run ends, aligned, with what to type next."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from trainer.launch import ending
from trainer.launch.attempts import Failure
from trainer.plan.plan import Task
from trainer.storage.run_directory import RunDirectory

SUMMARY: dict[str, Any] = {
    "steps": 300,
    "seconds": 28.84,
    "time_to_first_step_secs": 6.51,
    "examples_per_second": 3511.2,
    "eval_loss": 0.12081,
    "eval_accuracy": 0.9695,
    "params_sha256": "c0ffee",
    "run_dir": "runs/x",
    "ended_early": None,
}


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDirectory:
    """A run directory with an export and events, of a command that was typed as `trainer`."""
    monkeypatch.chdir(tmp_path)
    typed = ["/usr/bin/trainer", "mode=train", "cluster=2ps4w", "run=runs/x", "train.steps=300", "resume=never"]
    monkeypatch.setattr(sys, "argv", typed)
    monkeypatch.setattr(ending, "find_spec", lambda name: None)
    for name in ("export", "events", "checkpoints"):
        Path("runs/x", name).mkdir(parents=True)
    Path("runs/x/export/model.keras").touch()
    return RunDirectory(Path("runs/x").resolve())


def done(
    directory: RunDirectory, summary: dict[str, Any], *, start: int, has_report: bool, longer: str = "train.steps=600"
) -> str:
    return ending.done(directory, summary, start=start, longer=longer, has_report=has_report)


def test_a_run_that_is_done_says_what_it_reached_where_it_is_and_what_to_type_next(directory):
    assert done(directory, SUMMARY, start=0, has_report=False).splitlines() == [
        "done: 300 steps in 28.8 s (first step after 6.5 s), 3,511 examples/s",
        "evaluation    eval_loss 0.1208, eval_accuracy 0.9695",
        "params_sha256 c0ffee",
        "run           runs/x",
        "model         runs/x/export/model.keras",
        "continue      trainer cluster=2ps4w run=runs/x train.steps=600",
        "TensorBoard   pip install tensorboard && tensorboard --logdir runs/x",
    ]


def test_a_run_that_was_resumed_says_how_many_steps_it_made_now(directory):
    first = done(directory, SUMMARY, start=232, has_report=True).splitlines()[0]
    assert first.startswith("done: 300 steps (68 of them now) in 28.8 s")


def test_a_run_of_epochs_is_continued_for_as_many_again(directory, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/trainer", "train.epochs=5"])
    lines = done(directory, SUMMARY, start=0, longer="train.epochs=10", has_report=False).splitlines()
    assert "continue      trainer run=runs/x train.epochs=10" in lines


def test_tensorboard_where_it_is_installed_and_another_step_that_was_exported(directory, monkeypatch):
    monkeypatch.setattr(ending, "find_spec", lambda name: name == "tensorboard")
    lines = done(directory, SUMMARY | {"exported_step": 200}, start=0, has_report=False).splitlines()
    assert "TensorBoard   tensorboard --logdir runs/x" in lines
    assert "model         runs/x/export/model.keras (the best, of step 200)" in lines


def test_the_rows_of_tables_that_grow_are_counted(directory):
    def rows(**tables: int) -> str:
        lines = done(directory, SUMMARY | {"rows": tables}, start=0, has_report=False).splitlines()
        return next((line for line in lines if line.startswith("rows")), "")

    assert rows() == ""
    assert rows(a=1200, b=3) == "rows          a 1,200, b 3"
    assert rows(a=1200, b=3, c=4, d=5) == "rows          1,212 in 4 growing tables"


def test_a_run_that_ended_early_says_why_and_not_how_to_train_on(directory, snapshot):
    text = done(directory, SUMMARY | {"ended_early": "accuracy has not improved"}, start=0, has_report=False)
    assert text == snapshot
    assert "\ncontinue  " not in text


def test_an_evaluator_s_best_checkpoint_and_a_saved_model_are_named(directory):
    Path("runs/x/export/model.keras").rename("runs/x/export/saved_model")
    best = {"step": 200, "accuracy": 0.97, "path": str(directory.path / "best" / "000000200")}
    text = done(directory, SUMMARY | {"best": best}, start=0, has_report=True)
    assert "best          step 200, accuracy 0.9700, runs/x/best/000000200\n" in text
    assert "model         runs/x/export/saved_model\n" in text


@pytest.mark.parametrize(
    ("summary", "saved"), [({"steps": 232}, 232), ({}, 200), ({"time_to_first_step_secs": None}, None)]
)
def test_a_run_that_was_stopped_says_in_a_sentence_what_was_saved_and_the_command_that_continues(
    directory, summary, saved, snapshot
):
    if saved is not None:
        (directory.checkpoints / f"{saved:09d}").mkdir()
    assert ending.stopped(directory, {"time_to_first_step_secs": 5.0} | summary) == snapshot


def test_a_run_that_failed_names_the_first_failure_and_ends_with_its_log(directory, snapshot):
    task = Task("worker", 1, "", "", (), None, 1, 2)
    assert ending.failed(directory, Failure(task, 70, ["one", "two"], "an unexpected error")).splitlines() == snapshot
