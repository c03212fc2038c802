"""Finds layers and losses whose result for one example depends on the other examples of its batch.

Parts of a batch give another result than the whole. Two batches are computed that differ in their last examples: a
layer with other values for the first ones mixes them. BatchNormalization is excluded: it is known to do so.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer.workload import labels, step
from trainer.workload.counts import Counting
from trainer.workload.data.examples import Batch
from trainer.workload.objective import Objective
from trainer.workload.patches import patched
from trainer.workload.paths import Paths

OF_KERAS = ("keras.src.layers.", "keras.src.models.")  # modules
Noted = list[tuple[str, list[np.ndarray]]]  # what was called, in the order in which it ended, and its outputs
Call = Callable[..., Any]


def find(objective: Objective, batch: Batch) -> tuple[str, ...]:
    """Lists what mixes examples, and state that is not a mean: layer center, the loss std, the state seen/total."""
    found: list[str] = []
    for find_some in (_in_calls, _loss):
        with suppress(Exception):  # of many types; nothing is known then
            found += find_some(objective, batch)
    return tuple(found)


def _in_calls(objective: Objective, batch: Batch) -> Iterator[str]:
    """Yields the first layer that mixes examples, if the outputs depend on it, and state that is not a mean."""
    if not _may_mix(objective.model):
        return
    size = len(batch.tensors[0])
    kept = -(-size // 2)
    first, state = _call(objective, batch, range(size))
    other, _ = _call(objective, batch, [*range(kept), *range(size - kept)])
    differing = [
        name
        for (name, own), (_, others) in zip(first, other, strict=True)
        if any(
            _differ(one[:kept], another[:kept]) for one, another in zip(own, others, strict=True) if len(one) == size
        )
    ]
    if differing and differing[-1] == first[-1][0]:  # the model itself ends last
        yield f"layer {differing[0]}"
    if state:
        parts = [(len(rows), _call(objective, batch, rows)[1]) for rows in (range(kept), range(kept, size))]
        for path, value in state.items():
            if _differ(value, np.asarray(sum(count * values[path] for count, values in parts)) / size):
                yield f"the state {path}"


def _may_mix(model: keras.Model) -> bool:
    """Whether a model contains more than Keras's layers, which do not mix: a Lambda, an operation."""
    for layer in model._flatten_layers():
        is_of_keras = type(layer).__module__.startswith(OF_KERAS) and not isinstance(layer, keras.layers.Lambda)
        if not is_of_keras or not all(isinstance(one, keras.Layer) for one in getattr(layer, "operations", ())):
            return True
    return False


def _loss(objective: Objective, batch: Batch) -> Iterator[str]:
    """Yields the loss, if it is the user's own and its mean over a batch is not that of the means over its parts."""
    size, counting = len(batch.tensors[0]), Counting()
    if objective.is_summed or not labels.is_own(objective):
        return
    model, options = objective.model, {"training": False} if step.takes_training(objective.model) else {}
    outputs = model(objective.inputs(batch.features), **options)
    known = [(v, tf.convert_to_tensor(v.value)) for v in model.variables]

    def value(rows: Sequence[int]) -> float:
        compute = partial(objective.compute, known, _rows(batch, rows), own=[], training=True, counting=counting)
        return len(rows) * float(compute(outputs=tf.nest.map_structure(lambda one: tf.gather(one, rows), outputs))[0])

    whole = value(range(size))
    if counting.size or counting.unknown:
        return
    if _differ(np.array(whole), np.array(value(range(size // 2)) + value(range(size // 2, size)))):
        yield objective.text.partition(";")[0].replace("loss: ", "the loss ", 1)


def _call(objective: Objective, batch: Batch, rows: Sequence[int]) -> tuple[Noted, dict[str, np.ndarray]]:
    """Calls the model in training; returns what was called and the changed state; repeats its random draws."""
    noted: Noted = []
    model, paths = objective.model, Paths(objective.model)
    options = {"training": True} if step.takes_training(model) else {}
    tf.random.set_seed(0)
    with keras.StatelessScope() as scope, _noting(noted):
        model(objective.inputs(_rows(batch, rows).features), **options)
    changed = {path: scope.get_current_value(v) for path, v in paths.named(model.non_trainable_variables).items()}
    return noted, {path: np.asarray(value, np.float64) for path, value in changed.items() if value is not None}


@contextmanager
def _noting(noted: Noted) -> Iterator[None]:
    """Records the outputs of layers and operations; BatchNormalization computes as in inference."""

    def noting(call: Call) -> Call:
        def call_and_note(operation: Any, *args: Any, **options: Any) -> Any:
            outputs = call(operation, *args, **options)
            flat = [one.numpy() for one in tf.nest.flatten(outputs) if isinstance(one, tf.Tensor) and one.shape.rank]
            noted.append((getattr(operation, "path", None) or operation.name, flat))
            return outputs

        return call_and_note

    norm = keras.layers.BatchNormalization
    normalize = norm.call
    with patched(
        (keras.Operation, "__call__", noting(keras.Operation.__call__)),
        (keras.Layer, "__call__", noting(keras.Layer.__call__)),
        (norm, "call", lambda layer, inputs, training=None, mask=None: normalize(layer, inputs, False, mask)),
    ):
        yield


def _rows(batch: Batch, rows: Sequence[int]) -> Batch:
    return batch.map(lambda values: tf.gather(values, list(rows)))


def _differ(one: np.ndarray, other: np.ndarray) -> bool:
    if one.dtype.kind not in "fV":  # bfloat16 has no separate kind
        return not np.array_equal(one, other)
    one, other = one.astype(np.float64), other.astype(np.float64)
    return not np.allclose(one, other, rtol=1e-3, atol=1e-3 * float(np.abs(one).max(initial=0.0)), equal_nan=True)
