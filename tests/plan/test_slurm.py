"""What Slurm's variables say of nodes and ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from quick_config import load

from trainer.config.schema import RunConfig
from trainer.faults.problems import ConfigError
from trainer.plan import resolve, slurm
from trainer.plan.devices import Machine, for_tasks

STEP = {
    "SLURM_JOB_ID": "1234",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_NODELIST": "node[1-3]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
    "SLURM_PROCID": "0",
}


@pytest.mark.parametrize(("text", "expected"), [("2(x3)", [2, 2, 2]), ("4,1(x2)", [4, 1, 1]), ("16", [16])])
def test_counts_are_expanded(text: str, expected: list[int]):
    assert slurm.expand_counts(text) == expected


def places(**environ: str) -> list[str]:
    return [f"{place.node}.{place.number}" for place in slurm.places(STEP | environ)]


def test_ranks_fill_one_node_after_the_other():
    assert places(SLURM_STEP_TASKS_PER_NODE="4,1(x2)") == [
        "node1.0",
        "node1.1",
        "node1.2",
        "node1.3",
        "node2.0",
        "node3.0",
    ]


def test_or_are_dealt_out_until_a_node_is_full():
    dealt = places(SLURM_STEP_TASKS_PER_NODE="4,1(x2)", SLURM_DISTRIBUTION="cyclic")
    assert dealt == ["node1.0", "node2.0", "node3.0", "node1.1", "node1.2", "node1.3"]


def role(rank: int, *overrides: str, **environ: str):
    config = load(["cluster=2ps4w", *overrides])
    config, problems = resolve.resolve(config, STEP | {"SLURM_PROCID": str(rank)} | environ)
    if problems:
        raise ConfigError(problems)
    return config


def test_workers_are_the_first_ranks_and_ps_the_last():
    roles = [(config.job, config.task) for config in map(role, range(6))]
    assert roles == [("worker", 0), ("worker", 1), ("worker", 2), ("worker", 3), ("ps", 0), ("ps", 1)]


def test_every_rank_knows_where_all_listen_and_the_run_directory():
    configs = [role(rank) for rank in range(6)]
    assert len({str(config.cluster.addresses) for config in configs}) == 1
    assert configs[0].cluster.addresses == {
        "worker": ["node1:15680", "node1:15681", "node2:15680", "node2:15681"],
        "ps": ["node3:15680", "node3:15681"],
    }
    assert {config.run for config in configs} == {"runs/run-2ps4w-slurm-1234"}


def test_no_two_steps_of_a_job_or_of_hundreds_share_a_port():
    steps = [(job, 0) for job in range(1000, 1400)]
    begins = [slurm._first_port(*step) for step in steps]
    used = {begin + offset + n for begin in begins for offset in (0, 1000) for n in range(slurm.PORTS_OF_STEP)}
    assert len(used) == len(steps) * 2 * slurm.PORTS_OF_STEP
    assert max(used) < 32768  # where systems begin with ports of their own choice
    assert slurm._first_port(1, 0) != slurm._first_port(1, 1)


def test_a_worker_takes_the_gpus_that_it_was_given():
    assert role(1, CUDA_VISIBLE_DEVICES="2,3", SLURM_GPUS_PER_TASK="2").device.gpus == {"worker:1": [0, 1]}
    assert role(1, "device.gpus={worker:[1]}", CUDA_VISIBLE_DEVICES="2,3").device.gpus == {"worker": [1]}
    assert role(4, CUDA_VISIBLE_DEVICES="2,3").device.gpus == {}


@pytest.mark.parametrize(
    ("visible", "environ", "expected"),
    [
        ("0,1", {}, {0: [0], 1: [1], 2: [0], 3: [1]}),
        ("0,1,2,3", {}, {0: [0, 1], 1: [2, 3], 2: [0, 1], 3: [2, 3]}),
        ("0", {}, {0: [0], 1: [0], 2: [0], 3: [0]}),
        ("0", {"SLURM_GPUS_PER_TASK": "1"}, {0: [0], 1: [0], 2: [0], 3: [0]}),
        ("0,1", {"SLURM_TRES_PER_TASK": "cpu=2,gres/gpu=2"}, {0: [0, 1], 1: [0, 1], 2: [0, 1], 3: [0, 1]}),
        ("0,1", {"SLURM_TRES_PER_TASK": "cpu:2"}, {0: [0], 1: [1], 2: [0], 3: [1]}),
    ],
)
def test_workers_of_a_node_share_out_the_gpus_that_all_of_them_see(visible, environ, expected):
    gpus = {rank: role(rank, CUDA_VISIBLE_DEVICES=visible, **environ).device.gpus for rank in range(4)}
    assert gpus == {rank: {f"worker:{rank}": listed} for rank, listed in expected.items()}


def test_tasks_that_have_cores_of_their_own_do_not_share_them_again():
    config, machine = role(0), Machine(cores=8, gpus=0)
    assert threads_of(config, machine) == {4}
    own = slurm.cpus_of_task(STEP | {"SLURM_CPUS_PER_TASK": "8"})
    assert threads_of(config, replace(machine, cores_of_task=own)) == {8}
    assert slurm.cpus_of_task({"SLURM_CPUS_PER_TASK": "8"}) is None  # the launcher of a job


def threads_of(config: RunConfig, machine: Machine) -> set[int]:
    found = for_tasks(config.cluster, config.device, machine)
    return {found["worker", index]["intra_op_threads"] for index in range(config.cluster.worker)}


@pytest.mark.parametrize(
    ("overrides", "environ", "message"),
    [
        ([], {"SLURM_STEP_NUM_TASKS": "5"}, "the step has 5 tasks, but cluster=2ps4w has 6\n    type srun -n6"),
        (["cluster=local"], {}, "the step has 6 tasks, but cluster=local has 1\n    type srun -n1"),
        ([], {"SLURM_DISTRIBUTION": "arbitrary"}, "distributed by arbitrary.*\n    type srun --distribution=block"),
        (["+cluster.addresses.ps=[a:1,b:1]"], {}, "leave cluster.addresses and cluster.hosts out"),
    ],
)
def test_a_step_that_does_not_fit_is_refused(overrides, environ, message):
    with pytest.raises(ConfigError, match=message):
        role(0, *overrides, **environ)


@pytest.mark.parametrize(
    "environ",
    [{"SLURM_STEP_NODELIST": "node[1-3"}, {"SLURM_STEP_NODELIST": "node[1-4]"}, {"SLURM_STEP_TASKS_PER_NODE": "2(x2)"}],
)
def test_a_step_whose_lists_cannot_be_read_is_refused(environ):
    with pytest.raises(ConfigError) as caught:
        role(0, **environ)
    (problem,) = caught.value.problems
    assert problem.key.startswith("SLURM_STEP_")


def test_one_process_of_a_step_is_no_role():
    config, problems = resolve.resolve(load(["cluster=2ps4w"]), STEP | {"SLURM_STEP_NUM_TASKS": "1"})
    assert problems == []
    assert config.job is None


def test_the_nodes_of_an_allocation_are_the_hosts():
    config = load(["cluster=2ps4w", "launch=slurm"])
    environ = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node[1-2]", "SLURM_GPUS_ON_NODE": "2"}
    config, problems = resolve.resolve(config, environ)
    assert problems == []
    assert config.cluster.hosts == [{"address": "node1", "gpus": 2}, {"address": "node2", "gpus": 2}]
    assert config.device.gpus == {"worker:0": [0], "worker:1": [1], "worker:2": [0], "worker:3": [1]}


def test_more_arguments_whose_quotation_does_not_end_are_refused():
    config = load(["cluster=2ps4w", "launch=slurm"])
    config = replace(config, slurm=replace(config.slurm, args="--comment='mine"))
    _, (problem,) = resolve.resolve(config, {})
    assert problem.key == "slurm.args"


def test_outside_of_an_allocation_there_are_none():
    config, problems = resolve.resolve(load(["cluster=2ps4w", "launch=slurm"]), {})
    assert problems == []
    assert config.cluster.hosts == []
