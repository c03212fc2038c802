"""Objectives of the models of tests."""

from __future__ import annotations

import functools
from typing import Any

import keras

from trainer.workload import step, tracing
from trainer.workload.compiling import Wanted, make_objective
from trainer.workload.data.examples import ArraySpec, Spec
from trainer.workload.objective import Objective

CROSSENTROPY = "sparse_categorical_crossentropy"


@functools.cache
def objective_of(
    model: keras.Model, loss: str = CROSSENTROPY, *, features: tuple[int, ...] = (), labels: tuple[int, ...] = ()
) -> Objective:
    """The objective of a model, which knows its size.

    Args:
        features: of one example; those of the model's input unless they are given.
        labels: of one example, classes for a crossentropy of classes.
    """
    shape = features or tuple(model.inputs[0].shape[1:])
    kind = "int64" if loss == CROSSENTROPY else "float32"
    spec = Spec(ArraySpec(shape, "float32"), ArraySpec(labels, kind), None, 3)
    objective = make_objective(model, spec, Wanted(loss))
    tracing.trace(objective, spec)
    return objective


def make_step(model: keras.Model, loss: str = CROSSENTROPY, **options: Any) -> Any:
    """A model's step; `features` and `labels` among the options are those of `objective_of`."""
    shapes = {name: options.pop(name) for name in ("features", "labels") if name in options}
    return step.make_step(objective_of(model, loss, **shapes), **options)
