"""Checks that a model's outputs fit its losses: logits or probabilities, for each class of the data."""

import inspect
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer.workload.compiled_loss import Use
from trainer.workload.keras_internals import squeeze_or_expand_to_same_rank
from trainer.workload.keras_names import LOGITS
from trainer.workload.objective import Doubt

NEAR = 1e-3  # to 1, of a sum of probabilities
IGNORE = "ignore_class"  # an option of a loss: the class that means "no label"
FAR_OFF = 1.0  # from 0..1
OF_ANY_NUMBERS = (
    *(keras.losses.mean_squared_error, keras.losses.mean_absolute_error, keras.losses.mean_absolute_percentage_error),
    *(keras.losses.huber, keras.losses.log_cosh, keras.losses.hinge, keras.losses.squared_hinge),
)
# Losses that compare each label with the output at its place.
OF_PAIRS = (*OF_ANY_NUMBERS, keras.losses.mean_squared_logarithmic_error, keras.losses.poisson)
BINARY = (keras.losses.binary_crossentropy, keras.losses.binary_focal_crossentropy)


class Mismatch(ValueError):
    """The outputs do not fit the loss."""

    def __init__(self, message: str, remedy: str = "", *, is_clipped: bool = False) -> None:
        """Begins.

        Args:
            is_clipped: whether Keras still accepts these outputs, clipped to 0..1.
        """
        super().__init__(f"{message}: {remedy}" if remedy else message)
        self.doubt, self.is_clipped = Doubt(message, remedy), is_clipped


def check_classes(use: Use, classes: int) -> None:
    """Compares the classes of the labels with those of the model.

    Args:
        classes: of the data; 0: unknown, or there are several arrays of labels.
    """
    if function_of(use.loss) is not keras.losses.sparse_categorical_crossentropy or not _are_tensors(use):
        return
    if use.labels.shape == use.outputs.shape and use.labels.shape.rank > 1 and use.labels.shape[-1] > 1:
        raise Mismatch(
            f"{use.loss.name} takes the number of a class, but the labels{_in(use)} have the shape of the outputs",
            "name categorical_crossentropy instead, or give labels.argmax(-1)",
        )
    ignored, labels = option_of(use.loss, IGNORE), np.asarray(use.labels, np.int64)
    present = labels[labels != ignored]
    is_known = classes > 0 and ignored != classes - 1  # otherwise the highest class means "no label"
    needed = classes if is_known else int(present.max(initial=-1)) + 1
    given = use.outputs.shape[-1] if use.outputs.shape.rank else needed
    if given < needed:
        outputs = "1 output" if given == 1 else f"{given} outputs"
        binary = "; or name the loss of a single output, binary_crossentropy" if (given, needed) == (1, 2) else ""
        raise Mismatch(
            f"the data has labels 0..{needed - 1}, but the model has {outputs}{_in(use)}: give it {needed}, "
            f"e.g. Dense(classes){binary}{f'; the loss ignores only the label {ignored}' if ignored else ''}"
        )


def _are_tensors(use: Use) -> bool:
    """Whether there are labels and outputs; names that do not match give the loss something else."""
    return isinstance(use.labels, tf.Tensor) and isinstance(use.outputs, tf.Tensor)


def broadcast(use: Use) -> Doubt | None:
    """Returns a warning if the loss compares each label with several outputs, or each output with several labels."""
    if function_of(use.loss) not in OF_PAIRS or not _are_tensors(use):
        return None
    labels, outputs = squeeze_or_expand_to_same_rank(use.labels, use.outputs)
    if labels.shape == outputs.shape:
        return None
    given, returned = (list(one.shape[1:]) for one in (labels, outputs))
    message = (
        f"{use.loss.name}: labels of shape {given} and outputs{_in(use)} of shape {returned} are broadcast, as in Keras"
    )
    return Doubt(message, "let the last layer return the shape of the labels")


def is_doubtful(use: Use) -> bool:
    """Whether outputs may not fit their loss: they look like probabilities but it takes logits, or the reverse.

    Outputs of an untrained model may look so by chance: `contradiction` decides.
    """
    of_logits, values = option_of(use.loss, LOGITS), np.asarray(use.outputs, np.float32)
    if of_logits is None:
        return False
    return _look_like_probabilities(use, values) if of_logits else not _is_within(use, values, 0.0)


def contradiction(use: Use, first: tf.Tensor) -> Mismatch | None:
    """Returns the problem of doubtful outputs, if they look the same with other weights.

    Args:
        use: with the outputs of other weights.
        first: those of the model's own.
    """
    values, before = np.asarray(use.outputs, np.float32), np.asarray(first, np.float32)
    if np.array_equal(values, before):  # nothing can be said of a layer whose weights are frozen
        return None
    if not option_of(use.loss, LOGITS):
        if _is_within(use, values, FAR_OFF):  # as of a resized picture, whose edges overshoot
            return None
        return Mismatch(
            f"{use.loss.name} takes probabilities, but the model's outputs{_in(use)} range from {before.min():.3g} to "
            f"{before.max():.3g}",
            "end it with a softmax or sigmoid, or give the loss from_logits=True",
            is_clipped=True,
        )
    if not _look_like_probabilities(use, values) or len(np.unique(values)) == 1:
        return None
    like = "lie in 0..1" if _is_binary(use) else "lie in 0..1 and sum to 1"
    return Mismatch(
        f"{use.loss.name} takes logits, but the model's outputs{_in(use)} {like}: remove the softmax or sigmoid of its "
        "last layer, or give the loss from_logits=False; in a config, type model.loss_options.from_logits=false"
    )


def _look_like_probabilities(use: Use, values: np.ndarray) -> bool:
    if not bool(((values >= 0) & (values <= 1)).all()):
        return False
    axis = option_of(use.loss, "axis")
    return _is_binary(use) or bool((np.abs(values.sum(-1 if axis is None else axis) - 1) < NEAR).all())


def _is_within(use: Use, values: np.ndarray, margin: float) -> bool:
    """Whether values are in 0..1, give or take a margin; one loss divides them by their sum."""
    highest = np.inf if function_of(use.loss) is keras.losses.categorical_crossentropy else 1 + margin
    return bool(((values >= -margin) & (values <= highest)).all())


def _in(use: Use) -> str:
    return f" in {use.name}" if use.name else ""


def _is_binary(use: Use) -> bool:
    """Whether outputs are independent, so that they do not sum to 1."""
    return function_of(use.loss) in BINARY or use.outputs.shape.rank < 2 or use.outputs.shape[-1] == 1


def function_of(loss: keras.losses.Loss) -> Any:
    """Returns the function of keras.losses that a loss computes, whether it was given by a name or as an object."""
    function = getattr(loss, "fn", None)
    return function if getattr(function, "__module__", "").startswith("keras.") else None


def option_of(loss: keras.losses.Loss, name: str) -> Any:
    """Returns an option of a loss of Keras; None if it has no such option."""
    function = function_of(loss)
    parameter = inspect.signature(function).parameters.get(name) if function is not None else None
    return None if parameter is None else getattr(loss, "_fn_kwargs", {}).get(name, parameter.default)
