"""Tries a model on a batch before anything starts: whether its outputs fit the labels, its loss and its metrics."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer.workload import inputs, labels, mixing, step, tracing
from trainer.workload.compiled_loss import Use
from trainer.workload.data import DataError, DataSet
from trainer.workload.data.examples import (
    ArraySpec,
    Batch,
    Examples,
    LabelFault,
    Nest,
    Spec,
    Stream,
    StreamContext,
    describe_nest,
    map_nest,
)
from trainer.workload.error_text import one_paragraph
from trainer.workload.objective import Doubt, Objective
from trainer.workload.output_checks import Mismatch, broadcast, check_classes, contradiction, is_doubtful

EXAMPLES = 7  # of the batch; an unusual size, so that a model with a fixed size is noticed
UNUSED, REMEDY = "feature {} is not an input of the model, and is not used", "leave it out of the data to hide this"
UNCALLED = ("fit", "evaluate", "predict", "predict_step")  # methods of Keras that a run does without
FAR = -3.0  # times the weights, for outputs that are far from these


def run(objective: Objective, data: DataSet, *, has_values: bool, batch: int = 0) -> int:
    """Computes the loss and the metrics of a batch; after that the objective knows its size.

    Args:
        has_values: whether the model's variables have values; without them, the batch is traced and not computed.
        batch: examples that the model is given at once in training; 0: unknown.

    Returns:
        The number of examples that the model takes at once; 0: any.

    Raises:
        ValueError: if the loss or a metric cannot be computed, or outputs and loss contradict each other.
    """
    is_soft = tf.config.get_soft_device_placement()
    tf.config.set_soft_device_placement(True)  # a layer may name a device that only tasks have
    objective.doubts += [
        Doubt(UNUSED.format(name), REMEDY) for name in inputs.unused(objective.model, data.spec.features)
    ]
    kind = type(objective.model)
    objective.doubts += [
        Doubt(f"{kind.__name__} has its own {name}, which is never called", "put what it does into call, or the data")
        for name in UNCALLED
        if getattr(kind, name) is not getattr(keras.Model, name)
    ]
    try:
        data, tried = labels.for_loss(objective, data), labels.check(objective, data.faults)
        if has_values:
            size = _compute_sized(objective, data, batch)
            for fault in tried:
                _try_labels(objective, data, fault, size or EXAMPLES)
            return size
        tracing.trace(objective, data.spec)
        return 0
    except (ValueError, TypeError, KeyError, tf.errors.OpError) as error:
        if isinstance(error, Mismatch | DataError) or error.__traceback__ is None:
            raise
        raise ValueError(f"{objective.text}; it cannot be computed: {one_paragraph(error)}") from error
    finally:
        tf.config.set_soft_device_placement(is_soft)


def _compute_sized(objective: Objective, data: DataSet, batch: int) -> int:
    """Tries a few examples, and batches of other sizes if the model cannot compute these; returns the only size."""
    try:
        tried = _compute(objective, data, EXAMPLES)
    except Exception:  # of many types: the model may be anything
        for size in filter(None, (batch, step.batch_of(objective.model))):
            with suppress(Exception):
                _compute(objective, data, size)
                return size
        raise
    objective.mixing = mixing.find(objective, tried)
    return 0


def _compute(objective: Objective, data: DataSet, count: int) -> Batch:
    model, batch = objective.model, _first_batch(data.train, count)
    options = {"training": False} if step.takes_training(model) else {}
    before = _values_of_metrics(model)
    outputs = model(objective.inputs(batch.features), **options)
    _check_layers_count_nothing(before)
    known = [(v, tf.convert_to_tensor(v.value)) for v in model.variables]
    compute = partial(objective.compute, known, batch, own=model.losses, training=True)  # weighted by class
    try:
        sums = _compute_checked(compute, outputs, objective, batch, data.spec)
    except (ValueError, TypeError, KeyError, tf.errors.InvalidArgumentError) as error:
        if isinstance(error, Mismatch):
            raise
        named = _by_output(model, outputs)
        given = f"labels {describe_nest(_specs(batch.labels))}, outputs {describe_nest(_specs(named))}"
        remedy = ""
        if isinstance(batch.labels, dict) and isinstance(named, dict) and batch.labels.keys() != named.keys():
            remedy = f"give the labels the names of the outputs with a loss, of {', '.join(named)}, and no others"
        message = f"{objective.text}; it cannot be computed from {given}: {one_paragraph(error)}"
        raise Mismatch(message, remedy) from error
    _check_metrics(model)
    _check_results(objective.results(sums))
    if _has_own_metrics(model):
        twice = compute(outputs=outputs, before=sums)[1]
        _check_sums(objective.results(2 * sums), objective.results(twice))
    return batch


def _by_output(model: keras.Model, outputs: Nest) -> Nest:
    """Returns several outputs by the names that labels and losses may have, if the model names them."""
    names = getattr(model, "output_names", None) or ()
    is_listed = isinstance(outputs, list | tuple) and len(outputs) == len(names) == len(set(names))
    return dict(zip(names, outputs, strict=True)) if is_listed else outputs


def _try_labels(objective: Objective, data: DataSet, fault: LabelFault, count: int) -> None:
    """Computes the loss of examples, the first of which has labels that may be invalid."""
    examples = data.train if fault.part == "train" else data.evaluate
    batch = _first_batch(examples, count, begin=fault.example)
    outputs = objective.model(objective.inputs(batch.features))
    known = [(v, tf.convert_to_tensor(v.value)) for v in objective.model.variables]
    compute = partial(objective.compute, known, batch, own=objective.model.losses, training=True)
    labels.check_tried(fault, outputs, lambda outputs: compute(outputs=outputs))


def _compute_checked(
    compute: Callable[..., tuple[tf.Tensor, tf.Tensor]], outputs: Nest, objective: Objective, batch: Batch, spec: Spec
) -> tf.Tensor:
    """Returns the sums of the metrics of a batch, after checking that each loss fits its outputs."""
    classes = spec.classes if isinstance(spec.labels, ArraySpec) else 0
    first: list[Use] = []

    def check(use: Use) -> None:
        check_classes(use, classes)
        objective.doubts += filter(None, [broadcast(use)])
        first.append(use)

    def check_again(use: Use) -> None:
        before = next(again)
        if is_doubtful(before) and (mismatch := contradiction(use, before.outputs)):
            if not (mismatch.is_clipped and objective.is_given_loss):
                raise mismatch
            objective.doubts.append(mismatch.doubt)

    loss, sums = compute(outputs=outputs, check=check)
    if loss.shape.rank:
        raise Mismatch(
            f"{objective.text}; it has the shape {loss.shape.as_list()} instead of one number: take its mean"
        )
    if any(map(is_doubtful, first)):
        again = iter(first)
        compute(outputs=_of_other_weights(objective, batch), check=check_again)
    return sums


def _first_batch(examples: Examples | Stream, count: int, *, begin: int = 0) -> Batch:
    """Returns the first examples, or those from index `begin` on."""
    if isinstance(examples, Stream):
        batches = examples.open(StreamContext(0, 1, count, 0, 0, is_training=False))
        return next(iter(batches)).map(tf.constant)
    count = min(count, examples.count)
    arrays = tuple(tf.constant(array) for array in examples.arrays)
    return Batch(*examples.fetch((tf.range(count, dtype=tf.int64) + begin) % examples.count, arrays))


def _values_of_metrics(model: keras.Model) -> list[tuple[keras.Variable, np.ndarray]]:
    return [(v, np.copy(np.asarray(_first_value(v)))) for metric in model.metrics for v in metric.variables]


def _check_layers_count_nothing(before: Sequence[tuple[keras.Variable, np.ndarray]]) -> None:
    """Compares the variables of metrics with their values before a model was called."""
    for variable, value in before:
        if not np.array_equal(_first_value(variable), value):
            name = variable.path.partition("/")[0]
            variable.assign(value)
            raise Mismatch(
                f"metric {name} is updated when a layer is called, on each worker for itself; give it to compile(), or "
                "return it from metrics()"
            )


def _check_metrics(model: keras.Model) -> None:
    for variable in (variable for metric in model.metrics for variable in metric.variables):
        if np.asarray(_first_value(variable)).any():
            raise Mismatch(f"metric {variable.path} does not start at zero, so what workers count cannot be summed")


def _check_results(results: Mapping[str, tf.Tensor]) -> None:
    for name, value in results.items():
        if value.shape.rank:
            raise Mismatch(
                f"metric {name} returns values of the shape {value.shape.as_list()}; a metric is one number, e.g. "
                'keras.metrics.F1Score(average="macro")'
            )


def _has_own_metrics(model: keras.Model) -> bool:
    """Whether some metric is not one of Keras, whose metrics can all be summed."""
    compiled = model._compile_metrics.metrics if model._compile_metrics is not None else []
    return any(not type(metric).__module__.startswith("keras.") for metric in (*model.metrics, *compiled))


def _check_sums(of_sums: Mapping[str, tf.Tensor], of_one_process: Mapping[str, tf.Tensor]) -> None:
    """Compares the metrics of two equal batches: from the sum of what each adds, and one batch after the other."""
    for name, value in of_one_process.items():
        if not np.allclose(of_sums[name], value, rtol=1e-3, atol=1e-6, equal_nan=True):
            raise Mismatch(
                f"metric {name}: after two batches it is {float(value):.6g}, but {float(of_sums[name]):.6g} from the "
                "sum of what each adds to its variables; on several workers only sums can be counted"
            )


def _first_value(variable: keras.Variable) -> Any:
    """Returns the initial value, also of a variable that was made without one."""
    if variable._value is None:
        return variable._initializer(variable.shape, dtype=variable.dtype)
    return variable.value


def _of_other_weights(objective: Objective, batch: Batch) -> Nest:
    """Returns outputs under other weights, which only a softmax or sigmoid keeps in 0..1, unlike small logits."""
    model = objective.model
    drawn = np.random.default_rng(0)
    other = [v.value * FAR + drawn.normal(size=v.shape).astype(v.dtype) for v in model.trainable_variables]
    state = [v.value for v in model.non_trainable_variables]
    outputs, _ = model.stateless_call(other, state, objective.inputs(batch.features))
    return outputs


def _specs(nest: Nest) -> Nest:
    return map_nest(lambda one: ArraySpec(tuple(one.shape[1:]), one.dtype.name), nest)
