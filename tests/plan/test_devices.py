"""Devices of a config: what each task may use, what is refused, and what TensorFlow gets."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tensorflow as tf
from forks import Forks
from quick_config import load

from trainer.commands import validation
from trainer.config.schema import DeviceConfig
from trainer.faults.problems import ConfigError
from trainer.observe import machine
from trainer.plan import validate
from trainer.plan.description import Description
from trainer.plan.devices import Machine, parameters_of
from trainer.plan.layout import Parameter
from trainer.plan.make import make_plan
from trainer.plan.placement import place
from trainer.plan.plan import Plan, Task
from trainer.task.server import memory_limits, session_config, start_server

NO_GPU = Machine(cores=8, gpus=0)
ONE_GPU = Machine(cores=8, gpus=1)
TWO_GPUS = Machine(cores=8, gpus=2, gpu_mib=(24_000, 48_000))
MODEL = Description((Parameter("dense/kernel", (784, 128), True),), 10, 8000, 2000, layers=("dense",))
TWO_HOSTS = ["+cluster.addresses.ps=[10.0.0.1:2222]", "+cluster.addresses.worker=[10.0.0.1:2223,10.0.0.2:2222]"]


def problems(*overrides: str, on: Machine = NO_GPU) -> str:
    """What the checks say of a config, or nothing."""
    try:
        load(["cluster=1ps2w", *overrides], lambda config: validate.validate(config, on))
    except ConfigError as error:
        return str(error)
    return ""


def planned(*overrides: str, on: Machine = NO_GPU) -> Plan:
    return make_plan(load(["cluster=1ps2w", *overrides], lambda config: validate.validate(config, on)), MODEL, on)


def warnings(*overrides: str, on: Machine = TWO_GPUS) -> list[str]:
    """Warnings about devices."""
    return [str(warning) for warning in planned(*overrides, on=on).warnings if warning.key.startswith("device")]


def by_task(plan: Plan, field: str) -> dict[str, object]:
    """One field of every task, by the task's name."""
    return {task.name: getattr(task, field) for task in plan.tasks}


# Which tasks an entry applies to.


@pytest.mark.parametrize(
    ("override", "field", "expected"),
    [
        (r"+device.gpus={worker:[0],worker\:1:[1]}", "gpus", {"ps:0": (), "worker:0": (0,), "worker:1": (1,)}),
        (
            r"+device.intra_op_threads={worker:3,worker\:1:5}",
            "intra_op_threads",
            {"ps:0": 8, "worker:0": 3, "worker:1": 5},
        ),
        (r"+device.inter_op_threads={ps:4,worker\:1:5}", "inter_op_threads", {"ps:0": 4, "worker:0": 2, "worker:1": 5}),
        (
            r"+device.soft_placement={worker:false,worker\:1:true}",
            "soft_placement",
            {"ps:0": True, "worker:0": False, "worker:1": True},
        ),
    ],
    ids=["gpus", "intra_op_threads", "inter_op_threads", "soft_placement"],
)
def test_the_entry_of_a_task_overrides_that_of_its_job(override, field, expected):
    assert by_task(planned(override, on=TWO_GPUS), field) == expected


@pytest.mark.parametrize(
    ("override", "field", "expected"),
    [
        (r"+device.memory_fraction={worker:0.3,worker\:1:0.5}", "memory_fraction", {"worker:0": 0.3, "worker:1": 0.5}),
        (r"+device.memory_mib={worker:500,worker\:1:900}", "memory_mib", {"worker:0": 500, "worker:1": 900}),
        (r"+device.growth={worker:true,worker\:1:false}", "growth", {"worker:0": True, "worker:1": False}),
    ],
    ids=["memory_fraction", "memory_mib", "growth"],
)
def test_gpu_memory_of_a_task_overrides_that_of_its_job(override, field, expected):
    plan = planned("cluster=2w", "+device.gpus.worker=[0]", override, on=ONE_GPU)
    assert by_task(plan, field) == expected


