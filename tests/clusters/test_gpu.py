"""What the other tests show on CPUs, on the GPUs of this machine: strategies, equalities, placement, memory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable

import pytest
from runs import GPUS, Run, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.gpu]

Start = Callable[..., Run]
ON_GPU_0 = ["device=gpu", "device.memory_fraction={worker:0.08}"]  # of tests that run beside each other too
SHORT = ["seed=1", "train.steps=25", "history.every=1"]
CUDA_MIB = 1000  # that a process takes beside the memory of TensorFlow
STRATEGIES = {
    "local": [],
    "local, parameters on the CPU": ["device.parameters=/cpu:0"],
    "sync": ["cluster=2ps2w"],
    "sync, shards on the workers": ["cluster=2w"],
    "async": ["cluster=2ps2w", "strategy=async"],
    "backup": ["cluster=1ps3w", "train.batch_size=258", "strategy=backup", "strategy.quorum=2"],
    "parameters on the GPU": ["cluster=2w", "device.parameters=/gpu:0"],
}
several = pytest.mark.skipif(GPUS < 2, reason=f"needs 2 GPUs, this machine has {GPUS}")


def run_on_gpu(start: Start, *overrides: str) -> Run:
    run = start(*ON_GPU_0, *overrides)
    assert run.wait() == 0, run.output + "\n".join(log.read_text() for log in run.logs())
    return run


@pytest.mark.parametrize("name", STRATEGIES)
def test_every_strategy_learns_to_read_digits(start: Start, name):
    summary = run_on_gpu(start, *STRATEGIES[name], "train.steps=300", "seed=1").summary()
    assert summary["eval_accuracy"] >= 0.95


def test_the_bits_do_not_depend_on_where_the_shards_are_nor_on_a_worker_that_is_killed(start: Start):
    given = ["device.deterministic=true", "seed=1", "train.steps=300", "history.every=1"]
    runs = [run_on_gpu(start, f"cluster={size}", f"run={size}", *given) for size in ("1ps2w", "2ps2w", "2w")]
    broken = start(*ON_GPU_0, *given, "cluster=2ps2w", "run=broken")
    broken.wait_for_step(20)
    os.kill(broken.last_pid("worker:1"), signal.SIGKILL)
    assert broken.wait() == 0, broken.output
    assert broken.summary()["restarts"] == 1
    assert len({run.summary()["params_sha256"] for run in [*runs, broken]}) == 1


def test_workers_alone_take_memory_of_a_gpu_and_no_more_than_they_may(start: Start):
    run = start(
        "device=gpu", "device.memory_mib={worker:3000}", "cluster=1ps2w", "history.every=1", "train.steps=1000000"
    )
    run.wait_for_step(10)
    workers = {run.last_pid(task) for task in ("worker:0", "worker:1")}
    taken = memory_taken()
    assert workers <= taken.keys()
    assert run.last_pid("ps:0") not in taken
    assert all(1000 < taken[pid] < 3000 + CUDA_MIB for pid in workers), taken
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 143, run.output
    wait_until(lambda: not workers & memory_taken().keys())  # the driver takes a moment


def memory_taken() -> dict[int, int]:
    """MiB of the GPUs that each process has, by its number."""
    command = ["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader,nounits"]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return {int(pid): int(mib) for pid, mib in (line.split(",") for line in lines)}


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
    both = ["device.deterministic=true", "device.gpus={worker:[0,1]}", "device.replicas=[/gpu:0,/gpu:1]"]
    inside = run_on_gpu(start, "run=inside", "device.parameters=/cpu:0", *both, *SHORT).summary()
    between = run_on_gpu(start, "run=between", "cluster=1ps2w", "device.deterministic=true", *SHORT).summary()
    assert inside["params_sha256"] == between["params_sha256"]


@several
def test_all_reduce_between_gpus_learns(start: Start):
    apart = ["device.gpus={worker\\:0:[0],worker\\:1:[1]}", "device.memory_fraction={}"]
    summary = run_on_gpu(start, "cluster=2w", "strategy=all_reduce", *apart, "train.steps=300", "seed=1").summary()
    assert summary["eval_accuracy"] >= 0.95
