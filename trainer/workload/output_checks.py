"""Whether what a model returns is what its losses take: logits or probabilities, of as many classes as the data has."""

from __future__ import annotations

import inspect
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer.workload.objective import Use

NEAR = 1e-3  # to 1, of a sum of probabilities
LOGITS = "from_logits"
BINARY = (keras.losses.binary_crossentropy, keras.losses.binary_focal_crossentropy)


class Mismatch(ValueError):
    """Outputs that the loss does not take."""


def check_classes(use: Use, classes: int) -> None:
    """Compares the classes of the labels with those that the model tells apart.

    Args:
        classes: of the data; 0: unknown, or there are several arrays of labels.
    """
    if _function_of(use.loss) is not keras.losses.sparse_categorical_crossentropy:
        return
    if _option(use.loss, "ignore_class") is not None:
        return
    needed = classes or int(tf.reduce_max(tf.cast(use.labels, tf.int64))) + 1
    given = use.outputs.shape[-1] if use.outputs.shape.rank else needed
    if given < needed:
        raise Mismatch(
            f"the data has labels 0..{needed - 1}, but the model has {given} outputs{_in(use)}: end it with {needed}, "
            "e.g. Dense(spec.classes)"
        )


def check_probabilities(use: Use) -> None:
    """Refuses outputs that are not probabilities, for a loss that takes these."""
    values = np.asarray(use.outputs, np.float32)
    if _option(use.loss, LOGITS) is False and not bool(((values >= 0) & (values <= 1)).all()):
        raise Mismatch(
            f"{use.loss.name} takes probabilities, but the model's outputs{_in(use)} range from {values.min():.3g} to "
            f"{values.max():.3g}: end it with a softmax or sigmoid, or give the loss from_logits=True"
        )


def are_taken_for_logits(use: Use) -> bool:
    """Whether outputs look like probabilities, and the loss takes logits."""
    if not _option(use.loss, LOGITS):
        return False
    values = np.asarray(use.outputs, np.float32)
    in_range = bool(((values >= 0) & (values <= 1)).all()) and len(np.unique(values)) > 1
    return in_range and (_is_binary(use) or bool((np.abs(values.sum(-1) - 1) < NEAR).all()))


def not_logits(use: Use) -> Mismatch:
    like = "lie in 0..1" if _is_binary(use) else "lie in 0..1 and sum to 1"
    return Mismatch(
        f"{use.loss.name} takes logits, but the model's outputs{_in(use)} {like}: remove the softmax or sigmoid of its "
        "last layer, or give the loss from_logits=False; in a config, type model.loss_options.from_logits=false"
    )


def _in(use: Use) -> str:
    return f" in {use.name}" if use.name else ""


def _is_binary(use: Use) -> bool:
    """Whether each output is for itself, so that they do not sum to 1."""
    return _function_of(use.loss) in BINARY or use.outputs.shape.rank < 2 or use.outputs.shape[-1] == 1


def _function_of(loss: keras.losses.Loss) -> Any:
    """The function of keras.losses that a loss computes, whether it was given by a name or as an object."""
    return getattr(loss, "fn", None)


def _option(loss: keras.losses.Loss, name: str) -> Any:
    """What an option of a loss is set to; None if it has no such option."""
    if hasattr(loss, name):
        return getattr(loss, name)
    function = _function_of(loss)
    parameter = inspect.signature(function).parameters.get(name) if function is not None else None
    default = None if parameter is None or parameter.default is inspect.Parameter.empty else parameter.default
    return getattr(loss, "_fn_kwargs", {}).get(name, default)
