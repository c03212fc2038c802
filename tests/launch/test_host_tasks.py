"""What the launcher of several hosts makes of what they say."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from quick_config import load

from trainer.config import versions
from trainer.config.typed import Mode
from trainer.launch.hosts import launcher
from trainer.launch.hosts import tasks as module
from trainer.launch.hosts.connection import Connection
from trainer.launch.hosts.tasks import HostTasks
from trainer.launch.messages import HostFacts, NurseryOrder, Started, TaskEvent
from trainer.observe.peers import PeerError
from trainer.plan.hosts import resolve_hosts

ALIKE = HostFacts(versions.describe(), versions.code_hash(), 8, 0, True, (1, 2))


def problems(**facts: HostFacts) -> list[str]:
    return [f"{problem.key}: {problem.message}" for problem in launcher._compare(facts)]


def test_hosts_that_are_alike_have_no_problem():
    assert problems(a=ALIKE, b=replace(ALIKE, cores=2, gpus=4)) == []


@pytest.mark.parametrize("different", [{"sees_run": False}, {"version": "trainer 0.0.1 (Python 3.8.0)"}, {"code": "0"}])
def test_what_is_different_on_a_host_is_named(different: dict, snapshot):
    assert problems(a=ALIKE, b=replace(ALIKE, **different)) == snapshot


def test_gpus_that_a_host_lacks_are_refused(snapshot):
    config = load(["cluster=2ps2w", "cluster.hosts=[a,b]", "launch=ssh", "device.gpus={worker:[1]}"])
    config, problems = resolve_hosts(config, Mode.train)
    assert problems == []
    found = [*launcher._check_gpus(config, {"a": replace(ALIKE, gpus=2), "b": ALIKE})]
    assert [one.message for one in found] == snapshot


SCRIPTED = """
import json, sys
print("Welcome to this host!", flush=True)
print(json.dumps({{"kind": "HostFacts", **{facts}}}), flush=True)
for line in sys.stdin:
    request = json.loads(line)
    if request["kind"] == "StartTask":
        print(json.dumps({{"kind": "Started", "name": request["name"], "pid": 7}}), flush=True)
    if request["kind"] == "Stay":
        print(json.dumps({{"kind": "Here"}}), flush=True)
    if request["kind"] == "SignalTask":
        assert request["pid"] == 7
        if request["number"] == 9:
            sys.exit("it lost its power")
        print(json.dumps({{"kind": "Exited", "name": "worker:0", "pid": 7, "code": 3}}), flush=True)
"""


class ScriptedConnection(Connection):
    """A connection to a few lines of Python in place of a nursery."""

    def __init__(self, script: str, order: NurseryOrder) -> None:
        super().__init__([sys.executable, "-c", script], order)


def scripted(*hosts: str) -> HostTasks:
    facts = {"version": "1", "code": "2", "cores": 4, "gpus": 0, "sees_run": True, "ports": [5, 6]}
    connect = partial(ScriptedConnection, SCRIPTED.format(facts=facts))
    return HostTasks([NurseryOrder(host, "/runs/x", "token", 2) for host in hosts], connect)


def events_until(tasks: HostTasks, count: int) -> list[TaskEvent]:
    events: list[TaskEvent] = []
    deadline = time.monotonic() + 30
    while len(events) < count and time.monotonic() < deadline:
        events += tasks.events(0.1)
    return events


def start(tasks: HostTasks, **host_of: str) -> None:
    tasks.hosts(30)
    tasks.place({name.replace("_", ":"): host for name, host in host_of.items()})
    for name in host_of:
        tasks.start(name.replace("_", ":"), run="/runs/x", environment={}, log="log")


def test_tasks_of_two_hosts_with_equal_process_ids_are_told_apart():
    with scripted("a", "b") as tasks:
        start(tasks, worker_0="a", worker_1="b")
        pids = {event.name: event.pid for event in events_until(tasks, 2)}
        assert len(set(pids.values())) == 2
        tasks.signal(pids["worker:0"], 15)
        (ended,) = events_until(tasks, 1)
        assert (ended.name, ended.pid, ended.code) == ("worker:0", pids["worker:0"], 3)


def test_the_tasks_of_a_lost_host_have_ended_and_it_is_reached_again():
    with scripted("a", "b") as tasks:
        start(tasks, worker_0="a", worker_1="b", worker_2="b")
        pids = {event.name: event.pid for event in events_until(tasks, 3)}
        tasks.signal(pids["worker:1"], 9)
        ended = events_until(tasks, 2)
        assert {event.name: event.pid for event in ended} == {n: pids[n] for n in ("worker:1", "worker:2")}
        assert {(event.code, event.why) for event in ended} == {(-9, "b was lost: it lost its power")}
        tasks.start("worker:1", run="/runs/x", environment={}, log="log")
        (started,) = events_until(tasks, 1)
        assert isinstance(started, Started)
        assert started.name == "worker:1"
        assert tasks._orders["b"].held == (5, 6)  # the addresses that all others know


@pytest.mark.slow
def test_a_host_whose_nursery_hangs_is_lost(monkeypatch):
    facts = {"version": "1", "code": "2", "cores": 4, "gpus": 0, "sees_run": True, "ports": [5, 6]}
    hangs = SCRIPTED.format(facts=facts).replace(
        'if request["kind"] == "SignalTask":', "import time; time.sleep(60)\n    if 0:"
    )
    monkeypatch.setattr(module, "STAY_SECS", 0.1)
    monkeypatch.setattr(module, "HUNG_SECS", 1.0)
    with HostTasks([NurseryOrder("a", "/runs/x", "token", 2)], partial(ScriptedConnection, hangs)) as tasks:
        start(tasks, worker_0="a")
        started, ended = events_until(tasks, 2)
        assert (ended.name, ended.pid, ended.why) == ("worker:0", started.pid, "a was lost: it does not answer")


def test_a_host_that_is_not_there_is_named_with_what_the_command_said(tmp_path: Path, snapshot):
    def connect(order: NurseryOrder) -> Connection:
        return ScriptedConnection("import sys; sys.exit('ssh: Could not resolve hostname b')", order)

    with HostTasks([NurseryOrder("b", "/x", "t")], connect) as tasks, pytest.raises(PeerError) as raised:
        tasks.hosts(30)
    assert str(raised.value) == snapshot


def test_a_host_that_says_nothing_is_named():
    def connect(order: NurseryOrder) -> Connection:
        return ScriptedConnection("import sys; sys.stdin.read()", order)

    with (
        HostTasks([NurseryOrder("b", "/x", "t")], connect) as tasks,
        pytest.raises(PeerError, match="b: no answer within 0.1 s"),
    ):
        tasks.hosts(0.1)
