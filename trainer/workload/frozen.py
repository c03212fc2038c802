"""Stores what training never changes: frozen weights, and the states of adapted preprocessing layers.

The process that describes the model writes it to a file of the run, from which each task that computes takes it. No
vector holds it, so it is never sent; checkpoints have the file too.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from trainer.config.groups import is_frozen
from trainer.plan.layout import FrozenWeights
from trainer.workload import step
from trainer.workload.adapting import State
from trainer.workload.data.examples import Spec, map_nest
from trainer.workload.objective import Objective
from trainer.workload.paths import Paths
from trainer.workload.weights import read_npz

EXACT = 2**24  # all whole numbers up to here are float32
WEIGHTS, ADAPTED = "frozen/", "adapted/"  # names in the file begin so


class Frozen(NamedTuple):
    """The content of the file."""

    weights: Mapping[str, np.ndarray]  # by path
    adapted: Sequence[State]  # of layers, in the order in which they were adapted


def freeze(model: keras.Model, freezing: Sequence[Mapping[str, Any]]) -> None:
    """Freezes the parameters that the groups of `config.groups.freezing` select.

    A layer with all of its weights frozen is a frozen layer: a BatchNorm then computes with its statistics, and keeps
    them.
    """
    frozen = {id(v) for path, v in Paths(model).named(model.trainable_variables).items() if is_frozen(path, freezing)}
    for layer in model._flatten_layers() if frozen else ():
        own = {id(v) for v in layer.trainable_variables}
        if own and own <= frozen:
            layer.trainable = False
    for variable in model.trainable_variables:
        if id(variable) in frozen:
            variable.trainable = False


def find(objective: Objective, spec: Spec) -> list[str]:
    """Returns the non-trainable variables that a training step does not change; the step is only traced.

    Raises:
        ValueError: if it assigns a trainable variable, or changes integers that float32 cannot represent.
    """
    model, paths = objective.model, Paths(objective.model)
    options = {"training": True} if step.takes_training(model) else {}
    unchanged: list[str] = []

    def forward(trainable: list[tf.Tensor], others: list[tf.Tensor], features: Any) -> None:
        state = list(zip(model.non_trainable_variables, others, strict=True))
        parameters = list(zip(model.trainable_variables, trainable, strict=True))
        known = [*parameters, *state]
        with objective.in_graph(), keras.StatelessScope(state_mapping=known, collect_losses=True) as scope:
            model(objective.inputs(features), **options)
        unchanged.extend(paths.named(v for v, given in state if scope.get_current_value(v) is given))
        _check_not_assigned([paths[v] for v, given in parameters if scope.get_current_value(v) is not given])

    if paths.named(model.non_trainable_variables):
        specs = [
            [tf.TensorSpec(v.shape, v.dtype) for v in variables]
            for variables in (model.trainable_variables, model.non_trainable_variables)
        ]
        features = map_nest(lambda one: tf.TensorSpec([None, *one.shape], one.dtype), spec.features)
        tf.function(forward, autograph=False).get_concrete_function(*specs, features)
    _check_exact({p: v for p, v in paths.named(model.non_trainable_variables).items() if p not in unchanged})
    return [path for path in paths.named(model.variables) if path in unchanged]


def _check_not_assigned(paths: Sequence[str]) -> None:
    """Refuses layers that assign trainable variables, because training changes these only by gradients."""
    if paths:
        raise ValueError(
            f"a layer assigns the trainable variable {paths[0]} when it is called, as SpectralNormalization does; the "
            "assigned value is lost when gradients of several workers are averaged; leave this layer out"
        )


def _check_exact(state: Mapping[str, keras.Variable]) -> None:
    for path, v in state.items():
        if "int" in v.dtype and np.abs(v.numpy()).max(initial=0) > EXACT:
            raise ValueError(
                f"variable {path!r} has whole numbers above {EXACT:,}, but state is stored as float32, which is exact "
                "only up to that; start it at 0 and add the offset where it is used"
            )


def values_of(model: keras.Model, paths: Collection[str]) -> dict[str, np.ndarray]:
    """Returns the values of the variables of these paths, in the model's order."""
    return {path: np.asarray(v.numpy()) for path, v in Paths(model).named(model.variables).items() if path in paths}


def describe(values: Mapping[str, np.ndarray], adapted: Sequence[State] = ()) -> FrozenWeights:
    digest = hashlib.sha256()
    for path, value in [*sorted(values.items()), *_named(adapted).items()]:
        digest.update(f"{path} {value.dtype} {value.shape} ".encode())
        digest.update(np.ascontiguousarray(value).tobytes())
    nbytes = sum(value.nbytes for value in values.values())
    return FrozenWeights(tuple(values), nbytes, digest.hexdigest() if values or adapted else "")


def write(file: Path, frozen: Frozen) -> None:
    arrays: dict[str, Any] = {f"{WEIGHTS}{path}": value for path, value in frozen.weights.items()}
    np.savez(file, **arrays, **_named(frozen.adapted))


def read(file: Path) -> Frozen:
    weights: dict[str, np.ndarray] = {}
    adapted: dict[int, dict[str, np.ndarray]] = {}
    for name, value in read_npz(file).items():
        if name.startswith(WEIGHTS):
            weights[name.removeprefix(WEIGHTS)] = value
        else:
            _, number, of_layer = name.split("/", 2)
            adapted.setdefault(int(number), {})[of_layer] = value
    return Frozen(weights, [adapted[number] for number in sorted(adapted)])


def _named(adapted: Sequence[State]) -> dict[str, Any]:
    return {f"{ADAPTED}{number}/{name}": value for number, one in enumerate(adapted) for name, value in one.items()}
