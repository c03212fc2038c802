"""Decides whether a failed task is restarted, how soon, and which others with it."""

import signal
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from trainer.config.schema import RestartConfig
from trainer.config.words import count
from trainer.faults import exit_codes
from trainer.launch.attempts import Attempt, Attempts, Failure
from trainer.plan.plan import Plan
from trainer.storage.event_log import EventKind, RunEvent
from trainer.storage.journal import TaskRestart

LASTING = (
    exit_codes.CONFIG,
    exit_codes.BAD_DATA,
    exit_codes.INPUT_MISSING,
    exit_codes.RUN_IN_USE,
    exit_codes.STORAGE,
    exit_codes.CHECKPOINT,
)
AFTER_A_STEP = (exit_codes.UNAVAILABLE, exit_codes.INTERNAL)
SIGNALS = {-number: number.name for number in signal.Signals}  # by exit code; a real-time signal has no name
LEFT_BEHIND = (exit_codes.UNAVAILABLE, exit_codes.INCOMPLETE)  # codes of tasks that leave because another has ended


def can_help(code: int, *, has_stepped: bool) -> bool:
    """Whether restarting a task may help; a failure before the first step would repeat.

    Args:
        code: that the task ended with; negative: the signal that ended it.
        has_stepped: whether the run has made a step since it was launched.
    """
    return code not in LASTING and (has_stepped or code not in AFTER_A_STEP)


def holds_state(plan: Plan, task: str) -> bool:
    """Whether a part of the run's state is lost with a task; then all restart, from a checkpoint."""
    if task.startswith("evaluator"):
        return False
    return not plan.has_shard_hosts or any(shard.host == task for shard in plan.shards)


def may_be_left_behind(codes: Iterable[int]) -> bool:
    """Whether tasks that failed together may all have exited because of a task that is not among them."""
    return all(code in LEFT_BEHIND for code in codes)


def find_cause(codes: Mapping[str, int], plan: Plan) -> str:
    """Returns the task whose failure explains those of the others that failed with it."""
    return min(codes, key=lambda task: (codes[task] in LEFT_BEHIND, not holds_state(plan, task)))


class Budget:
    """The restarts that each task may have; the pause before each doubles."""

    def __init__(self, config: RestartConfig) -> None:
        self._config = config
        self._restarts: dict[str, list[float]] = {}  # when, by task
        self.total: dict[str, int] = {}  # by task, of those that were restarted

    def spend(self, task: str, now: float) -> float | None:
        """Returns the seconds to wait before a task is restarted; None if it has used up its restarts.

        Args:
            now: monotonic seconds.
        """
        recent = self.recent(task, now)
        if len(recent) >= self.allowed(task):
            return None
        self._restarts[task] = [*recent, now]
        self.total[task] = self.total.get(task, 0) + 1
        return self._config.delay_secs * 2 ** len(recent)

    def recent(self, task: str, now: float) -> list[float]:
        """Returns the times of a task's restarts within the window."""
        return [at for at in self._restarts.get(task, []) if now - at <= self._config.window_secs]

    def allowed(self, task: str) -> int:
        """Returns the restarts allowed within the window."""
        own = self._config.max_of
        return own.get(task, own.get(task.partition(":")[0], self._config.max))


