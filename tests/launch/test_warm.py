"""The process that has imported TensorFlow and waits for the next command of its user."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import wait_until

from trainer.launch.messages import Exited
from trainer.launch.processes import warm
from trainer.launch.processes.tasks import ProcessTasks

pytestmark = pytest.mark.slow  # each test starts processes that import TensorFlow

PROGRAM = """
import json, os, sys
from trainer.launch.processes import warm
connection = warm.connect(float(sys.argv[1]), os.environ, open(os.devnull, "wb"), os.memfd_create("m"))
print(json.dumps([[one.pid for one in warm.find()], list(map(repr, warm.facts(os.environ)))]))
"""


@pytest.fixture(autouse=True)
def folder(monkeypatch) -> Iterator[Path]:
    """Where the sockets are; pytest's own folders have names that are too long for one."""
    with tempfile.TemporaryDirectory() as runtime:
        monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
        yield Path(runtime, "trainer")
        for one in warm.find():
            warm.end(one)


def pids() -> list[int]:
    return sorted(one.pid for one in warm.find())


def ask(
    environment: dict[str, str] | None = None, *, minutes: float = 1.0, cwd: Path | None = None
) -> tuple[list[int], list[str]]:
    """Asks for a warm process as another command does; returns the pids of all, and what decides which it gets."""
    command = [sys.executable, "-c", PROGRAM, str(minutes)]
    ended = subprocess.run(command, env=os.environ | (environment or {}), cwd=cwd, capture_output=True, check=True)
    return tuple(json.loads(ended.stdout))


def start_warm(environment: dict[str, str] | None = None, *, minutes: float = 1.0) -> list[int]:
    return ask(environment, minutes=minutes)[0]


def wait_until_gone() -> None:
    """Others may look at it at any rate: they do not keep it."""
    wait_until(lambda: not pids(), explain=lambda: f"{pids()} is still there", poll_secs=0.001)


def test_none_is_started_unless_it_is_asked_for():
    assert start_warm(minutes=0.0) == pids() == []


def test_a_second_command_finds_the_process_of_the_first(tmp_path):
    first, facts = ask()
    assert len(first) == 1
    second, same_facts = ask(cwd=tmp_path, environment={"TRAINER_ANYTHING": "1"})
    assert (same_facts, second) == (facts, first)
    assert start_warm(minutes=0.0) == first


def test_a_hierarchy_of_control_groups_that_is_mounted_in_between_changes_nothing():
    before = "4:memory:/jobs/7\n1:cpu:/\n0::/\n"
    assert warm._groups(f"5:net_cls:/\n{before}") == warm._groups(before) == ["memory:/jobs/7"]
    assert warm._groups("1:cpu:/jobs/7\n0::/\n") != warm._groups("1:cpu:/jobs/8\n0::/\n")


def test_a_command_with_another_environment_library_or_limit_does_not_use_it(tmp_path):
    first = start_warm()
    assert len(start_warm({"TF_ENABLE_ONEDNN_OPTS": "0"})) == 2
    assert len(start_warm({"PYTHONPATH": str(tmp_path)})) == 3
    for count, setting in enumerate(("ulimit -n 512", "umask 027"), 4):
        command = ["bash", "-c", f'{setting} && exec "$@"', "bash", sys.executable, "-c", PROGRAM, "1"]
        assert len(json.loads(subprocess.run(command, capture_output=True, check=True).stdout)[0]) == count
    assert set(first) < set(pids())


def test_it_ends_when_its_libraries_change(tmp_path):
    assert start_warm({"PYTHONPATH": str(tmp_path)})
    (tmp_path / "new_library.py").touch()
    wait_until_gone()


def test_it_ends_when_nobody_has_used_it_for_its_minutes():
    assert start_warm(minutes=0.001)
    wait_until_gone()


def test_a_folder_that_others_may_enter_is_not_used(folder):
    folder.mkdir(mode=0o755)
    assert start_warm() == []


def test_one_that_was_killed_is_replaced():
    (first,) = start_warm()
    os.kill(first, 9)
    wait_until_gone()  # the kernel may accept connections for it until it has freed its memory
    (second,) = start_warm()
    assert second != first


def test_its_nursery_has_the_directory_and_the_environment_of_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with ProcessTasks(warm_minutes=1.0) as tasks:
        assert tasks.is_warm
        tasks.start("worker:0", run="nowhere", environment={"MINE": "1"}, log="task.log")
        events = []
        while not any(isinstance(event, Exited) for event in events):
            events += tasks.events(10.0)
    assert "nowhere" in (tmp_path / "task.log").read_text()
    assert len(pids()) == 1


def test_tasks_of_a_killed_command_end(tmp_path):
    """The nursery of a command ends with it, and the warm process stays."""
    (warm_pid,) = start_warm()
    code = "import time; from trainer.launch.processes.tasks import ProcessTasks; t = ProcessTasks(); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", code]) as command:
        children = Path(f"/proc/{warm_pid}/task/{warm_pid}/children")
        wait_until(children.read_text)
        command.kill()
    wait_until(lambda: not children.read_text())  # the warm process has noticed
    assert pids() == [warm_pid]


def test_mode_clean_ends_it(python, tmp_path):
    (pid,) = start_warm()
    nobody = {"DOCKER_HOST": f"unix://{tmp_path}/none.sock"}
    assert (
        f"ended: warm process {pid}"
        in python.run("-m", "trainer", "mode=clean", cwd=tmp_path, environment=nobody).stdout
    )
    wait_until_gone()
