"""Docker engines of several hosts: what is said of those that do not answer, and of hosts that are lost."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from quick_config import load

from trainer.config.schema import RunConfig
from trainer.config.typed import Mode, Target
from trainer.faults import exit_codes
from trainer.launch.containers import on_hosts
from trainer.launch.containers.docker_errors import DockerError
from trainer.launch.containers.on_hosts import ContainersOnHosts, DockerEngine, Engines
from trainer.launch.messages import Started, TaskEvent
from trainer.plan.checks.containers import check_containers
from trainer.plan.hosts import host_by_task, resolve_hosts

REFUSES = "import sys; sys.exit('gpu2: Permission denied (publickey).')"
LEADS_NOWHERE = """
import socket, sys, time
here = sys.argv[sys.argv.index("-L") + 1].split(":")[0]
print("channel 0: open failed: connect failed: No such file or directory", file=sys.stderr, flush=True)
socket.socket(socket.AF_UNIX).bind(here)  # last: it is what the test waits for
time.sleep(60)
"""


def config_with(script: Path, text: str) -> RunConfig:
    script.write_text(text)
    config = load(["cluster=2ps2w", "cluster.hosts=[gpu1,gpu2]", "launch=docker"])
    config = replace(config, launch=replace(config.launch, ssh=f"{sys.executable} {script}"))
    config, problems = resolve_hosts(config, Mode.train)
    assert [*problems, *check_containers(config, Mode.train, Target.compose)] == []
    return config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (REFUSES, r"gpu\d cannot be reached: gpu2: Permission denied \(publickey\)\."),
        (LEADS_NOWHERE, r"gpu\d: no Docker engine answers \(Connection refused\).* \(ssh says: channel 0: open failed"),
    ],
)
def test_a_host_that_does_not_answer_is_named_with_what_ssh_said(tmp_path: Path, text: str, message: str):
    config = config_with(tmp_path / "ssh.py", text)
    before = {path.name for path in Path("/proc").glob("[0-9]*") if is_of(path, tmp_path)}
    with pytest.raises(DockerError, match=message), Engines(config.launch, config.cluster):
        pass
    assert {path.name for path in Path("/proc").glob("[0-9]*") if is_of(path, tmp_path)} == before


def is_of(process: Path, folder: Path) -> bool:
    try:
        return os.fsencode(folder) in (process / "cmdline").read_bytes()
    except OSError:
        return False


class FakeTasks:
    """In place of the containers of one engine."""

    def __init__(self, client: Any, specs: Any, run: str, *, report: Any, numbers: Any) -> None:
        self.report, self._numbers, self.is_abandoned = report, numbers, False

    def start(self, name: str, **options: Any) -> int:
        number = next(self._numbers)
        self.report(Started(name, number))
        return number

    def close(self) -> None: ...

    def abandon(self) -> None:
        self.is_abandoned = True


def lose(tasks: FakeTasks, name: str, **options: Any) -> int:
    raise DockerError("Connection aborted")


class FakeTunnel:
    is_open, last_words = False, "Timeout, server gpu2 not responding."

    def close(self) -> None: ...


class FakeEngine(DockerEngine):
    answers = False  # type: ignore[assignment]

    def close(self) -> None: ...


def test_tasks_of_a_lost_host_have_ended_and_start_when_it_is_reached_again(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(on_hosts, "ContainerTasks", FakeTasks)
    config = config_with(tmp_path / "ssh.py", REFUSES)
    engines = Engines(config.launch, config.cluster)
    tunnel, client = FakeTunnel(), None
    engines.by_host = {host: FakeEngine(tunnel, client) for host in ("gpu1", "gpu2")}  # type: ignore[arg-type]
    specs: Any = [SimpleNamespace(task=task, host=host) for task, host in host_by_task(config.cluster).items()]
    with ContainersOnHosts(engines, specs, str(tmp_path)) as tasks:
        for name in host_by_task(config.cluster):
            tasks.start(name, run="", environment={}, log="")
        pids = {event.name: event.pid for event in events_until(tasks, 4)}
        tasks._tasks["gpu2"].report(DockerError("the Docker engine has stopped"))  # type: ignore[attr-defined]
        ended = events_until(tasks, 2)
        assert {one.name: one.pid for one in ended} == {name: pids[name] for name in ("ps:1", "worker:1")}
        assert {(one.code, one.why) for one in ended} == {(-9, f"gpu2 was lost: {FakeTunnel.last_words}")}
        tasks.start("ps:1", run="", environment={}, log="")
        (unreached,) = events_until(tasks, 1)
        assert (unreached.name, unreached.pid, unreached.code) == ("ps:1", None, exit_codes.UNAVAILABLE)
        assert "Permission denied" in unreached.why
        monkeypatch.setattr(engines, "connect", lambda host: FakeEngine(tunnel, client))
        with monkeypatch.context() as lost_again:
            lost_again.setattr(FakeTasks, "start", lose)
            tasks.start("ps:1", run="", environment={}, log="")
            (unreached,) = events_until(tasks, 1)
            assert (unreached.name, unreached.code) == ("ps:1", exit_codes.UNAVAILABLE)
        tasks.start("ps:1", run="", environment={}, log="")
        (started,) = events_until(tasks, 1)
        assert isinstance(started, Started)
        assert started.pid not in pids.values()


def events_until(tasks: ContainersOnHosts, count: int) -> list[TaskEvent]:
    events: list[TaskEvent] = []
    for _ in range(100):
        if len(events) < count:
            events += tasks.events(0.1)
    return events
