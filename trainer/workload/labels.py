"""Checks unusual labels with the loss, which alone decides whether NaN or a non-class is valid."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from trainer.workload.data.errors import DataError
from trainer.workload.data.examples import DataSet, LabelFault, Nest
from trainer.workload.error_text import one_paragraph
from trainer.workload.objective import Objective
from trainer.workload.output_checks import IGNORE, OF_ANY_NUMBERS, function_of, option_of

NUMBERS = (*OF_ANY_NUMBERS, keras.losses.cosine_similarity)  # losses of Keras that accept any integer as a number


def for_loss(objective: Objective, data: DataSet) -> DataSet:
    """Returns the data for the loss: one that is not Keras's may ignore labels that are not finite."""
    return data.with_any_labels() if is_own(objective) else data


def check(objective: Objective, faults: Iterable[LabelFault]) -> list[LabelFault]:
    """Returns the faults to try, because the loss is not one of Keras.

    Raises:
        DataError: for labels that the loss does not accept.
    """
    if is_own(objective):
        return list(faults)
    for fault in faults:
        if not fault.values or not all(loss.takes(fault.values) for loss in _losses(objective)):
            raise DataError(fault.message)
    return []


def check_tried(fault: LabelFault, outputs: Nest, compute: Callable[[Nest], tuple[tf.Tensor, tf.Tensor]]) -> None:
    """Computes the loss and its gradient for examples whose labels may be invalid.

    Args:
        compute: returns (loss, sums of the metrics) for outputs.

    Raises:
        DataError: if one is not finite, or the loss or a metric cannot be computed.
    """
    flat = [one for one in tf.nest.flatten(outputs) if one.dtype.is_floating]
    try:
        with tf.GradientTape() as tape:
            tape.watch(flat)
            loss, _ = compute(outputs)
        gradients = [tf.convert_to_tensor(one) for one in tape.gradient(loss, flat) if one is not None]
    except (ValueError, TypeError, tf.errors.InvalidArgumentError) as error:
        raise DataError(
            f"{fault.message}; loss and metrics cannot be computed for it: {one_paragraph(error)}"
        ) from error
    if not np.isfinite(loss).all():
        raise DataError(f"{fault.message}; the loss for such examples is {float(loss)}")
    if not all(np.isfinite(one).all() for one in gradients):
        raise DataError(
            f"{fault.message}; the loss for such examples is finite, but its gradient is not: replace these labels "
            "before they are used in a computation, e.g. y = ops.where(ops.isnan(y), outputs, y)"
        )


class _Loss(NamedTuple):
    """A loss that a model was compiled with."""

    function: Callable[..., Any] | None  # of keras.losses; None: another loss
    ignored: int | None  # the class that it ignores

    def takes(self, values: Iterable[int]) -> bool:
        """Whether it accepts integers that are not classes."""
        return self.function in NUMBERS or (self.ignored is not None and set(values) == {self.ignored})


def is_own(objective: Objective) -> bool:
    """Whether a loss is not one of Keras."""
    if type(objective.model).compute_loss is not keras.Model.compute_loss or objective.compiled_loss is None:
        return True
    return any(loss.function is None for loss in _losses(objective))


def _losses(objective: Objective) -> list[_Loss]:
    return [_loss_of(one) for one in keras.tree.flatten(objective.compiled_loss._user_loss) if one is not None]


def _loss_of(given: Any) -> _Loss:
    """Reads a loss as `compile` takes it: a name, a function or an object."""
    loss = keras.losses.get(given)
    if isinstance(loss, keras.losses.Loss):
        return _Loss(function_of(loss), option_of(loss, IGNORE))
    return _Loss(loss if loss.__module__.startswith("keras.") else None, None)
