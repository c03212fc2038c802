"""Starting tasks on this machine: ports and the nursery."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar
from weakref import WeakKeyDictionary

import pytest
from runs import STALLED_SECS, has_ended, wait_until

from trainer.commands.start import start_early
from trainer.config.schema import DataConfig, ModelConfig
from trainer.launch.messages import Exited, Started, TaskEvent
from trainer.launch.processes.ports import HeldPorts
from trainer.launch.processes.tasks import ProcessTasks
from trainer.observe.machine import is_local
from trainer.observe.peers import read_status
from trainer.plan.description import Description, ModelProbe
from trainer.plan.serialize import from_json

SLEEP = "import time; time.sleep(60)"


# Ports


def server(port: int, option: int | None) -> socket.socket:
    """Listens on a port of this machine, with one socket option set."""
    listening = socket.socket()
    if option is not None:
        listening.setsockopt(socket.SOL_SOCKET, option, 1)
    try:
        listening.bind(("127.0.0.1", port))
        listening.listen()
    except OSError:
        listening.close()
        raise
    return listening


def test_two_launchers_never_hold_the_same_port():
    with HeldPorts(400) as one, HeldPorts(400) as other:
        assert len({*one.ports, *other.ports}) == 800


def test_a_server_with_reuseport_can_use_a_held_port():
    with (
        HeldPorts(1) as ports,
        server(ports.ports[0], socket.SO_REUSEPORT) as listening,
        socket.create_connection(("127.0.0.1", ports.ports[0]), timeout=5) as client,
    ):
        accepted, address = listening.accept()
        accepted.close()
        assert address == client.getsockname()


@pytest.mark.parametrize("option", [None, socket.SO_REUSEADDR], ids=["no option", "SO_REUSEADDR"])
def test_another_program_cannot_take_a_held_port(option):
    with HeldPorts(1) as ports, pytest.raises(OSError, match="already in use"):
        server(ports.ports[0], option)


def test_a_port_is_free_after_it_was_released():
    with HeldPorts(1) as ports:
        pass
    server(ports.ports[0], None).close()


def test_a_port_that_the_config_names_is_held():
    with HeldPorts(1) as free:
        port = free.ports[0]
    with HeldPorts(0) as ports:
        ports.hold(port)
        with pytest.raises(OSError, match="already in use"):
            server(port, None)


@pytest.mark.parametrize("option", [None, socket.SO_REUSEADDR, socket.SO_REUSEPORT])
def test_a_port_that_another_program_serves_cannot_be_held(option):
    with HeldPorts(1) as free:
        port = free.ports[0]
    with server(port, option), HeldPorts(0) as ports, pytest.raises(OSError, match="already in use"):
        ports.hold(port)


def test_a_port_that_another_run_holds_cannot_be_held():
    with HeldPorts(1) as other, HeldPorts(0) as ports, pytest.raises(OSError, match="already in use"):
        ports.hold(other.ports[0])


PAGE = """
import sys, time
from trainer.observe import status, task_page

