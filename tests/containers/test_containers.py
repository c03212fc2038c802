"""Clusters of containers on a real Docker engine: by launch=docker, and by make cluster-up."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from runs import LONGEST_SECS, Command, Run, wait_until

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "compose/cluster.sh")
STEPS = 400  # take seconds, so that a test can act on a run before its end
EXACT = ["model=mlp", "seed=4", "train.batch_size=48", f"train.steps={STEPS}", "checkpoint.every=10", "history.every=1"]
LONG = ["model=mlp", "train.batch_size=48", "train.steps=100000", "checkpoint.every=0", "history.every=1"]
MODELS = """
import os, keras

def mine(input_shape, classes, *, fails="", allocates=""):
    me = os.environ.get("TRAINER_CONTROL", "")
    if fails and me.startswith(fails):
        raise ValueError("this worker fails")
    if allocates and me.startswith(allocates):
        blocks = [b"x" * 2**26 for _ in range(200)]
    inputs = keras.Input(input_shape)
    return keras.Model(inputs, keras.layers.Dense(classes, name="logits")(keras.layers.Flatten()(inputs)))
"""
KNOCK = """
import socket, sys, time
with socket.create_connection((sys.argv[1], 2222), timeout=3):
    time.sleep(30)
"""

pytestmark = [pytest.mark.cluster, pytest.mark.docker]


def docker(*words: str, check: bool = True) -> str:
    ended = subprocess.run(["docker", *words], capture_output=True, text=True, timeout=LONGEST_SECS, check=False)
    assert ended.returncode == 0 or not check, ended.stderr
    return ended.stdout


@pytest.fixture(scope="session", autouse=True)
def _image() -> None:
    """Builds the image of this tree."""
    subprocess.run([SCRIPT, "image", "cpu"], check=True, capture_output=True, timeout=LONGEST_SECS)


@pytest.fixture(autouse=True)
def _no_leftovers(tmp_path: Path) -> Iterator[None]:
    """Checks after each test that Docker has nothing of its runs; removes the leftovers of a failed test."""
    tmp_path.chmod(0o755)  # tasks that root starts run as nobody, and read the files in this folder
    yield
    leftovers = objects_of_runs_in(tmp_path)
    for kind, name in leftovers:
        if kind == "container":
            docker("rm", "--force", "--volumes", name, check=False)
    for kind, name in leftovers:
        if kind == "network":
            docker("network", "rm", name, check=False)
    assert leftovers == []


def objects_of_runs_in(folder: Path) -> list[tuple[str, str]]:
    """Containers and networks of runs in a folder: their labels have its path."""
    objects = []
    for kind, listing in (("container", ["ps", "--all"]), ("network", ["network", "ls"])):
        for name in docker(*listing, "--no-trunc", "--format", "{{.ID}}").split():
            if f"{folder}/" in docker("inspect", name, check=False):
                objects.append((kind, name))
    return objects


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """unbroken(cluster) -> params_sha256 of the run as processes; made once."""
    shas: dict[str, str] = {}

    def make(cluster: str) -> str:
        if cluster not in shas:
            run = Run([*EXACT, f"cluster={cluster}"], tmp_path_factory.mktemp("unbroken"), {})
            assert run.wait() == 0, run.output
            shas[cluster] = run.summary()["params_sha256"]
        return shas[cluster]

    return make


@pytest.fixture
def launch(start: Callable[..., Run]) -> Callable[..., Run]:
    """launch(*overrides, environment={...}) -> a Run with launch=docker."""
    return lambda *overrides, **options: start("launch=docker", *overrides, **options)


@pytest.fixture
def call(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """call(command, *overrides, VARIABLE=...) -> the script that make's cluster targets call; killed at the end."""
    commands: list[Command] = []

    def call_one(command: str, *overrides: str, **environment: str) -> Command:
        commands.append(Command([SCRIPT, command, *overrides], tmp_path, environment))
        return commands[-1]

    yield call_one
    for command in commands:
        command.end()


