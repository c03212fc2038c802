"""The training loop: take steps, and let the actions look at each one."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trainer.engine.engine import Engine
from trainer.engine.step_result import StepResult
from trainer.task import not_finite
from trainer.task.pace import Every

BetweenSteps = Callable[[int], None]  # called with the global step; under sync no replica can move it meanwhile
AfterPull = Callable[[StepResult], None]


def train(
    engine: Engine,
    *,
    start: int,
    until: int,
    stop_requested: Callable[[], bool],
    gradients_every: int = 0,
    between: Sequence[BetweenSteps] = (),
    after: Sequence[AfterPull] = (),
    on_bad: AfterPull = not_finite.stop,
) -> tuple[StepResult, bool]:
    """Steps from global step `start` to `until`, or until a replica asks to stop: under sync all stop at the same one.

    Args:
        gradients_every: steps between those whose gradients the actions see; 0: never.
        between: called before each step but the first, with the global step that no replica can pass meanwhile.
        after: called with what each step pulled: the metrics of the update before it.
        on_bad: called before `after` where updates were left out since the pull before: see not_finite.py.

    Returns:
        Where the run stands, with the metrics of the last update; and whether it was stopped.
    """
    step, stopped, last = start, False, None
    look_at = _Look(on_bad, after)
    wants_gradients = Every(gradients_every, start=start - 1)
    while step < until:
        if step > start:
            for action in between:
                action(step)
        pulled = engine.step(stop=stop_requested(), fetch_gradients=wants_gradients.is_due(step))
        look_at(pulled)
        step, stopped = pulled.step + 1, pulled.stop
        if stopped or step >= until:
            last = engine.peek()  # under sync this is the end; otherwise the push may have been dropped
            step = until if stopped else last.step
    last = last or engine.peek()
    stopped = stopped and last.step < until
    if last.step > start:
        look_at(last)
    return last, stopped


class _Look:
    """Shows what was pulled to the actions, and notices updates that were left out, whoever saw them first."""

    def __init__(self, on_bad: AfterPull, after: Sequence[AfterPull]) -> None:
        self._on_bad, self._after = on_bad, after
        self._bad: int | None = None  # as of the pull before; a state that is joined may bring one

    def __call__(self, pulled: StepResult) -> None:
        if self._bad is not None and pulled.bad > self._bad:
            self._on_bad(pulled)
        self._bad = pulled.bad
        for action in self._after:
            action(pulled)
