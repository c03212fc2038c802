"""Follows the tasks of a run to their ends: starts again what failed, ends what is silent, obeys signals."""

from __future__ import annotations

import contextlib
import json
import math
import os
import signal
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol

from trainer.config.schema import RunConfig
from trainer.faults import exit_codes
from trainer.launch.attempts import Attempt, Failure, RunOutcome, log_tail
from trainer.launch.fault_hooks import Injector, Seen
from trainer.launch.progress import Progress
from trainer.launch.restarts import Budget, can_help, holds_state, may_be_left_behind, most_telling
from trainer.launch.signals import Signals
from trainer.observe.machine import oom_kills
from trainer.observe.peers import read_status
from trainer.observe.slow import Slow
from trainer.observe.stall import describe as describe_stall
from trainer.plan.plan import Plan
from trainer.storage.journal import Journal
from trainer.storage.run_directory import RunDirectory, write_atomically

POLL_SECS = 0.25
INJECTOR_POLL_SECS = 0.05
FIRST_STEP_TAKES = 10  # times as long as others may: it compiles
SETTLE_SECS = 0.5  # after a failure: the cause may be heard of after its consequences
SILENT_SECS = 2.0  # that a task may be silent before it can be the cause: far more than from page to page
STACKS_SECS = 0.5  # to write stacks
STUCK_SECS = 3.0  # to write stacks, and for pages from before to be followed by others
STALL_EVERY_SECS = 30.0  # between two lines about the same stall
BEATING = ("waiting", "training", "saving", "serving", "evaluating")  # states in which a task must answer
BUSY = ("saving", "evaluating", "exporting")  # states in which a step may take as long as it takes


class Starter(Protocol):
    """Who starts tasks, signals them and hears of their ends: `Tasks` as processes, `Containers` as containers."""

    def start(self, name: str, *, run: str, environment: Mapping[str, str], log: str) -> None: ...
    def signal(self, pid: int, number: int) -> None: ...
    def events(self, timeout_secs: float) -> list[dict[str, Any]]: ...


