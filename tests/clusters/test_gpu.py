"""What the other tests show on CPUs, on the GPUs of this machine: strategies, equalities, placement, memory."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from runs import GPUS, Run

pytestmark = [pytest.mark.cluster, pytest.mark.gpu]

Start = Callable[..., Run]
ON_GPU_0 = ["device=gpu", "device.memory_fraction={worker:0.2}"]
# Without these a GPU sums in any order, and multiplies in fewer bits.
EXACT = {"TF_DETERMINISTIC_OPS": "1", "NVIDIA_TF32_OVERRIDE": "0"}
SHORT = ["seed=1", "train.steps=25", "summary.every=1"]
STRATEGIES = {
    "local": [],
    "sync": ["cluster=2ps2w"],
    "sync, shards on the workers": ["cluster=2w"],
    "async": ["cluster=2ps2w", "strategy=async"],
    "backup": ["cluster=1ps3w", "train.batch_size=258", "strategy=backup", "strategy.quorum=2"],
    "parameters on the GPU": ["cluster=2w", "device.parameters=/gpu:0"],
}
several = pytest.mark.skipif(GPUS < 2, reason=f"needs 2 GPUs, this machine has {GPUS}")


def run_on_gpu(start: Start, *overrides: str) -> Run:
    run = start(*ON_GPU_0, *overrides, environment=EXACT)
    assert run.wait() == 0, run.output + "\n".join(log.read_text() for log in run.logs())
    return run


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_learns_to_read_digits(start: Start, name):
    summary = run_on_gpu(start, *STRATEGIES[name], "train.steps=300", "seed=1").summary()
    assert summary["eval_accuracy"] >= 0.95


def test_the_bits_do_not_depend_on_where_the_shards_are(start: Start):
    runs = [run_on_gpu(start, f"cluster={size}", f"run={size}", *SHORT) for size in ("1ps2w", "2ps2w", "2w")]
    assert len({run.summary()["params_sha256"] for run in runs}) == 1


@pytest.mark.parametrize("name", STRATEGIES)
def test_everything_ran_where_it_was_planned(start: Start, name):
    run = run_on_gpu(start, *STRATEGIES[name], *SHORT, "device.log_placement=true")
    placed = json.loads((run.directory / "placement.json").read_text())
    assert placed["as_planned"]
    assert any(device.endswith("gpu:0") for record in placed["records"] for device in record["devices"])


@pytest.mark.parametrize("knob", ["train.precision=mixed_bfloat16", "train.precision=mixed_float16", "train.jit=true"])
def test_how_a_replica_computes_is_its_own_affair(start: Start, knob):
    assert run_on_gpu(start, "cluster=1ps2w", "train.steps=60", knob).summary()["eval_accuracy"] > 0.8


@several
def test_replicas_on_several_gpus_have_the_bits_of_as_many_workers(start: Start):
    both = ["device.gpus={worker:[0,1]}", "device.replicas=[/gpu:0,/gpu:1]"]
    inside = run_on_gpu(start, "run=inside", *both, *SHORT).summary()
    between = run_on_gpu(start, "run=between", "cluster=1ps2w", *SHORT).summary()
    assert inside["params_sha256"] == between["params_sha256"]


@several
def test_all_reduce_between_gpus_learns(start: Start):
    apart = ["device.gpus={worker\\:0:[0],worker\\:1:[1]}", "device.memory_fraction={}"]
    summary = run_on_gpu(start, "cluster=2w", "strategy=all_reduce", *apart, "train.steps=300", "seed=1").summary()
    assert summary["eval_accuracy"] >= 0.95
