"""What follows when a loss or a gradient is not finite: its update is not made (engine/update.py), and then?

A run that goes back to its newest checkpoint writes that down in <run>/rollbacks.jsonl, one line each. Their number
changes the order of the data, so that what comes after a checkpoint is not the same again.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from trainer.config.schema import NotFinitePolicy
from trainer.engine.step_result import StepResult
from trainer.faults.exit_codes import NotFiniteError, RollbackError

_log = logging.getLogger(__name__)

ROLLBACKS_AT_MOST = 3
ODD = 0x9E3779B1  # spreads the first few numbers over all 32 bits that TensorFlow takes of a seed

Reaction = Callable[[StepResult], None]  # called with each pull that shows an update that was left out


def reaction(policy: NotFinitePolicy, *, rollbacks: int = 0) -> Reaction:
    """What to do about an update that was left out.

    Args:
        rollbacks: how often the run has gone back already; when that was too often it stops.
    """
    if policy is NotFinitePolicy.skip:
        return skip
    if policy is NotFinitePolicy.rollback and rollbacks < ROLLBACKS_AT_MOST:
        return roll_back
    return stop


def stop(pulled: StepResult) -> None:
    raise NotFiniteError(
        f"{_found(pulled)}; checkpoints before it are untouched. A lower optimizer.learning_rate or "
        "optimizer.clip_norm=1 may help, or train.on_not_finite=skip"
    )


def skip(pulled: StepResult) -> None:
    _log.warning("%s; training continues", _found(pulled))


def roll_back(pulled: StepResult) -> None:
    raise RollbackError(
        f"{_found(pulled)}; the run goes back to its newest checkpoint, and on with other batches", step=pulled.bad
    )


def order_seed(seed: int, rollbacks: int) -> int:
    """The seed of the data order: the run's own until it has gone back."""
    return (seed + rollbacks * ODD) % 2**32


def _found(pulled: StepResult) -> str:
    return (
        f"the loss or a gradient of step {pulled.bad} is NaN or infinite, so its update was skipped; the log of the "
        "worker that computed it names the replica"
    )
