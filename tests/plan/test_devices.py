"""Devices of a config: what each task may use, what is refused, and what TensorFlow gets."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import tensorflow as tf
from forks import Forks
from quick_config import load, validated_on
from snapshots import cases

from trainer.commands import validation
from trainer.config.schema import DeviceConfig, RunConfig
from trainer.observe import machine
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
TWO_HOSTS = "+cluster.addresses.ps=[10.0.0.1:2222] +cluster.addresses.worker=[10.0.0.1:2223,10.0.0.2:2222]"
GPUS_OF_TWO_HOSTS = r"+device.gpus={worker\:0:[0],worker\:1:[7]}"


def validated(*overrides: str, on: Machine = NO_GPU) -> RunConfig:
    return load(["cluster=1ps2w", *overrides], validated_on(on))


def planned(*overrides: str, on: Machine = NO_GPU) -> Plan:
    return make_plan(validated(*overrides, on=on), MODEL, on)


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


# What is typed beside cluster=1ps2w on a machine, by the codes of its problems.
SHARING = "train.batch_size=48 +device.gpus.worker=[0]"  # by all workers
BAD = {
    **{
        f"device.{key}.boss/unknown-choice": {f"{key} of a boss": (NO_GPU, f"+device.{key}={{boss:{value}}}")}
        for key, value in {
            "gpus": "[0]",
            "memory_fraction": 0.5,
            "memory_mib": 100,
            "growth": "true",
            "intra_op_threads": 2,
            "inter_op_threads": 2,
            "soft_placement": "false",
        }.items()
    },
    "device.gpus.boss/unknown-choice device.inter_op_threads.ps/out-of-range device.parameters/malformed "
    "device.replicas/not-available": {
        "several at once": (
            NO_GPU,
            "+device.gpus={boss:[0]} +device.inter_op_threads.ps=1 device.replicas=[/gpu:0] device.parameters=x",
        )
    },
    "device.gpus.evaluator/unknown-choice": {
        "a job that the cluster does not have": (ONE_GPU, "+device.gpus={evaluator:[0]}")
    },
    "device.gpus.worker/duplicate": {
        "a GPU listed twice": (TWO_GPUS, "+device.gpus.worker=[0,1,0] +device.memory_fraction.worker=0.4")
    },
    "device.gpus.worker/out-of-range": {"a negative GPU": (NO_GPU, "+device.gpus.worker=[-1]")},
    "device.gpus.wroker/unknown-choice": {"a misspelt job": (NO_GPU, "+device.gpus={wroker:[0]}")},
    "device.gpus/not-available device.gpus/not-available": {
        "GPUs where all tasks would start": (NO_GPU, f"{TWO_HOSTS} {GPUS_OF_TWO_HOSTS}")
    },
    "device.gpus/not-available": {
        "GPU 7 of a task started alone": (ONE_GPU, f"{TWO_HOSTS} job=worker task=1 {GPUS_OF_TWO_HOSTS}"),
        "no GPUs": (NO_GPU, r"+device.gpus={worker\:0:[5]}"),
        "GPU 5 of one": (ONE_GPU, r"+device.gpus={worker\:0:[5]}"),
        "GPU 5 of two": (TWO_GPUS, r"+device.gpus={worker\:0:[5]}"),
    },
    "device.growth.worker/not-set": {"growth on no GPU": (NO_GPU, "+device.growth.worker=true")},
    "device.inter_op_threads.ps/out-of-range": {
        "one thread between operations": (NO_GPU, "+device.inter_op_threads.ps=1")
    },
    "device.intra_op_threads.worker/out-of-range": {"no threads": (NO_GPU, "+device.intra_op_threads.worker=0")},
    "device.intra_op_threads.worker:7/unknown-choice": {
        "an unknown task": (NO_GPU, r"+device.intra_op_threads={worker\:7:2}")
    },
    "device.layers.dense/malformed": {"a bad name for a layer": (NO_GPU, "+device.layers={dense:cpu1}")},
    "device.layers/conflict": {"layers that are compiled": (NO_GPU, "+device.layers={dense:/cpu:1} train.jit=true")},
    "device.layers/not-available": {"a layer on no GPU": (NO_GPU, "+device.layers={dense:/gpu:0}")},
    "device.memory_fraction.worker/conflict": {
        "a fraction and MiB": (
            ONE_GPU,
            "+device.gpus.worker=[0] +device.memory_fraction.worker=0.4 +device.memory_mib.worker=100",
        ),
        "a fraction and growth": (
            ONE_GPU,
            "+device.gpus.worker=[0] +device.memory_fraction.worker=0.4 +device.growth.worker=true",
        ),
    },
    "device.memory_fraction.worker/not-set": {"a fraction of no GPU": (NO_GPU, "+device.memory_fraction.worker=0.5")},
    "device.memory_fraction.worker/not-set device.memory_fraction.worker/out-of-range": {
        "fraction 0": (NO_GPU, "+device.memory_fraction.worker=0"),
        "fraction 1.5": (NO_GPU, "+device.memory_fraction.worker=1.5"),
        "fraction -0.1": (NO_GPU, "+device.memory_fraction.worker=-0.1"),
        "fraction nan": (NO_GPU, "+device.memory_fraction.worker=nan"),
    },
    "device.memory_fraction/over-capacity": {
        "three fractions": (ONE_GPU, f"{SHARING} cluster=1ps3w +device.memory_fraction.worker=0.4"),
        "a sum of each GPU": (
            TWO_GPUS,
            r"+device.gpus={worker\:0:[0,1],worker\:1:[1],ps:[0]} +device.memory_fraction={worker:0.6,ps:0.3}",
        ),
        "a GPU shared without settings": (ONE_GPU, SHARING),
        "a GPU shared by many": (ONE_GPU, f"{SHARING} cluster=8w"),
        "a task started alone": (
            ONE_GPU,
            "+cluster.addresses.ps=[10.0.0.1:2222] +cluster.addresses.worker=[10.0.0.2:2222,10.0.0.2:2223] "
            "job=worker task=1 +device.gpus.worker=[0] +device.memory_fraction.worker=0.9",
        ),
        "two names of one host": (
            ONE_GPU,
            f"{SHARING} +cluster.addresses.ps=[127.0.0.1:2222] "
            "+cluster.addresses.worker=[localhost:2223,'[::1]:2225'] +device.memory_fraction.worker=0.9",
        ),
    },
    "device.memory_mib.worker/conflict": {
        "MiB and growth": (ONE_GPU, "+device.gpus.worker=[0] +device.memory_mib.worker=100 +device.growth.worker=true")
    },
    "device.memory_mib.worker/not-set": {"MiB of no GPU": (NO_GPU, "+device.memory_mib.worker=100")},
    "device.memory_mib.worker/not-set device.memory_mib.worker/out-of-range": {
        "no memory": (NO_GPU, "+device.memory_mib.worker=0")
    },
    "device.memory_mib/over-capacity": {
        "a sum of MiB": (TWO_GPUS, f"{SHARING} +device.memory_mib.worker=12001"),
        "shares and MiB": (
            TWO_GPUS,
            rf"{SHARING} +device.memory_fraction={{worker\:0:0.5}} +device.memory_mib={{worker\:1:12001}}",
        ),
        "more MiB than there are": (TWO_GPUS, f"{SHARING} cluster=1ps1w +device.memory_mib.worker=50000"),
    },
    "device.parameters/malformed": {
        **{
            f"'{name}' for a device": (TWO_GPUS, f"cluster=local device.parameters='{name}'")
            for name in ("device:CPU:1", "/device:GPU:0", "/CPU:1", "gpu1", "/cpu", "/cpu:01", "/tpu:0", "auto0", "")
        },
        "a bad name for parameters": (NO_GPU, "device.parameters=cpu1"),
    },
    "device.parameters/not-available": {
        "parameters on no GPU of the ps": (ONE_GPU, r"+device.gpus={worker\:0:[0]} device.parameters=/gpu:0"),
        "parameters on no GPU without a ps": (NO_GPU, "cluster=2w device.parameters=/gpu:0"),
    },
    "device.parameters/out-of-range": {"CPU 64": (NO_GPU, "device.parameters=/cpu:64")},
    "device.replicas/duplicate train.batch_size/not-divisible": {
        "a device of two replicas": (NO_GPU, "device.replicas=[/cpu:0,/cpu:1,/cpu:0]")
    },
    "device.replicas/malformed": {"a bad name of a replica": (NO_GPU, "device.replicas=[/cpu:0,cpu1]")},
    "device.replicas/not-available": {
        "a GPU that the worker does not see": (
            TWO_GPUS,
            "cluster=local +device.gpus.worker=[0] device.replicas=[/gpu:0,/gpu:1]",
        ),
        "replicas of a worker without GPUs": (ONE_GPU, r"+device.gpus={worker\:0:[0]} device.replicas=[/gpu:0]"),
        "an entry of the task": (
            TWO_GPUS,
            r"cluster=1ps1w +device.gpus={worker\:0:[1]} device.replicas=[/gpu:0,/gpu:1]",
        ),
    },
}
FINE = {
    "GPUs of other machines": (ONE_GPU, f"{TWO_HOSTS} job=worker task=0 {GPUS_OF_TWO_HOSTS}"),
    "a plan for other machines": (NO_GPU, f"{TWO_HOSTS} {GPUS_OF_TWO_HOSTS} mode=plan"),
    "a setting of memory where some tasks have GPUs": (
        ONE_GPU,
        r"+device.gpus={worker\:1:[0]} +device.memory_fraction.worker=0.5",
    ),
    "growth that is off beside a fraction": (
        ONE_GPU,
        "+device.gpus.worker=[0] +device.memory_fraction.worker=0.4 +device.growth.worker=false",
    ),
    "two fifths for each of two": (ONE_GPU, f"{SHARING} +device.memory_fraction.worker=0.4"),
    "fractions that sum to one": (
        ONE_GPU,
        f"{SHARING} cluster=10w train.batch_size=100 +device.memory_fraction.worker=0.1",
    ),
    "MiB of an unknown memory": (ONE_GPU, f"{SHARING} +device.memory_mib.worker=12001"),
    "the remedy for a GPU shared without settings": (ONE_GPU, f"{SHARING} +device.memory_fraction={{worker:0.45}}"),
    "one task on each GPU": (TWO_GPUS, r"+device.gpus={worker\:0:[0],worker\:1:[1]}"),
    "GPUs of two hosts": (
        ONE_GPU,
        f"{TWO_HOSTS} job=worker task=0 +device.gpus.worker=[0] +device.memory_fraction.worker=0.9",
    ),
    "CPU 63": (NO_GPU, "device.parameters=/cpu:63"),
    "the first of the GPUs that a task sees": (
        TWO_GPUS,
        "cluster=local +device.gpus.worker=[1] device.replicas=[/gpu:0]",
    ),
    "parameters on the GPU of a ps": (ONE_GPU, "+device.gpus.ps=[0] device.parameters=/gpu:0"),
}


@pytest.mark.parametrize(("codes", "case"), cases(BAD))
def test_a_bad_device_is_refused(refused, codes, case):
    on, typed = case
    refused(codes, validated, *typed.split(), on=on)


@pytest.mark.parametrize(("on", "typed"), FINE.values(), ids=FINE)
def test_a_good_device_is_not_refused(on, typed):
    validated(*typed.split(), on=on)


def test_an_evaluator_is_a_job_like_any_other():
    plan = planned("cluster=1ps2w1e", "+device.gpus={evaluator:[0]}", on=ONE_GPU)
    assert by_task(plan, "gpus") == {"ps:0": (), "worker:0": (), "worker:1": (), "evaluator:0": (0,)}


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


def test_tasks_that_grow_on_one_gpu_get_a_warning(snapshot):
    assert warnings("+device.gpus.worker=[0]", "+device.growth.worker=true") == snapshot


def test_a_task_without_a_memory_setting_beside_one_with_gets_a_warning(snapshot):
    answers = warnings("+device.gpus.worker=[0]", r"+device.memory_fraction={worker\:0:0.5}")
    assert [line.splitlines()[0] for line in answers] == snapshot


def test_tasks_that_fit_get_no_warning():
    assert warnings("+device.gpus.worker=[0]", "+device.memory_fraction.worker=0.5") == []


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


@pytest.mark.parametrize("cluster", ["local", "1ps1w", "2ps2w", "1ps4w", "4w"])
def test_threads_of_a_replica_do_not_depend_on_how_many_workers_share_them_out(cluster):
    plan = planned(f"cluster={cluster}", "train.replicas=4")
    assert {task.intra_op_threads for task in plan.workers} == {2}
    assert plan.replicas == 4


def test_replicas_are_shared_out_and_use_all_cores_of_a_worker():
    plan = planned("cluster=1ps3w", "train.replicas=8")
    shares = {"worker:0": 3, "worker:1": 3, "worker:2": 2}
    assert {task.name: len(task.replicas) for task in plan.workers} == shares
    assert [plan.replica_numbers(task) for task in plan.workers] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert plan.workers[0].replicas == ("/cpu:0", "/cpu:1", "/cpu:0")  # 8 cores, 3 workers, 1 thread for each replica


def test_a_gpu_computes_its_replicas_in_turn():
    plan = planned(
        "cluster=1ps2w",
        "train.replicas=6",
        "train.batch_size=48",
        "+device.memory_fraction={worker:0.4}",
        "+device.gpus={worker:[0,1]}",
        "device.replicas=[/gpu:0,/gpu:1]",
        on=TWO_GPUS,
    )
    assert by_task(plan, "replicas")["worker:1"] == ("/gpu:0", "/gpu:1", "/gpu:0")


@pytest.mark.parametrize(
    ("cluster", "pushed"),
    [
        ("1ps1w", [[(0, 8)]]),
        ("2ps4w", [[(0, 2)], [(2, 2)], [(4, 2)], [(6, 2)]]),
        ("1ps3w", [[(0, 2), (2, 1)], [(3, 1), (4, 2)], [(6, 2)]]),
    ],
)
def test_a_worker_pushes_one_sum_for_each_span_of_its_replicas(cluster, pushed):
    plan = planned(f"cluster={cluster}", "train.replicas=8", "strategy.wire=float32")
    assert [[tuple(span) for span in spans] for spans in plan.spans] == pushed
    (once,) = {shard.nbytes for shard in plan.shards if shard.host == "ps:0"}
    sent = [plan.link_nbytes()[f"{task.name} - ps:0"] // once for task in plan.workers]
    assert sent == [1 + len(spans) for spans in pushed]  # and the vector that it pulls


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


def test_a_share_of_an_unknown_memory_is_refused(raises):
    with raises(ValueError):
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


def test_nvidia_smi_runs_only_if_the_config_names_a_gpu(nvidia_smi, refused):
    arguments = nvidia_smi("echo 24000")
    load(["cluster=1ps2w"], validation.complete)
    assert not arguments.exists()
    words = ["cluster=1ps2w", "+device.gpus.worker=[0]", "+device.memory_mib.worker=12001"]
    refused("device.memory_mib/over-capacity", load, words, validation.complete)
