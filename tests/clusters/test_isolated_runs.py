"""Runs in a network of their own: nothing outside reaches them, and everything else is as without."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from runs import REFUSED, UNPRIVILEGED, Run, can_be_unprivileged, wait_until

from trainer.launch.processes.isolation import why_impossible
from trainer.observe.peers import read_status

pytestmark = pytest.mark.cluster

LISTENS = "0A"  # state of a socket, in /proc/net/tcp
EXACT = [
    "model=mlp",
    "model.options.width=256",
    "seed=4",
    "train.batch_size=48",
    "checkpoint.every=10",
    "history.every=1",
]
CHAOS = ["mode=chaos", "run=runs", *EXACT, "train.steps=120"]

Start = Callable[..., Run]


@pytest.fixture(params=[[], UNPRIVILEGED], ids=["this user", "a user without capabilities"])
def within(request: pytest.FixtureRequest) -> list[str]:
    """Begins a command whose run can be isolated."""
    if reason := why_impossible() if not request.param else "" if can_be_unprivileged() else "unshare cannot do it":
        pytest.skip(reason)
    return request.param


WITHOUT_CAPABILITIES = pytest.mark.parametrize("within", [UNPRIVILEGED], ids=["without capabilities"], indirect=True)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Run]:
    """A run that is not isolated."""
    run = Run([*EXACT, "cluster=2ps2w", "train.steps=60", "security.isolate=never"], tmp_path_factory.mktemp("a"), {})
    assert run.wait() == 0, run.output
    yield run
    run.end()


def sockets_of(pid: int) -> dict[int, tuple[str, str]]:
    """State and local address of every TCP socket in the network of a process, by its inode."""
    rows = [
        line.split()
        for kind in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{kind}").read_text().splitlines()[1:]
    ]
    return {int(row[9]): (row[3], row[1]) for row in rows if row[9] != "0"}


def inodes_of(pids: list[int]) -> set[int]:
    """Inodes of the sockets that processes have open."""
    found = set()
    for path in [path for pid in pids for path in Path(f"/proc/{pid}/fd").iterdir()]:
        with contextlib.suppress(FileNotFoundError):  # it has just been closed
            if (link := os.readlink(path)).startswith("socket:["):
                found.add(int(link[8:-1]))
    return found


def task_addresses(run: Run) -> list[tuple[str, int]]:
    listed = [task["address"].split(":") for task in run.plan()["tasks"] if task["address"]]
    return [(host, int(port)) for host, port in listed]


@pytest.mark.long(but=["a user without capabilities"])
def test_nothing_outside_reaches_a_run_and_it_computes_the_same(start: Start, within: list[str], shared: Run):
    run = start(*EXACT, "cluster=2ps2w", "train.steps=60", within=within)
    run.wait_for_step(5)
    pids = run.pids()
    inside, outside = sockets_of(pids[0]), sockets_of(os.getpid())
    assert sum(state == LISTENS for state, _ in inside.values()) >= 4  # a server for each task
    assert not inodes_of([*pids, run.process.pid]) & outside.keys()
    before = {address for state, address in outside.values() if state == LISTENS}
    for host, port in task_addresses(run):
        if not any(address.endswith(f":{port:04X}") for address in before):  # another program's
            with socket.socket() as probe:
                assert probe.connect_ex((host, port)) != 0
    pages = {task["name"]: read_status(task["control"], timeout_secs=10) for task in run.plan()["tasks"]}
    assert {page.pid for page in pages.values()} == set(pids)
    assert run.wait() == 0, run.output
    assert run.summary()["params_sha256"] == shared.summary()["params_sha256"]
    assert [line["loss"] for line in run.history()] == [line["loss"] for line in shared.history()]
    assert run.pids() == []
    assert not (run.directory / "pages").exists()


@pytest.mark.long
def test_a_scan_of_listening_sockets_shows_no_difference(start: Start):
    """In a network where nobody else is, because other programs of this machine come and go."""
    alone = ["unshare", "--user", "--map-user=1234", "--map-group=1234", "--net"]
    if not can_be_unprivileged():
        pytest.skip("unshare cannot make it")
    run = start(*EXACT, "cluster=2ps2w", "train.steps=30", within=alone)
    here, scans = os.readlink("/proc/self/ns/net"), []
    while run.process.poll() is None:
        with contextlib.suppress(OSError):  # it has just ended
            if os.readlink(f"/proc/{run.process.pid}/ns/net") != here:
                scans.append(sockets_of(run.process.pid))
        time.sleep(0.05)
    assert run.wait() == 0, run.output
    assert scans[5:]
    assert not any(scans)


@pytest.mark.long
@WITHOUT_CAPABILITIES
def test_tasks_that_are_killed_come_back(start: Start, within: list[str], shared: Run):
    run = start(*EXACT, "cluster=2ps2w", "train.steps=60", within=within)
    run.wait_for_step(15)
    os.kill(run.last_pid("worker:1"), signal.SIGKILL)
    run.wait_for_step(35)
    os.kill(run.last_pid("ps:0"), signal.SIGKILL)
    assert run.wait() == 0, run.output
    assert run.summary()["restarts_of"].keys() == {"worker:1", "ps:0"}
    assert run.summary()["params_sha256"] == shared.summary()["params_sha256"]


@pytest.mark.long  # runs of this user are isolated wherever that is possible, so test_ends.py does the same
@WITHOUT_CAPABILITIES
def test_ctrl_c_saves_and_a_killed_launcher_leaves_nothing(start: Start, within: list[str]):
    run = start(*EXACT, "cluster=2ps2w", "train.steps=100000", within=within)
    run.wait_for_step(5)
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130, run.output
    assert f"Stopped at step {run.summary()['steps']}, checkpoint saved" in run.output
    again = start(*EXACT, "cluster=2ps2w", "train.steps=100000", within=within)
    again.wait_for_step(run.summary()["steps"] + 5)
    pids = again.pids()
    os.kill(again.process.pid, signal.SIGKILL)
    assert len(pids) == 4
    wait_until(lambda: not again.pids())


@pytest.mark.long
@WITHOUT_CAPABILITIES
def test_faults_of_tasks_and_links_change_no_bit(start: Start, within: list[str]):
    faults = "kill worker:1 @15; cut worker:1->ps:0 @40 for 2s; kill ps:0 @80"
    run = start("cluster=1ps2w", f'chaos.schedule="{faults}"', "security.isolate=always", *CHAOS, within=within)
    assert run.wait() == 0, run.output
    (kind,) = json.loads((run.directory / "chaos.json").read_text())["kinds"]
    assert (kind["runs"], kind["finished"], kind["identical"]) == (1, 1, 1)
    plan = json.loads((run.directory / "schedule/plan.json").read_text())
    assert all(task["control"].startswith("unix:") for task in plan["tasks"])


@pytest.mark.long
@WITHOUT_CAPABILITIES
def test_an_evaluator_a_profile_and_all_reduce_need_no_other_network(start: Start, within: list[str]):
    run = start(*EXACT, "cluster=1ps2w1e", "train.steps=30", "profile=true", within=within)
    assert run.wait() == 0, run.output
    assert run.summary()["best"]["step"] in (10, 20, 30)
    offsets = [
        (run.directory / f"profile/{task}.jsonl").read_text().count("offset_secs") for task in ("ps-0", "worker-1")
    ]
    assert min(offsets) >= 1
    ring = start(*EXACT, "cluster=2w", "strategy=all_reduce", "train.steps=10", "run=ring", within=within)
    assert ring.wait() == 0, ring.output


@pytest.mark.long
@pytest.mark.skipif(not can_be_unprivileged(), reason="unshare makes no user namespace here")
def test_where_the_system_refuses_runs_are_as_before_unless_they_must_be_isolated(start: Start):
    run = start(*EXACT, "cluster=1ps1w", "train.steps=10", within=REFUSED)
    assert run.wait() == 0, run.output
    assert "isolat" not in run.output
    assert run.plan()["tasks"][0]["control"].startswith("127.0.0.1:")
    must = start(*EXACT, "cluster=1ps1w", "security.isolate=always", "run=must", within=REFUSED)
    assert must.wait() == 2
    assert re.search(r"security.isolate: .* system refuses it \(unshare: No", must.output)
    assert not must.directory.exists()


@pytest.mark.long
def test_code_of_the_user_keeps_its_network_and_a_machine_is_told_once(start: Start, within: list[str], tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        "import keras\n"
        "def mine(input_shape, classes):\n"
        "    return keras.Sequential([keras.Input(input_shape), keras.layers.Flatten(), keras.layers.Dense(classes)])\n"
    )
    typed = ["user=mine.py", "model=mine", "cluster=1ps1w", "train.steps=10"]
    within = [*within, "env", f"XDG_CACHE_HOME={tmp_path}"]
    run = start(*typed, "run=mine", within=within)
    assert run.wait() == 0, run.output
    assert run.output.count("not isolated: the code") == 1
    again = start(*typed, "run=again", within=within)
    assert again.wait() == 0, again.output
    assert "not isolated" not in again.output
    assert run.plan()["tasks"][0]["control"].startswith("127.0.0.1:")
    must = start(*typed, "security.isolate=always", "run=must", within=within)
    assert must.wait() == 0, must.output
    assert "not isolated" not in must.output
    assert must.plan()["tasks"][0]["control"].startswith("unix:")
