"""Runs on three real Docker engines: as a stack of their swarm, and as containers that a launcher follows over ssh."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import Engine, engine
from runs import ON_HOSTS, Command, Run, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.docker]

ROOT = Path(__file__).parents[2]
NODES = ("node1", "node2", "node3")
OPTIONS = [*ON_HOSTS, "train.steps=600", "checkpoint.every=50"]
RESTARTED_SECS = 300  # without a step: all tasks start again after a lost ps, six containers beside other tests


@pytest.fixture(scope="module")
def swarm() -> Iterator[Engine]:
    with engine("swarm") as started:
        subprocess.run([ROOT / "compose/cluster.sh", "image", "cpu"], check=True, capture_output=True)
        started.call("load", "trainer:cpu")
        yield started


def test_a_stack_ends_with_the_bits_of_one_machine_after_a_killed_worker_and_a_killed_ps(
    swarm: Engine, finish: Callable[..., Run], tmp_path: Path
):
    expected = finish(*OPTIONS, "run=here").summary()["params_sha256"]
    directory = tmp_path / "runs/digits"
    directory.parent.mkdir()
    for path in (directory.parent, tmp_path):
        path.chmod(0o777)
    words = ["mode=render", "target=stack", *OPTIONS, f"run={directory}"]
    render = Command([sys.executable, "-m", "trainer", *words], tmp_path, {})
    assert render.wait() == 0, render.output
    file = tmp_path / "stack.yaml"
    file.write_text(render.output)
    deploy = ["stack", "deploy", "--detach=true", "--resolve-image", "never"]
    swarm.call("docker", "node1", *deploy, "-c", str(file), "digits")

    def last_step() -> int:
        path = directory / "history.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)

    def kill(task: str) -> None:
        for node in NODES:
            if found := swarm.call("docker", node, "ps", "-q", "--filter", f"name=digits_{task}").split():
                swarm.call("docker", node, "kill", found[0])

    def explain() -> str:
        return swarm.call("docker", "node1", "stack", "ps", "--no-trunc", "digits")

    waiting: dict[str, Any] = {"progress": last_step, "explain": explain, "stalled_secs": RESTARTED_SECS}
    for task, step in (("worker-1", 100), ("ps-1", 300)):
        wait_until(lambda step=step: last_step() >= step, **waiting)
        kill(task)

    def replicas() -> list[str]:
        listed = swarm.call("docker", "node1", "service", "ls", "--format", "{{.Replicas}}").splitlines()
        return [one for one in listed if re.search(r"\(1/1 completed\)", one)]

    wait_until(lambda: len(replicas()) == 6, poll_secs=1, **waiting)
    assert json.loads((directory / "summary.json").read_text())["params_sha256"] == expected


# As `ssh`, but that the engines of these hosts, which share their files, have sockets of different names.
SSH = """\
import os, sys
words = [word.replace("/var/run/docker.sock", f"/run/trainer-swarm/{{sys.argv[-1]}}.sock") for word in sys.argv[1:]]
os.execvp("ssh", {command} + words)
"""


@pytest.fixture
def over_ssh(swarm: Engine, tmp_path: Path) -> Iterator[str]:
    """What `launch.ssh` must be."""
    ssh = Engine("ssh")
    ssh.call("up", "3")
    script = tmp_path / "over_ssh.py"
    script.write_text(SSH.format(command=shlex.split(ssh.environment()["SSH_COMMAND"])))
    yield f"{sys.executable} {script}"
    shutil.rmtree("/var/lib/trainer-ssh")  # the hosts end with the swarm


def test_containers_followed_over_ssh_survive_a_kill_a_cut_cable_and_a_lost_host(
    swarm: Engine, over_ssh: str, start: Callable[..., Run], finish: Callable[..., Run], tmp_path: Path
):
    expected = finish(*OPTIONS, "run=here").summary()["params_sha256"]
    hosts = ["launch=docker", f"cluster.hosts=[{','.join(NODES)}]", f"launch.ssh={over_ssh}"]
    run = start(*OPTIONS, *hosts, "restart.max=6", "restart.delay_secs=5", "run=digits")
    run.wait_for_step(60)
    label = f"label=trainer.run={run.directory}"
    worker = swarm.call("docker", "node2", "ps", "-q", "--filter", label, "--filter", "label=trainer.task=worker:2")
    swarm.call("docker", "node2", "kill", worker.strip())
    run.wait_for_step(120)
    swarm.hosts("cut", "node3")
    time.sleep(15)  # the fault itself
    swarm.hosts("mend", "node3")
    run.wait_for_step(240)
    swarm.call("stop", "node2")
    swarm.call("start", "node2")
    Engine("ssh").call("up", "3")
    assert run.wait() == 0, run.output
    assert run.summary()["params_sha256"] == expected
    for node in NODES:
        assert swarm.call("docker", node, "ps", "-aq", "--filter", label) == ""
