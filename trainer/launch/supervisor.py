"""Follows the tasks of a run until all have ended: restarts, signals, stalls, injected faults."""

import math
import signal
import time
from collections.abc import Mapping

from trainer.launch.attempts import Attempt, Attempts, Failure, PlannedRun, RunOutcome, Starter
from trainer.launch.fault_hooks import FaultHooks, RunView
from trainer.launch.metrics_endpoint import MetricsEndpoint
from trainer.launch.progress import Progress
from trainer.launch.restarts import Restarts, may_be_left_behind
from trainer.launch.signals import Signals
from trainer.launch.silence import PageReader, SilenceWatch
from trainer.launch.status_file import StatusFile
from trainer.launch.view import TaskView
from trainer.observe.slow import SlowWorkers
from trainer.observe.stall import describe as describe_stall
from trainer.observe.task_page import TaskPage
from trainer.observe.waits import Waits
from trainer.storage import requests
from trainer.storage.event_log import EventKind, RunEvent
from trainer.storage.requests import Request

POLL_SECS = 0.25
FAULTS_POLL_SECS = 0.05
SETTLE_SECS = 0.5  # after a failure: its consequences may be reported before the cause
STALL_EVERY_SECS = 30.0  # between two lines about the same stall


class Supervisor:
    """Starts the tasks and follows them until all have ended."""

    def __init__(
        self,
        planned: PlannedRun,
        starter: Starter,
        progress: Progress,
        signals: Signals,
        faults: FaultHooks | None = None,
    ) -> None:
        """Prepares to start the plan's tasks."""
        config, plan, directory, _ = planned
        self.attempts = Attempts(plan.tasks, directory, starter)
        self._plan, self._directory, self._progress = plan, directory, progress
        self._signals, self._faults = signals, faults
        self._grace_secs = config.timeouts.stop_grace_secs
        self._restarts = Restarts(config.restart, plan, self.attempts, self._say)
        self._metrics = MetricsEndpoint(planned, self.attempts, self._restarts)
        self._pages = PageReader(self.attempts, config.timeouts.heartbeat_secs)
        self._silence = SilenceWatch(self.attempts, plan, config.timeouts)
        self._slow = SlowWorkers(plan.effective_strategy.when_slow)
        self._status = StatusFile(planned)
        self.waits = Waits(for_all=plan.effective_strategy.waits_for_all)
        self._first_step_at: float | None = None  # Unix time, seconds
        self._obeyed = 0  # signals
        self._stop_by: float | None = None  # the tasks must stop by then, or are killed
        self._was_asked = False  # they were
        self._is_killing = False
        self._stall_said_at = -math.inf
        self._stand_ins: dict[str, str] = {}  # by worker that is away, who computes for it

    def run(self) -> RunOutcome:
        """Supervises the run until no task is left."""
        try:
            return self._run()
        finally:
            self._metrics.close()

    def _run(self) -> RunOutcome:
        for name in self.attempts.current:
            self._start(name, 0)
        failed = None
        while any(attempt.code is None or attempt.restarts_at is not None for attempt in self.attempts):
            self.attempts.poll(self._poll_secs())
            self._obey_requests()
            self._obey_signals()
            if failed is None and not self._is_killing:
                failed = self._handle_failures()
            if failed is not None or (self._stop_by is not None and time.monotonic() > self._stop_by):
                self._give_up()
            self._stop_if_asked()
            if self._is_killing or self._restarts.is_ending_all:
                for name in self.attempts.current:  # each time: a task may only now be known to have started
                    self.attempts.signal(name, signal.SIGKILL)
            for attempt in [] if self._is_killing else self._restarts.due():
                self._start(attempt.task.name, attempt.number + 1)
            self._pages.poll()
            self._show()
            self._silence.poll()
            if self._faults:
                self._faults.act(self._view())
        self._pages.close()
        return RunOutcome(failed, self._restarts.budget.total, self._first_step_at)

    def _poll_secs(self) -> float:
        """Returns how long to wait for an event: until the next poll of the pages, or the next restart."""
        now = time.monotonic()
        pauses = [attempt.restarts_at - now for attempt in self.attempts if attempt.restarts_at is not None]
        return min([FAULTS_POLL_SECS if self._faults else POLL_SECS, *(secs for secs in pauses if secs > 0)])

    def _start(self, name: str, number: int) -> None:
        self.attempts.start(name, number, self._faults.environment(name) if self._faults else {})

    def _handle_failures(self) -> Failure | None:
        """Schedules restarts of failed tasks; returns the failure that ends the run, if one does."""
        failed = self._failed()
        if self._restarts.is_ending_all or not failed:
            return None
        if may_be_left_behind(attempt.code or 0 for attempt in failed.values()) and self._silence.is_host_silent():
            return None  # the host answers again, or is killed and then the cause
        settled_at = time.monotonic() + SETTLE_SECS
        while time.monotonic() < settled_at:
            self.attempts.poll(max(0.0, settled_at - time.monotonic()))
        has_stepped = self._first_step_at is not None
        if not (failed := self._failed()):
            return None  # the whole run was asked to stop, not just an evaluator
        return self._restarts.handle(failed, has_stepped=has_stepped, is_stopping=self._was_asked)

    def _failed(self) -> dict[str, Attempt]:
        """Returns the failed attempts, including an evaluator that stopped although the run was not asked to."""
        failed = self.attempts.failed()
        if self._signals.numbers or self._is_stopping():
            return failed
        stopped = (attempt for attempt in self.attempts if attempt.has_stopped and not attempt.trains)
        return failed | {attempt.task.name: attempt for attempt in stopped}

    def _is_stopping(self) -> bool:
        """Whether the run was asked to stop; a request to an evaluator alone does not count."""
        return self._stop_by is not None or any(one.is_stopping for one in self.attempts if one.trains)

    def _obey_requests(self) -> None:
        """Obeys requests of other commands to the run, or to one of its tasks."""
        if not requests.pending(self._directory):
            return
        if requests.take(self._directory, Request.stop) and not self._signals.numbers:  # a second signal would kill
            self._signals.receive(signal.SIGTERM)
        for name, attempt in self.attempts.current.items():
            if requests.take(self._directory, Request.stacks, name) and attempt.page:  # else the signal would end it
                self.attempts.signal(name, signal.SIGUSR1)
            if requests.take(self._directory, Request.kill, name):
                self._say(f"killing {name} as requested")
                self.attempts.signal(name, signal.SIGKILL)

    def _obey_signals(self) -> None:
        """Obeys signals: the first asks every task to save and exit, the second kills them."""
        if len(self._signals.numbers) == self._obeyed:
            return
        self._obeyed = len(self._signals.numbers)
        if self._obeyed > 1:
            self._say("Stopping now.")
            self._give_up()
        elif not self._directory.has_loaded():
            self._give_up()  # the last line says so
        else:
            self._ask_to_stop("Stopping", " Press Ctrl-C again to stop now.")

    def _ask_to_stop(self, why: str, hint: str = "") -> None:
        self._say(f"{why}: finishing this step and saving a checkpoint (at most {self._grace_secs:g} s).{hint}")
        self._stop_by = time.monotonic() + self._grace_secs

    def _stop_if_asked(self) -> None:
        """Signals the tasks once no restart is pending: the others could not finish the step that they wait in."""
        if self._restarts.is_ending_all or self._is_killing:
            return
        if self._stop_by is None and self._is_stopping():
            self._ask_to_stop("One task was asked to stop, so all are stopping")
        if self._stop_by is None or self._was_asked or self.attempts.failed():
            return
        if all(attempt.can_stop for attempt in self.attempts):
            self._was_asked = True
            for name, attempt in self.attempts.current.items():
                if not attempt.is_stopping:  # a second signal would mean at once
                    self.attempts.signal(name, signal.SIGTERM)

    def _give_up(self) -> None:
        """Ends all tasks, for good."""
        self._is_killing = True
        for attempt in self.attempts:
            attempt.restarts_at = None
            attempt.was_given_up = attempt.was_given_up or attempt.code is None

    def _show(self) -> None:
        """Passes the newest pages to the progress, to status.json, and to the reports of stalled and slow tasks."""
        current = self.attempts.current
        pages = {name: attempt.page for name, attempt in current.items() if attempt.page}
        first_steps = [page.first_step_at for page in pages.values() if page.first_step_at]
        self._first_step_at = self._first_step_at or min(first_steps, default=None)
        now = time.monotonic()
        self._progress.show(
            [
                TaskView(name, one.state, one.page, now - one.heard_at if one.is_alive else 0.0, one.code)
                for name, one in current.items()
            ]
        )
        self._say_stalls(pages)
        self._say_stand_ins(pages)
        for sentence in self._slow.poll(pages, time.monotonic()):
            self._say(sentence)
        self.waits.poll({name: page for name, page in pages.items() if current[name].is_alive}, now)
        self._status.write(self.attempts, self.waits.to_json())

    def _say(self, text: str) -> None:
        self.attempts.events.write(RunEvent(EventKind.message, text))
        self._progress.say(text)

    def _say_stalls(self, pages: Mapping[str, TaskPage]) -> None:
        now = time.monotonic()
        stalled = [page for page in pages.values() if page.missing and page.stalled_secs >= STALL_EVERY_SECS]
        if stalled and now - self._stall_said_at >= STALL_EVERY_SECS:
            self._stall_said_at = now
            page = stalled[0]
            heard = {name: (page.step, now - self.attempts.current[name].heard_at) for name, page in pages.items()}
            workers = [task.name for task in self._plan.workers]
            self._say(describe_stall(page.step, page.stalled_secs, workers, page.missing, heard))

    def _say_stand_ins(self, pages: Mapping[str, TaskPage]) -> None:
        before = self._stand_ins
        self._stand_ins = {of: name for name, page in pages.items() for of in page.computes_for if of != name}
        for worker in self._stand_ins.keys() - before.keys():
            self._say(f"{self._stand_ins[worker]} computes for {worker} until it is back")
        for worker in before.keys() - self._stand_ins.keys():
            if worker in pages and worker in pages[worker].computes_for:
                self._say(f"{worker} is back")

    def _view(self) -> RunView:
        alive = self.attempts.alive()
        return RunView(
            now=time.monotonic(),
            pages={name: attempt.page for name, attempt in alive.items() if attempt.page},
            pids={name: attempt.pid for name, attempt in alive.items() if attempt.pid},
            signal=self.attempts.signal,
        )