class Restarts:
    """Schedules the next attempts of failed tasks: each alone, or all tasks together from a checkpoint."""

    def __init__(self, config: RestartConfig, plan: Plan, attempts: Attempts, say: Callable[[str], None]) -> None:
        self._plan, self._attempts, self._say = plan, attempts, say
        self._window_secs = config.window_secs
        self._first_failures: dict[str, Failure] = {}  # by task, within the window
        self._all_restart_at: float | None = None  # monotonic; until then all tasks are being ended
        self.budget = Budget(config)
        self.reasons: Counter[tuple[str, str]] = Counter()  # restarts by task and by what ended its attempt

    @property
    def is_ending_all(self) -> bool:
        """Whether all tasks are being ended, to restart together."""
        return self._all_restart_at is not None

    def handle(self, failed: Mapping[str, Attempt], *, has_stepped: bool, is_stopping: bool) -> Failure | None:
        """Schedules restarts for tasks that failed together; returns the failure that ends the run, if one does."""
        codes = {name: attempt.code for name, attempt in failed.items() if attempt.code is not None}
        cause = failed[find_cause(codes, self._plan)]
        for name, attempt in failed.items():
            if name not in self._first_failures or not self.budget.recent(name, time.monotonic()):
                self._first_failures[name] = self._attempts.failure_of(attempt)
        if is_stopping or not can_help(codes[cause.task.name], has_stepped=has_stepped):
            return self._attempts.failure_of(cause)
        if self._must_all_restart(codes):
            return self._restart_all(cause)
        for attempt in failed.values():
            if (failure := self._restart(attempt)) is not None:
                return failure
        return None

    def due(self) -> list[Attempt]:
        """Returns the attempts whose tasks shall be restarted now."""
        now = time.monotonic()
        if self._all_restart_at is not None:
            if any(attempt.code is None for attempt in self._attempts):
                return []
            for attempt in self._attempts:
                attempt.restarts_at = self._all_restart_at
            self._all_restart_at = None
        return [attempt for attempt in self._attempts if attempt.restarts_at is not None and now >= attempt.restarts_at]

    def _must_all_restart(self, codes: Mapping[str, int]) -> bool:
        """Whether a failed task, or one that has already ended, held a part of the state."""
        ended = [name for name, attempt in self._attempts.current.items() if attempt.code == exit_codes.OK]
        is_incomplete = exit_codes.INCOMPLETE in codes.values()
        is_all_evaluators = all(name.startswith("evaluator") for name in codes)
        return is_incomplete or (
            not is_all_evaluators and any(holds_state(self._plan, name) for name in [*ended, *codes])
        )

    def _restart(self, attempt: Attempt) -> Failure | None:
        name = attempt.task.name
        delay_secs = self._spend(attempt, "task")
        if delay_secs is None:
            return self._first_failures[name]
        attempt.restarts_at = attempt.ended_at + delay_secs
        self._say(f"{_obituary(attempt)}; restarting it in {delay_secs:g} s ({self._count(name)})")
        return None

    def _restart_all(self, cause: Attempt) -> Failure | None:
        name = cause.task.name
        delay_secs = self._spend(cause, "cluster")
        if delay_secs is None:
            return self._first_failures[name]
        self._all_restart_at = time.monotonic() + delay_secs
        why = "" if cause.code == exit_codes.INCOMPLETE else ", and part of the run's state was lost"
        self._say(
            f"{_obituary(cause)}{why}; restarting all tasks from the newest checkpoint in {delay_secs:g} s "
            f"({self._count(name)})"
        )
        return None

    def _spend(self, attempt: Attempt, scope: str) -> float | None:
        name = attempt.task.name
        delay_secs = self.budget.spend(name, time.monotonic())
        if delay_secs is not None:
            self._attempts.journal.write(TaskRestart(scope, name))
            self._attempts.events.write(RunEvent(EventKind.restart, task=name, scope=scope))
            self.reasons[name, _reason(attempt)] += 1
        elif allowed := self.budget.allowed(name):
            self._say(
                f"{_obituary(attempt)}; it was restarted {count(allowed, 'time')} within {self._window_secs:g} s "
                "(restart.max), so the run ends"
            )
        return delay_secs

    def _count(self, name: str) -> str:
        return f"{len(self.budget.recent(name, time.monotonic()))} of {self.budget.allowed(name)}"


def _reason(attempt: Attempt) -> str:
    """Describes what ended an attempt: the name of a signal, or an exit code."""
    return SIGNALS.get(attempt.code or 0, f"exit {attempt.code}")


def _obituary(attempt: Attempt) -> str:
    why = attempt.why if attempt.end_reason else SIGNALS.get(attempt.code or 0, attempt.why)
    return f"{attempt.task.name} {'left' if attempt.code in LEFT_BEHIND else 'died'} ({why})"
