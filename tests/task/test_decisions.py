"""What follows from evaluations, beside Keras's callbacks on the same random values."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import keras
import pytest

from trainer.config.schema import EvaluateConfig, OptimizerConfig, OptimizerName, PlateauConfig
from trainer.engine import optimizers
from trainer.storage.evaluations import Evaluation
from trainer.task.chief import decisions

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")  # of Keras

SEQUENCES, LENGTH = 40, 14
MODES = {"loss": "min", "accuracy": "max"}


def scored(metric: str, values: Sequence[float]) -> list[Evaluation]:
    return [Evaluation(10 * number, {"loss": 0.0, metric: value}, 0.1) for number, value in enumerate(values, start=1)]


def sequences(draw: random.Random) -> list[list[float]]:
    """Values on a coarse grid, so that many differ by nothing or by exactly a min_delta; some are NaN."""
    grid = [number / 10 for number in range(6)]
    rows = [[draw.choice(grid) for _ in range(LENGTH)] for _ in range(SEQUENCES)]
    return [[draw.choice([value] * 20 + [float("nan")]) for value in row] for row in rows]


def watched(callback: Any, optimizer: Any = None) -> tuple[Any, Callable[[int, float], None]]:
    """(a stand-in for the model, what the callback does with the value of an epoch)."""
    model = SimpleNamespace(stop_training=False, metrics=[], optimizer=optimizer)
    callback._model = model
    callback.on_train_begin()
    return model, lambda epoch, value: callback.on_epoch_end(epoch, {"watched": value})


@pytest.mark.parametrize("metric", ["loss", "accuracy"])
def test_training_ends_where_keras_ends_it(metric):
    draw, ended = random.Random(1), 0
    for values in sequences(draw):
        patience, min_delta = draw.choice([1, 2, 4, 12]), draw.choice([0.0, 0.1, 0.15])
        callback = keras.callbacks.EarlyStopping("watched", min_delta, patience, mode=MODES[metric])
        model, see = watched(callback)
        config = EvaluateConfig(best_metric=metric, patience=patience, min_delta=min_delta)
        for epoch, value in enumerate(values):
            see(epoch, value)
            so_far = scored(metric, values[: epoch + 1])
            ends = len(so_far) - 1 - decisions.best_of(so_far, metric, config) >= patience
            assert ends == model.stop_training, (values, patience, min_delta, epoch)
            if ends:
                ended += 1
                break
    assert SEQUENCES / 2 < ended < SEQUENCES


@pytest.mark.parametrize("metric", ["loss", "accuracy"])
def test_the_rate_is_reduced_where_keras_reduces_it(metric):
    draw, reduced = random.Random(2), set()
    for values in sequences(draw):
        plateau = PlateauConfig(
            patience=draw.choice([1, 2, 3]),
            factor=draw.choice([0.1, 0.5]),
            min_rate=draw.choice([0.0, 0.001, 0.0024]),
            cooldown=draw.choice([0, 1, 3]),
            min_delta=draw.choice([0.0, 0.1, 1e-4]),
        )
        ours = OptimizerConfig(name=OptimizerName.sgd, learning_rate=0.01, plateau=plateau)
        theirs = keras.optimizers.SGD(0.01)
        callback = keras.callbacks.ReduceLROnPlateau(
            "watched",
            plateau.factor,
            plateau.patience,
            mode=MODES[metric],
            min_delta=plateau.min_delta,
            cooldown=plateau.cooldown,
            min_lr=plateau.min_rate,
        )
        _, see = watched(callback, theirs)
        count, rate = 0, float(theirs.learning_rate.numpy())
        for epoch, value in enumerate(values):
            see(epoch, value)
            now = float(theirs.learning_rate.numpy())
            count, rate = count + (now != rate), now
            found = decisions.reductions(scored(metric, values[: epoch + 1]), metric, EvaluateConfig(), ours)
            assert found == count, (values, plateau, epoch)
            assert float(optimizers.learning_rate(ours, 0, count)) == pytest.approx(rate, rel=1e-6)
        reduced.add(count)
    assert len(reduced) > 4


def test_without_a_patience_and_without_evaluations_nothing_is_reduced():
    without = OptimizerConfig(name=OptimizerName.sgd)
    assert decisions.reductions(scored("loss", [1.0] * 30), "loss", EvaluateConfig(), without) == 0
    with_patience = OptimizerConfig(name=OptimizerName.sgd, plateau=PlateauConfig(patience=1))
    assert decisions.reductions([], "loss", EvaluateConfig(), with_patience) == 0
