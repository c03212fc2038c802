"""Which task is reported when tasks end each other: a supervisor of scripted tasks."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from pages import page
from quick_config import load

from trainer.faults import exit_codes
from trainer.launch import attempts, restarts, silence, supervisor
from trainer.launch.attempts import PlannedRun, RunOutcome
from trainer.launch.messages import Exited, Started, TaskEvent
from trainer.launch.progress import make_progress
from trainer.launch.signals import Signals
from trainer.launch.supervisor import Supervisor
from trainer.launch.view import Course
from trainer.observe.task_page import TaskPage
from trainer.plan.environment import FINISHED
from trainer.plan.layout import Shard
from trainer.plan.plan import Plan, Task
from trainer.storage.run_directory import RunDirectory

HEARTBEAT_SECS = 5.0
TASKS = ("ps:0", "worker:0", "worker:1", "evaluator:0")


class Clock:
    """Stands in for the module `time`; seconds pass only when the launcher waits for its tasks."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


class NoThreads:
    """Stands in for a pool of threads: reads a page at once."""

    def __init__(self, **options: Any) -> None: ...
    def shutdown(self, *, wait: bool) -> None: ...

    def submit(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*arguments))
        return future


class Script:
    """Tasks that freeze or exit at given seconds after the launcher could read a page of each.

    Restarted tasks exit as `exits["again"]` says, or at once.
    """

    def __init__(self, frozen: str | None, frozen_at: float, exits: Mapping[str, tuple[float, int]]) -> None:
        self.clock = Clock()
        self._frozen, self._frozen_at, self._exits = frozen, frozen_at, exits
        self._seen: dict[str, float] = {}  # when a task's page was read first
        self._pids: dict[int, str] = {}  # of those that are alive
        self._events: list[TaskEvent] = []
        self.attempts = dict.fromkeys(TASKS, 0)
        self.started: dict[str, float] = {}  # when a task's last attempt was
        self.answers_after: dict[str, float] = {}  # seconds from its start
        self.ended: dict[str, float] = {}  # when its first attempt was
        self.asked: list[int] = []  # the attempts of tasks that were asked to stop
        self.signals: Signals | None = None  # gets a Ctrl-C at `stopped_at`
        self.stopped_at = float("inf")

    def start(self, name: str, *, run: str, environment: Mapping[str, str], log: str) -> None:
        self.attempts[name] += 1
        pid = 1000 * self.attempts[name] + TASKS.index(name)
        self._pids[pid] = name
        self.started[name] = self.clock.now
        self._events.append(Started(name, pid))

    def signal(self, pid: int, number: int) -> None:
        if number == signal.SIGKILL:
            self._end(pid, -number)
        if number == signal.SIGTERM:
            self.asked.append(pid // 1000)
            self._end(pid, exit_codes.TERMINATED)

    def events(self, timeout_secs: float) -> list[TaskEvent]:
        self.clock.now += min(timeout_secs, 0.05)
        if self.signals is not None and self._now() > self.stopped_at:
            self.signals.numbers, self.stopped_at = [signal.SIGINT], float("inf")
        for pid, name in list(self._pids.items()):
            at, code = self._exits.get(name, (float("inf"), 0)) if pid < 2000 else self._exits.get("again", (0.0, 0))
            if self._now() > at:
                self._end(pid, code)
        events, self._events = self._events, []
        return events

    def page(self, control: str, timeout_secs: float, reader: str) -> TaskPage | None:
        """The status page of a task; none while it is frozen, and none when it has ended."""
        pid, name = next(((pid, name) for pid, name in self._pids.items() if control == name), (0, ""))
        if not pid or (name == self._frozen and pid < 2000 and self._now() > self._frozen_at):
            return None
        if self.clock.now - self.started[name] < self.answers_after.get(name, 0.0):
            return None
        self._seen.setdefault(name, self.clock.now)
        state = "serving" if name.startswith("ps") else "training"
        return page(name, state, pid=pid, step=7, first_step_at=1.0)

    def _now(self) -> float:
        return self.clock.now - max(self._seen.values()) if len(self._seen) == len(TASKS) else -1.0

    def _end(self, pid: int, code: int) -> None:
        if (name := self._pids.pop(pid, None)) is not None:
            self.ended.setdefault(name, self.clock.now)
            code = code or FINISHED
            self._events.append(Exited(name, pid, code))


def supervise(script: Script, path: Path, monkeypatch: pytest.MonkeyPatch, *, delay_secs: float = 0.1) -> RunOutcome:
    monkeypatch.setattr(silence, "try_status", script.page)
    monkeypatch.setattr(silence, "ThreadPoolExecutor", NoThreads)
    for module in (attempts, restarts, silence, supervisor):
        monkeypatch.setattr(module, "time", script.clock)
    config = load([f"timeouts.heartbeat_secs={HEARTBEAT_SECS}", f"restart.delay_secs={delay_secs}"])
    tasks = tuple(
        Task(job, int(index), "", f"{job}:{index}", (), None, 1, 2)
        for job, index in (name.split(":") for name in TASKS)
    )
    plan = Plan("test", "sync", 10, 8, tasks, (Shard(0, "ps:0", (), ()),), 96, ())
    path.mkdir()
    with make_progress(Course(plan.steps)) as progress, Signals() as signals:
        script.signals = signals
        return Supervisor(PlannedRun(config, plan, RunDirectory(path), 0.0), script, progress, signals).run()


def test_the_pause_before_a_restart_begins_when_the_task_ends(tmp_path, monkeypatch):
    script = Script(None, 0.0, dict.fromkeys(TASKS, (4.0, exit_codes.OK)) | {"worker:0": (0.5, -signal.SIGKILL)})
    supervise(script, tmp_path / "run", monkeypatch, delay_secs=1.0)
    assert 1.0 <= script.started["worker:0"] - script.ended["worker:0"] < 1.1


def test_a_task_that_starts_need_not_answer_before_the_roll_call_ends(tmp_path, monkeypatch):
    script = Script(None, 0.0, dict.fromkeys(TASKS, (1.0, exit_codes.OK)))
    script.answers_after = {"worker:1": 4 * HEARTBEAT_SECS}
    assert supervise(script, tmp_path / "run", monkeypatch).restarts == {}
    assert script.attempts == dict.fromkeys(TASKS, 1)


@pytest.mark.parametrize("code", [exit_codes.UNAVAILABLE, exit_codes.INCOMPLETE])
def test_a_frozen_task_is_the_cause_even_if_others_leave_before_it_is_killed(code, tmp_path, monkeypatch, capsys):
    script = Script("ps:0", 0.5, {"worker:0": (4.0, code), "worker:1": (4.0, exit_codes.UNAVAILABLE)})
    outcome = supervise(script, tmp_path / "run", monkeypatch)
    output = capsys.readouterr().out
    assert f"ps:0 died (killed: silent for longer than timeouts.heartbeat_secs={HEARTBEAT_SECS:g})" in output
    assert "worker:0 left" not in output
    assert (outcome.failed, outcome.restarts) == (None, {"ps:0": 1})
    assert script.attempts == dict.fromkeys(TASKS, 2)


def test_a_task_that_leaves_while_all_others_answer_is_restarted_alone(tmp_path, monkeypatch, capsys, snapshot):
    exits = dict.fromkeys(TASKS, (4.0, exit_codes.OK)) | {"worker:0": (0.5, exit_codes.UNAVAILABLE)}
    outcome = supervise(Script(None, 0.0, exits), tmp_path / "run", monkeypatch)
    assert capsys.readouterr().out == snapshot
    assert (outcome.failed, outcome.restarts) == (None, {"worker:0": 1})


def test_a_frozen_evaluator_is_no_cause_for_a_worker_to_leave(tmp_path, monkeypatch, capsys):
    exits = {"worker:0": (4.0, exit_codes.UNAVAILABLE), "ps:0": (8.0, 0), "worker:1": (8.0, 0)}
    outcome = supervise(Script("evaluator:0", 0.5, exits), tmp_path / "run", monkeypatch)
    output = capsys.readouterr().out
    assert output.index("worker:0 left (a peer or a port") < output.index("evaluator:0 died (killed: silent")
    assert (outcome.failed, outcome.restarts) == (None, {"worker:0": 1, "evaluator:0": 1})


def test_an_evaluator_that_is_asked_to_stop_stops_nobody_else(tmp_path, monkeypatch):
    exits = dict.fromkeys(TASKS, (8.0, exit_codes.OK)) | {"evaluator:0": (0.5, exit_codes.TERMINATED)}
    script = Script(None, 0.0, exits)
    outcome = supervise(script, tmp_path / "run", monkeypatch)
    assert (outcome.failed, outcome.restarts, script.asked) == (None, {"evaluator:0": 1}, [])


def test_an_evaluator_that_is_asked_to_stop_with_all_others_is_not_restarted(tmp_path, monkeypatch):
    monkeypatch.setattr(RunDirectory, "has_loaded", lambda self: True)
    script = Script(None, 0.0, {"evaluator:0": (0.5, exit_codes.TERMINATED)})
    script.stopped_at = 0.7
    outcome = supervise(script, tmp_path / "run", monkeypatch)
    assert (outcome.failed, outcome.restarts, script.asked) == (None, {}, [1] * (len(TASKS) - 1))


def test_a_run_stops_only_after_a_pending_restart(tmp_path, monkeypatch):
    monkeypatch.setattr(RunDirectory, "has_loaded", lambda self: True)
    script = Script("ps:0", 0.5, {"worker:0": (4.0, exit_codes.UNAVAILABLE), "again": (float("inf"), 0)})
    script.stopped_at = 4.2
    outcome = supervise(script, tmp_path / "run", monkeypatch)
    assert (outcome.failed, outcome.restarts) == (None, {"ps:0": 1})
    assert script.asked == [2] * len(TASKS)
