"""Runs on several hosts: addresses of this machine stand for them, and a script for ssh."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import ON_HOSTS, Run, has_ended, wait_until

pytestmark = pytest.mark.cluster

HOSTS = "cluster.hosts=[127.0.0.2,127.0.0.3]"
EXACT = [*ON_HOSTS, "checkpoint.every=10", "cluster=2ps2w"]
SSH = """#!/bin/sh
while [ $# -gt 2 ]; do shift; done
{before}
exec sh -c "$2"
"""


@pytest.fixture
def on_hosts(start: Callable[..., Run], tmp_path: Path) -> Callable[..., Run]:
    """on_hosts(*overrides, before="a line of shell, with the host in $1") -> a Run with launch=ssh."""

    def start_one(*overrides: str, before: str = "") -> Run:
        script = tmp_path / "ssh"
        script.write_text(SSH.replace("{before}", before))
        script.chmod(0o755)
        return start("launch=ssh", f"launch.ssh={script}", HOSTS, *overrides)

    return start_one


def nurseries(run: Run) -> dict[str, int]:
    """Process of each host's nursery."""
    return {path.stem: json.loads(path.read_text())["pid"] for path in (run.directory / "hosts").glob("*.json")}


def test_the_bits_are_those_of_one_machine_after_a_killed_worker_and_a_lost_host_with_a_ps(finish, on_hosts):
    expected = finish(*EXACT, "train.steps=70", "run=here").summary()
    run = on_hosts(*EXACT, "train.steps=70")
    run.wait_for_step(15)
    os.kill(run.last_pid("worker:0"), signal.SIGKILL)
    run.wait_for_step(35)
    tasks = {task["name"]: task["address"] for task in run.plan()["tasks"]}
    lost = {name: run.last_pid(name) for name, address in tasks.items() if address.startswith("127.0.0.3:")}
    assert lost.keys() == {"ps:1", "worker:1"}
    os.kill(nurseries(run)["127.0.0.3"], signal.SIGKILL)
    wait_until(lambda: all(has_ended(pid) for pid in lost.values()))
    assert run.wait() == 0, run.output
    assert "worker:0 died (SIGKILL)" in run.output
    assert "127.0.0.3 was lost" in run.output
    assert run.summary()["params_sha256"] == expected["params_sha256"]
    assert {address.rpartition(":")[0] for address in tasks.values()} == {"127.0.0.2", "127.0.0.3"}
    assert not (run.directory / "hosts").exists()
    assert run.pids() == []


@pytest.mark.long
def test_ctrl_c_saves_and_a_killed_launcher_of_the_run_that_is_continued_leaves_nothing(on_hosts, start):
    run = on_hosts(*EXACT, "train.steps=100000")
    run.wait_for_step(5)
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130, run.output
    assert f"Stopped at step {run.summary()['steps']}, checkpoint saved" in run.output
    again = start("continue", f"run={run.directory}")
    again.wait_for_step(run.summary()["steps"] + 5)
    pids = [*again.pids(), *nurseries(again).values()]
    again.process.kill()
    wait_until(lambda: all(has_ended(pid) for pid in pids))


@pytest.mark.parametrize(
    ("before", "code", "message"),
    [
        (
            '[ $1 = 127.0.0.3 ] && { echo "ssh: no route to $1" >&2; exit 255; }',
            69,
            "127.0.0.3 cannot be reached: ssh: no",
        ),
        ('[ $1 = 127.0.0.3 ] && set -- $1 "false && $2"', 69, "127.0.0.3 cannot be reached: the command exited with"),
    ],
)
def test_a_host_that_cannot_serve_is_named_before_anything_starts(on_hosts, before, code, message):
    run = on_hosts(*EXACT, "train.steps=10", before=before)
    assert run.wait() == code, run.output
    assert message in run.output
    assert "Traceback" not in run.output
    assert not run.directory.exists()