@pytest.mark.parametrize(
    "override",
    [
        "gpus={boss:[0]}",
        "memory_fraction={boss:0.5}",
        "memory_mib={boss:100}",
        "growth={boss:true}",
        "intra_op_threads={boss:2}",
        "inter_op_threads={boss:2}",
        "soft_placement={boss:false}",
    ],
)
def test_an_unknown_job_is_refused_with_the_known_ones(override):
    answer = problems(f"+device.{override}")
    assert "'boss' is neither a job nor a task of the cluster; available: ps (ps:0), worker (worker:0..1)" in answer


def test_an_unknown_task_is_refused_with_the_nearest():
    assert problems(r"+device.intra_op_threads={worker\:7:2}") == (
        "device.intra_op_threads.worker:7: "
        "'worker:7' is neither a job nor a task of the cluster; available: ps (ps:0), worker (worker:0..1)\n"
        "    e.g. 'device.intra_op_threads={worker\\:1:2}'"
    )


def test_a_misspelt_job_is_refused_with_the_probable_one():
    assert problems("+device.gpus={wroker:[0]}").endswith("e.g. 'device.gpus={worker:[0]}'")


def test_a_job_that_the_cluster_does_not_have_is_refused():
    answer = problems("+device.gpus={evaluator:[0]}", on=ONE_GPU)
    assert "'evaluator' is neither a job nor a task of the cluster" in answer
    assert "leave it out, or choose a cluster with evaluator tasks" in answer


def test_an_evaluator_is_a_job_like_any_other():
    plan = planned("cluster=1ps2w1e", "+device.gpus={evaluator:[0]}", on=ONE_GPU)
    assert by_task(plan, "gpus") == {"ps:0": (), "worker:0": (), "worker:1": (), "evaluator:0": (0,)}


# Numbers.


@pytest.mark.parametrize("fraction", ["0", "1.5", "-0.1", "nan"])
def test_a_memory_fraction_out_of_range_is_refused(fraction):
    answer = problems(f"+device.memory_fraction.worker={fraction}")
    assert f"device.memory_fraction.worker: {float(fraction):g} is not in (0, 1]" in answer


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("memory_mib.worker=0", "device.memory_mib.worker: 0 is out of range; it must be at least 1"),
        ("intra_op_threads.worker=0", "device.intra_op_threads.worker: 0 is out of range; it must be at least 1"),
        ("inter_op_threads.ps=1", "it must be at least 2: 1 deadlocks a server that waits in queues"),
        ("inter_op_threads.ps=1", "e.g. 'device.inter_op_threads={ps:2}'"),
    ],
)
def test_a_number_out_of_range_is_refused(override, says):
    assert says in problems(f"+device.{override}")


def test_a_gpu_listed_twice_is_refused():
    answer = problems("+device.gpus.worker=[0,1,0]", "+device.memory_fraction.worker=0.4", on=TWO_GPUS)
    assert answer == ("device.gpus.worker: GPU 0 is listed twice in [0,1,0]\n    type 'device.gpus={worker:[0,1]}'")


def test_a_negative_gpu_is_refused():
    assert "device.gpus.worker: -1 is not a GPU index; indices start at 0" in problems("+device.gpus.worker=[-1]")


# GPUs of this machine.


@pytest.mark.parametrize(
    ("on", "there"), [(NO_GPU, "no GPU"), (ONE_GPU, "GPU 0"), (TWO_GPUS, "GPUs 0..1")], ids=["none", "one", "two"]
)
def test_a_missing_gpu_is_refused(on, there):
    assert f"there is no GPU 5; this machine has {there}" in problems(r"+device.gpus={worker\:0:[5]}", on=on)


def test_gpus_of_other_machines_are_not_checked():
    alone = [*TWO_HOSTS, "job=worker", "task=0", r"+device.gpus={worker\:0:[0],worker\:1:[7]}"]
    assert problems(*alone, on=ONE_GPU) == ""