def container_of(run: Path, task: str) -> str:
    """The id of a task's container, of launch=docker or of Compose."""
    return wait_until(lambda: find_containers(run, task))[0]


def find_containers(run: Path, task: str) -> list[str]:
    service = task.replace(":", "-")
    named = docker("ps", "--filter", f"label=trainer.task={task}", "--format", "{{.ID}}").split()
    return [
        name
        for name in named
        if str(run) in docker("inspect", name) and service in docker("inspect", "-f", "{{.Name}}", name)
    ]


# The same run, unchanged


@pytest.mark.long
def test_containers_compute_the_bits_of_processes_and_the_caller_owns_the_run(launch, unbroken):
    run = launch(*EXACT, "cluster=2ps2w1e")
    assert run.wait() == 0, run.output
    summary = run.summary()
    assert summary["params_sha256"] == unbroken("2ps2w")
    assert (summary["run_dir"], summary["restarts"]) == (str(run.directory), 0)
    assert {task["code"] for task in summary["tasks"].values()} == {0}
    assert {path.stat().st_uid for path in [run.directory, *run.directory.rglob("*")]} == {os.getuid()}
    assert [log.name for log in run.logs()] == [
        *("evaluator-0.log", "ps-0.log", "ps-1.log", "worker-0.log", "worker-1.log")
    ]
    trained = [log for log in run.logs() if not log.name.startswith("evaluator")]
    assert all(f" done at step {STEPS}" in log.read_text() for log in trained)


def test_cluster_up_computes_the_bits_of_processes_and_the_caller_owns_the_run(call, unbroken):
    up = call("up", "cluster=1ps2w", *EXACT, "run=up")
    assert up.wait() == 0, up.output
    run = up.directory
    assert up.summary()["params_sha256"] == unbroken("1ps2w")
    assert f"params_sha256 {unbroken('1ps2w')}" in up.output
    assert re.search(rf"^worker:1 +\| .* worker:1 INFO  done at step {STEPS}$", up.output, re.MULTILINE)
    assert re.search(r"^done: .*/up$", up.output, re.MULTILINE)
    assert {path.stat().st_uid for path in [run, *run.rglob("*")]} == {os.getuid()}
    assert (run / "logs/worker-1.log").exists()
    assert not (run / "lock").exists()


@pytest.mark.long
@pytest.mark.parametrize("extra", [["cluster=2w"], ["cluster=2w", "strategy=all_reduce"], []])
def test_every_kind_of_cluster_runs_in_containers(launch, extra):
    run = launch(*EXACT, "train.steps=20", *extra)
    assert run.wait() == 0, run.output
    assert run.summary()["steps"] == 20


# Faults


@pytest.mark.long
@pytest.mark.parametrize("task", ["worker:1", "ps:0"])
def test_a_killed_container_is_restarted_and_the_bits_are_the_same(launch, unbroken, task):
    run = launch(*EXACT, "cluster=1ps2w")
    victim = container_of(run.directory, task)  # before it trains, because looking takes a while
    run.wait_for_step(25)
    docker("kill", victim)
    assert run.wait() == 0, run.output
    assert f"{task} died (SIGKILL)" in run.output
    assert run.summary()["restarts_of"] == {task: 1}
    assert run.summary()["params_sha256"] == unbroken("1ps2w")


@pytest.mark.long
def test_a_killed_ps_without_restarts_ends_the_run_with_its_code(launch):
    run = launch(*LONG, "cluster=1ps2w", "restart.max=0")
    run.wait_for_step(5)
    docker("kill", container_of(run.directory, "ps:0"))
    assert run.wait() == 137
    assert "ps:0 failed first, exit code -9" in run.output


@pytest.mark.long
def test_a_killed_ps_ends_cluster_up_with_its_code(call):
    up = call("up", "cluster=1ps2w", *LONG, "run=up")
    up.wait_for_step(5)
    docker("kill", container_of(up.directory, "ps:0"))
    assert up.wait() == 137, up.output
    assert "ps-0 failed first, exit code 137" in up.output


