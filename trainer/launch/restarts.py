"""Whether a task that failed is started again, how soon, and who with it."""

from __future__ import annotations

from collections.abc import Iterable

from trainer.config.schema import RestartConfig
from trainer.faults import exit_codes
from trainer.plan.plan import Plan

LASTING = (
    exit_codes.CONFIG,
    exit_codes.BAD_DATA,
    exit_codes.INPUT_MISSING,
    exit_codes.RUN_IN_USE,
    exit_codes.STORAGE,
    exit_codes.CHECKPOINT,
)
AFTER_A_STEP = (exit_codes.UNAVAILABLE, exit_codes.INTERNAL)
LEFT_BEHIND = (exit_codes.UNAVAILABLE, exit_codes.INCOMPLETE)  # codes of who leaves because another is gone


def can_help(code: int, *, has_stepped: bool) -> bool:
    """Whether starting a task again may help; what fails before any step was made would fail again.

    Args:
        code: that the task ended with; negative: the signal that ended it.
        has_stepped: whether the run has made a step since it was launched.
    """
    return code not in LASTING and (has_stepped or code not in AFTER_A_STEP)


def holds_state(plan: Plan, task: str) -> bool:
    """Whether a part of the run's state is gone with a task: then all start again, from a checkpoint."""
    if task.startswith("evaluator"):
        return False
    return not plan.has_shard_hosts or any(shard.host == task for shard in plan.shards)


def may_be_left_behind(codes: Iterable[int]) -> bool:
    """Whether tasks that failed together may all have left because of one that is not among them."""
    return all(code in LEFT_BEHIND for code in codes)


def most_telling(codes: Iterable[tuple[str, int]], plan: Plan) -> str:
    """Of tasks that failed together, the one whose failure explains the others'."""

    def rank(failed: tuple[str, int]) -> tuple[bool, bool]:
        task, code = failed
        return code in LEFT_BEHIND, not holds_state(plan, task)

    return min(codes, key=rank)[0]


class Budget:
    """How often each task may be started again; the pause before it doubles each time."""

    def __init__(self, config: RestartConfig) -> None:
        self._config = config
        self._restarts: dict[str, list[float]] = {}  # when, by task
        self.total: dict[str, int] = {}  # by task, of those that were started again

    def spend(self, task: str, now: float) -> float | None:
        """Seconds to wait before a task is started again; None if it was so often already.

        Args:
            now: seconds, of a clock that only rises.
        """
        recent = self.recent(task, now)
        if len(recent) >= self.allowed(task):
            return None
        self._restarts[task] = [*recent, now]
        self.total[task] = self.total.get(task, 0) + 1
        return self._config.delay_secs * 2 ** len(recent)

    def recent(self, task: str, now: float) -> list[float]:
        """When a task was started again, as far as that counts."""
        return [at for at in self._restarts.get(task, []) if now - at <= self._config.window_secs]

    def allowed(self, task: str) -> int:
        """Restarts within the window."""
        own = self._config.max_of
        return own.get(task, own.get(task.partition(":")[0], self._config.max))