def test_gpus_of_a_task_started_alone_are_checked():
    alone = [*TWO_HOSTS, "job=worker", "task=1", r"+device.gpus={worker\:0:[0],worker\:1:[7]}"]
    assert "there is no GPU 7; this machine has GPU 0" in problems(*alone, on=ONE_GPU)


def test_a_plan_for_other_machines_does_not_check_this_one():
    gpus = [*TWO_HOSTS, r"+device.gpus={worker\:0:[0],worker\:1:[7]}"]
    assert problems(*gpus, "mode=plan") == ""
    assert "there is no GPU 0" in problems(*gpus)  # where all would start here


@pytest.mark.parametrize("task", ["ps:0", "evaluator:0"])
def test_only_workers_see_gpus_unless_the_config_says_so(task):
    tasks = {t.name: t for t in planned("cluster=1ps1w1e", "device=gpu", on=ONE_GPU).tasks}
    assert tasks["worker:0"].environment()["CUDA_VISIBLE_DEVICES"] == "0"
    assert tasks[task].environment()["CUDA_VISIBLE_DEVICES"] == "-1"


def test_a_ps_sees_the_gpus_that_the_config_gives_it():
    ps = planned("+device.gpus.ps=[1,0]", on=TWO_GPUS).task("ps", 0)
    assert ps.environment()["CUDA_VISIBLE_DEVICES"] == "1,0"
    assert ps.environment()["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


def test_the_users_xla_flags_come_last_and_win():
    worker = planned().task("worker", 0)
    ours = worker.environment()["XLA_FLAGS"]
    assert worker.environment({"XLA_FLAGS": "--xla_dump_to=/tmp"})["XLA_FLAGS"] == f"{ours} --xla_dump_to=/tmp"


# GPU memory.


@pytest.mark.parametrize("override", ["memory_fraction.worker=0.5", "memory_mib.worker=100", "growth.worker=true"])
def test_memory_of_a_task_without_gpu_is_refused(override):
    answer = problems(f"+device.{override}")
    assert f"device.{override.partition('=')[0]}: it sees no GPU\n    add 'device.gpus={{worker:[0]}}'" in answer


def test_a_job_with_gpus_for_some_tasks_may_have_a_memory_setting():
    assert problems(r"+device.gpus={worker\:1:[0]}", "+device.memory_fraction.worker=0.5", on=ONE_GPU) == ""


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("memory_fraction.worker=0.4", "memory_mib.worker=100"),
        ("memory_fraction.worker=0.4", "growth.worker=true"),
        ("memory_mib.worker=100", "growth.worker=true"),
    ],
)
def test_two_settings_of_memory_are_refused_by_both_names(first, second):
    answer = problems("+device.gpus.worker=[0]", f"+device.{first}", f"+device.{second}", on=ONE_GPU)
    keys = [f"device.{override.partition('=')[0]}" for override in (first, second)]
    assert answer.startswith(f"{keys[0]}: worker:0 ")
    assert " and ".join(keys) in answer


def test_growth_that_is_off_is_not_a_second_setting():
    settings = ["+device.gpus.worker=[0]", "+device.memory_fraction.worker=0.4", "+device.growth.worker=false"]
    assert problems(*settings, on=ONE_GPU) == ""


def sharing(*overrides: str, on: Machine = ONE_GPU) -> str:
    """Problems where all workers see GPU 0."""
    return problems("train.batch_size=48", "+device.gpus.worker=[0]", *overrides, on=on)


def test_two_tasks_with_two_fifths_each_share_a_gpu():
    assert sharing("+device.memory_fraction.worker=0.4") == ""


def test_fractions_may_sum_to_one():
    assert sharing("cluster=10w", "train.batch_size=100", "+device.memory_fraction.worker=0.1") == ""


def test_memory_fractions_on_one_gpu_are_summed():
    assert sharing("cluster=1ps3w", "+device.memory_fraction.worker=0.4") == (
        "device.memory_fraction: the tasks on GPU 0 take 3 x 0.4 = 1.2 > 1 of its memory\n    give each at most 0.33"
    )