@pytest.mark.long
def test_a_worker_that_raises_ends_the_run_with_its_code_and_its_reason(launch, tmp_path):
    (tmp_path / "mine.py").write_text(MODELS)
    run = launch("user=mine.py", "model=mine", "model.options.fails=worker-1", "cluster=1ps2w")
    assert run.wait() == 70
    assert re.search(r"worker.1 failed first, exit code 70", run.output)
    assert "ValueError: this worker fails" in run.output


@pytest.mark.long
def test_a_container_that_runs_out_of_memory_is_reported(call, tmp_path):
    (tmp_path / "mine.py").write_text(MODELS)
    overrides = ["user=mine.py", "model=mine", "model.options.allocates=worker-1", "cluster=1ps2w", "restart.max=0"]
    overrides += ["container.memory_mib={worker:1500}"]
    run = call("up", *overrides, "run=up")
    assert run.wait() == 137
    assert re.search(r"worker.1 failed first, exit code -?\d+[:,] out of memory", run.output)


@pytest.mark.long
def test_the_same_command_continues_after_ctrl_c_and_after_its_launcher_was_killed(launch, unbroken):
    stopped = launch(*EXACT, "cluster=2ps2w")
    stopped.wait_for_step(15)
    os.kill(stopped.process.pid, signal.SIGINT)
    assert stopped.wait() == 130
    assert "checkpoint saved. To continue: " in stopped.output
    dead = launch(*EXACT, "cluster=2ps2w")
    dead.wait_for_step(stopped.summary()["steps"] + 5)
    dead.end()  # its containers train on; the next run removes them
    again = launch(*EXACT, "cluster=2ps2w")
    assert again.wait() == 0, again.output
    assert again.summary()["params_sha256"] == unbroken("2ps2w")


@pytest.mark.long
def test_ctrl_c_stops_cluster_up_after_a_save(call):
    up = call("up", "cluster=1ps1w", *LONG, "run=up")
    up.wait_for_step(5)
    os.killpg(up.process.pid, signal.SIGINT)  # as a terminal does: to all of them
    assert up.wait() == 130
    assert ", checkpoint saved." in up.output
    assert "command with run=" in up.output
    assert up.summary()["steps"] >= 5


@pytest.mark.long
def test_mode_clean_removes_the_containers_of_a_killed_launcher_and_keeps_a_live_run(launch, start, tmp_path):
    live = launch(*LONG, "cluster=1ps1w", f"run={tmp_path}/live")
    dead = launch(*LONG, "cluster=1ps1w", f"run={tmp_path}/dead")
    for run in (live, dead):
        run.wait_for_step(2)
    dead.end()
    assert container_of(dead.directory, "worker:0")
    cleaned = start("mode=clean", f"run={tmp_path}/clean")
    assert cleaned.wait() == 0
    assert f"removed from {dead.directory}: " in cleaned.output
    assert re.search(f"kept: {live.directory} .* by process {live.process.pid}", cleaned.output)
    assert {f"{dead.directory}" in docker("inspect", name) for _, name in objects_of_runs_in(tmp_path)} == {False}
    os.kill(live.process.pid, signal.SIGTERM)
    assert live.wait() == 143


@pytest.mark.long
def test_a_second_run_in_the_same_directory_is_refused_and_harms_nothing(launch, call):
    first = launch(*LONG, "cluster=1ps1w")
    first.wait_for_step(2)
    second = launch(*LONG, "cluster=1ps1w")
    assert second.wait() == 73
    up = call("up", "cluster=1ps1w", *LONG, f"run={first.directory}")
    assert up.wait() == 73, up.output
    os.kill(first.process.pid, signal.SIGTERM)
    assert first.wait() == 143
    assert "checkpoint saved. To continue: " in first.output


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("container.image=no-such-image:1", "no image no-such-image:1"),
        pytest.param(
            "device.gpus={worker:[0]}",
            "a container GPUs",
            marks=pytest.mark.skipif(bool(list(Path("/dev").glob("nvidia0"))), reason="this machine has a GPU"),
        ),
    ],
)
def test_an_error_of_docker_is_reported_with_its_remedy(launch, override, message, tmp_path):
    environment = {}
    if "gpus" in override:  # the check of the machine comes first
        environment = {"PYTHONPATH": str(tmp_path)}
        (tmp_path / "sitecustomize.py").write_text(
            "import pathlib\nglob = pathlib.Path.glob\n"
            "pathlib.Path.glob = lambda self, p: iter([self / 'nvidia0']) if p == 'nvidia[0-9]*' else glob(self, p)\n"
        )
    run = launch("cluster=1ps1w", "container.image=trainer:cpu", override, environment=environment)
    assert run.wait() == 69, run.output
    assert message in run.output
    assert "Traceback" not in run.output


