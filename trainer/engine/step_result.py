"""The result that a step returns to the loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from trainer.observe.profile.stamps import Stamps


class StepResult(NamedTuple):
    """The state that a replica step started from, and how long it took.

    The loss belongs to the update that led to `step`: the exact mean over the replicas of that update. It means
    nothing at the first step after a (re)load, before the first update.
    """

    generation: int
    step: int  # global step: updates applied
    loss: float
    stop: bool  # a replica asked to stop; under sync all see this at the same step
    bad: int = 0  # newest step whose update was left out because a loss or a gradient was not finite; 0: none yet
    wait_secs: float = 0.0  # until all parameters had arrived
    compute_secs: float = 0.0  # forward and backward pass
    # of the metrics' variables, means over the replicas, since the last multiple of Shard.sums_every; padded with zeros
    sums: Sequence[float] = ()
    is_last: bool = False  # all replicas have stopped: no step is taken from this state
    reductions: int = 0  # of the learning rate, in the update that led to `step`
    gradients: dict[str, np.ndarray] | None = None  # of this process, by path; only when requested
    stamps: Stamps | None = None  # only when profiling

    @classmethod
    def read(
        cls, tags: np.ndarray, metrics: np.ndarray, *, wait_secs: float = 0.0, compute_secs: float = 0.0
    ) -> StepResult:
        """Reads the tags [shards, 2] and the metrics [metrics_size of the first shard] that a step fetched."""
        if not (tags == tags[0]).all():
            raise RuntimeError(f"the shards disagree: (generation, step) of each is {tags.tolist()}")
        loss, stop, _, bad, reductions, _, *sums = metrics.tolist()
        generation, step = tags[0].tolist()
        more = {"is_last": stop > 1, "reductions": int(reductions)}
        return cls(generation, step, loss, stop > 0, int(bad), wait_secs, compute_secs, sums, **more)