status.serve(task_page.TaskPage("ps", 0, "", "c0ffee"), "127.0.0.1", int(sys.argv[1]))
print("ready", flush=True)
time.sleep(60)
"""


def test_a_port_can_be_held_again_while_connections_of_the_last_run_linger():
    with HeldPorts(1) as ports:
        port = ports.ports[0]
        with subprocess.Popen([sys.executable, "-c", PAGE, str(port)], stdout=subprocess.PIPE, text=True) as task:
            assert task.stdout is not None
            assert task.stdout.readline() == "ready\n"
            read_status(f"127.0.0.1:{port}", timeout_secs=5)
            task.kill()
    with HeldPorts(0) as again:
        again.hold(port)


@pytest.mark.parametrize(
    ("host", "local"), [("127.0.0.1", True), ("localhost", True), ("192.0.2.1", False), ("no-such-host.invalid", False)]
)
def test_whether_a_host_is_this_machine(host, local):
    assert is_local(host) is local


# Tasks


@pytest.fixture
def tasks() -> Iterator[ProcessTasks]:
    """A nursery that starts plain processes."""
    with ProcessTasks(fork=False) as started:
        yield started


@pytest.fixture
def start(tasks: ProcessTasks, tmp_path: Path) -> Callable[..., None]:
    """start(name, code, **environment): a task that runs a line of Python instead of TensorFlow."""

    def start_one(name: str, code: str, **environment: str) -> None:
        environment = stand_in(tmp_path, code) | environment
        tasks.start(name, run=str(tmp_path), environment=environment, log=str(tmp_path / "task.log"))

    return start_one


def stand_in(folder: Path, code: str) -> dict[str, str]:
    """The environment in which a new Python process runs `code` instead of the task, and ends."""
    (folder / "sitecustomize.py").write_text("import os\ntry: exec(os.environ['CODE'])\nfinally: os._exit(0)\n")
    return {"PYTHONPATH": str(folder), "CODE": code, "PYTHONUNBUFFERED": "1"}


E = TypeVar("E", Started, Exited)


def next_event(tasks: ProcessTasks, kind: type[E]) -> E:
    """The next event of a kind; skips those before it, and leaves those after it for the next call."""
    unread = _unread.setdefault(tasks, deque())
    deadline = time.monotonic() + STALLED_SECS
    while time.monotonic() < deadline:
        while unread:
            if isinstance(event := unread.popleft(), kind):
                return event
        unread.extend(tasks.events(timeout_secs=0.1))
    pytest.fail(f"no event {kind.__name__} within {STALLED_SECS:.0f} s")


_unread: WeakKeyDictionary[ProcessTasks, deque[TaskEvent]] = WeakKeyDictionary()


def wait_for_end(*pids: int) -> None:
    deadline = time.monotonic() + STALLED_SECS
    while alive := [pid for pid in pids if not has_ended(pid)]:
        if time.monotonic() > deadline:
            for pid in alive:
                os.kill(pid, signal.SIGKILL)
            pytest.fail(f"processes {alive} of {pids} outlived the launcher by {STALLED_SECS:.0f} s")
        time.sleep(0.01)


def test_a_start_and_an_end_are_reported_with_name_process_and_code(tasks, start):
    start("worker:1", "os._exit(7)")
    started = next_event(tasks, Started)
    assert started.name == "worker:1"
    assert next_event(tasks, Exited) == Exited("worker:1", started.pid, 7)


def test_the_code_of_a_killed_task_is_its_signal(tasks, start):
    start("ps:0", SLEEP)
    tasks.signal(next_event(tasks, Started).pid, signal.SIGKILL)
    assert next_event(tasks, Exited).code == -9


def test_a_task_writes_into_its_log(tasks, start, tmp_path):
    start("ps:0", "print('hello', flush=True)")
    next_event(tasks, Exited)
    assert (tmp_path / "task.log").read_text() == "hello\n"


def test_a_task_has_its_own_environment(tasks, start, tmp_path):
    start("worker:0", "print(os.environ['CUDA_VISIBLE_DEVICES'], flush=True)", CUDA_VISIBLE_DEVICES="2,3")
    next_event(tasks, Exited)
    assert (tmp_path / "task.log").read_text() == "2,3\n"


def test_only_tasks_are_signalled(tasks, start):
    with subprocess.Popen(["sleep", "60"]) as stranger:
        tasks.signal(stranger.pid, signal.SIGKILL)
        start("worker:0", "os._exit(0)")
        next_event(tasks, Exited)  # the nursery handles requests in order
        assert stranger.poll() is None
        stranger.kill()


def test_waiting_for_events_has_a_timeout(tasks):
    assert tasks.events(timeout_secs=0.01) == []


def test_leaving_the_block_ends_a_running_task(tmp_path):
    with ProcessTasks(fork=False) as tasks:
        tasks.start("ps:0", run="", environment=stand_in(tmp_path, SLEEP), log=str(tmp_path / "task.log"))
        pid = next_event(tasks, Started).pid
    wait_for_end(pid)


LAUNCHER = """
import json, sys, time
from trainer.launch.processes.tasks import ProcessTasks

if __name__ == "__main__":
    with ProcessTasks(fork=False) as tasks:
        tasks.start("ps:0", run="", environment=json.loads(sys.argv[1]), log=sys.argv[2])
        (started,) = tasks.events(10)
        print(tasks._nursery.pid, started.pid, flush=True)
        time.sleep(60)
"""


def test_what_a_task_has_started_ends_with_it(tasks, start, tmp_path):
    """Also where it has left the task's session, and ignores what it can."""
    apart = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
    code = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', {apart!r}], start_new_session=True"
    start("worker:0", f"{code}, env={{}}); print(p.pid, flush=True)")
    next_event(tasks, Exited)
    wait_for_end(int((tmp_path / "task.log").read_text()))


def test_a_daemon_of_a_task_does_not_end_with_another_task(tasks, start, tmp_path):
    daemon = "if os.fork() == 0: print(os.getpid(), flush=True); time.sleep(60)"
    start("worker:0", f"import time\nif os.fork() == 0:\n    {daemon}\n    os._exit(0)\n{SLEEP}")
    task, log = next_event(tasks, Started).pid, tmp_path / "task.log"
    wait_until(lambda: log.exists() and log.read_text().endswith("\n"))
    pid = int(log.read_text())
    start("worker:1", "os._exit(0)")
    next_event(tasks, Exited)
    start("worker:2", "os._exit(0)")  # by now the nursery has killed what the first left behind
    next_event(tasks, Exited)
    assert not has_ended(pid)
    tasks.signal(task, signal.SIGKILL)
    next_event(tasks, Exited)
    wait_for_end(pid)


def test_killing_the_launcher_ends_nursery_and_tasks(tmp_path):
    environment = json.dumps(stand_in(tmp_path, SLEEP))
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, environment, str(tmp_path / "task.log")], stdout=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout is not None
        pids = [int(pid) for pid in launcher.stdout.readline().split()]
        assert not any(map(has_ended, pids))
        launcher.kill()
    wait_for_end(*pids)