def test_every_gpu_has_a_sum_of_its_own():
    gpus = [r"+device.gpus={worker\:0:[0,1],worker\:1:[1],ps:[0]}", "+device.memory_fraction={worker:0.6,ps:0.3}"]
    assert problems(*gpus, on=TWO_GPUS).startswith("device.memory_fraction: the tasks on GPU 1 take 2 x 0.6 = 1.2 > 1")


def test_mib_on_one_gpu_are_summed_if_its_memory_is_known():
    assert sharing("+device.memory_mib.worker=12001", on=TWO_GPUS) == (
        "device.memory_mib: the tasks on GPU 0 take 2 x 12001 = 24002 MiB, and it has 24000\n"
        "    give each at most 12000 MiB"
    )


def test_mib_are_not_checked_if_the_memory_of_the_gpu_is_unknown():
    assert sharing("+device.memory_mib.worker=12001", on=ONE_GPU) == ""


def test_shares_and_mib_of_one_gpu_are_summed_in_mib():
    mixed = [r"+device.memory_fraction={worker\:0:0.5}", r"+device.memory_mib={worker\:1:12001}"]
    assert "the tasks on GPU 0 take 0.5 x 24000 + 12001 = 24001 MiB, and it has 24000" in sharing(*mixed, on=TWO_GPUS)


def test_one_task_cannot_have_more_mib_than_there_are():
    alone = ["cluster=1ps1w", "+device.memory_mib.worker=50000"]
    assert "the tasks on GPU 0 take 50000 = 50000 MiB, and it has 24000" in sharing(*alone, on=TWO_GPUS)


def test_tasks_on_one_gpu_without_memory_settings_are_refused():
    assert sharing() == (
        "device.memory_fraction: worker:0 and worker:1 share GPU 0, and the first would take nearly all of its "
        "memory\n    add 'device.memory_fraction={worker:0.45}'"
    )


def test_the_remedy_for_tasks_without_memory_settings_works():
    assert sharing("+device.memory_fraction={worker:0.45}") == ""


def test_one_task_alone_on_a_gpu_needs_no_memory_setting():
    assert problems(r"+device.gpus={worker\:0:[0],worker\:1:[1]}", on=TWO_GPUS) == ""


def test_many_tasks_are_not_all_listed():
    assert "worker:0, worker:1, worker:2 and 5 more share GPU 0" in sharing("cluster=8w")


def test_tasks_that_grow_on_one_gpu_get_a_warning():
    assert warnings("+device.gpus.worker=[0]", "+device.growth.worker=true") == [
        "device.memory_fraction: GPU 0 is shared by 2 tasks, and worker:0 and worker:1 take whatever is free\n"
        "    a memory_fraction or memory_mib for each keeps them apart"
    ]


def test_a_task_without_a_memory_setting_beside_one_with_gets_a_warning():
    answers = warnings("+device.gpus.worker=[0]", r"+device.memory_fraction={worker\:0:0.5}")
    assert [line.splitlines()[0] for line in answers] == [
        "device.memory_fraction: GPU 0 is shared by 2 tasks, and worker:1 takes whatever is free"
    ]


def test_tasks_that_fit_get_no_warning():
    assert warnings("+device.gpus.worker=[0]", "+device.memory_fraction.worker=0.5") == []


def test_gpus_of_two_hosts_are_two_gpus():
    apart = [*TWO_HOSTS, "job=worker", "task=0", "+device.gpus.worker=[0]", "+device.memory_fraction.worker=0.9"]
    assert problems(*apart, on=ONE_GPU) == ""


def test_a_task_started_alone_shares_its_gpu_with_the_tasks_of_its_host():
    together = ["+cluster.addresses.ps=[10.0.0.1:2222]", "+cluster.addresses.worker=[10.0.0.2:2222,10.0.0.2:2223]"]
    alone = [*together, "job=worker", "task=1", "+device.gpus.worker=[0]", "+device.memory_fraction.worker=0.9"]
    assert "the tasks on GPU 0 of 10.0.0.2 take 2 x 0.9 = 1.8 > 1" in problems(*alone, on=ONE_GPU)


