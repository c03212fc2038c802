"""The protocol of an engine: what the training loop asks of whatever holds the parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from trainer.engine.sharded.staleness import Table
from trainer.engine.step_result import StepResult
from trainer.engine.vectors.snapshot import Snapshot
from trainer.observe.placement.executed import Executed


class Engine(Protocol):
    """Where parameters live and how gradients meet."""

    graph: Any
    is_tracing: bool  # the next step also leaves what ran where in `executed`
    executed: Executed | None
    scopes: Mapping[str, str]  # layer path by name scope
    variables: Mapping[str, str]  # device by name, of variables that are no operations
    generation: int  # of the state; known when `start` returns
    missed: Sequence[StepResult]  # of a state that `start` found: updates that nobody may have written down

    def connect(self, target: str, session_config: Any) -> None: ...
    def load(self, snapshot: Snapshot, *, generation: int) -> None: ...
    def held(self) -> int: ...  # generation of the state that is there already; 0: none
    def start(self) -> int: ...
    def step(self, *, stop: bool = False, fetch_gradients: bool = False) -> StepResult: ...
    def peek(self) -> StepResult: ...
    def snapshot(self) -> Snapshot: ...
    def contributions(self) -> Table | None: ...
    def leave(self) -> None: ...