def test_a_nursery_that_has_ended_is_an_error_with_its_code(tasks, raises):
    tasks._nursery.kill()
    with raises(RuntimeError):
        next_event(tasks, Started)


def test_a_nursery_that_ends_before_it_has_read_a_request_is_the_same_error(tasks, start):
    os.kill(tasks._nursery.pid, signal.SIGSTOP)
    start("ps:0", "os._exit(0)")
    tasks._nursery.kill()
    with pytest.raises(RuntimeError, match="ended with code -9"):
        next_event(tasks, Started)


def test_a_nursery_that_has_ended_takes_no_request(tasks, start):
    tasks._nursery.kill()
    tasks._nursery.wait()
    with pytest.raises(RuntimeError, match="ended with code -9"):
        start("ps:0", "os._exit(0)")


@pytest.mark.parametrize(
    ("arguments", "is_started"),
    [
        ([], True),
        (["cluster=2ps4w", "+experiment=digits", "train.steps=5"], True),
        (["cluster=2ps4w", "mode=plan"], False),
        (["launch=docker"], False),
        (["job=ps", "task=0"], False),
        (["hydra.job.chdir=true"], False),
        (["--help"], False),
        (["train", "cluster=2ps4w"], True),
        (["plan", "cluster=2ps4w"], False),
        (["-m", "seed=1,2"], False),
    ],
)
def test_a_nursery_is_started_before_the_config_is_read_if_a_command_seems_to_train_here(
    arguments, is_started, monkeypatch
):
    monkeypatch.delenv("TF_CONFIG", raising=False)
    early = start_early(arguments)
    try:
        assert (early is not None) == is_started
    finally:
        if early:
            early.discard()


def test_a_task_that_a_scheduler_starts_has_no_nursery(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", "{}")
    assert start_early([]) is None


def test_an_unused_nursery_ends_at_once_and_ending_it_again_does_nothing(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))  # without a warm process
    early = ProcessTasks(fork=True)  # imports for seconds, without reading requests
    early.discard()
    assert early._nursery.returncode == -signal.SIGKILL
    early.discard()


@pytest.fixture(scope="module")
def forking() -> Iterator[ProcessTasks]:
    """A nursery as runs use it: TensorFlow is imported, tasks are forked."""
    with ProcessTasks(fork=True) as started:
        yield started


@pytest.mark.slow
def test_a_fork_of_the_nursery_describes_a_model(forking):
    data = DataConfig("synthetic", {"train_examples": 30, "evaluate_examples": 10, "shape": [4], "classes": 2})
    result = forking.describe(ModelProbe.about(ModelConfig("mlp", {"depth": 0}), data, user=None, seed=0))
    description = from_json(Description, result["description"])
    assert [(p.path, p.shape) for p in description.parameters] == [("logits/kernel", (4, 2)), ("logits/bias", (2,))]


ENDS = {  # what a model's function does -> what the answer must say, where the function does not return
    "os._exit(0)": "exit code 0",
    "os._exit(3)": "exit code 3",
    "os.kill(os.getpid(), 9)": "SIGKILL",
    "ctypes.string_at(0)": "mine.py, line 3, in model: ",
    "sys.exit(0)": "mine.py, line 3, in model: SystemExit",
    "os.fork()": "",
    "multiprocessing.get_context('fork').Process(target=time.sleep, args=(60,)).start()": "",
    'print(\'{"kind": "Described", "name": "describe 1", "answer": {}}\', flush=True)': "",
    "time.sleep(1.5)": "",
    "assert 'trainer.task.process' in sys.modules  # or each task would import it": "",
}


@pytest.mark.slow
def test_a_description_comes_or_is_known_not_to_come_whatever_the_users_code_does(forking, tmp_path):
    lines = []
    for number, (does, failure) in enumerate(ENDS.items()):
        user = tmp_path / str(number) / "mine.py"
        user.parent.mkdir()
        body = f"def model():\n    {does}\n    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(2)])\n"
        user.write_text(f"import ctypes, keras, multiprocessing, os, sys, time\n{body}")
        data = DataConfig("synthetic", {"train_examples": 30, "evaluate_examples": 10, "shape": [4], "classes": 2})
        question = ModelProbe.about(ModelConfig("model"), data, user=str(user), seed=0)
        result = forking.describe(question, lambda line, _: lines.append(line))
        assert (failure in result["failure"], result["exit_code"]) == (True, 65) if failure else "description" in result
    assert "mine.py, line 3, in model" in lines


@pytest.mark.slow
def test_a_forked_task_that_cannot_start_logs_why(forking, tmp_path):
    log = tmp_path / "task.log"
    forking.start("worker:0", run=str(tmp_path / "nowhere"), environment={}, log=str(log))
    pid = next_event(forking, Started).pid
    while (ended := next_event(forking, Exited)).pid != pid:
        pass  # the fork that described a model
    assert (ended.code, "nowhere/config.yaml" in log.read_text()) == (70, True)