# Isolation


def test_a_task_has_no_privileges_and_can_write_nowhere(launch):
    run = launch(*LONG, "cluster=1ps1w")
    run.wait_for_step(2)
    for task in ("ps:0", "worker:0"):
        name = container_of(run.directory, task)
        status = docker("exec", name, "cat", "/proc/1/status")
        assert re.search(r"^Uid:\s+0\b", status, re.MULTILINE) is None
        assert set(re.findall(r"^Cap(?:Eff|Prm|Bnd|Amb):\s+(\w+)", status, re.MULTILINE)) == {"0" * 16}
        assert re.search(r"^NoNewPrivs:\s+1", status, re.MULTILINE)
        assert re.search(r"^Seccomp:\s+2", status, re.MULTILINE)
        for path in ("/x", "/opt/x", "/usr/x", "/trainer/run/config.yaml"):
            tried = ["docker", "exec", name, "sh", "-c", f"echo >> {path}"]
            assert b"Read-only" in subprocess.run(tried, capture_output=True, check=False).stderr
        assert docker("exec", name, "sh", "-c", "ls /var/run/docker.sock || echo none").strip() == "none"
    tried = ["docker", "exec", container_of(run.directory, "ps:0"), "sh", "-c", "echo > /trainer/run/x"]
    assert subprocess.run(tried, capture_output=True, check=False).returncode != 0  # only the chief can write there
    docker("exec", container_of(run.directory, "ps:0"), "python3", "-m", "trainer.observe.health")
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.wait() == 143


def who_is_connected(ps: str) -> set[str]:
    """Addresses that have a connection to the port of a ps, from its /proc/net."""
    lines = docker("exec", ps, "sh", "-c", "cat /proc/net/tcp /proc/net/tcp6").splitlines()
    rows = [line.split() for line in lines if line.split()[0] != "sl"]
    here = [row[2] for row in rows if row[1].endswith(f":{2222:04X}") and row[3] == "01"]
    return {".".join(str(int(at[-13:-5][i : i + 2], 16)) for i in (6, 4, 2, 0)) for at in here}


def address_of(container: str) -> str:
    return docker("inspect", "-f", "{{range .NetworkSettings.Networks}}{{.IPAddress}}{{end}}", container).strip()


@pytest.mark.long
def test_only_its_workers_can_connect_to_a_ps(launch):
    run = launch(*LONG, "cluster=1ps1w")
    run.wait_for_step(2)
    ps, worker = container_of(run.directory, "ps:0"), container_of(run.directory, "worker:0")
    sockets = docker("inspect", "-f", '{{index .Config.Labels "trainer.sockets"}}', ps).strip()
    address, its_own = address_of(ps), {address_of(ps), address_of(worker)}
    assert who_is_connected(ps) <= its_own
    network = docker("inspect", "-f", "{{range $name, $_ := .NetworkSettings.Networks}}{{$name}}{{end}}", ps).strip()
    here = ["python3", "-c", KNOCK, address]
    elsewhere = ["docker", "run", "--rm", "--init", "--entrypoint", "python3", "trainer:cpu", "-c", KNOCK, address]
    inside = [*elsewhere[:3], "--network", network, *elsewhere[3:]]
    assert newcomers(ps, inside, its_own) != set()  # so the port and the method are right
    assert newcomers(ps, here, its_own) == set()
    assert newcomers(ps, elsewhere, its_own) == set()
    assert docker("inspect", "-f", "{{json .NetworkSettings.Ports}}", ps).strip() in ("{}", "null")
    os.kill(run.process.pid, signal.SIGTERM)
    assert run.wait() == 143
    assert not Path(sockets).exists()


