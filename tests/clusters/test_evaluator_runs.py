"""Real clusters with an evaluator task: every checkpoint scored, the best kept, whatever happens in between."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from runs import Run, free_ports, wait_until

from trainer.storage import checkpoint

pytestmark = pytest.mark.cluster

Finish = Callable[..., Run]
SMALL = ["model=mlp", "train.batch_size=32", "checkpoint.every=10", "history.every=1", "seed=1"]


def evaluations(run: Run) -> list[dict[str, Any]]:
    path = run.directory / "evaluations.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))


def test_every_checkpoint_is_scored_as_the_chief_alone_would_score_it(finish: Finish):
    run = finish("cluster=1ps2w1e", "train.steps=60", "run=with", *SMALL)
    alone = finish("cluster=1ps2w", "train.steps=60", "evaluate.every=10", "run=alone", *SMALL)
    lines, summary, expected = evaluations(run), run.summary(), alone.summary()
    assert [line["step"] for line in lines] == [10, 20, 30, 40, 50, 60]
    assert summary["params_sha256"] == expected["params_sha256"]
    assert summary["eval_accuracy"] == expected["eval_accuracy"] == lines[-1]["accuracy"]
    assert summary["eval_loss"] == pytest.approx(expected["eval_loss"], rel=1e-6)
    assert [line["accuracy"] for line in lines] == pytest.approx(_scores_of(alone), rel=1e-6)
    best = max(lines, key=lambda line: line["accuracy"])
    path = run.directory / f"best/{best['step']:09d}"
    assert summary["best"] == {
        "step": best["step"], "loss": best["loss"], "accuracy": best["accuracy"], "path": str(path)
    }  # fmt: skip
    checkpoint.verify(checkpoint.read_manifest(path))
    assert names(run.directory / "checkpoints") == ["000000040", "000000050", "000000060"]
    assert f"best          step {best['step']}, loss {best['loss']:.4f}" in run.output
    assert f"eval_accuracy {summary['eval_accuracy']:.4f}" in run.output
    assert "eval_" not in (run.directory / "logs/worker-0.log").read_text()
    assert run.plan()["tasks"][-1]["address"] == ""


def _scores_of(run: Run) -> list[float]:
    """What the chief wrote for TensorBoard, by step."""
    (events,) = (run.directory / "events").glob("events*")
    scores = {
        event.step: value.simple_value
        for event in tf.compat.v1.train.summary_iterator(str(events))
        for value in event.summary.value
        if value.tag == "evaluation/accuracy"
    }
    return [scores[step] for step in sorted(scores)]


@pytest.mark.long
def test_training_that_is_faster_than_scoring_loses_no_checkpoint(finish: Finish):
    slow = ["evaluate.batch_size=1", "checkpoint.keep=1", "checkpoint.every=5"]
    run = finish("cluster=1ps1w1e", "train.steps=100", *SMALL, *slow)
    assert [line["step"] for line in evaluations(run)] == list(range(5, 101, 5))
    assert names(run.directory / "checkpoints") == ["000000100"]


@pytest.mark.long
def test_one_process_and_workers_that_hold_the_shards_have_an_evaluator_too(finish: Finish):
    for number, chosen in enumerate((["cluster=1w1e", "strategy=local"], ["cluster=2w1e", "optimizer.ema=0.9"])):
        run = finish(*chosen, "train.steps=20", f"run={number}", *SMALL)
        assert [line["step"] for line in evaluations(run)] == [10, 20]
        assert run.summary()["eval_accuracy"] == evaluations(run)[-1]["accuracy"]


@pytest.mark.long
def test_after_a_crash_no_checkpoint_is_scored_twice_and_none_is_left_out(start, finish: Finish):
    crowded = [*SMALL, "cluster=1ps2w1e", "train.steps=300", "run=broken"]
    broken = start(*crowded)
    broken.wait_for_step(60)
    wait_until(lambda: evaluations_whole(broken) >= 2)
    os.killpg(broken.process.pid, signal.SIGKILL)
    broken.process.wait()
    wait_until(lambda: not broken.pids())
    before = [line for line in (broken.directory / "evaluations.jsonl").read_text().splitlines() if line[-1:] == "}"]
    resumed = finish(*crowded)
    assert resumed.summary()["resumed_from"] is not None
    assert (resumed.directory / "evaluations.jsonl").read_text().splitlines()[: len(before)] == before
    assert [line["step"] for line in evaluations(resumed)] == list(range(10, 301, 10))
    again = finish(*crowded)  # it has ended, and is scored
    assert len(evaluations(again)) == 30
    assert again.summary()["eval_accuracy"] == resumed.summary()["eval_accuracy"]


def evaluations_whole(run: Run) -> int:
    """Lines that are there in full."""
    path = run.directory / "evaluations.jsonl"
    return path.read_text().count("}\n") if path.exists() else 0


@pytest.mark.long
def test_a_stopped_run_stops_its_evaluator_and_scores_the_rest_when_it_continues(start, finish: Finish):
    run = start(*SMALL, "cluster=1ps2w1e", "train.steps=100000", "run=stopped")
    run.wait_for_step(50)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 143, run.output
    summary = run.summary()
    assert summary["tasks"]["evaluator:0"]["code"] == 143
    last = summary["steps"] + 5
    resumed = finish(*SMALL, "cluster=1ps2w1e", f"train.steps={last}", "run=stopped")
    steps = [line["step"] for line in evaluations(resumed)]
    assert steps == sorted({*range(10, last, 10), summary["steps"], last})


@pytest.mark.long
def test_scores_of_another_past_do_not_count(finish: Finish):
    first = finish(*SMALL, "cluster=1ps1w1e", "train.steps=40", "checkpoint.keep=9", "run=mine")
    at_20 = first.directory / "checkpoints/000000020"
    back = finish(*SMALL, "cluster=1ps1w1e", "train.steps=30", "checkpoint.every=5", f"resume={at_20}", "run=mine")
    assert [line["step"] for line in evaluations(back)] == [10, 20, 25, 30]
    assert back.summary()["best"]["step"] in (25, 30)
    anew = finish(*SMALL, "cluster=1ps1w1e", "train.steps=20", "resume=never", "run=mine")
    assert [line["step"] for line in evaluations(anew)] == [10, 20]
    (aside,) = anew.directory.glob("before-*")
    assert {"best", "checkpoints", "config.yaml", "evaluations.jsonl", "events", "export", "summary.json"} <= set(
        names(aside)
    )
    best = anew.summary()["best"]["path"]
    other = finish(*SMALL, "cluster=1ps1w", "train.steps=25", f"resume={Path(best).parent}", "run=other")
    assert other.summary()["resumed_from"] == best


def test_an_evaluator_that_is_killed_ends_the_run_with_its_name(start):
    run = start(*SMALL, "cluster=1ps1w1e", "train.steps=100000", "restart.max=0")
    run.wait_for_step(5)
    log = (run.directory / "logs/evaluator-0.log").read_text()
    os.kill(int(log.partition("pid ")[2].partition(":")[0]), signal.SIGKILL)
    assert run.wait() == 137
    assert "evaluator:0 failed first, exit code -9" in run.output
    assert run.pids() == []


@pytest.mark.long
@pytest.mark.parametrize("listed", [True, False], ids=["in the cluster", "only as a task type"])
def test_pods_of_a_scheduler_play_an_evaluator_by_the_same_command(start, listed):
    ports = free_ports(4)
    cluster = {"ps": [f"localhost:{ports[0]}"], "chief": [f"localhost:{ports[1]}"], "worker": [f"localhost:{ports[2]}"]}
    cluster |= {"evaluator": [f"localhost:{ports[3]}"]} if listed else {}
    roles = ("evaluator", "worker", "chief", "ps")
    runs = {
        job: start(
            "run=scheduled",
            *SMALL,
            "train.steps=30",
            environment={"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": job, "index": 0}})},
        )
        for job in roles
    }
    assert [run.wait() for run in runs.values()] == [0] * 4, "\n".join(run.output for run in runs.values())
    assert [line["step"] for line in evaluations(runs["chief"])] == [10, 20, 30]
    alone = runs["chief"].summary().get("eval_accuracy")  # a chief that does not know of the evaluator scores too
    assert alone == (None if listed else evaluations(runs["chief"])[-1]["accuracy"])
    assert len(names(runs["chief"].directory / "best")) == 1


@pytest.mark.long
def test_a_pod_that_starts_alone_again_scores_what_is_left(start, finish: Finish):
    run = finish(*SMALL, "cluster=1ps1w1e", "train.steps=30", "run=mine")
    lines = (run.directory / "evaluations.jsonl").read_text().splitlines(keepends=True)
    (run.directory / "evaluations.jsonl").write_text("".join(lines[:-1]))
    ports = free_ports(2)
    cluster = {"ps": [f"localhost:{ports[0]}"], "worker": [f"localhost:{ports[1]}"]}
    role = json.dumps({"cluster": cluster, "task": {"type": "evaluator", "index": 0}})
    alone = start(*SMALL, "train.steps=30", "run=mine", environment={"TF_CONFIG": role})
    assert alone.wait() == 0, alone.output
    assert [line["step"] for line in evaluations(alone)] == [10, 20, 30]


@pytest.mark.long
def test_an_evaluator_whose_chief_never_comes_says_so(start):
    ports = free_ports(1)
    role = {"cluster": {"worker": [f"localhost:{ports[0]}"]}, "task": {"type": "evaluator", "index": 0}}
    run = start(*SMALL, "timeouts.roll_call_secs=1", "run=mine", environment={"TF_CONFIG": json.dumps(role)})
    assert run.wait() == 69
    assert f"missing after 1 s: worker:0 at localhost:{ports[0] + 1000}: connection refused" in run.output