def test_localhost_and_the_loopback_address_are_one_host():
    names = ["+cluster.addresses.ps=[127.0.0.1:2222]", "+cluster.addresses.worker=[localhost:2223,'[::1]:2225']"]
    assert "take 2 x 0.9 = 1.8 > 1" in sharing(*names, "+device.memory_fraction.worker=0.9")


# Devices inside a task.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("device:CPU:1", "/cpu:1"),
        ("/device:GPU:0", "/gpu:0"),
        ("/CPU:1", "/cpu:1"),
        ("gpu1", "/gpu:1"),
        ("/cpu", "/cpu:0"),
        ("/cpu:01", "/cpu:1"),
        ("/tpu:0", "auto"),
        ("auto0", "auto"),
        ("", "auto"),
    ],
)
def test_a_device_has_one_spelling(name, meant):
    answer = problems("cluster=local", f"device.parameters='{name}'", on=TWO_GPUS)
    assert answer == (
        f"device.parameters: '{name}' is not a device; available: auto, /cpu:0, /cpu:1, ... and /gpu:0, /gpu:1, ...\n"
        f"    write {meant}"
    )


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("device.replicas=[/cpu:0,cpu1]", "device.replicas"),
        ("device.parameters=cpu1", "device.parameters"),
        ("+device.layers={dense:cpu1}", "device.layers.dense"),
    ],
)
def test_every_key_that_names_a_device_is_checked(override, key):
    assert f"{key}: 'cpu1' is not a device" in problems(override)


def test_a_task_has_64_cpus_at_most():
    assert problems("device.parameters=/cpu:63") == ""
    assert "/cpu:64 is out of range; a task has /cpu:0 to /cpu:63" in problems("device.parameters=/cpu:64")


def test_a_device_holds_one_replica_of_a_worker():
    answer = problems("device.replicas=[/cpu:0,/cpu:1,/cpu:0]")
    assert "device.replicas: /cpu:0 is listed twice" in answer
    assert "type device.replicas=[/cpu:0,/cpu:1]" in answer


def test_a_replica_on_a_gpu_that_the_worker_does_not_see_is_refused():
    answer = problems("cluster=local", "+device.gpus.worker=[0]", "device.replicas=[/gpu:0,/gpu:1]", on=TWO_GPUS)
    assert answer == (
        "device.replicas: there is no /gpu:1: worker:0 sees 1 GPU (0)\n    add 'device.gpus={worker:[0,1]}'"
    )


def test_a_gpu_is_counted_among_those_that_the_task_sees():
    assert problems("cluster=local", "+device.gpus.worker=[1]", "device.replicas=[/gpu:0]", on=TWO_GPUS) == ""


def test_a_worker_without_gpus_has_none_for_its_replicas():
    answer = problems(r"+device.gpus={worker\:0:[0]}", "device.replicas=[/gpu:0]", on=ONE_GPU)
    assert "there is no /gpu:0: worker:1 sees no GPU\n    add 'device.gpus={worker:[0]}'" in answer


def test_the_remedy_names_the_task_if_it_has_its_own_entry():
    answer = problems("cluster=1ps1w", r"+device.gpus={worker\:0:[1]}", "device.replicas=[/gpu:0,/gpu:1]", on=TWO_GPUS)
    assert r"worker:0 sees 1 GPU (1)" in answer
    assert r"add 'device.gpus={worker\:0:[1,0]}'" in answer


def test_a_layer_on_a_gpu_that_the_worker_does_not_see_is_refused():
    answer = problems("+device.layers={dense:/gpu:0}")
    assert "device.layers: there is no /gpu:0: worker:0 sees no GPU" in answer


