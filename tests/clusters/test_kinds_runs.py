"""Kinds of models as real runs: a killed worker and a resume on another cluster change no bit."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from kinds import KINDS, ZOO

pytestmark = pytest.mark.cluster


def overrides_of(kind: str) -> list[str]:
    model, data, options, named = KINDS[kind]
    given = {"model.options": options, **{f"model.{key}": value for key, value in named.items()}}
    texts = [f"{key}={json.dumps(value)}".replace('"', "").replace(" ", "") for key, value in given.items() if value]
    return [f"user={ZOO}", f"model={model}", f"data={data}", *texts, "seed=1", "train.batch_size=32"]


# Those that differ in what processes exchange, save or read; tests/engine has all kinds on every cluster.
AS_RUNS = ["dicts and texts", "two outputs", "masked steps", "frozen weights"]


@pytest.mark.long
@pytest.mark.parametrize("kind", AS_RUNS)
def test_a_kind_of_model_is_the_same_after_a_kill_and_a_resume(start, finish, tmp_path: Path, kind: str):
    given = [*overrides_of(kind), "checkpoint.every=10", "history.every=1"]
    unbroken = finish(*given, "cluster=1ps2w", "train.steps=40", f"run={tmp_path / 'unbroken'}")
    killed = start(*given, "cluster=2w", "train.steps=30")
    killed.wait_for_step(10)
    os.kill(killed.last_pid("worker:1"), signal.SIGKILL)
    assert killed.wait() == 0, killed.output
    assert "worker:1 died (SIGKILL)" in killed.output
    resumed = finish(*given, "cluster=2ps2w", "train.steps=40", f"run={killed.directory}")
    assert "resumes at step 30" in resumed.output
    assert resumed.summary()["params_sha256"] == unbroken.summary()["params_sha256"]
    both = [[(line["step"], line["loss"]) for line in run.history()] for run in (unbroken, resumed)]
    assert both[0] == both[1]


ENGINES = {
    "sync": ["cluster=2w"],
    "local": ["cluster=local"],
    "all_reduce": ["cluster=2w", "strategy=all_reduce"],
    "compiled": ["cluster=1ps2w", "train.jit=true"],
    "in parts": ["cluster=1ps1w", "train.accumulate=2"],
}


@pytest.mark.long(but=["all_reduce"])
@pytest.mark.parametrize("engine", ENGINES)
def test_no_engine_executes_a_sum_whose_order_varies(finish, engine: str):
    given = [*overrides_of("a tensor used three times"), "train.steps=3", "device.log_placement=true"]
    run = finish(*given, *ENGINES[engine])
    placed = json.loads((run.directory / "placement.json").read_text())
    steps = [record["devices"] for record in placed["records"] if record["run"] == "step"]
    types = {operation["type"] for devices in steps for own in devices.values() for operation in own}
    assert any("MatMul" in one or one == "compiled" for one in types)
    assert "AddN" not in types
