"""Starting tasks on this machine: ports, the nursery, and the progress of a run."""

from __future__ import annotations

import io
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
from types import SimpleNamespace
from typing import Any
from weakref import WeakKeyDictionary

import pytest
from rich.console import Console
from runs import STALLED_SECS, has_ended

from trainer.commands.start import start_early
from trainer.config.schema import DataConfig, ModelConfig
from trainer.launch import progress
from trainer.launch.processes.ports import HeldPorts
from trainer.launch.processes.tasks import ProcessTasks
from trainer.observe.machine import is_local
from trainer.observe.peers import read_status
from trainer.plan.description import Description, Question
from trainer.plan.plan import Task
from trainer.plan.serialize import from_json
from trainer.storage.history import History

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
    with HeldPorts(1) as ports, pytest.raises(OSError, match="Address already in use"):
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
        with pytest.raises(OSError, match="Address already in use"):
            server(port, None)


@pytest.mark.parametrize("option", [None, socket.SO_REUSEADDR, socket.SO_REUSEPORT])
def test_a_port_that_another_program_serves_cannot_be_held(option):
    with HeldPorts(1) as free:
        port = free.ports[0]
    with server(port, option), HeldPorts(0) as ports, pytest.raises(OSError, match="Address already in use"):
        ports.hold(port)


def test_a_port_that_another_run_holds_cannot_be_held():
    with HeldPorts(1) as other, HeldPorts(0) as ports, pytest.raises(OSError, match="Address already in use"):
        ports.hold(other.ports[0])


PAGE = """
import sys, time
from trainer.observe import status

status.serve(status.Status("ps", 0, "", "c0ffee"), "127.0.0.1", int(sys.argv[1]))
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


def next_event(tasks: ProcessTasks, kind: str) -> dict[str, Any]:
    """The next event of a kind; skips those before it, and leaves those after it for the next call."""
    unread = _unread.setdefault(tasks, deque())
    deadline = time.monotonic() + STALLED_SECS
    while time.monotonic() < deadline:
        while unread:
            if (event := unread.popleft())["event"] == kind:
                return event
        unread.extend(tasks.events(timeout_secs=0.1))
    pytest.fail(f"no event {kind} within {STALLED_SECS:.0f} s")


_unread: WeakKeyDictionary[ProcessTasks, deque[dict[str, Any]]] = WeakKeyDictionary()


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
    started = next_event(tasks, "started")
    assert started == {"event": "started", "name": "worker:1", "pid": started["pid"]}
    assert next_event(tasks, "exited") == {"event": "exited", "name": "worker:1", "pid": started["pid"], "code": 7}


def test_the_code_of_a_killed_task_is_its_signal(tasks, start):
    start("ps:0", SLEEP)
    tasks.signal(next_event(tasks, "started")["pid"], signal.SIGKILL)
    assert next_event(tasks, "exited")["code"] == -9


def test_a_task_writes_into_its_log(tasks, start, tmp_path):
    start("ps:0", "print('hello', flush=True)")
    next_event(tasks, "exited")
    assert (tmp_path / "task.log").read_text() == "hello\n"


def test_a_task_has_its_own_environment(tasks, start, tmp_path):
    start("worker:0", "print(os.environ['CUDA_VISIBLE_DEVICES'], flush=True)", CUDA_VISIBLE_DEVICES="2,3")
    next_event(tasks, "exited")
    assert (tmp_path / "task.log").read_text() == "2,3\n"


def test_only_tasks_are_signalled(tasks, start):
    with subprocess.Popen(["sleep", "60"]) as stranger:
        tasks.signal(stranger.pid, signal.SIGKILL)
        start("worker:0", "os._exit(0)")
        next_event(tasks, "exited")  # the nursery handles requests in order
        assert stranger.poll() is None
        stranger.kill()


def test_waiting_for_events_has_a_timeout(tasks):
    assert tasks.events(timeout_secs=0.01) == []


def test_leaving_the_block_ends_a_running_task(tmp_path):
    with ProcessTasks(fork=False) as tasks:
        tasks.start("ps:0", run="", environment=stand_in(tmp_path, SLEEP), log=str(tmp_path / "task.log"))
        pid = next_event(tasks, "started")["pid"]
    wait_for_end(pid)


LAUNCHER = """
import json, sys, time
from trainer.launch.processes.tasks import ProcessTasks