def test_parameters_on_a_gpu_need_a_ps_with_a_gpu():
    assert problems("+device.gpus.ps=[0]", "device.parameters=/gpu:0", on=ONE_GPU) == ""
    answer = problems(r"+device.gpus={worker\:0:[0]}", "device.parameters=/gpu:0", on=ONE_GPU)
    assert answer == "device.parameters: there is no /gpu:0: ps:0 sees no GPU\n    add 'device.gpus={ps:[0]}'"


def test_parameters_on_a_gpu_need_workers_with_gpus_if_there_is_no_ps():
    assert "device.parameters: there is no /gpu:0: worker:0 sees no GPU" in problems(
        "cluster=2w", "device.parameters=/gpu:0"
    )


def test_layers_on_devices_of_their_own_cannot_be_compiled():
    answer = problems("+device.layers={dense:/cpu:1}", "train.jit=true")
    assert "device.layers: train.jit=true compiles the whole step for one device" in answer


def test_several_problems_are_found_in_one_pass():
    answer = problems(
        "+device.gpus={boss:[0]}", "+device.inter_op_threads.ps=1", "device.replicas=[/gpu:0]", "device.parameters=x"
    )
    assert [line.split(":")[0] for line in answer.splitlines() if not line.startswith(" ")] == [
        "device.gpus.boss",
        "device.inter_op_threads.ps",
        "device.parameters",
        "device.replicas",
    ]


# What a task gets by default.


def test_a_worker_has_one_replica_on_its_first_gpu_or_the_cpu():
    plan = planned(r"+device.gpus={worker\:1:[1]}", on=TWO_GPUS)
    assert by_task(plan, "replicas") == {"ps:0": (), "worker:0": ("/cpu:0",), "worker:1": ("/gpu:0",)}


def test_cores_are_divided_among_workers_and_replicas():
    plan = planned("cluster=1ps2w1e", "device.replicas=[/cpu:0,/cpu:1]")
    expected = {"ps:0": 8, "worker:0": 2, "worker:1": 2, "evaluator:0": 1}  # 8 / (2 x 2)
    assert by_task(plan, "intra_op_threads") == expected


def test_a_ps_has_the_cores_that_workers_leave_when_they_wait_for_it():
    assert by_task(planned("cluster=1ps4w"), "intra_op_threads")["ps:0"] == 8
    assert by_task(planned("cluster=2ps4w"), "intra_op_threads")["ps:1"] == 4


def test_every_task_has_a_thread():
    assert by_task(planned("cluster=4w", on=Machine(cores=2, gpus=0)), "intra_op_threads") == {
        f"worker:{index}": 1 for index in range(4)
    }


def test_all_tasks_of_a_job_have_what_the_host_with_the_least_has():
    """Their bits depend on it, so it does not depend on which host has which task."""
    addresses = ["+cluster.addresses.worker=[10.0.0.1:2222,10.0.0.1:2223,10.0.0.2:2222]", "train.batch_size=48"]
    plan = planned("cluster=3w", *addresses)
    assert by_task(plan, "intra_op_threads") == {"worker:0": 4, "worker:1": 4, "worker:2": 4}
    uneven = Machine(cores=8, gpus=0, cores_of={"10.0.0.1": 8, "10.0.0.2": 2})
    assert set(by_task(planned("cluster=3w", *addresses, on=uneven), "intra_op_threads").values()) == {2}


def test_every_replica_can_wait_in_a_thread_of_its_own():
    plan = planned("cluster=1ps1w", "train.batch_size=48", "device.replicas=[/cpu:0,/cpu:1,/cpu:2]")
    assert by_task(plan, "inter_op_threads") == {"ps:0": 2, "worker:0": 3}


def test_a_task_has_the_cpus_that_its_config_names():
    plan = planned("device.replicas=[/cpu:0,/cpu:1]", "+device.layers={dense:/cpu:2}", "device.parameters=/cpu:3")
    assert by_task(plan, "cpus") == {"ps:0": 4, "worker:0": 3, "worker:1": 3}


