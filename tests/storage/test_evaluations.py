"""Scores and the best checkpoint, as files: what is read back, what stays, and what a crash leaves."""

from __future__ import annotations

import json
import random
import select
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from trainer.config.schema import BestIs, EvaluateConfig
from trainer.storage import checkpoint, checkpoint_writer, evaluations, resume
from trainer.storage.evaluations import Evaluation
from trainer.storage.run_directory import RunDirectory

ROOT = Path(__file__).parents[2]
KILL_SEED = 5
LINES = (
    '{"step": 10, "loss": 0.5, "accuracy": 0.8, "seconds": 0.1}\n'
    '{"step": 20, "loss": 0.25, "accuracy": 0.9, "seconds": 0.1}\n'
)


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")


def save(directory: RunDirectory, *steps: int) -> Path:
    """Saves checkpoints that hold their step; returns the last one's folder."""
    saved = [
        checkpoint_writer.write(directory.checkpoints, step, 1, {}, {"parameters/a": np.float32([step])}, keep=99)
        for step in steps
    ]
    return saved[-1]


def scored(step: int, *, loss: float = 0.5, accuracy: float = 0.8) -> Evaluation:
    return Evaluation(step, {"loss": loss, "accuracy": accuracy}, 0.1)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# ---- lines


def test_without_a_file_nothing_is_scored(tmp_path):
    assert evaluations.read(tmp_path / "evaluations.jsonl") == []


def test_a_line_that_was_cut_off_does_not_count(tmp_path):
    (tmp_path / "evaluations.jsonl").write_text(LINES + '{"step": 30, "lo')
    assert evaluations.read(tmp_path / "evaluations.jsonl") == [scored(10), scored(20, loss=0.25, accuracy=0.9)]


# ---- the best


@pytest.mark.parametrize(
    ("metric", "loss", "accuracy", "wins"),
    [
        ("accuracy", 9.0, 0.81, True),
        ("accuracy", 0.1, 0.79, False),
        ("accuracy", 0.1, 0.80, False),
        ("loss", 0.4, 0.1, True),
        ("loss", 0.6, 0.9, False),
        ("loss", 0.5, 0.9, False),
        ("loss", float("nan"), 0.9, False),
        ("accuracy", 0.1, float("nan"), False),
    ],
    ids=["more right", "less right", "tie", "less loss", "more loss", "tie of losses", "NaN loss", "NaN accuracy"],
)
def test_the_best_has_the_highest_accuracy_or_the_lowest_loss_and_the_earlier_stays_on_a_tie(
    metric, loss, accuracy, wins
):
    assert (
        evaluations.is_better(scored(20, loss=loss, accuracy=accuracy), scored(10), EvaluateConfig(best_metric=metric))
        is wins
    )


def test_the_first_score_is_the_best_unless_it_is_nan():
    assert evaluations.is_better(scored(10), None, EvaluateConfig(best_metric="loss"))
    assert not evaluations.is_better(scored(10, loss=float("nan")), None, EvaluateConfig(best_metric="loss"))


def test_without_an_accuracy_the_loss_decides():
    worse, better = (Evaluation(10, {"loss": loss, "mean_absolute_error": 0.1}, 0.1) for loss in (0.5, 0.4))
    assert evaluations.is_better(better, worse, EvaluateConfig())
    assert not evaluations.is_better(worse, better, EvaluateConfig())
    assert evaluations.is_better(scored(20, loss=9.0, accuracy=0.9), scored(10), EvaluateConfig())


@pytest.mark.parametrize(("best_is", "wins"), [("auto", True), ("highest", True), ("lowest", False)])
def test_the_direction_of_a_metric_of_ones_own_can_be_chosen(best_is, wins):
    one, other = (Evaluation(10, {"distance": value}, 0.1) for value in (0.5, 0.4))
    assert evaluations.is_better(one, other, EvaluateConfig(best_metric="distance", best_is=BestIs(best_is))) is wins


@pytest.mark.parametrize(
    ("metric", "is_error"),
    [("auc", False), ("loss", True), ("mean_absolute_error", True), ("rmse", True), ("mean_io_u", False)],
)
def test_the_direction_of_a_metric_follows_from_its_name(metric, is_error):
    assert evaluations.is_error(metric) is is_error


def test_the_best_is_a_checkpoint_with_its_score_beside_it(directory):
    save(directory, 10, 20)
    for step in (10, 20):
        evaluations.keep_as_best(directory.best, directory.checkpoints / f"{step:09d}", scored(step))
    assert names(directory.best) == ["000000020"]
    assert names(directory.best / "000000020") == ["evaluation.json", "manifest.json", "tensors.npz"]
    assert evaluations.best(directory.best) == (scored(20), directory.best / "000000020")
    assert json.loads((directory.best / "000000020/evaluation.json").read_text())["accuracy"] == 0.8


def test_there_is_no_best_before_the_first_score(directory):
    assert evaluations.best(directory.best) is None


