"""Reads the status pages of the tasks, and kills tasks that stop answering or that a step waits for too long."""

import math
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from signal import SIGUSR1, SIGUSR2

from trainer.config.schema import TimeoutsConfig
from trainer.launch.attempts import Attempt, Attempts
from trainer.launch.restarts import holds_state
from trainer.observe.page_server import LAUNCHER
from trainer.observe.peers import try_status
from trainer.observe.task_page import TaskPage, TaskState
from trainer.plan.plan import Plan

FIRST_STEP_TAKES = 10  # times as long as other steps may: it compiles
SECS_PER_TASK = 0.001  # between two reads of a page, for each task of the run: 1,000 pages are read once a second
SILENT_SECS = 2.0  # a shorter silence is no cause for others to leave: far longer than between two pages
STACKS_SECS = 0.5  # to write stacks
STUCK_SECS = 3.0  # to write stacks, and for newer pages to arrive


class PageReader:
    """Reads the status pages of living tasks in threads, so that a frozen task delays no other."""

    def __init__(self, attempts: Attempts, heartbeat_secs: float) -> None:
        self._attempts = attempts
        self._timeout_secs = max(1.0, heartbeat_secs / 2)  # a busy machine answers late
        self._threads = ThreadPoolExecutor(max_workers=16, thread_name_prefix="pages")
        self._reads: dict[str, tuple[int, Future[TaskPage | None]]] = {}  # an attempt's number and its page
        self._every_secs = SECS_PER_TASK * len(attempts.current)
        self._asked_at = dict.fromkeys(attempts.current, -math.inf)

    def poll(self) -> None:
        """Stores the pages that have arrived and requests new ones; a task that does not answer keeps its last page."""
        for name, attempt in self._attempts.current.items():
            number, read = self._reads.get(name, (0, None))
            if read is not None and read.done():
                del self._reads[name]
                page = read.result()
                if page and number == attempt.number and attempt.code is None and attempt.is_mine(page):
                    attempt.page, attempt.heard_at, attempt.was_asked = page, time.monotonic(), False
                    attempt.peak_bytes = max(attempt.peak_bytes, page.memory_bytes)
            is_due = time.monotonic() - self._asked_at[name] >= self._every_secs
            if name not in self._reads and attempt.code is None and is_due:
                self._asked_at[name] = time.monotonic()
                read = self._threads.submit(try_status, attempt.task.control, self._timeout_secs, LAUNCHER)
                self._reads[name] = attempt.number, read

    def close(self) -> None:
        self._threads.shutdown(wait=False)


class SilenceWatch:
    """Kills tasks that are silent or stuck, after giving them time to write their stacks to their logs."""

    def __init__(self, attempts: Attempts, plan: Plan, timeouts: TimeoutsConfig) -> None:
        self._attempts, self._plan, self._timeouts = attempts, plan, timeouts
        self._polled_at = time.monotonic()
        self._stuck: dict[str, tuple[int, int]] = {}  # by task, its attempt's number and its step
        self._stuck_since = 0.0
        self._had_no_data_at: dict[str, float] = {}  # by task: when its step last waited for data

    def poll(self) -> None:
        now, limit = time.monotonic(), self._timeouts.heartbeat_secs
        if now - self._polled_at > limit / 2:  # this process was frozen itself, and read no page
            for attempt in self._attempts:
                attempt.heard_at = now
        self._polled_at = now
        alive = self._attempts.alive()
        for name, attempt in alive.items():
            patience = limit if attempt.state.must_answer else max(limit, self._timeouts.roll_call_secs)
            silent_secs = now - attempt.heard_at
            if silent_secs > patience + STACKS_SECS:
                key = "heartbeat_secs" if patience == limit else "roll_call_secs"
                self._attempts.kill(name, f"silent for longer than timeouts.{key}={patience:g}")
            elif silent_secs > patience and attempt.page and not attempt.was_asked:  # without a page it still starts
                attempt.was_asked = True
                self._attempts.signal(name, SIGUSR2)  # it writes stacks, even if a thread holds the interpreter
        self._kill_stuck(alive, now)

    def is_host_silent(self) -> bool:
        """Whether a task that holds state has been silent for so long that others may have exited because of it.

        A task that outlives its SIGKILL does not count: it may hang in a driver or a file system forever.
        """
        now, limit = time.monotonic(), self._timeouts.heartbeat_secs
        hosts = [attempt for name, attempt in self._attempts.current.items() if holds_state(self._plan, name)]
        silences = [now - host.heard_at for host in hosts if host.code is None and host.state.must_answer]
        return any(max(SILENT_SECS, limit / 2) < secs < limit + STACKS_SECS + STUCK_SECS for secs in silences)

    def _kill_stuck(self, alive: Mapping[str, Attempt], now: float) -> None:
        """Kills tasks that a step has waited for too long, if it still waits some moments later."""
        pages = [attempt.page for attempt in alive.values() if attempt.page]
        self._had_no_data_at |= {name: now for name, one in alive.items() if one.state is TaskState.waiting_for_data}
        had_no_data = {name for name, at in self._had_no_data_at.items() if now - at < self._timeouts.step_secs}
        computes = {of: name for name, one in alive.items() if one.page for of in one.page.computes_for}
        names = {computes.get(name, name) for page in pages for name in page.stuck}
        names = {name for name in names if name in alive and self._is_stuck(alive[name])}
        names = set() if had_no_data and self._plan.effective_strategy.has_ring else names - had_no_data
        names |= {name for name, one in alive.items() if self._waits_too_long_for_data(one)}
        if any(page.state.may_take_long for page in pages):
            names = set()  # the others wait for that task, and will not in a moment
        stuck = {name: (alive[name].number, page.step) for name in names if (page := alive[name].page)}
        if stuck != self._stuck:
            self._stuck, self._stuck_since = stuck, now
            for name in alive if stuck else ():
                if alive[name].page:  # else it still starts, and the signal would end it
                    self._attempts.signal(name, SIGUSR1)  # it writes the stacks of its threads into its log
        elif stuck and now - self._stuck_since > STUCK_SECS:
            for name in stuck:
                key, for_what = "step_secs", "it"
                if self._waits_too_long_for_data(alive[name]):
                    key, for_what = "data_secs", "its data"
                why = f"a step waited for {for_what} longer than timeouts.{key}; stacks are in the logs"
                self._attempts.kill(name, why)

    def _waits_too_long_for_data(self, attempt: Attempt) -> bool:
        limit, page = self._timeouts.data_secs, attempt.page
        waits = page is not None and attempt.state is TaskState.waiting_for_data
        return page is not None and waits and limit is not None and page.data_secs > limit

    def _is_stuck(self, attempt: Attempt) -> bool:
        """Whether a worker that a step has waited for is in a state that should not take this long."""
        if attempt.page is None or attempt.page.state is not TaskState.training:
            return False
        has_compiled = attempt.page.first_step_at is not None
        age_secs = time.monotonic() - attempt.began_at
        return has_compiled or age_secs > FIRST_STEP_TAKES * self._timeouts.step_secs