def newcomers(ps: str, command: list[str], known: set[str], within_secs: float = 6) -> set[str]:
    """Addresses connected to a ps besides those known, while a command tries to connect."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as knocking:
        deadline, new = time.monotonic() + within_secs, set()
        while not new and knocking.poll() is None and time.monotonic() < deadline:
            new = who_is_connected(ps) - known
        knocking.terminate()
    return new


# Clusters side by side, data, and the rest of the script


@pytest.mark.long
def test_two_clusters_side_by_side_do_not_mix(call):
    ups = [call("up", "cluster=1ps1w", *EXACT, f"run={name}/same") for name in ("a", "b")]
    assert [up.wait() for up in ups] == [0, 0], ups[0].output + ups[1].output
    assert ups[0].summary()["params_sha256"] == ups[1].summary()["params_sha256"]


@pytest.mark.long
def test_a_cluster_in_the_background_is_listed_and_taken_down(call, tmp_path):
    start = call("start", "cluster=1ps1w", *LONG, "run=up")
    assert start.wait() == 0, start.output
    run = start.directory
    start.wait_for_step(5)
    listed = call("ps")
    assert listed.wait() == 0
    assert re.search(r"up-\w{6} +worker:0 +Up ", listed.output)
    down = call("down", RUN=str(run))
    assert down.wait() == 0, down.output
    assert objects_of_runs_in(tmp_path) == []
    assert "worker:0 INFO  done at step" in (run / "cluster.log").read_text()
    assert start.summary()["steps"] >= 5
    assert call("down", RUN=str(run)).wait() == 0  # a second time changes nothing


@pytest.mark.long
def test_all_tasks_can_read_data_of_the_host_and_none_can_write_it(launch, call, tmp_path):
    random = np.random.default_rng(0)
    arrays = {f"{name}_{part}": random for part in ("train", "test") for name in "xy"}
    digits = {n: random.random((200, 8)) if n[0] == "x" else random.integers(0, 3, 200) for n in arrays}
    np.savez(tmp_path / "digits.npz", **digits)
    overrides = ["model=mlp", "data=npz", "train.steps=10", "train.batch_size=20", "cluster=1ps2w"]
    run = launch(*overrides, "data.options.path=digits.npz")
    assert run.wait() == 0, run.output
    data = f"{tmp_path}/digits.npz"
    up = call("up", *overrides, f"data.options.path={data}", "run=up", DATA=data)
    assert up.wait() == 0, up.output
    assert up.summary()["params_sha256"] == run.summary()["params_sha256"]
    services = yaml.safe_load((up.directory / "compose.yaml").read_text())["services"]
    mounts = {mount["source"]: mount for mount in services["worker-0"]["volumes"]}
    assert mounts[data]["read_only"] is True


@pytest.mark.long
def test_the_image_tests_itself_with_no_more_than_a_task_has():
    hardened = ["--read-only", "--tmpfs", "/tmp", "--network", "none", "--cap-drop", "ALL"]
    assert "selftest: passed" in docker("run", "--rm", *hardened, "trainer:cpu", "mode=selftest")


def test_the_image_is_small_and_runs_unprivileged():
    image: dict[str, Any] = json.loads(docker("inspect", "trainer:cpu"))[0]
    assert image["Size"] <= 1.4e9
    assert image["Config"]["User"] == "10001:10001"
    assert image["Config"]["Healthcheck"]["Test"] == ["CMD", "python3", "-m", "trainer.observe.health"]


@pytest.mark.parametrize("path", sorted((ROOT / "compose").glob("*.yaml")), ids=lambda path: path.stem)
def test_compose_accepts_the_files_that_are_shipped(path):
    docker("compose", "-f", str(path), "config", "--quiet")
