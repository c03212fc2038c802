"""Tries a model on a batch before anything starts: whether its outputs fit the labels, its loss and its metrics."""

from __future__ import annotations

import re
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer.workload import step
from trainer.workload.data import DataSet
from trainer.workload.data.examples import (
    ArraySpec,
    Batch,
    Examples,
    Nest,
    Stream,
    StreamContext,
    describe_nest,
    leaves_of,
    map_nest,
)
from trainer.workload.objective import Objective

EXAMPLES = 8  # of the batch
LOGITS = "from_logits"
NEAR = 1e-3  # to 1, of a sum of probabilities


def run(objective: Objective, data: DataSet, *, has_values: bool) -> None:
    """Computes the loss and the metrics of a batch; after that the objective knows its size.

    Args:
        has_values: whether the model's variables have values; without them, the batch is traced and not computed.

    Raises:
        ValueError: if the loss or a metric cannot be computed, or outputs and loss contradict each other.
    """
    is_soft = tf.config.get_soft_device_placement()
    tf.config.set_soft_device_placement(True)  # a layer may name a device that only tasks have
    try:
        if has_values:
            _compute(objective, data)
        else:
            step.trace(objective, data.spec)
    except (ValueError, TypeError, KeyError, tf.errors.OpError) as error:
        if isinstance(error, Mismatch) or error.__traceback__ is None:
            raise
        raise ValueError(f"{objective.text}; it cannot be computed: {_first_line(error)}") from error
    finally:
        tf.config.set_soft_device_placement(is_soft)


class Mismatch(ValueError):
    """Outputs that the loss does not take."""


def _compute(objective: Objective, data: DataSet) -> None:
    batch = _first_batch(data.train)
    model = objective.model
    options = {"training": False} if step.takes_training(model) else {}
    outputs = model(objective.inputs(batch.features), **options)
    loss = model._compile_loss._user_loss if model._compile_loss is not None else None
    if isinstance(loss, keras.losses.Loss):
        _check_logits(loss, outputs)
    _check_metrics(model)
    known = [(v, tf.convert_to_tensor(v.value)) for v in model.variables]
    try:
        objective.compute(known, batch, outputs, model.losses, training=False)
    except (ValueError, TypeError, KeyError, tf.errors.InvalidArgumentError) as error:
        given = f"labels {describe_nest(_specs(batch.labels))}, outputs {describe_nest(_specs(outputs))}"
        raise Mismatch(f"{objective.text}; it cannot be computed of {given}: {_first_line(error)}") from error


def _first_batch(examples: Examples | Stream) -> Batch:
    if isinstance(examples, Stream):
        batches = examples.open(StreamContext(0, 1, EXAMPLES, 0, 0))
        return next(iter(batches)).map(tf.constant)
    count = min(EXAMPLES, examples.count)
    arrays = tuple(tf.constant(array) for array in examples.arrays)
    return Batch(*examples.fetch(tf.range(count, dtype=tf.int64), arrays))


def _check_metrics(model: keras.Model) -> None:
    for metric in model.metrics:
        if any(v.value is not None and np.asarray(v.value).any() for v in metric.variables):
            raise Mismatch(f"metric {metric.name} does not start at zero, so what workers count cannot be summed")


def _check_logits(loss: keras.losses.Loss, outputs: Nest) -> None:
    """Compares what a loss takes outputs for, logits or probabilities, with what they look like."""
    of_logits = _option(loss, LOGITS)
    leaves = leaves_of(outputs)
    if of_logits is None or len(leaves) != 1:
        return
    values = np.asarray(leaves[0][1], np.float32)
    are_probabilities = bool(((values >= 0) & (values <= 1)).all())
    if values.shape[-1] > 1:
        are_probabilities &= bool((np.abs(values.sum(-1) - 1) < NEAR).all())
    if of_logits and are_probabilities and len(np.unique(values)) > 1:
        like = "lie in 0..1 and sum to 1" if values.shape[-1] > 1 else "lie in 0..1"
        raise Mismatch(
            f"{loss.name} takes logits, but the model's outputs {like}: remove the softmax or sigmoid of its last "
            "layer, or type model.loss_options.from_logits=false"
        )
    if not of_logits and not bool(((values >= 0) & (values <= 1)).all()):
        raise Mismatch(
            f"{loss.name} takes probabilities, but the model's outputs range from {values.min():.3g} to "
            f"{values.max():.3g}: end it with a softmax or sigmoid, or give the loss from_logits=True"
        )


def _option(loss: keras.losses.Loss, name: str) -> Any:
    if hasattr(loss, name):
        return getattr(loss, name)
    return getattr(loss, "_fn_kwargs", {}).get(name)


def _specs(nest: Nest) -> Nest:
    return map_nest(lambda one: ArraySpec(tuple(one.shape[1:]), one.dtype.name), nest)


def _first_line(error: Exception) -> str:
    """The first line of an error that says what is wrong; Keras begins with where, and colours the rest."""
    plain = re.sub(r"\x1b\[\d+m", "", str(error))
    lines = [line.strip() for line in plain.splitlines() if line.strip() and "Exception encountered when" not in line]
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
