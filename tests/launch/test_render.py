"""The containers of tasks and what they may do, the Compose files, and several hosts."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from trainer.config.schema import (
    ClusterConfig,
    ContainerConfig,
    DataConfig,
    HistoryConfig,
    Launch,
    LaunchConfig,
    RunConfig,
    TimeoutsConfig,
)
from trainer.config.typed import Mode, Target
from trainer.faults.problems import Problem
from trainer.launch.containers import compose_file
from trainer.launch.containers.inputs import with_absolute_paths
from trainer.launch.containers.spec import INSIDE, ContainerSpec, container_specs, inside, project_of
from trainer.plan import hosts
from trainer.plan.checks.containers import check_containers
from trainer.plan.devices import Machine
from trainer.plan.layout import FrozenWeights, Shard
from trainer.plan.plan import Plan, Task

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
COMMITTED = sorted((ROOT / "compose").glob("*.yaml"))


def task(job: str, index: int, gpus: tuple[int, ...] = ()) -> Task:
    return Task(job, index, "127.0.0.1:0", "127.0.0.1:0", gpus, None, 1, 2, replicas=("/cpu:0",))


def plan_of(*tasks: Task) -> Plan:
    return Plan("test", "sync", 10, 64, tasks, (Shard(0, tasks[0].name, (), ()),), 1000, ())


def rendered(config: RunConfig, *tasks: Task, **options: Any) -> dict[str, Any]:
    """The services of the Compose file."""
    specs = container_specs(config, plan_of(*tasks), run=".", **options)
    text = compose_file.render(specs, name="n", words="w", overrides="o", user=(1000, 1001))
    assert text.startswith("# w\n# Made by `python -m trainer o`")
    return yaml.safe_load(text)


def container_of(name: str, specs: list[ContainerSpec]) -> ContainerSpec:
    return next(container for container in specs if container.task == name)


# One task


def test_a_service_has_no_privilege_that_a_task_does_not_need():
    services = rendered(RunConfig(), task("ps", 0), task("worker", 0))["services"]
    for name in ("ps-0", "worker-0", "tensorboard"):
        service = services[name]
        assert service["user"] == "${TRAINER_UID:-1000}:${TRAINER_GID:-1001}"
        assert (service["read_only"], service["cap_drop"], service["init"]) == (True, ["ALL"], True)
        assert service["security_opt"] == ["no-new-privileges:true"]
        assert service["pull_policy"] == "never"
        assert not {"privileged", "cap_add", "devices"} & set(service)
        assert "docker.sock" not in str(service)


def test_no_port_of_a_task_is_published_and_its_network_is_internal():
    file = rendered(RunConfig(), task("ps", 0), task("worker", 0))
    assert [name for name, service in file["services"].items() if "ports" in service] == ["tensorboard"]
    assert file["services"]["tensorboard"]["ports"] == ["127.0.0.1:${TENSORBOARD_PORT:-6006}:6006"]
    assert file["services"]["tensorboard"]["networks"] == ["published"]
    assert file["networks"]["cluster"] == {
        "internal": True,
        "driver_opts": {"com.docker.network.bridge.inhibit_ipv4": "true"},
    }
    assert file["services"]["ps-0"]["networks"] == ["cluster"]


@pytest.mark.parametrize(
    ("job", "journal", "profile", "expected"),
    [
        ("ps", False, False, False),
        ("worker", False, False, False),
        ("evaluator", False, False, True),
        ("worker", True, False, True),
        ("ps", False, True, True),
    ],
)
def test_only_tasks_that_write_can_write(job, journal, profile, expected):
    config = RunConfig(profile=profile, history=HistoryConfig(journal=journal))
    specs = container_specs(config, plan_of(task("worker", 0), task(job, 1)), run="/r")
    assert [m.target for m in container_of("worker:0", specs).mounts if m.is_writable] == [INSIDE]
    writable = [m.target for m in container_of(f"{job}:1", specs).mounts if m.is_writable]
    assert writable == ([INSIDE] if expected else [])
    read = {m.target: m.is_writable for m in container_of(f"{job}:1", specs).mounts}
    assert read[f"{INSIDE}/config.yaml"] is read[f"{INSIDE}/plan.json"] is False


def test_a_worker_reads_what_training_never_changes_where_the_chief_writes():
    plan = replace(plan_of(task("worker", 0), task("worker", 1)), frozen=FrozenWeights(("dense/kernel",), 4, "1f"))
    mounts = [{m.target for m in container.mounts} for container in container_specs(RunConfig(), plan, run="/r")]
    of_files = {f"{INSIDE}/config.yaml", f"{INSIDE}/plan.json"}
    # The chief has all of the directory: what is mounted by itself cannot be linked to from there.
    assert mounts == [{INSIDE, *of_files}, {f"{INSIDE}/frozen.npz", *of_files}]


def test_a_task_has_its_gpus_and_counts_them_from_0():
    specs = container_specs(RunConfig(), plan_of(task("ps", 0), task("worker", 0, (2, 3))), run="/r")
    worker, ps = container_of("worker:0", specs), container_of("ps:0", specs)
    assert (worker.gpus, worker.environment["CUDA_VISIBLE_DEVICES"], worker.image) == ((2, 3), "0,1", "trainer:gpu")
    assert (ps.gpus, ps.environment["CUDA_VISIBLE_DEVICES"], ps.image) == ((), "-1", "trainer:cpu")
    assert inside(plan_of(task("worker", 0, (2, 3)))).tasks[0].gpus == (0, 1)


def test_gpus_are_reserved_by_their_index_on_the_host():
    service = rendered(RunConfig(), task("worker", 0, (2, 3)))["services"]["worker-0"]
    devices = service["deploy"]["resources"]["reservations"]["devices"]
    assert devices == [{"driver": "nvidia", "device_ids": ["2", "3"], "capabilities": ["gpu"]}]


def test_limits_are_those_of_the_config():
    config = RunConfig(
        container=ContainerConfig(memory_mib={"worker": 900, "worker:1": 700}, cpus={"ps": 0.5}, pids=99)
    )
    services = rendered(config, task("ps", 0), task("worker", 0), task("worker", 1))["services"]
    assert [services[name].get("mem_limit") for name in ("ps-0", "worker-0", "worker-1")] == [None, "900m", "700m"]
    assert services["worker-1"]["memswap_limit"] == "700m"
    assert (services["ps-0"]["cpus"], "cpus" in services["worker-0"]) == (0.5, False)
    assert services["ps-0"]["pids_limit"] == 99


def test_a_stop_has_more_time_than_a_save_may_take():
    config = RunConfig(timeouts=TimeoutsConfig(stop_grace_secs=20))
    assert rendered(config, task("worker", 0))["services"]["worker-0"]["stop_grace_period"] == "35s"


def test_a_dollar_in_a_path_is_no_variable():
    file = rendered(RunConfig(container=ContainerConfig(mounts=["/data/a$b"])), task("worker", 0))
    assert file["services"]["worker-0"]["volumes"][-1]["source"] == "/data/a$$b"


@pytest.mark.parametrize("path", ["/home/a/Runs/My Run", "/x/--", "/tmp/ä"])
def test_the_name_of_a_run_is_one_that_docker_accepts(path):
    name = project_of(path)
    assert name.isascii()
    assert name == name.lower()
    assert name[0].isalnum()
    assert project_of(path) == name != project_of(path + "/other/" + path.rpartition("/")[2])


# The files that are shipped


@pytest.mark.parametrize("path", COMMITTED, ids=lambda path: path.stem)
def test_the_command_in_a_shipped_file_renders_that_file(path: Path):
    command = path.read_text().split("`")[1]
    result = subprocess.run(
        [sys.executable, *shlex.split(command)[1:]], cwd="/", capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout == path.read_text()


def test_the_usual_sizes_and_a_gpu_cluster_are_shipped():
    assert {"1ps1w", "1ps2w", "2ps4w", "1ps2w-gpu"} <= {path.stem for path in COMMITTED}
    assert "device_ids" in (ROOT / "compose/1ps2w-gpu.yaml").read_text()


# Files of the host


def test_the_inputs_of_a_run_have_absolute_paths_and_are_visible(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    for name in ("mine.py", "digits.npz", "train-0.tfrecord", "image"):
        (tmp_path / name).touch()
    for name in ("photos", "test", "others"):
        (tmp_path / name).mkdir()
    folders, _ = with_absolute_paths(
        RunConfig(data=DataConfig("images", {"path": "photos", "evaluate": "./others", "split": "test"}))
    )
    assert folders.data.options == {"path": f"{tmp_path}/photos", "evaluate": f"{tmp_path}/others", "split": "test"}
    options = {"path": "digits.npz", "train": "./train-*.tfrecord", "feature": "image", "classes": 10}
    config = RunConfig(user="mine.py", resume="old", data=DataConfig("tfrecord", options))
    absolute, inputs = with_absolute_paths(config)
    assert (absolute.user, absolute.resume) == (f"{tmp_path}/mine.py", f"{tmp_path}/old")
    assert absolute.data.options == {
        "path": f"{tmp_path}/digits.npz",
        "train": f"{tmp_path}/train-*.tfrecord",
        "feature": "image",
        "classes": 10,
    }
    assert inputs == [str(tmp_path), f"{tmp_path}/old", f"{tmp_path}/digits.npz"]


# Several hosts


def resolve(*listed: Any, cluster: str = "2ps4w", mode: Mode = Mode.render) -> tuple[RunConfig, list[Problem]]:
    ps, worker = int(cluster[0]), int(cluster[3])
    config = RunConfig(cluster=ClusterConfig(cluster, ps, worker, hosts=list(listed)))
    return hosts.resolve_hosts(config, mode)


def test_tasks_are_spread_evenly_over_hosts():
    config, problems = resolve("gpu-a", "gpu-b")
    assert problems == []
    assert config.cluster.addresses == {
        "ps": ["gpu-a:2222", "gpu-b:2222"],
        "worker": ["gpu-a:2223", "gpu-a:2224", "gpu-b:2223", "gpu-b:2224"],
    }
    assert hosts.host_by_task(config.cluster)["worker:2"] == "gpu-b"


def test_hosts_have_the_given_numbers_of_tasks_and_workers_use_their_gpus_in_turn():
    config, problems = resolve(
        {"address": "10.0.0.1", "ps": 2, "worker": 1}, {"address": "10.0.0.2", "gpus": 2, "worker": 3}
    )
    assert problems == []
    assert config.cluster.addresses["ps"] == ["10.0.0.1:2222", "10.0.0.1:2223"]
    assert config.cluster.addresses["worker"] == ["10.0.0.1:2224", "10.0.0.2:2222", "10.0.0.2:2223", "10.0.0.2:2224"]
    assert config.device.gpus == {"worker:1": [0], "worker:2": [1], "worker:3": [0]}


def test_tasks_use_the_network_of_their_host():
    config, _ = resolve("gpu-a", "gpu-b", cluster="1ps1w")
    tasks = (task("ps", 0), task("worker", 0))
    file = rendered(config, *tasks, hosts={"ps:0": "gpu-a", "worker:0": "gpu-b"})
    assert file["services"]["ps-0"]["network_mode"] == "host"
    assert "networks" not in file["services"]["ps-0"]


@pytest.mark.parametrize(
    ("listed", "codes"),
    [
        (["gpu-a:22", "gpu-b"], "cluster.hosts/malformed"),
        (["http://gpu-a", "gpu-b"], "cluster.hosts/malformed"),
        (["gpu-a", "gpu-a"], "cluster.hosts/duplicate"),
        ([{"adress": "gpu-a"}], "cluster.hosts/malformed"),
        ([7], "cluster.hosts/malformed"),
        ([{"address": "gpu-a", "gpu": 1}], "cluster.hosts/unknown-key"),
        ([{"address": "gpu-a", "gpus": -1}], "cluster.hosts/out-of-range"),
        ([{"address": "gpu-a", "worker": 1}, "gpu-b"], "cluster.hosts/mismatch"),
    ],
)
def test_invalid_hosts_are_refused(refused, listed, codes):
    config, problems = resolve(*listed)
    refused(codes, lambda: problems)
    assert config.cluster.addresses == {}


def test_hosts_are_for_a_launcher_that_starts_tasks_on_them(snapshot):
    _, problems = resolve("gpu-a", "gpu-b", mode=Mode.train)
    assert "type launch=ssh, or launch=docker; or trainer render" in str(problems[0])
    config = RunConfig(cluster=ClusterConfig("2ps4w", 2, 4), launch=LaunchConfig(Launch.ssh))
    assert hosts.resolve_hosts(config, Mode.train)[1] == snapshot
    config = replace(config, cluster=replace(config.cluster, hosts=["gpu-a", "gpu-b"]))
    assert hosts.resolve_hosts(config, Mode.train)[1] == []


# Bad input


@pytest.mark.parametrize(
    ("change", "codes"),
    [
        ({"mounts": ["data"]}, "container.mounts/malformed"),
        ({"mounts": ["/data/../etc"]}, "container.mounts/malformed"),
        ({"mounts": ["/"]}, "container.mounts/conflict"),
        ({"mounts": ["/tmp"]}, "container.mounts/conflict"),
        ({"mounts": ["/opt"]}, "container.mounts/conflict"),
        ({"mounts": ["/usr/bin"]}, "container.mounts/conflict"),
        ({"mounts": ["/no/such/folder"]}, "container.mounts/not-found"),
        ({"memory_mib": {"worker": 5}}, "container.memory_mib.worker/out-of-range"),
        ({"memory_mib": {"wroker": 900}}, "container.memory_mib.wroker/unknown-choice"),
        ({"cpus": {"worker": 0.0}}, "container.cpus.worker/out-of-range"),
        ({"job": "worker"}, "launch/conflict"),
        ({"mode": Mode.chaos}, "launch/not-supported"),
        ({"addresses": {"worker": ["a:1"]}}, "launch/no-effect"),
    ],
)
def test_invalid_options_of_containers_are_refused_with_a_remedy(refused, change, codes):
    cluster = ClusterConfig("1ps1w", 1, 1, addresses=change.pop("addresses", {}))
    mode, job = change.pop("mode", Mode.train), change.pop("job", None)
    config = RunConfig(
        launch=LaunchConfig(Launch.docker), cluster=cluster, job=job, container=ContainerConfig(**change)
    )
    assert all(problem.remedy for problem in refused(codes, check_containers, config, mode, Target.compose))


def test_rendering_needs_no_gpu(tmp_path: Path):
    command = [sys.executable, "-m", "trainer", "cluster=1ps1w", "device.gpus={worker:[7]}"]
    rendered_file = subprocess.run(
        [*command, "mode=render"], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert "device_ids" in rendered_file.stdout, rendered_file.stderr
    if Machine(1, len(list(Path("/dev").glob("nvidia[0-9]*")))).gpus < 8:
        refused = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
        assert (refused.returncode, "no GPU 7" in refused.stderr) == (2, True)
        assert os.listdir(tmp_path) == []
