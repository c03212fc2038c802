"""Every bad cluster, typed as the real command: exit 2, the answer alone, and nothing started or left behind."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from forks import Forks
from quick_config import load, validated_on
from snapshots import Snapshot, cases

from trainer.config.schema import RunConfig
from trainer.plan.devices import Machine

pytestmark = pytest.mark.slow

SMALL = Machine(cores=2, gpus=0)


def addresses(ps: str = "10.0.0.1:2222", worker: str = "10.0.0.2:2222,10.0.0.3:2222") -> list[str]:
    return ["cluster=1ps2w", f"cluster.addresses={{ps:['{ps}'],worker:[{worker}]}}"]


def tf_config(value: object) -> dict[str, str]:
    return {"TF_CONFIG": value if isinstance(value, str) else json.dumps(value)}


TWO_WORKERS = {"worker": ["10.0.0.2:2222", "10.0.0.3:2222"]}

# What is typed, and the environment; other tests have the rest of what is answered.
COMMANDS = {
    "2ps": (["cluster=2ps"], {}),
    "size and count": (["cluster=2ps4w", "cluster.worker=8"], {}),
    "local and a count": (["cluster.ps=2"], {}),
    "duplicate": (addresses(ps="10.0.0.2:2222"), {}),
    "TF_CONFIG contradicts": (
        ["cluster=2ps4w"],
        tf_config({"cluster": TWO_WORKERS, "task": {"type": "worker", "index": 0}}),
    ),
    "GPU": (["cluster=1ps2w", "device.gpus={worker:[99]}"], {}),
    "pins": (["cluster=1ps2w", "model=mlp", "placement.pins={conv*:0,dense0/*:4}"], {}),
    "layer pin": (["cluster=1ps2w", "model=mlp", "device.layers={conv:/cpu:3}"], {}),
    "all at once": (
        ["strategy=sync", "strategy.quorum=0", "train.steps=0", "optimizer.learning_rate=nan", "name=My", "sede=1"],
        {},
    ),
    "many": (["cluster=9999ps9999w", "train.batch_size=9999"], {}),
}


@pytest.mark.long(but=["2ps", "duplicate", "TF_CONFIG contradicts", "GPU", "all at once", "many"])
@pytest.mark.parametrize("row", COMMANDS)
def test_a_bad_cluster_is_explained_by_the_command_which_starts_and_writes_nothing(
    tmp_path: Path, python: Forks, snapshot: Snapshot, row: str
):
    overrides, environment = COMMANDS[row]
    ended = python.run("-m", "trainer", *overrides, cwd=tmp_path, environment=environment)
    assert (ended.returncode, ended.stdout) == (2, "")
    same_anywhere = re.sub(r"ulimit .*\n.*\n", "", ended.stderr)
    assert re.sub(r"(this machine has|tasks on|machine starts) [^;\n]*", r"\1 ...", same_anywhere) == snapshot
    assert list(tmp_path.iterdir()) == []


def validated(*overrides: str, on: Machine) -> RunConfig:
    return load(list(overrides), validated_on(on))


def test_a_machine_starts_64_tasks_a_core(refused):
    fits, too_many = "cluster=64ps64w", "cluster=65ps64w"
    validated(fits, on=SMALL)
    refused("cluster/over-capacity", validated, too_many, on=SMALL)
    validated(too_many, on=Machine(cores=4, gpus=0))


def test_the_number_of_tasks_with_addresses_is_not_limited():
    listed = {job: [f"10.{place}.{i}.1:2222" for i in range(64)] for place, job in enumerate(("ps", "worker"))}
    listed_addresses = ",".join(f"{job}:[{','.join(listed[job])}]" for job in listed)
    validated("cluster=64ps64w", f"cluster.addresses={{{listed_addresses}}}", on=Machine(cores=1, gpus=0))


def test_a_limit_of_open_files_that_is_too_low_is_refused(refused):
    validated("cluster=2ps4w", on=Machine(cores=2, gpus=0, files=50))
    refused("ulimit/over-capacity", validated, "cluster=2ps4w", on=Machine(cores=2, gpus=0, files=49))


def test_a_limit_of_threads_that_is_too_low_is_refused(refused):
    validated("cluster=2ps4w", on=Machine(cores=2, gpus=0, threads=300))
    refused("ulimit/over-capacity", validated, "cluster=2ps4w", on=Machine(cores=2, gpus=0, threads=299))


BAD_RESTARTS = {
    "restart.max_of.evaluator/unknown-choice": ["{evaluator:1}"],
    "restart.max_of.wroker/unknown-choice": ["{wroker:3}"],
    "restart.max_of.worker:2/unknown-choice": ["{worker\\:2:1}"],
    "restart.max_of.ps/out-of-range": ["{ps:-1}"],
}


@pytest.mark.parametrize(("codes", "entry"), cases(BAD_RESTARTS))
def test_a_number_of_restarts_is_of_a_job_or_a_task(refused, codes, entry):
    validated("cluster=1ps2w", "restart.max_of={ps:0,worker\\:1:9}", on=SMALL)
    refused(codes, validated, "cluster=1ps2w", f"restart.max_of={entry}", on=SMALL)