def test_a_run_starts_from_the_best_of_another_by_the_name_of_its_folder(directory, tmp_path):
    evaluations.keep_as_best(directory.best, save(directory, 10), scored(10))
    found = resume.find(str(directory.best), RunDirectory(tmp_path / "other"), steps=50)
    assert (found.step, found.path) == (10, directory.best / "000000010")
    assert resume.find(str(directory.best / "000000010"), RunDirectory(tmp_path / "other"), steps=50).step == 10


REPLACE_FOR_EVER = """
import itertools, sys
from pathlib import Path
import numpy as np
from trainer.storage import checkpoint, checkpoint_writer, evaluations

folder = Path(sys.argv[1])
for step in itertools.count(int(sys.argv[2])):
    saved = checkpoint_writer.write(folder / "checkpoints", step, 0, {}, {"parameters/a": np.full(9, step)}, keep=2)
    evaluations.keep_as_best(folder / "best", saved, evaluations.Evaluation(step, {"loss": 0.5}, 0.1))
    print(step, flush=True)
"""


@pytest.mark.slow
def test_a_task_killed_at_any_moment_leaves_a_whole_best(tmp_path):
    print(f"seed {KILL_SEED}")
    delays = random.Random(KILL_SEED)
    held = 0
    for _ in range(8):
        command = [sys.executable, "-c", REPLACE_FOR_EVER, str(tmp_path), str(held + 1)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            said = int(process.stdout.readline())
            select.select([], [], [], delays.uniform(0, 0.05))
            process.kill()
            said = int((process.stdout.read().split() or [said])[-1])
        best, path = evaluations.best(tmp_path / "best")
        held = best.step
        checkpoint.verify(checkpoint.read_manifest(path))
        assert said <= held <= said + 1


# ---- what waits for its score


def test_checkpoints_wait_until_they_are_scored(directory):
    directory.path.mkdir()
    directory.evaluations.write_text(LINES)
    release = evaluations.release_when_scored(directory.evaluations, waiting_at_most=None)
    assert release([10, 20, 30, 40]) == [10, 20]


def test_all_wait_while_nothing_is_scored(directory):
    assert evaluations.release_when_scored(directory.evaluations, waiting_at_most=None)(list(range(100))) == []


def test_the_oldest_is_given_up_when_too_many_wait_and_it_is_logged(directory, caplog, snapshot):
    directory.path.mkdir()
    directory.evaluations.write_text(LINES)
    release = evaluations.release_when_scored(directory.evaluations, waiting_at_most=2)
    assert release([20, 30, 40]) == [20]
    assert release([20, 30, 40, 50]) == [20, 30]
    assert caplog.messages == snapshot


# ---- what a summary says


def test_a_summary_has_the_scores_of_the_last_step_and_the_best(directory):
    evaluations.keep_as_best(directory.best, save(directory, 10), scored(10, loss=0.5, accuracy=0.95))
    directory.evaluations.write_text(LINES)
    path = str(directory.best / "000000010")
    assert evaluations.results(directory, 20) == {
        "eval_loss": 0.25,
        "eval_accuracy": 0.9,
        "best": {"step": 10, "loss": 0.5, "accuracy": 0.95, "path": path},
    }


def test_a_summary_of_a_run_that_stopped_before_its_score_has_none(directory):
    assert evaluations.results(directory, 20) == {"best": None}


# ---- another past


def test_a_run_that_starts_anew_sets_aside_what_the_earlier_one_made(directory):
    evaluations.keep_as_best(directory.best, save(directory, 10), scored(10))
    directory.evaluations.write_text(LINES)
    directory.export.mkdir()
    directory.config.write_text("seed: 1")
    resume.set_aside(directory, directory.config)
    (aside,) = directory.path.iterdir()
    assert aside.name.startswith("before-")
    assert names(aside) == ["best", "checkpoints", "config.yaml", "evaluations.jsonl", "export"]


def test_a_run_that_made_nothing_leaves_nothing_to_set_aside(directory):
    directory.path.mkdir(exist_ok=True)
    directory.config.write_text("seed: 1")
    resume.set_aside(directory, directory.config)
    assert names(directory.path) == ["config.yaml"]


def test_scores_and_a_best_that_are_newer_than_the_start_do_not_count(directory):
    evaluations.keep_as_best(directory.best, save(directory, 10, 20), scored(20))
    directory.evaluations.write_text(LINES)
    resume.set_aside_newer(directory, step=10)
    assert evaluations.best(directory.best) is None
    assert directory.evaluations.read_text() == LINES.splitlines(keepends=True)[0]
    moved = [name.partition("-until-")[0] for name in names(directory.path) if "-until-" in name]
    assert moved == ["best", "checkpoints"]


def test_a_best_that_is_older_than_the_start_stays(directory):
    save(directory, 10, 20)
    evaluations.keep_as_best(directory.best, directory.checkpoints / "000000010", scored(10))
    resume.set_aside_newer(directory, step=10)
    assert evaluations.best(directory.best) == (scored(10), directory.best / "000000010")