@pytest.mark.parametrize(
    ("overrides", "device"),
    [
        (["cluster=local"], "/gpu:0"),
        (["cluster=local", "device.replicas=[/gpu:1,/gpu:0]"], "/gpu:1"),
        (["cluster=local", "device.replicas=[/cpu:0]"], "/cpu:0"),
        (["cluster=local", "device.parameters=/cpu:0"], "/cpu:0"),
        (["cluster=1w"], "/cpu:0"),  # which other workers may join
        (["cluster=1ps1w"], "/cpu:0"),
        (["cluster=2w", "strategy=all_reduce", "+device.memory_fraction.worker=0.4"], "/cpu:0"),
    ],
)
def test_parameters_stay_on_a_gpu_if_one_process_alone_uses_them(overrides, device):
    assert planned("+device.gpus.worker=[0,1]", *overrides, on=TWO_GPUS).parameters == device


def test_parameters_stay_on_the_cpu_beside_rows_of_tables():
    device = DeviceConfig(gpus={"worker": [0]})
    assert parameters_of(device, is_one_process=True, has_tables=False) == "/gpu:0"
    assert parameters_of(device, is_one_process=True, has_tables=True) == "/cpu:0"


# What TensorFlow gets.


def task(**fields: object) -> Task:
    facts = {"gpus": (), "memory_fraction": None, "intra_op_threads": 3, "inter_op_threads": 5}
    return Task("worker", 0, "127.0.0.1:0", "", **(facts | fields))  # type: ignore[arg-type]


def test_a_server_has_the_threads_cpus_and_placement_of_its_task():
    config = session_config(task(cpus=2, soft_placement=False), peers=["ps:1"])
    assert config.intra_op_parallelism_threads == 3
    assert config.inter_op_parallelism_threads == 5
    assert config.device_count == {"CPU": 2}
    assert config.allow_soft_placement is False
    assert list(config.device_filters) == ["/job:worker/task:0", "/job:ps/task:1"]


def test_a_share_of_gpu_memory_reaches_the_server():
    options = session_config(task(gpus=(0, 1), memory_fraction=0.25), peers=[]).gpu_options
    assert (options.per_process_gpu_memory_fraction, options.allow_growth) == (0.25, False)
    assert len(options.experimental.virtual_devices) == 0


def test_mib_of_gpu_memory_reach_the_server_for_each_gpu():
    options = session_config(task(gpus=(2, 3), memory_mib=9000), peers=[]).gpu_options
    assert [list(gpu.memory_limit_mb) for gpu in options.experimental.virtual_devices] == [[9000], [9000]]
    assert options.per_process_gpu_memory_fraction == 0  # TensorFlow refuses both


def test_growth_reaches_the_server():
    assert session_config(task(gpus=(0,), growth=True), peers=[]).gpu_options.allow_growth is True


def test_a_server_makes_the_cpus_of_its_task():
    me = task(cpus=2)
    shards = place([Parameter("dense/kernel", (2, 2), True)], ["worker:0"], pins={})
    server = start_server(Plan("1w", "sync", 1, 1, (me,), shards, 1, ()), me)
    with tf.compat.v1.Session(server.target) as session:
        names = [device.name for device in session.list_devices() if device.device_type == "CPU"]
    assert names == [f"/job:worker/replica:0/task:0/device:CPU:{index}" for index in (0, 1)]