class Watch:
    """Starts the tasks and follows them until all have ended."""

    def __init__(
        self,
        config: RunConfig,
        plan: Plan,
        directory: RunDirectory,
        tasks: Starter,
        progress: Progress,
        signals: Signals,
        injector: Injector | None = None,
    ) -> None:
        self.lives = {task.name: Attempt(task) for task in plan.tasks}
        self._config, self._plan, self._directory, self._tasks = config, plan, directory, tasks
        self._progress, self._signals, self._injector = progress, signals, injector
        self._journal = Journal(directory.journal / "launcher.jsonl")
        self._budget = Budget(config.restart)
        self._firsts: dict[str, Failure] = {}  # by task
        self._first_step_at: float | None = None  # Unix time, seconds
        self._heard = 0  # signals acted upon
        self._stop_by: float | None = None  # the tasks are to be asked to stop, and are killed after this
        self._was_asked = False
        self._is_killing = False
        self._restarting_since: float | None = None  # all tasks are being ended, to start again together
        self._restart_delay_secs = 0.0
        self._oom_kills = oom_kills()
        self._looked_at = time.monotonic()
        self._stall_told_at = -math.inf
        self._slow = Slow(plan.intake)
        self._stuck: dict[str, tuple[int, int]] = {}  # by task, the number of its life and its step
        self._stuck_since = 0.0
        self._patience_secs = max(1.0, config.timeouts.heartbeat_secs / 2)  # a busy machine answers late
        self._readers = ThreadPoolExecutor(max_workers=16, thread_name_prefix="pages")
        self._reads: dict[str, tuple[int, Future[dict[str, Any] | None]]] = {}  # life's number and its page

    def run(self) -> RunOutcome:
        """Returns when no task is left."""
        for life in self.lives.values():
            self._start(life)
        poll_secs = INJECTOR_POLL_SECS if self._injector else POLL_SECS
        failed = None
        while any(life.code is None or life.starts_at is not None for life in self.lives.values()):
            self._hear(poll_secs)
            self._obey_signals()
            if failed is None and not self._is_killing:
                failed = self._look_at_failures()
            if failed is not None or (self._stop_by is not None and time.monotonic() > self._stop_by):
                self._give_up()
            self._stop_if_asked()
            if self._is_killing or self._restarting_since is not None:
                self._signal_all(signal.SIGKILL)  # each time: a task may only now be known to have started
            self._start_what_is_due()
            self._read_pages()
            self._end_what_is_silent()
            if self._injector:
                self._injector.act(self._seen())
        self._readers.shutdown(wait=False)
        return RunOutcome(failed, self._budget.total, self._first_step_at)

    def _start(self, life: Attempt) -> None:
        task, directory = life.task, self._directory
        environment = task.environment(os.environ)
        if self._injector:
            environment |= self._injector.environment(task.name, life.number)
        log = str(directory.path / task.log)
        life.pid, life.code, life.page, life.starts_at = None, None, None, None
        life.ended_for, life.peak_bytes, life.was_asked = None, 0, False
        life.began_at = life.heard_at = time.monotonic()
        self._tasks.start(task.name, run=str(directory.path), environment=environment, log=log)
        self._journal.write("start", task=task.name, life=life.number)

    def _hear(self, timeout_secs: float) -> None:
        for event in self._tasks.events(timeout_secs):
            life = self.lives.get(event["name"])
            if life and event["event"] == "started":
                life.pid = event["pid"]
            elif life and event["event"] == "exited" and event["pid"] == life.pid:
                life.code = event["code"]
                life.ended_for = life.ended_for or event.get("why")
                self._journal.write("exit", task=life.task.name, code=life.code)
                self._tell_if_out_of_memory(life)

    def _tell_if_out_of_memory(self, life: Attempt) -> None:
        """Takes a kill of the kernel's for what it is: it counts them, of all processes of the machine."""
        kills = oom_kills()
        if kills > self._oom_kills and life.code == -signal.SIGKILL and life.ended_for is None:
            had = f"; it had {life.peak_bytes / 2**20:,.0f} MiB at its most" if life.peak_bytes else ""
            life.ended_for = f"out of memory, so the kernel killed it{had}"
        self._oom_kills = kills

    def _obey_signals(self) -> None:
        """The first signal asks every task to save and leave; the second ends them."""
        if len(self._signals.numbers) == self._heard:
            return
        self._heard = len(self._signals.numbers)
        if self._heard > 1 or not self._directory.has_loaded():
            self._progress.say("stops at once" if self._heard > 1 else "stops before the first step")
            self._give_up()
        else:
            self._ask_to_stop("stops after this step and saves (once more: stops at once)")

    def _ask_to_stop(self, why: str) -> None:
        grace = self._config.timeouts.stop_grace_secs
        self._progress.say(f"{why}, within {grace:g} s")
        self._stop_by = time.monotonic() + grace

    def _stop_if_asked(self) -> None:
        """Tells the tasks, once no one is on its way back: the others could not make the step that they wait for."""
        lives = self.lives.values()
        if self._restarting_since is not None or self._is_killing:
            return
        if self._stop_by is None and any(life.is_stopping for life in lives):
            self._ask_to_stop("a task was asked to stop, so all do")
        if self._failures():  # still to be started again
            return
        if self._stop_by is not None and not self._was_asked and all(life.is_up for life in lives):
            self._was_asked = True
            for life in lives:
                if life.pid and life.code is None and not life.is_stopping:  # a second time would mean at once
                    self._tasks.signal(life.pid, signal.SIGTERM)

    def _give_up(self) -> None:
        """Ends all tasks, for good."""
        self._is_killing = True
        for life in self.lives.values():
            life.starts_at = None

    def _signal_all(self, number: int) -> None:
        for life in self.lives.values():
            if life.pid and life.code is None:
                self._tasks.signal(life.pid, number)

    def _look_at_failures(self) -> Failure | None:
        """Starts again what can be; returns the failure that ends the run, if one does."""
        failed = self._failures()
        if self._restarting_since is not None or not failed:
            return None
        if may_be_left_behind(life.code or 0 for life in failed.values()) and self._is_a_host_silent():
            return None  # it answers, or is ended and then the cause
        settled = time.monotonic() + SETTLE_SECS
        while time.monotonic() < settled:
            self._hear(max(0.0, settled - time.monotonic()))
        failed = self._failures()
        codes = {name: life.code for name, life in failed.items() if life.code is not None}
        cause = failed[most_telling(codes.items(), self._plan)]
        for name, life in failed.items():
            if name not in self._firsts or not self._budget.recent(name, time.monotonic()):
                self._firsts[name] = self._failure_of(life)
        if self._was_asked or not can_help(codes[cause.task.name], has_stepped=self._first_step_at is not None):
            return self._failure_of(cause)
        if self._must_all_restart(codes):
            return self._restart_all(cause)
        for life in failed.values():
            if (spent := self._restart(life)) is not None:
                return spent
        return None

    def _failures(self) -> dict[str, Attempt]:
        return {name: life for name, life in self.lives.items() if life.has_failed and life.starts_at is None}

    def _is_a_host_silent(self) -> bool:
        """Whether a task that holds state has not answered for so long that others may have left because of it.

        Not one that outlives its end: what hangs in a driver or a file system may do so for ever.
        """
        now, limit = time.monotonic(), self._config.timeouts.heartbeat_secs
        hosts = [life for name, life in self.lives.items() if holds_state(self._plan, name)]
        silent = [now - life.heard_at for life in hosts if life.code is None and life.state in BEATING]
        return any(max(SILENT_SECS, limit / 2) < secs < limit + STACKS_SECS + STUCK_SECS for secs in silent)

    def _must_all_restart(self, codes: Mapping[str, int]) -> bool:
        """Whether what failed, or what has left already, holds a part of the state."""
        gone = [name for name, life in self.lives.items() if life.code == exit_codes.OK] + list(codes)
        is_incomplete = exit_codes.INCOMPLETE in codes.values()
        is_all_evaluators = all(name.startswith("evaluator") for name in codes)
        return is_incomplete or (not is_all_evaluators and any(holds_state(self._plan, name) for name in gone))

    def _restart(self, life: Attempt) -> Failure | None:
        name = life.task.name
        delay = self._spend(life)
        if delay is None:
            return self._firsts[name]
        life.starts_at = time.monotonic() + delay
        self._journal.write("restart", scope="task", cause=name)
        self._progress.say(f"{self._why_ended(life)}; starts it again in {delay:g} s")
        return None

    def _restart_all(self, cause: Attempt) -> Failure | None:
        delay = self._spend(cause)
        if delay is None:
            return self._firsts[cause.task.name]
        self._restarting_since, self._restart_delay_secs = time.monotonic(), delay
        self._journal.write("restart", scope="cluster", cause=cause.task.name)
        why = "" if cause.code == exit_codes.INCOMPLETE else "a part of the run's state is gone with it, so "
        self._progress.say(
            f"{self._why_ended(cause)}; {why}all tasks start again from the newest checkpoint, in {delay:g} s"
        )
        return None

    def _spend(self, life: Attempt) -> float | None:
        name = life.task.name
        delay = self._budget.spend(name, time.monotonic())
        if delay is None and self._budget.allowed(name):
            self._progress.say(
                f"{self._why_ended(life)}; it was started again {self._budget.allowed(name)} times within "
                f"{self._config.restart.window_secs:g} s (restart.max), so the run ends"
            )
        return delay

    def _why_ended(self, life: Attempt) -> str:
        return f"{life.task.name} is gone ({life.why})"

    def _start_what_is_due(self) -> None:
        now = time.monotonic()
        if self._restarting_since is not None:
            if any(life.code is None for life in self.lives.values()):
                return
            for life in self.lives.values():
                life.starts_at = self._restarting_since + self._restart_delay_secs
            self._restarting_since = None
        for life in self.lives.values():
            if life.starts_at is not None and now >= life.starts_at:
                life.number += 1
                self._start(life)

    def _read_pages(self) -> None:
        """Takes in the pages that have come, and asks for new ones; a task that does not answer keeps its last page."""
        for name, life in self.lives.items():
            number, read = self._reads.get(name, (0, None))
            if read is not None and read.done():
                del self._reads[name]
                page = read.result()
                if page and number == life.number and life.code is None:
                    life.page, life.heard_at, life.was_asked = page, time.monotonic(), False
                    life.peak_bytes = max(life.peak_bytes, page["memory_bytes"])
            if name not in self._reads and life.code is None:
                self._reads[name] = (
                    life.number,
                    self._readers.submit(_read_page, life.task.control, self._patience_secs),
                )
        pages = {name: life.page for name, life in self.lives.items() if life.page}
        states = {name: life.state for name, life in self.lives.items()}
        began = [page["first_step_at"] for page in pages.values() if page["first_step_at"]]
        self._first_step_at = self._first_step_at or min(began, default=None)
        self._progress.show(pages, states)
        self._tell_stalls(pages)
        for told in self._slow.look(pages, time.monotonic()):
            self._progress.say(told)
        with contextlib.suppress(OSError):  # a full disk is the chief's to tell
            write_atomically(self._directory.status, json.dumps({"tasks": pages, "states": states}, indent=1))

    def _tell_stalls(self, pages: Mapping[str, Mapping[str, Any]]) -> None:
        now = time.monotonic()
        stalled = [page for page in pages.values() if page["missing"] and page["stalled_secs"] >= STALL_EVERY_SECS]
        if stalled and now - self._stall_told_at >= STALL_EVERY_SECS:
            self._stall_told_at = now
            page = stalled[0]
            seen = {name: (other["step"], now - self.lives[name].heard_at) for name, other in pages.items()}
            workers = [task.name for task in self._plan.workers]
            self._progress.say(describe_stall(page["step"], page["stalled_secs"], workers, page["missing"], seen))

    def _end_what_is_silent(self) -> None:
        """Ends tasks that have stopped answering, and those that a step waited for too long for."""
        now, limit = time.monotonic(), self._config.timeouts.heartbeat_secs
        if now - self._looked_at > limit / 2:  # this process slept itself, and heard nobody
            for life in self.lives.values():
                life.heard_at = now
        self._looked_at = now
        alive = {name: life for name, life in self.lives.items() if life.code is None and life.pid}
        for life in alive.values():
            patience = limit if life.state in BEATING else max(limit, self._config.timeouts.roll_call_secs)
            if now - life.heard_at > patience + STACKS_SECS:
                self._end(life, f"silent for {patience:g} s")
            elif now - life.heard_at > patience and life.page and not life.was_asked:  # without a page it still starts
                life.was_asked = True
                self._signal(life.task.name, signal.SIGUSR2)  # it writes stacks, even if a thread holds the interpreter
        self._end_what_is_stuck(alive, now)

    def _end_what_is_stuck(self, alive: Mapping[str, Attempt], now: float) -> None:
        """Ends tasks that a step waits for too long for, when they still do so some moments later."""
        pages = [life.page for life in alive.values() if life.page]
        names = {name for page in pages for name in page["stuck"] if name in alive and self._is_stuck(alive[name])}
        if any(page["state"] in BUSY for page in pages):
            names = set()  # the others wait for that, and will
        stuck = {name: (alive[name].number, alive[name].page["step"]) for name in names}  # type: ignore[index]
        if stuck != self._stuck:
            self._stuck, self._stuck_since = stuck, now
            for name in alive if stuck else ():
                if alive[name].page:  # else it still starts, and the signal would end it
                    self._signal(name, signal.SIGUSR1)  # it writes the stacks of its threads into its log
        elif stuck and now - self._stuck_since > STUCK_SECS:
            for name in stuck:
                self._end(alive[name], "a step waited for it for too long (timeouts.step_secs); stacks are in the logs")

    def _is_stuck(self, life: Attempt) -> bool:
        """Whether a worker that a step waits for too long for does what should not take so long."""
        if life.page is None or life.page["state"] != "training":
            return False
        has_compiled = life.page["first_step_at"] is not None
        lived = time.monotonic() - life.began_at
        return has_compiled or lived > FIRST_STEP_TAKES * self._config.timeouts.step_secs

    def _end(self, life: Attempt, why: str) -> None:
        if life.pid and life.ended_for is None:
            life.ended_for = f"{why}, so it was ended"
            self._tasks.signal(life.pid, signal.SIGKILL)

    def _seen(self) -> Seen:
        alive = {name: life for name, life in self.lives.items() if life.code is None and life.pid}
        return Seen(
            now=time.monotonic(),
            pages={name: life.page for name, life in alive.items() if life.page},
            pids={name: life.pid for name, life in alive.items() if life.pid},
            lives={name: life.number for name, life in self.lives.items()},
            signal=self._signal,
        )

    def _signal(self, name: str, number: int) -> None:
        life = self.lives[name]
        if life.pid and life.code is None:
            self._tasks.signal(life.pid, number)

    def _failure_of(self, life: Attempt) -> Failure:
        assert life.code is not None
        log = self._directory.path / life.task.log
        return Failure(life.task, life.code, log_tail(log, life.task.name), life.why)


def _read_page(control: str, timeout_secs: float) -> dict[str, Any] | None:
    try:
        return read_status(control, timeout_secs=timeout_secs)
    except (OSError, ValueError):  # not up yet, leaving, or frozen
        return None
