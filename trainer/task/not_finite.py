"""Reacts to a loss or a gradient that is not finite, after its update was skipped (engine/update.py).

A run that returns to its newest checkpoint adds a line to <run>/rollbacks.jsonl. The number of lines changes the
order of the data, so that the batches after the checkpoint are not the same again.
"""

import logging
from collections.abc import Callable

from trainer.config.schema import NotFinitePolicy
from trainer.engine.step_result import StepResult
from trainer.faults.exit_codes import NotFiniteError, RollbackError

_log = logging.getLogger(__name__)

ROLLBACKS_AT_MOST = 3
ODD = 0x9E3779B1  # spreads small numbers over all 32 bits of a TensorFlow seed

Reaction = Callable[[StepResult], None]  # called with each result that shows a skipped update


def reaction(policy: NotFinitePolicy, *, rollbacks: int = 0) -> Reaction:
    """Chooses the reaction to a skipped update.

    Args:
        rollbacks: how often the run has rolled back already; after ROLLBACKS_AT_MOST it stops.
    """
    if policy is NotFinitePolicy.skip:
        return skip
    if policy is NotFinitePolicy.rollback and rollbacks < ROLLBACKS_AT_MOST:
        return roll_back
    return stop


def stop(result: StepResult) -> None:
    raise NotFiniteError(
        f"{_describe(result)}; checkpoints before it are untouched. A lower optimizer.learning_rate or "
        "optimizer.clip_norm=1 may help, or train.on_not_finite=skip"
    )


def skip(result: StepResult) -> None:
    _log.warning("%s; training continues", _describe(result))


def roll_back(result: StepResult) -> None:
    raise RollbackError(
        f"{_describe(result)}; the run returns to its newest checkpoint and continues with other batches",
        step=result.bad,
    )


def order_seed(seed: int, rollbacks: int) -> int:
    """Returns the seed of the data order: that of the run until it rolls back."""
    return (seed + rollbacks * ODD) % 2**32


def _describe(result: StepResult) -> str:
    return (
        f"the loss or a gradient of step {result.bad} is NaN or infinite, so its update was skipped; the log of the "
        "worker that computed it names the replica"
    )