@pytest.fixture
def in_a_child(tensorflow_python: Forks, tmp_path: Path) -> Callable[[str], str]:
    """What a program prints after `task` was made; the devices of this process are made already."""
    start = (
        "import tensorflow as tf\nfrom trainer.plan.plan import Task\nfrom trainer.task.server import configure_eager\n"
        "task = Task('worker', 0, '', '', (), None, 3, 5, soft_placement=False, cpus=2)\n"
    )

    def run(code: str) -> str:
        done = tensorflow_python.run("-c", start + code, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.mark.slow
def test_the_eager_context_has_the_threads_cpus_and_placement_of_its_task(in_a_child):
    printed = in_a_child(
        "import json\nconfigure_eager(task)\n"
        "with tf.device('/cpu:1'): place = tf.constant(1.0).device\n"
        "print(json.dumps([tf.config.threading.get_intra_op_parallelism_threads(),\n"
        "    tf.config.threading.get_inter_op_parallelism_threads(), tf.config.get_soft_device_placement(),\n"
        "    [device.name for device in tf.config.list_logical_devices('CPU')], place]))"
    )
    assert json.loads(printed) == [
        3,
        5,
        False,
        ["/device:CPU:0", "/device:CPU:1"],
        "/job:localhost/replica:0/task:0/device:CPU:1",
    ]


@pytest.mark.slow
def test_an_eager_context_that_has_its_devices_is_refused(in_a_child):
    printed = in_a_child(
        "tf.constant(1.0)\ntry: configure_eager(task)\nexcept RuntimeError as error: print('refused:', error)"
    )
    assert printed.startswith("refused: ")


def test_a_share_of_gpu_memory_is_in_mib_for_the_eager_context():
    assert memory_limits(task(gpus=(1, 0), memory_fraction=0.25), lambda: (24_000, 48_000)) == [12_000, 6_000]


def test_mib_of_gpu_memory_are_the_same_for_the_eager_context():
    assert memory_limits(task(gpus=(1, 0), memory_mib=900), lambda: ()) == [900, 900]


@pytest.mark.parametrize("fields", [{}, {"growth": True}])
def test_without_a_number_the_eager_context_has_no_limit(fields):
    assert memory_limits(task(gpus=(0,), **fields), lambda: ()) == [None]


def test_a_share_of_an_unknown_memory_is_refused():
    with pytest.raises(ValueError, match="worker:0 uses 0.5 of .* give device.memory_mib instead of device.memory_fra"):
        memory_limits(task(gpus=(1,), memory_fraction=0.5), lambda: (24_000,))


# What this machine has.


@pytest.fixture
def nvidia_smi(tmp_path, monkeypatch):
    """Puts a program of this name alone on the PATH; it leaves a file beside it when it is run."""

    def make(script: str) -> Path:
        program = tmp_path / "nvidia-smi"
        program.write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/arguments\n{script}\n')
        program.chmod(0o755)
        return tmp_path / "arguments"

    monkeypatch.setenv("PATH", str(tmp_path))
    return make


def test_the_memory_of_gpus_comes_from_nvidia_smi(nvidia_smi):
    arguments = nvidia_smi("echo 24564\necho 81559")
    assert machine.this_machine(with_gpu_memory=True).gpu_mib == (24564, 81559)
    assert arguments.read_text() == "--query-gpu=memory.total --format=csv,noheader,nounits\n"


def test_gpus_that_nvidia_smi_lists_are_counted(nvidia_smi):
    nvidia_smi("echo 24564\necho 81559")
    assert machine.this_machine(with_gpu_memory=True).gpus == 2


@pytest.mark.parametrize("script", ["echo '[N/A]'", "echo 24564\nexit 9", "exit 0"], ids=["no number", "error", "none"])
def test_an_nvidia_smi_without_an_answer_is_not_an_error(nvidia_smi, script):
    nvidia_smi(script)
    assert machine.memory_of_gpus() == ()


def test_a_machine_without_nvidia_smi_is_not_an_error(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert machine.memory_of_gpus() == ()


def test_an_nvidia_smi_that_hangs_is_killed(nvidia_smi, monkeypatch):
    monkeypatch.setattr(machine, "NVIDIA_SMI_DEADLINE_SECS", 0.2)
    nvidia_smi("exec /bin/sleep 60")
    assert machine.memory_of_gpus() == ()


def test_nvidia_smi_runs_only_if_the_config_names_a_gpu(nvidia_smi):
    arguments = nvidia_smi("echo 24000")
    validation.validate(load(["cluster=1ps2w"]))
    assert not arguments.exists()
    refused = validation.validate(load(["cluster=1ps2w", "+device.gpus.worker=[0]", "+device.memory_mib.worker=12001"]))
    assert [problem.key for problem in refused] == ["device.memory_mib"]
