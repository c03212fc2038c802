"""The training loop: takes steps, and runs the actions between and after them.

What the chief does, put together in chief/wiring.py, in this order:

    before a step   reports a save that has failed
                    takes one snapshot if something is due, and with it: saves a checkpoint, answers what commands have
                    asked (runs save, export), evaluates, writes histograms
                    decides whether the run ends early and whether the learning rate falls
    the step
    after it        handles an update that was skipped because it was not finite
                    writes histograms of gradients; writes history, events and progress; calls the hook on_step
"""

from collections.abc import Callable, Sequence

from trainer.engine.engine import Engine
from trainer.engine.step_result import StepResult
from trainer.task import not_finite
from trainer.task.pace import Every

BetweenSteps = Callable[[int], None]  # called with the global step; under sync no replica can move it meanwhile
AfterStep = Callable[[StepResult], None]


def train(
    engine: Engine,
    *,
    start: int,
    until: int,
    stop_requested: Callable[[], bool],
    reductions: Callable[[], int] = lambda: 0,
    gradients_every: int = 0,
    between: Sequence[BetweenSteps] = (),
    after: Sequence[AfterStep] = (),
    on_bad: AfterStep = not_finite.stop,
) -> tuple[StepResult, bool]:
    """Takes steps from global step `start` to `until`, or until a replica asks to stop; under sync all stop together.

    Args:
        reductions: how often the learning rate must have been reduced by now.
        gradients_every: steps between those whose gradients the actions see; 0: never.
        between: called before each step but the first, with the global step that no replica can pass meanwhile.
        after: called with the result of each step, which has the metrics of the update before it.
        on_bad: called before `after` where updates were skipped since the last result: see not_finite.py.

    Returns:
        The progress of the run, with the metrics of the last update; and whether it was stopped.
    """
    step, stopped, last = start, False, None
    asked = 0  # reductions that the state has
    run_after = _After(on_bad, after)
    wants_gradients = Every(gradients_every, start=start - 1)
    while step < until:
        if step > start:
            for action in between:
                action(step)
        wanted = reductions()
        result = engine.step(
            stop=stop_requested(),
            reductions=wanted if wanted > asked else 0,
            fetch_gradients=wants_gradients.is_due(step),
        )
        asked = result.reductions
        run_after(result)
        step, stopped = result.step + 1, result.stop
        if stopped or step >= until:
            last = engine.peek()  # under sync this is the end; otherwise the push may have been dropped
            step = until if stopped else last.step
    last = last or engine.peek()
    stopped = stopped and last.step < until
    if last.step > start:
        run_after(last)
    return last, stopped


class _After:
    """Runs the actions on a result, and notices updates that were skipped, whichever worker saw them first."""

    def __init__(self, on_bad: AfterStep, actions: Sequence[AfterStep]) -> None:
        self._on_bad, self._actions = on_bad, actions
        self._bad: int | None = None  # of the last result; the state that a worker joins may have one already

    def __call__(self, result: StepResult) -> None:
        if self._bad is not None and result.bad > self._bad:
            self._on_bad(result)
        self._bad = result.bad
        for action in self._actions:
            action(result)
