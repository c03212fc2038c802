"""The protocol of an engine: the operations that the training loop needs from whatever holds the parameters."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from trainer.engine.sharded.staleness import Table
from trainer.engine.step_result import StepResult
from trainer.engine.vectors.snapshot import Snapshot
from trainer.observe.placement.executed import Executed


class Engine(Protocol):
    """Holds the parameters, and turns gradients into updates.

    The order of calls is connect, load (the chief only, unless `held` says that a state is there), start, then step,
    peek, snapshot and contributions in any order, and leave. Calls that talk to other tasks raise `tf.errors.OpError`
    when one of those ends.
    """

    graph: Any  # of the step; known when `connect` returns
    is_tracing: bool  # the next step also writes what ran where to `executed`
    executed: Executed | None
    scopes: Mapping[str, str]  # layer path by name scope
    variables: Mapping[str, str]  # device by name, of variables that are no operations
    generation: int  # of the state; known when `start` returns
    missed: Sequence[StepResult]  # the last updates before `start`, which a predecessor may not have logged

    def connect(self, target: str, session_config: Any) -> None:
        """Opens the session on the task's own server; shard hosts must be up. Does not wait for a state.

        Args:
            target: of the server; "" where there is none.
            session_config: a `tf.compat.v1.ConfigProto`.
        """

    def load(self, snapshot: Snapshot, *, generation: int) -> None:
        """Makes a snapshot the state of every task. Blocks until the shard hosts, or all workers, have received it."""

    def held(self) -> int:
        """Returns the generation of the state that already exists; 0: none. Does not block.

        Raises:
            IncompleteError: if some shard hosts have a state and others have none, or a different one.
        """

    def start(self) -> int:
        """Takes this worker's place and sets its input to the global step, which it returns.

        Blocks until the chief has loaded a state.
        """

    def step(self, *, stop: bool = False, reductions: int = 0, fetch_gradients: bool = False) -> StepResult:
        """Computes on the next batch, and updates or pushes.

        Blocks until the parameters have arrived: under sync until all gradients of the previous step have been pushed.

        Args:
            stop: asks all replicas to stop after the next step.
            reductions: how often the learning rate must be reduced from this update on; fewer change nothing.
            fetch_gradients: also returns the mean gradient of this process's replicas.

        Returns:
            The state that the step was computed on, with the metrics of the update that led to it.

        Raises:
            tf.errors.OutOfRangeError: after the last batch.
        """

    def data_wait_secs(self) -> float:
        """Returns how long the current step has been waiting for its batch; 0 if it is not. Safe from any thread."""

    def peek(self) -> StepResult:
        """Reads the state of the run, without a step. Blocks until this worker's pushes are applied or dropped."""

    def snapshot(self) -> Snapshot:
        """Returns everything a checkpoint holds. Blocks as `peek` does.

        All of it belongs to one step, except under async, where a shard may be some steps ahead of the one that counts.
        """

    def release(self) -> None:
        """Ends the use of the last snapshot: no more of its rows of tables will be requested."""

    def contributions(self) -> Table | None:
        """Returns how many gradients of each worker were applied and dropped; None if every update has all."""

    def leave(self) -> None:
        """Ends this worker's part in the run. Under all_reduce it blocks until all workers call it."""
