"""Decides from a series of evaluations, as Keras's EarlyStopping and ReduceLROnPlateau do. Pure.

All evaluations of a series have the metric by which they are compared.
"""

from collections.abc import Sequence

import numpy as np

from trainer.config.schema import EvaluateConfig, OptimizerConfig
from trainer.storage.evaluations import Evaluation, prefers_less


def improves(one: Evaluation, best: Evaluation, metric: str, config: EvaluateConfig, *, min_delta: float) -> bool:
    """Whether an evaluation is better than the best before it by more than `min_delta`, in float32 as in Keras."""
    sign = -1 if prefers_less(metric, config.best_is) else 1
    new, old = np.float32(one.scores[metric] - sign * min_delta), np.float32(best.scores[metric])
    return bool(sign * new > sign * old)


def best_of(scored: Sequence[Evaluation], metric: str, config: EvaluateConfig) -> int:
    """Returns the index of the best evaluation; training ends when `evaluate.patience` others follow it."""
    best = 0
    for place, one in enumerate(scored):
        if improves(one, scored[best], metric, config, min_delta=config.min_delta):
            best = place
    return best


def reductions(scored: Sequence[Evaluation], metric: str, evaluate: EvaluateConfig, optimizer: OptimizerConfig) -> int:
    """Returns how often evaluations without an improvement have reduced the learning rate."""
    plateau, best = optimizer.plateau, scored[0] if scored else None
    if plateau.patience is None or best is None:
        return 0
    rate = np.float32(optimizer.learning_rate)
    count = waited = cooling = 0
    for one in scored[1:]:
        if cooling:
            cooling, waited = cooling - 1, 0
        if improves(one, best, metric, evaluate, min_delta=plateau.min_delta):
            best, waited = one, 0
        elif not cooling:
            waited += 1
            if waited >= plateau.patience and rate > np.float32(plateau.min_rate):
                rate = np.float32(max(float(rate) * plateau.factor, plateau.min_rate))
                count, waited, cooling = count + 1, 0, plateau.cooldown
    return count
