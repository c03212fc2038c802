"""Every file of conf/experiment: its header says what to type, how long it takes and what comes out; and it runs."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
import yaml
from quick_config import load, validated_on
from runs import Run

from trainer.plan.devices import Machine

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).resolve().parents[2] / "conf" / "experiment"
EXPERIMENTS = sorted(path.stem for path in FOLDER.glob("*.yaml"))
FEW = ["train.steps=6"]
SHORT = {  # what makes a run of seconds from each; FEW for one that is not listed
    "towers_mnist": ["train.steps=30", "train.batch_size=40", "history.histogram_every=10", "checkpoint.every=10"],
    "between_graph_async": ["train.steps=30", "train.batch_size=48"],
}


def header(name: str) -> list[str]:
    """The comment that an experiment begins with, line by line."""
    lines = (FOLDER / f"{name}.yaml").read_text().splitlines()
    end = next(number for number, line in enumerate(lines) if not line.startswith("#"))
    return [line.removeprefix("#").removeprefix(" ") for line in lines[:end]]


# What the headers say


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_a_header_says_what_is_learnt_then_the_command_its_time_and_its_result(name):
    package, *lines = header(name)
    command = next(number for number, line in enumerate(lines) if line.startswith("  python -m trainer"))
    time, _, result = lines[command].partition(f"  python -m trainer experiment={name}   ")[2].strip().partition("; ")
    assert package == "@package _global_"
    assert " ".join(lines[:command]).endswith(".")
    assert re.search(r"^((half )?an? minute|\d+ (seconds|minutes?))( on 2 cores)?$", time), lines[command]
    assert re.search(r"\d", result), lines[command]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_command_in_a_header_composes(name):
    """Also those for GPUs, on a machine that has them."""
    machine = Machine(cores=8, gpus=4, gpu_mib=(8000,) * 4)
    commands = [line.split("  ")[1] for line in header(name) if line.startswith("  python -m trainer")]
    added = [line.partition(" add: ")[2] for line in header(name) if " add: " in line]
    for overrides in [*(c.split()[3:] for c in commands), *([f"experiment={name}", *keys.split()] for keys in added)]:
        typed = [override.strip("'") for override in overrides]
        assert load(typed, validated_on(machine)).name


def test_the_two_between_graph_experiments_differ_in_their_strategy_alone():
    sync, asynchronous = (yaml.safe_load((FOLDER / f"between_graph_{s}.yaml").read_text()) for s in ("sync", "async"))
    assert asynchronous.pop("name") == "between-graph-async"
    assert sync.pop("name") == "between-graph-sync"
    sync["defaults"].remove({"override /strategy": "sync"})
    asynchronous["defaults"].remove({"override /strategy": "async"})
    assert sync == asynchronous


# What they do


def check_digits(run: Run) -> None:
    assert [task["name"] for task in run.plan()["tasks"]] == [
        *("ps:0", "ps:1"),
        *("worker:0", "worker:1", "worker:2", "worker:3"),
    ]
    assert "every update waits for all 4 replicas" in run.output


def check_device_placement(run: Run) -> None:
    planned, ran = run.plan(), json.loads((run.directory / "placement.json").read_text())
    assert {shard["host"]: [piece["path"] for piece in shard["trainable"]] for shard in planned["shards"]} == {
        "ps:0": ["conv/kernel", "dense/kernel", "logits/kernel"],
        "ps:1": ["conv/bias", "dense/bias", "logits/bias"],
    }
    assert ran["as_planned"] is True
    records = {record["task"]: record for record in ran["records"]}
    devices = {record["device"] for name in ("ps:0", "ps:1") for record in records[name]["parameters"]}
    assert devices == {"/job:ps/task:0/cpu:0", "/job:ps/task:1/cpu:0"}
    replicas = [(replica["devices"], replica["backward"] > 0) for replica in records["worker:0"]["replicas"]]
    counts = map(int, re.findall(r"forward and backward: (\d+) operations", "\n".join(header("device_placement"))))
    assert replicas == [({f"/job:worker/task:0/cpu:{1 + i}": count}, True) for i, count in enumerate(counts)]


def check_towers(run: Run) -> None:
    planned = run.plan()
    assert (planned["replicas"], planned["strategy"], len(planned["tasks"])) == (4, "local", 1)
    assert planned["tasks"][0]["replicas"] == ["/cpu:0", "/cpu:1", "/cpu:2", "/cpu:3"]
    progress = r"^step (\d+)/30, loss \d\.\d{4}, [\d,]+ examples/s, \d+\.\d{3} s/batch$"
    assert re.findall(progress, run.output, re.MULTILINE) == ["10", "20", "30"]
    drawn = histograms(run.directory / "events")
    assert {"conv/kernel", "dense/kernel", "logits/bias"} <= drawn["parameters"] & drawn["gradients"]
    assert sorted(path.name for path in (run.directory / "checkpoints").iterdir()) == [
        *("000000010", "000000020", "000000030")
    ]
    manifest = json.loads((run.directory / "checkpoints" / "000000030" / "manifest.json").read_text())
    assert "slots/ema/dense/kernel" in manifest["tensors"]
    rates = [line["learning_rate"] for line in run.history()]
    assert rates == pytest.approx([0.001, 0.001, 0.00099])


def histograms(folder: Path) -> dict[str, set[str]]:
    """Parameters that the events have a histogram of, by what of them is shown: gradients or parameters."""
    (file,) = folder.iterdir()
    events = tf.compat.v1.train.summary_iterator(str(file))
    tags = [value.tag for event in events for value in event.summary.value if value.HasField("histo")]
    kinds = ("gradients", "parameters")
    return {kind: {tag.removeprefix(f"{kind}/") for tag in tags if tag.startswith(kind)} for kind in kinds}


def check_between_graph_sync(run: Run) -> None:
    assert (jobs(run), run.plan()["strategy"]) == ({"ps": 2, "worker": 3}, "sync")
    assert "every update waits for all 3 replicas" in run.output
    assert "contributions" not in run.summary()


def check_between_graph_async(run: Run) -> None:
    assert (jobs(run), run.plan()["strategy"]) == ({"ps": 2, "worker": 3}, "async")
    contributions = run.summary()["contributions"]
    assert list(contributions) == ["worker:0", "worker:1", "worker:2"]
    assert sum(worker["applied"] for worker in contributions.values()) == 30
    assert [worker["dropped"] for worker in contributions.values()] == [0, 0, 0]
    assert max(worker["staleness_max"] or 0 for worker in contributions.values()) >= 1


def check_multi_worker_mirrored(run: Run) -> None:
    assert (jobs(run), run.plan()["strategy"]) == ({"worker": 2}, "all_reduce")
    assert run.plan()["replica_batch"] == 64
    assert [line["step"] for line in run.history()] == [1, 2, 3, 4, 5, 6]
    assert run.history()[-1]["loss"] < run.history()[0]["loss"]


def jobs(run: Run) -> dict[str, int]:
    names = [task["job"] for task in run.plan()["tasks"]]
    return {name: names.count(name) for name in dict.fromkeys(names)}


CHECKS: dict[str, Callable[[Run], Any]] = {
    "digits": check_digits,
    "device_placement": check_device_placement,
    "towers_mnist": check_towers,
    "between_graph_sync": check_between_graph_sync,
    "between_graph_async": check_between_graph_async,
    "multi_worker_mirrored": check_multi_worker_mirrored,
}


@pytest.mark.long(but=["between_graph_sync"])
@pytest.mark.cluster
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_runs_and_does_what_its_header_says(finish, name):
    """At reduced length; one that is not known here is run all the same."""
    run = finish(f"experiment={name}", *SHORT.get(name, FEW))
    CHECKS.get(name, lambda run: None)(run)
