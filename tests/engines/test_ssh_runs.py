"""Runs on three hosts that are reached by a real ssh."""

from __future__ import annotations

import os
import platform
import signal
import site
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engines import Engine, engine
from runs import ON_HOSTS, Run, has_ended, wait_until

import trainer

pytestmark = [pytest.mark.cluster, pytest.mark.long]

EXACT = [*ON_HOSTS, "checkpoint.every=20"]


@pytest.fixture(scope="module")
def ssh() -> Iterator[Engine]:
    with engine("ssh") as started:
        yield started


@pytest.fixture
def on_hosts(ssh: Engine, start: Callable[..., Run]) -> Callable[..., Run]:
    """on_hosts(*overrides, hosts="node1,node2,node3") -> a Run with launch=ssh."""

    def start_one(*overrides: str, hosts: str = "node1,node2,node3") -> Run:
        command = ssh.environment()["SSH_COMMAND"]
        return start("launch=ssh", f"launch.ssh={command}", f"cluster.hosts=[{hosts}]", *overrides)

    return start_one


def hosts_of(run: Run) -> dict[str, str]:
    return {task["name"]: task["address"].rpartition(":")[0] for task in run.plan()["tasks"]}


def test_kills_a_cut_cable_and_a_lost_node_change_no_bit(ssh: Engine, on_hosts, finish):
    expected = finish(*EXACT, "train.steps=400", "run=here").summary()["params_sha256"]
    run = on_hosts(*EXACT, "train.steps=400")
    run.wait_for_step(20)
    for task, at in (("worker:2", 60), ("ps:0", 110), ("worker:0", 160)):
        os.kill(run.last_pid(task), signal.SIGKILL)
        run.wait_for_step(at)
    ssh.hosts("cut", "node3")
    time.sleep(15)  # the fault itself
    ssh.hosts("mend", "node3")
    run.wait_for_step(220)
    ssh.hosts("kill", "node2")
    restart_sshd(ssh)
    assert run.wait() == 0, run.output
    assert run.summary()["params_sha256"] == expected
    assert set(hosts_of(run).values()) == {"node1", "node2", "node3"}
    assert run.pids() == []


def restart_sshd(ssh: Engine) -> None:
    """A host that has its power again."""
    ssh.call("up", "3")


def test_a_killed_launcher_leaves_nothing_on_any_host_and_the_same_command_continues(on_hosts, finish):
    expected = finish(*EXACT, "train.steps=150", "run=here").summary()["params_sha256"]
    run = on_hosts(*EXACT, "train.steps=150")
    run.wait_for_step(50)
    pids = run.pids()
    run.process.kill()
    wait_until(lambda: all(has_ended(pid) for pid in pids))
    again = on_hosts(*EXACT, "train.steps=150")
    assert again.wait() == 0, again.output
    assert "resumes at step" in again.output
    assert again.summary()["params_sha256"] == expected


OTHER_PYTHON = Path("/usr/bin/python3")  # of the system

# Reaches the hosts as ssh does; node2 has another Python where this one is.
REACH = """#!{python}
import os, sys
*words, command = sys.argv[1:]
if "node2" in words:
    command = command.replace("exec env ", "exec env PYTHONPATH={packages} ").replace("{python}", "{other}")
os.execvp("ssh", ["ssh", *words, command])
"""


def test_a_host_with_another_python_is_named(ssh: Engine, on_hosts, tmp_path: Path):
    said = subprocess.run([OTHER_PYTHON, "--version"], capture_output=True, text=True, check=False).stdout.split()
    if said[-1:] in ([], [platform.python_version()]):
        pytest.skip(f"NO OTHER PYTHON WAS TESTED: {OTHER_PYTHON} is the same, or does not exist")
    packages = ":".join([str(Path(__file__).parents[2]), *site.getsitepackages()])
    reach = tmp_path / "reach"
    reach.write_text(REACH.format(python=sys.executable, packages=packages, other=OTHER_PYTHON))
    reach.chmod(0o755)
    _, _, options = ssh.environment()["SSH_COMMAND"].partition(" ")
    run = on_hosts(*EXACT, "train.steps=10", f"launch.ssh={reach} {options}", hosts="node1,node2")
    assert run.wait() == 2, run.output
    assert f"node2 has trainer {trainer.__version__} (Python {said[-1]}," in run.output
    assert "install the same" in run.output


@pytest.mark.parametrize(
    ("hosts", "overrides", "code", "message"),
    [
        ("node1,nowhere", [], 69, "nowhere cannot be reached: ssh: Could not resolve hostname nowhere"),
        ("node1,node2", ["cluster=1ps4w", "run=/proc/mine"], 74, "the run directory cannot be written"),
    ],
    ids=["no such host", "no such directory"],
)
def test_what_cannot_work_is_said_in_one_paragraph(on_hosts, tmp_path: Path, hosts, overrides, code, message):
    run = on_hosts(*EXACT, "train.steps=10", *overrides, hosts=hosts)
    assert run.wait() == code, run.output
    assert message in run.output
    assert "Traceback" not in run.output
