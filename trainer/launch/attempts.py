"""Keeps the current attempt of every task: starts attempts, signals them and records their ends."""

import math
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from trainer.config.schema import RunConfig
from trainer.faults import exit_codes
from trainer.launch.messages import Exited, Started, TaskEvent
from trainer.observe.machine import oom_kills
from trainer.observe.task_page import TaskPage, TaskState
from trainer.plan.environment import FINISHED, SUPERVISED
from trainer.plan.plan import Plan, Task
from trainer.storage import journal
from trainer.storage.event_log import EventKind, EventLog, RunEvent
from trainer.storage.journal import Journal
from trainer.storage.run_directory import RunDirectory
from trainer.task.log import STARTED

LOG_LINES = 20
ENDED_EARLY = "its process ended with exit code 0 before its work was done; user code may have called os._exit"


class PlannedRun(NamedTuple):
    """A run whose tasks are to be started."""

    config: RunConfig
    plan: Plan  # with the addresses by which this process reaches the tasks' pages
    directory: RunDirectory
    started_at: float  # when the command was typed, Unix time, seconds


class Starter(Protocol):
    """Starts tasks, signals them and reports when they end.

    `ProcessTasks`, `ContainerTasks`, and on several hosts `HostTasks` and `ContainersOnHosts`.
    """

    def start(self, name: str, *, run: str, environment: Mapping[str, str], log: str) -> object: ...
    def signal(self, pid: int, number: int) -> None: ...
    def events(self, timeout_secs: float) -> list[TaskEvent]: ...


@dataclass
class Attempt:
    """One process of a task, as the launcher knows it."""

    task: Task
    number: int = 0  # restarts before it
    pid: int | None = None
    code: int | None = None  # once it has ended
    ended_at: float = math.nan  # monotonic; then
    page: TaskPage | None = None  # the last status page read
    earlier: tuple[int, float] | None = None  # the process that the attempt before it was
    heard_at: float = field(default_factory=lambda: time.monotonic())  # when that was
    was_asked: bool = False  # for its stacks, since then
    began_at: float = field(default_factory=lambda: time.monotonic())
    restarts_at: float | None = None  # monotonic; set while the task waits for its next attempt
    end_reason: str | None = None  # why it ended, where the code does not say it
    was_given_up: bool = False  # killed because the run ends
    peak_bytes: int = 0  # most memory that a page showed

    @property
    def state(self) -> TaskState:
        if self.restarts_at is not None:
            return TaskState.restarting
        if self.code is None:
            return self.page.state if self.page else TaskState.starting
        if self.code == 0:
            return TaskState.done
        was_stopped = self.was_given_up and self.code == -signal.SIGKILL
        return TaskState.stopped if was_stopped or self.code == exit_codes.TERMINATED else TaskState.ended

    @property
    def state_text(self) -> str:
        return self.state.text(self.code)

    @property
    def process(self) -> tuple[int, float] | None:
        """Returns the process of the status page, by id and start; at first, that of the previous attempt."""
        return (self.page.pid, self.page.started_at) if self.page else self.earlier

    def is_mine(self, page: TaskPage) -> bool:
        """Whether a page is not that of the earlier attempt, which may still run on an unreachable host."""
        return (page.pid, page.started_at) != self.earlier

    @property
    def is_alive(self) -> bool:
        return self.pid is not None and self.code is None

    @property
    def why(self) -> str:
        """Describes why it ended."""
        assert self.code is not None
        return self.end_reason or exit_codes.meaning(self.code)

    @property
    def has_failed(self) -> bool:
        """Whether it ended with an error and is not about to be restarted."""
        return self.code not in (None, exit_codes.OK, exit_codes.TERMINATED) and self.restarts_at is None

    @property
    def has_stopped(self) -> bool:
        """Whether it ended on request, and is not about to be restarted."""
        return self.code == exit_codes.TERMINATED and self.restarts_at is None

    @property
    def trains(self) -> bool:
        """Whether other tasks wait for this one; none waits for an evaluator."""
        return self.task.job != "evaluator"

    @property
    def is_stopping(self) -> bool:
        """Whether it was asked to stop."""
        return self.code == exit_codes.TERMINATED or (self.page is not None and self.page.is_stopping)

    @property
    def can_stop(self) -> bool:
        """Whether it would obey a signal to stop at a step boundary; an evaluator need not."""
        is_ready = self.code is not None or self.state.stops_between_steps or not self.trains
        return self.restarts_at is None and is_ready


