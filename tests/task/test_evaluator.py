"""An evaluator task with a real directory and model, and with chiefs that start, stay silent or leave."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from pages import page
from quick_config import load

from trainer.config.schema import RunConfig
from trainer.engine.vectors.snapshot import Snapshot
from trainer.launch.processes.ports import HeldPorts
from trainer.observe.peers import PeerError
from trainer.observe.task_page import TaskPage
from trainer.plan.layout import FrozenWeights, Shard
from trainer.plan.plan import Plan, Task
from trainer.storage import checkpoint, checkpoint_writer, evaluations
from trainer.storage.checkpoint import CheckpointError
from trainer.storage.journal import Journal
from trainer.storage.run_directory import RunDirectory
from trainer.task.evaluator import life
from trainer.task.evaluator.life import ChiefStatus, Finder
from trainer.task.evaluator.score import CheckpointScorer, FittingRows, make_evaluator
from trainer.task.runtime import TaskRuntime
from trainer.task.spec import TaskSpec
from trainer.workload import step as replica
from trainer.workload.workload import open_workload

pytestmark = pytest.mark.slow

STEPS = 30
SHARDS = (Shard(0, "worker:0", (), (), sums=2),)
EVALUATOR = Task("evaluator", 0, "", "127.0.0.1:0", (), None, 1, 2)


def config(*overrides: str) -> RunConfig:
    small = ["data=synthetic", "data.options.train_examples=64", "data.options.evaluate_examples=64", "model=mlp"]
    return load(["cluster=1ps1w1e", *small, "train.batch_size=8", f"train.steps={STEPS}", *overrides])


@pytest.fixture(scope="module")
def workload() -> Any:
    """(model, data) of `config`."""
    return open_workload(config(), Plan("local", "local", 1, 8, (), SHARDS, 64, ()))


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")


@pytest.fixture
def save(directory: RunDirectory, workload: Any) -> Callable[..., Path]:
    """save(step, scale=1): a checkpoint of the model's first weights, times a factor; returns its folder.

    With `sure_of`, the model predicts that class for every example.
    """

    def save_one(step: int, scale: float = 1.0, sure_of: int | None = None) -> Path:
        values = {path: np.float32(value * scale) for path, value in replica.initial_values(workload.model).items()}
        if sure_of is not None:
            values["logits/bias"][sure_of] = 1000.0
        tensors = Snapshot(step, values, {}, {"momentum": values}).to_tensors()
        return checkpoint_writer.write(directory.checkpoints, step, 1, {}, tensors, keep=99)

    return save_one


def new_scorer(directory: RunDirectory, workload: Any, *overrides: str) -> CheckpointScorer:
    """The scorer of an evaluator that has just started."""
    chosen = config(*overrides)
    evaluator = make_evaluator(chosen.evaluate, workload, "/cpu:0")
    evaluator.connect("", None)
    plan: Any = SimpleNamespace(tables=(), frozen=FrozenWeights())
    rows = FittingRows(plan, workload, precision=chosen.train.precision.value, seed=chosen.seed)
    return CheckpointScorer(chosen.evaluate, directory, evaluator, status(), rows)


def status() -> TaskPage:
    return page("evaluator:0", tensorflow="2.21.0")


def score_all(scorer: CheckpointScorer, directory: RunDirectory) -> None:
    for path in scorer.unscored(checkpoint.finished(directory.checkpoints)):
        scorer.score(path)


def lines(directory: RunDirectory) -> list[dict[str, Any]]:
    return [json.loads(line) for line in directory.evaluations.read_text().splitlines()]


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


# ---- scoring


def test_every_checkpoint_gets_the_score_that_the_chief_would_give_it(directory, save, workload):
    save(20, scale=2.0)
    save(10)
    score_all(new_scorer(directory, workload), directory)
    evaluator = make_evaluator(config().evaluate, workload, "/cpu:0")
    evaluator.connect("", None)
    for line, scale in zip(lines(directory), (1.0, 2.0), strict=True):
        values = {path: np.float32(value * scale) for path, value in replica.initial_values(workload.model).items()}
        scores = evaluator.score(Snapshot(line["step"], values, {}, {}))
        assert scores == {"loss": line["loss"], "accuracy": line["accuracy"]}
    assert [line["step"] for line in lines(directory)] == [10, 20]
    assert set(lines(directory)[0]) == {"step", "loss", "accuracy", "seconds"}


def test_tensorboard_shows_the_scores_as_a_separate_run(directory, save, workload):
    save(10)
    score_all(new_scorer(directory, workload), directory)
    (events,) = (directory.events / "evaluator").iterdir()
    scalars = {
        value.tag: (event.step, value.simple_value)
        for event in tf.compat.v1.train.summary_iterator(str(events))
        for value in event.summary.value
    }
    assert scalars["evaluation/loss"] == (10, pytest.approx(lines(directory)[0]["loss"]))
    assert scalars["evaluation/accuracy"] == (10, pytest.approx(lines(directory)[0]["accuracy"]))


def test_a_restarted_evaluator_scores_no_checkpoint_twice_and_repairs_a_cut_line(directory, save, workload):
    save(10)
    score_all(new_scorer(directory, workload), directory)
    first = directory.evaluations.read_text()
    save(20)
    directory.evaluations.write_text(first + '{"step": 20, "lo')
    again = new_scorer(directory, workload)
    score_all(again, directory)
    assert directory.evaluations.read_text().startswith(first)
    assert [line["step"] for line in lines(directory)] == [10, 20]
    assert again.last_step == 20


def test_a_best_checkpoint_without_a_line_is_scored_again_and_stays(directory, save, workload):
    path = save(10)
    score_all(new_scorer(directory, workload), directory)
    directory.evaluations.unlink()
    score_all(new_scorer(directory, workload), directory)
    assert [line["step"] for line in lines(directory)] == [10]
    assert evaluations.best(directory.best)[1].name == path.name


def test_scores_of_steps_beyond_the_newest_checkpoint_are_discarded(directory, save, workload):
    save(10)
    directory.evaluations.write_text('{"step": 40, "loss": 0.1, "accuracy": 0.9, "seconds": 0.1}\n')
    score_all(new_scorer(directory, workload), directory)
    assert [line["step"] for line in lines(directory)] == [10]


@pytest.mark.parametrize(("metric", "best"), [("loss", "000000020"), ("accuracy", "000000010")])
def test_the_metric_of_the_config_decides_which_checkpoint_is_the_best(directory, save, workload, metric, best):
    labels = workload[1].evaluate.arrays[1]
    most, least = (int(order[0]) for order in (np.argsort(-np.bincount(labels)), np.argsort(np.bincount(labels))))
    save(10, sure_of=most)
    save(20, scale=0.0)  # all logits 0: a loss of ln 10, and always the first class
    save(30, sure_of=least)
    evaluated = new_scorer(directory, workload, f"evaluate.best_metric={metric}")
    score_all(evaluated, directory)
    by_step = {line["step"]: line for line in lines(directory)}
    assert by_step[20]["loss"] == pytest.approx(np.log(10))
    assert by_step[20]["loss"] < by_step[10]["loss"] < by_step[30]["loss"]
    assert by_step[10]["accuracy"] > by_step[20]["accuracy"]
    assert [path.name for path in directory.best.iterdir()] == [best]


def test_a_damaged_checkpoint_is_skipped_once_and_scored_after_it_was_saved_again(directory, save, workload, caplog):
    damaged = save(10)
    flip_a_bit(damaged / "tensors.npz")
    save(20)
    scorer = new_scorer(directory, workload)
    score_all(scorer, directory)
    score_all(scorer, directory)
    message = f"skipping a damaged checkpoint: {damaged}: tensors.npz does not match its checksum"
    assert caplog.messages.count(message) == 1
    assert [line["step"] for line in lines(directory)] == [20]
    save(10)
    score_all(scorer, directory)
    assert [line["step"] for line in lines(directory)] == [20, 10]


def test_a_checkpoint_of_another_model_is_refused(directory, workload, raises):
    other = {"parameters/other/kernel": np.zeros((2, 3), np.float32)}
    checkpoint_writer.write(directory.checkpoints, 10, 1, {}, other, keep=1)
    with raises(CheckpointError):
        score_all(new_scorer(directory, workload), directory)


# ---- which checkpoints belong to this run


def test_checkpoints_of_an_earlier_run_wait_until_the_chief_has_begun(directory, save):
    earlier = save(10)
    finder = Finder(directory.checkpoints, may_be_moved=True)
    assert finder.find(chief_has_begun=False) == []
    assert finder.find(chief_has_begun=True) == [earlier]


def test_a_new_checkpoint_shows_that_the_chief_has_begun(directory, save):
    earlier = save(10)
    finder = Finder(directory.checkpoints, may_be_moved=True)
    new = save(20)
    assert finder.find(chief_has_begun=False) == [earlier, new]


def test_a_checkpoint_that_replaces_an_older_one_is_new(directory, save):
    earlier = save(10)
    finder = Finder(directory.checkpoints, may_be_moved=True)
    earlier.rename(directory.path / "elsewhere")
    assert finder.find(chief_has_begun=False) == []
    new = save(10)
    assert finder.find(chief_has_begun=False) == [new]


def test_checkpoints_that_the_run_continues_are_found_at_once(directory, save):
    earlier = save(10)
    assert Finder(directory.checkpoints, may_be_moved=False).find(chief_has_begun=False) == [earlier]


# ---- with a chief


@pytest.fixture
def control() -> Iterator[str]:
    """A free address for a status page."""
    with HeldPorts(1) as ports:
        yield f"127.0.0.1:{ports.ports[0]}"


def chief_at(control: str) -> Task:
    return Task("worker", 0, "", control, (), None, 1, 2)


def run(directory: RunDirectory, control: str, stop: Any = None, **overrides: str) -> TaskPage:
    """Runs the task to its end; returns its status page."""
    chief = chief_at(control)
    plan = Plan("local", "local", STEPS, 8, (chief,), SHARDS, 64, ())
    typed = [f"{key.replace('__', '.')}={value}" for key, value in overrides.items()]
    stop = stop or SimpleNamespace(requested=False, let_step_finish=lambda: None)
    runtime = TaskRuntime(status(), stop, Journal(None))
    assert life.run(TaskSpec(config(*typed), plan, directory, EVALUATOR), runtime) == stop.requested
    return runtime.status


CHIEF = """
import sys, time
from trainer.observe import status
from trainer.observe.task_page import TaskPage, TaskState

