"""The training loop: take steps, and let the actions look at each one."""

from __future__ import annotations

import math
import time
from array import array
from collections.abc import Callable, Mapping, MutableSequence, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from trainer.engine.sharded.staleness import Table
from trainer.engine.step_result import Pulled
from trainer.engine.vectors.snapshot import Snapshot
from trainer.observe.placement.executed import Executed
from trainer.task import not_finite

BetweenSteps = Callable[[int], None]  # called with the global step; in lockstep no replica can move it meanwhile
AfterPull = Callable[[Pulled], None]


class Engine(Protocol):
    """Where parameters live and how gradients meet."""

    graph: Any
    is_tracing: bool  # the next step also leaves what ran where in `executed`
    executed: Executed | None
    scopes: Mapping[str, str]  # layer path by name scope
    variables: Mapping[str, str]  # device by name, of variables that are no operations
    generation: int  # of the state; known when `start` returns
    missed: Sequence[Pulled]  # of a state that `start` found: updates that nobody may have written down

    def connect(self, target: str, session_config: Any) -> None: ...
    def load(self, snapshot: Snapshot, *, generation: int) -> None: ...
    def held(self) -> int: ...  # generation of the state that is there already; 0: none
    def start(self) -> int: ...
    def step(self, *, stop: bool = False, fetch_gradients: bool = False) -> Pulled: ...
    def peek(self) -> Pulled: ...
    def snapshot(self) -> Snapshot: ...
    def contributions(self) -> Table | None: ...
    def leave(self) -> None: ...


@dataclass
class Pace:
    """Durations of the steps of one replica, in seconds; the first one builds and compiles, and does not count."""

    began: float = field(default_factory=time.monotonic)
    step_secs: MutableSequence[float] = field(default_factory=lambda: array("d"))
    wait_secs: MutableSequence[float] = field(default_factory=lambda: array("d"))  # of each, until parameters were here

    pulled_steps: tuple[int, ...] = ()  # global steps that the first two of them, and the last, started from

    def __post_init__(self) -> None:
        self._total_secs, self._total_waited = sum(self.step_secs), sum(self.wait_secs)  # kept: a run has many steps

    def tick(self, pulled: Pulled) -> None:
        now = time.monotonic()
        self.step_secs.append(now - self.began)
        self._total_secs += now - self.began
        self.wait_secs.append(pulled.wait_secs)
        self._total_waited += pulled.wait_secs
        self.began = now
        self.pulled_steps = (*self.pulled_steps[:2], pulled.step)

    def percentile_ms(self, share: float) -> float:
        """The shortest of their durations that `share` of the steps stay within (nearest rank)."""
        ordered = sorted(self.step_secs[1:] or self.step_secs) or [0.0]
        return 1000 * ordered[max(0, math.ceil(share * len(ordered)) - 1)]

    def steps_per_second(self, last: int | None = None) -> float:
        """Over the last so many steps, or all."""
        recent = self.step_secs[max(1, len(self.step_secs) - last) if last else 1 :]
        return len(recent) / sum(recent) if recent else 0.0

    def updates_per_second(self) -> float:
        """Of the run: where replicas do not wait for each other, more than this one's steps."""
        if not self.pulled_steps:
            return 0.0
        first = 1 if len(self.pulled_steps) > 2 else 0
        updates, secs = self.pulled_steps[-1] - self.pulled_steps[first], sum(self.step_secs[first:])
        return updates / secs if secs else 0.0

    def wait_fraction(self, last: int | None = None) -> float:
        """Over the last so many steps, or all, the first too."""
        if last is None:
            return self._total_waited / max(self._total_secs, 1e-9)
        return sum(self.wait_secs[-last:]) / max(sum(self.step_secs[-last:]), 1e-9)


class Every:
    """Says when an interval of steps has passed.

    Its multiple itself may never be seen: where workers do not wait for each other the global step moves by more than
    one between two steps of one worker.
    """

    def __init__(self, interval: int, *, start: int) -> None:
        """Begins at a step.

        Args:
            interval: steps; 0: never.
        """
        self._interval, self._passed = interval, start // interval if interval else 0

    def is_due(self, step: int) -> bool:
        """Whether a multiple of the interval was reached since the last time that it was."""
        if not self._interval or step // self._interval <= self._passed:
            return False
        self._passed = step // self._interval
        return True


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
) -> tuple[Pulled, bool]:
    """Steps from global step `start` to `until`, or until a replica asks to stop: in lockstep all stop at the same one.

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
            last = engine.peek()  # in lockstep this is the end; elsewhere the push may have been dropped
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

    def __call__(self, pulled: Pulled) -> None:
        if self._bad is not None and pulled.bad > self._bad:
            self._on_bad(pulled)
        self._bad = pulled.bad
        for action in self._after:
            action(pulled)