if __name__ == "__main__":
    with ProcessTasks(fork=False) as tasks:
        tasks.start("ps:0", run="", environment=json.loads(sys.argv[1]), log=sys.argv[2])
        (started,) = tasks.events(10)
        print(tasks._nursery.pid, started["pid"], flush=True)
        time.sleep(60)
"""


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


def test_a_nursery_that_has_ended_is_an_error_with_its_code(tasks):
    tasks._nursery.kill()
    with pytest.raises(RuntimeError, match="the process that starts tasks ended with code -9"):
        next_event(tasks, "started")


def test_a_nursery_that_ends_before_it_has_read_a_request_is_the_same_error(tasks, start):
    os.kill(tasks._nursery.pid, signal.SIGSTOP)
    start("ps:0", "os._exit(0)")
    tasks._nursery.kill()
    with pytest.raises(RuntimeError, match="the process that starts tasks ended with code -9"):
        next_event(tasks, "started")


def test_a_nursery_that_has_ended_takes_no_request(tasks, start):
    tasks._nursery.kill()
    tasks._nursery.wait()
    with pytest.raises(RuntimeError, match="the process that starts tasks ended with code -9"):
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
    result = forking.describe(Question.about(ModelConfig("mlp", {"depth": 0}), data, user=None, seed=0))
    description = from_json(Description, result["description"])
    assert [(p.path, p.shape) for p in description.parameters] == [("logits/kernel", (4, 2)), ("logits/bias", (2,))]


def test_a_forked_task_that_cannot_start_logs_why(forking, tmp_path):
    log = tmp_path / "task.log"
    forking.start("worker:0", run=str(tmp_path / "nowhere"), environment={}, log=str(log))
    pid = next_event(forking, "started")["pid"]
    while (ended := next_event(forking, "exited"))["pid"] != pid:
        pass  # the fork that described a model
    assert (ended["code"], "nowhere/config.yaml" in log.read_text()) == (70, True)


# Progress

PAGES = {
    "ps:0": {"job": "ps", "index": 0, "step": 40, "examples_per_second": 0.0, "wait_fraction": 0.5, "loss": None},
    "worker:0": {"job": "worker", "index": 0, "step": 41, "examples_per_second": 1500.0, "wait_fraction": 0.3},
    "worker:1": {"job": "worker", "index": 1, "step": 40, "examples_per_second": 1000.4, "wait_fraction": 0.04},
}
for _page in PAGES.values():
    _page |= {"memory_bytes": 300 * 2**20} | ({"loss": 0.12345} if _page["job"] == "worker" else {})
STATES = {"ps:0": "serving", "worker:0": "training", "worker:1": "training"}
CLUSTER = tuple(Task(job, index, "", "", (), None, 1, 2) for job, index in (("ps", 0), ("worker", 0), ("worker", 1)))


def table_rows(pages: dict[str, Any], states: dict[str, str]) -> list[list[str]]:
    """The cells of each row of the table, the heading first."""
    console = Console(record=True, file=io.StringIO(), width=100)
    console.print(progress.table(CLUSTER, pages, states, 300))
    lines = [line.replace("┃", "│") for line in console.export_text().splitlines()]
    return [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines if "│" in line]


def test_a_line_shows_step_loss_rate_and_the_slowest_worker():
    text = progress.line(PAGES, STATES, 300)
    assert text == "step 41/300, loss 0.1235, 2,500 examples/s, slowest worker:1 (waits 4%)"


def test_a_line_of_one_worker_names_no_slowest():
    alone = {"worker:0": PAGES["worker:0"]}
    assert progress.line(alone, {"worker:0": "training"}, 300) == "step 41/300, loss 0.1235, 1,500 examples/s"


def test_a_line_before_the_first_loss_has_none():
    alone = {"worker:0": PAGES["worker:0"] | {"loss": None}}
    assert progress.line(alone, {"worker:0": "training"}, 300) == "step 41/300, 1,500 examples/s"


def test_a_line_before_the_first_step_shows_the_state_of_each_task():
    pages = {"worker:0": PAGES["worker:0"] | {"step": 0}}
    text = progress.line(pages, {"ps:0": "starting", "worker:0": "roll call"}, 300)
    assert text == "starting: ps:0 starting, worker:0 roll call"


def test_the_table_has_a_row_for_each_task():
    assert table_rows(PAGES, STATES) == [
        ["task", "state", "step", "examples/s", "wait", "memory"],
        ["ps:0", "serving", "40", "", "50%", "300 MiB"],
        ["worker:0", "training", "41", "1,500", "30%", "300 MiB"],
        ["worker:1", "training", "40", "1,000", "4%", "300 MiB"],
    ]


def test_a_task_that_does_not_answer_has_a_row_with_its_state():
    states = {"ps:0": "starting", "worker:0": "ended (70)"}
    assert [row[:2] for row in table_rows({}, states)[1:]] == [
        ["ps:0", "starting"],
        ["worker:0", "ended (70)"],
        ["worker:1", ""],
    ]


def test_without_a_terminal_a_line_is_shown_every_five_seconds(monkeypatch, capsys):
    clock = iter([100.0, 104.9, 105.0, 105.0, 109.9])
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    with progress.make_progress(CLUSTER, 300) as lines:
        lines.show({}, {"ps:0": "at 104.9"})
        lines.show({}, {"ps:0": "at 105.0"})
        lines.show({}, {"ps:0": "at 109.9"})
    assert capsys.readouterr().out == "starting: ps:0 at 105.0\n"


# Lines of the history


def history_line(step: int, loss: float = 0.4321, examples_per_second: float = 3456.0) -> str:
    return json.dumps({"step": step, "loss": loss, "examples_per_second": examples_per_second}) + "\n"


def test_a_line_of_the_history_shows_step_loss_rate_and_the_seconds_of_an_update():
    text = progress.history_line({"step": 120, "loss": 0.43214, "examples_per_second": 3456.0}, 1000, 400)
    assert text == "step 120/1000, loss 0.4321, 3,456 examples/s, 0.116 s/batch"


def test_a_rate_that_was_rounded_to_0_shows_no_seconds():
    text = progress.history_line({"step": 1, "loss": 2.3, "examples_per_second": 0.0}, 1000, 1)
    assert text == "step 1/1000, loss 2.3000, 0 examples/s"


def test_each_line_of_the_history_is_shown_once_and_when_it_is_whole(tmp_path):
    path = tmp_path / "history.jsonl"
    lines = progress.HistoryLines(path, start=0, steps=30, batch=400)
    first, second = history_line(10), history_line(20)
    steps = []
    for text in (None, "", first + second[:9], second[9:] + history_line(30), ""):
        if text is not None:
            with path.open("a") as file:
                file.write(text)
        steps.append([line.partition(",")[0] for line in lines.new()])
    assert steps == [[], [], ["step 10/30"], ["step 20/30", "step 30/30"], []]


def test_lines_of_an_earlier_run_are_not_shown(tmp_path):
    path = tmp_path / "history.jsonl"
    path.write_text(history_line(10) + history_line(20))
    lines = progress.HistoryLines(path, start=10, steps=30, batch=400)
    assert lines.new() == []
    history = History(path, start=10)
    history.write(20, {"loss": 0.5, "examples_per_second": 4000.0})
    history.close()
    assert lines.new() == ["step 20/30, loss 0.5000, 4,000 examples/s, 0.100 s/batch"]


def test_lines_of_the_history_replace_those_of_every_few_seconds(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(progress, "LINE_EVERY_SECS", 0.0)
    show_two_lines(tmp_path / "history.jsonl")
    assert capsys.readouterr().out.splitlines() == [
        "starting: ps:0 serving",
        "step 10/300, loss 0.4321, 3,456 examples/s, 0.116 s/batch",
        "step 20/300, loss 0.4321, 3,456 examples/s, 0.116 s/batch",
    ]


def test_lines_of_the_history_are_printed_above_the_table_of_a_terminal(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    show_two_lines(tmp_path / "history.jsonl")
    out = capsys.readouterr().out
    assert -1 < out.find("step 10/300, loss 0.4321") < out.find("step 20/300, loss 0.4321") < out.rfind("worker:0")


def show_two_lines(path: Path) -> None:
    history = progress.HistoryLines(path, start=0, steps=300, batch=400)
    with progress.make_progress(CLUSTER, 300, history) as shown:
        shown.show({}, {"ps:0": "serving"})
        for step in (10, 20):
            with path.open("a") as file:
                file.write(history_line(step))
            shown.show(PAGES, STATES)