page = TaskPage("worker", 0, "runs/x", "c0ffee", tensorflow="2.21.0", is_listening=True, step=17)
page.state = TaskState(sys.argv[2])
status.serve(page, "127.0.0.1", int(sys.argv[1]))
print("ready", flush=True)
time.sleep(60)
"""


@pytest.fixture
def chief(control: str) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """chief(state): a process that serves the page of a chief."""
    started: list[subprocess.Popen[str]] = []

    def start(state: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", CHIEF, control.rpartition(":")[2], state]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]))
        assert started[-1].stdout is not None
        assert started[-1].stdout.readline() == "ready\n"
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_checkpoints_are_scored_as_they_come_and_after_the_last_only_the_newest_stay(directory, save, control, chief):
    chief("training")
    save(10)
    threading.Timer(0.5, lambda: (save(20), save(STEPS))).start()
    page = run(directory, control, checkpoint__keep="2")
    assert [line["step"] for line in lines(directory)] == [10, 20, 30]
    assert (page.step, page.loss) == (30, lines(directory)[-1]["loss"])
    assert [path.name for path in checkpoint.finished(directory.checkpoints)] == ["000000020", "000000030"]


def test_a_run_that_has_ended_is_scored_without_its_chief(directory, save, control):
    save(10)
    save(STEPS)
    run(directory, control)
    before = directory.evaluations.read_text()
    assert [line["step"] for line in lines(directory)] == [10, 30]
    run(directory, control)
    assert directory.evaluations.read_text() == before


def test_a_chief_that_does_not_start_is_named(directory, control):
    with pytest.raises(PeerError, match=f"missing after 0 s: worker:0 at {control}: connection refused"):
        run(directory, control, timeouts__roll_call_secs="0.2")


def test_a_chief_that_leaves_before_the_end_is_named_with_its_step(directory, save, control, chief, monkeypatch):
    monkeypatch.setattr(life, "GONE_SECS", 0.5)
    monkeypatch.setattr("trainer.task.other_tasks.CHIEF_POLL_SECS", 0.1)
    save(10)
    process, poll = chief("training"), life.ChiefStatus.poll

    def poll_and_end(watch: life.ChiefStatus) -> float:
        gone_secs = poll(watch)
        if watch.step == 17:
            process.kill()
        return gone_secs

    monkeypatch.setattr(life.ChiefStatus, "poll", poll_and_end)
    with pytest.raises(PeerError, match=r"worker:0 at 127.*last reported step 17 of 30.*000000030 does not exist"):
        run(directory, control)
    assert [line["step"] for line in lines(directory)] == [10]


def test_a_directory_that_only_the_chief_can_see_is_an_error(directory, control, chief, raises):
    chief("training")
    with raises(FileNotFoundError):
        run(directory, control, timeouts__roll_call_secs="1")


def test_a_new_run_is_not_scored_by_the_checkpoints_of_an_earlier_one(directory, save, control, chief):
    old = save(STEPS)
    chief("roll call")

    def begin() -> None:
        old.rename(directory.path / "aside")
        save(20)
        save(STEPS)

    threading.Timer(1.0, begin).start()
    run(directory, control, resume="never")
    assert [line["step"] for line in lines(directory)] == [20, 30]


def test_an_evaluator_that_is_asked_to_stop_finishes_at_most_one_score(directory, save, control, chief):
    chief("training")
    for step in (10, 20, 30):
        save(step)
    stop = SimpleNamespace(requested=False, let_step_finish=lambda: None)
    watch = threading.Thread(target=lambda: _stop_after_a_line(directory, stop), daemon=True)
    watch.start()
    run(directory, control, stop, data__options__evaluate_examples="2000", evaluate__batch_size="1")
    assert [line["step"] for line in lines(directory)] in ([10], [10, 20])


def _stop_after_a_line(directory: RunDirectory, stop: Any) -> None:
    while not evaluations.read(directory.evaluations):
        time.sleep(0.001)
    stop.requested = True


def test_a_chief_is_silent_from_the_first_poll_that_it_does_not_answer(control, chief):
    clock = [100.0]
    watch = ChiefStatus(chief_at(control), now=lambda: clock[0])
    process = chief("training")
    assert (watch.poll(), watch.step, watch.has_begun) == (0.0, 17, True)
    process.kill()
    process.wait()
    clock[0] = 400.0  # a checkpoint was scored for long
    assert watch.poll() == 0.0
    clock[0] = 430.0
    assert watch.poll() == 30.0
    chief("roll call")
    clock[0] = 440.0
    assert (watch.poll(), watch.has_begun) == (0.0, True)