@dataclass(frozen=True)
class Failure:
    """The first failure of a run, as recorded when it happened."""

    task: Task
    code: int
    tail: list[str]  # of its log
    why: str  # in words


@dataclass
class RunOutcome:
    """The outcome of a run."""

    failed: Failure | None = None  # none: it did not fail in the end
    restarts: dict[str, int] = field(default_factory=dict)  # by task that they were needed for
    first_step_at: float | None = None  # Unix time, seconds


class Attempts:
    """The current attempt of every task, by the task's name."""

    def __init__(self, tasks: Sequence[Task], directory: RunDirectory, starter: Starter) -> None:
        self.current = {task.name: Attempt(task) for task in tasks}
        self.journal = Journal(directory.journal / "launcher.jsonl")
        self.events = EventLog(directory.event_log)
        self._directory, self._starter = directory, starter
        self._oom_kills = oom_kills()

    def __iter__(self) -> Iterator[Attempt]:
        return iter(self.current.values())

    def start(self, name: str, number: int, environment: Mapping[str, str]) -> None:
        """Starts an attempt of a task, with variables added to the task's environment."""
        before = self.current[name]
        task = before.task
        self.current[name] = Attempt(task, number, earlier=before.process)
        log = str(self._directory.path / task.log)
        environment = task.environment(os.environ) | {SUPERVISED: "1"} | dict(environment)
        self._starter.start(name, run=str(self._directory.path), environment=environment, log=log)
        self.journal.write(journal.TaskStart(name, number))
        self.events.write(RunEvent(EventKind.start, task=name, attempt=number))

    def poll(self, timeout_secs: float) -> None:
        """Records starts and ends, waiting at most this long for the first."""
        for event in self._starter.events(timeout_secs):
            attempt = self.current.get(event.name)
            if attempt and isinstance(event, Started):
                attempt.pid = event.pid
            elif attempt and isinstance(event, Exited) and event.pid == attempt.pid:
                attempt.code, attempt.ended_at = event.code, time.monotonic()
                attempt.end_reason = attempt.end_reason or event.why
                if attempt.code == FINISHED:
                    attempt.code = exit_codes.OK
                elif attempt.code == exit_codes.OK:
                    attempt.code, attempt.end_reason = exit_codes.BAD_DATA, ENDED_EARLY
                self.journal.write(journal.TaskExit(attempt.task.name, attempt.code))
                self._explain_oom_kill(attempt)
                why = attempt.why if attempt.code else None
                self.events.write(RunEvent(EventKind.exit, why, task=attempt.task.name, code=attempt.code))

    def _explain_oom_kill(self, attempt: Attempt) -> None:
        """Explains a kill by lack of memory if the machine's count of out-of-memory kills has risen."""
        kills = oom_kills()
        if kills > self._oom_kills and attempt.code == -signal.SIGKILL and attempt.end_reason is None:
            peak = f"; it had {attempt.peak_bytes / 2**20:,.0f} MiB at its peak" if attempt.peak_bytes else ""
            attempt.end_reason = f"out of memory, so the kernel killed it{peak}"
        self._oom_kills = kills

    def alive(self) -> dict[str, Attempt]:
        return {name: attempt for name, attempt in self.current.items() if attempt.is_alive}

    def failed(self) -> dict[str, Attempt]:
        return {name: attempt for name, attempt in self.current.items() if attempt.has_failed}

    def signal(self, name: str, number: int) -> None:
        """Sends a signal to a task, if it is alive."""
        pid = self.current[name].pid
        if pid is not None and self.current[name].code is None:
            self._starter.signal(pid, number)

    def kill(self, name: str, why: str) -> None:
        """Kills an attempt that does not respond or misbehaves."""
        attempt = self.current[name]
        if attempt.is_alive and attempt.end_reason is None:
            attempt.end_reason = f"killed: {why}"
            self.signal(name, signal.SIGKILL)

    def failure_of(self, attempt: Attempt) -> Failure:
        assert attempt.code is not None
        task = attempt.task
        log = self._directory.path / task.log
        lines = log.read_text(errors="replace").splitlines() if log.exists() else []
        starts = [number for number, text in enumerate(lines) if f"{STARTED}{task.name} of " in text]
        tail = lines[starts[-1] if starts else 0 :][-LOG_LINES:]
        return Failure(task, attempt.code, tail, attempt.why)
