"""Calls a loss of all labels and all outputs, which a user's file defines."""

import inspect
from collections.abc import Callable

import tensorflow as tf

from trainer.workload.data.examples import Nest
from trainer.workload.keras_internals import squeeze_or_expand_to_same_rank

WholeLoss = Callable[..., tf.Tensor]  # (labels, outputs[, weight]) -> [N] or []


def losses_of(loss: WholeLoss, labels: Nest, outputs: Nest, weights: Nest) -> tf.Tensor:
    """Returns a user's loss [N] or []; a loss without the argument `weight` is multiplied by weights afterwards.

    Raises:
        ValueError: if it returned something else, or weights have no effect on it.
    """
    if isinstance(labels, tf.Tensor) and isinstance(outputs, tf.Tensor):  # as for losses of Keras, lest they broadcast
        labels, outputs = squeeze_or_expand_to_same_rank(labels, outputs)
    takes_weights = "weight" in inspect.signature(loss).parameters
    returned = loss(labels, outputs, weight=weights) if takes_weights else loss(labels, outputs)
    count = tf.nest.flatten(outputs)[0].shape[0]
    shape = None if returned is None else tf.convert_to_tensor(returned).shape
    if shape is None or (shape.rank and None not in (shape[0], count) and shape[0] != count):
        given = "None" if shape is None else f"the shape {shape.as_list()}"
        raise ValueError(f"the loss of the user's file returned {given} for {count} examples; return [N] or a scalar")
    losses = _one_each(returned, outputs)
    if not takes_weights and weights is not None:
        losses = _weighted(losses, weights)
    return tf.reduce_mean(losses, range(1, losses.shape.rank)) if (losses.shape.rank or 0) > 1 else losses


def _weighted(losses: tf.Tensor, weights: Nest) -> tf.Tensor:
    """Multiplies losses [N, ...] by weights of examples [N], or of their parts.

    Raises:
        ValueError: if there is not a loss for each weight.
    """
    if isinstance(weights, tf.Tensor) and losses.shape.rank:
        while weights.shape.rank > losses.shape.rank and weights.shape[-1] == 1:
            weights = tf.squeeze(weights, -1)
        size = weights.shape.rank
        pairs = zip(weights.shape, losses.shape, strict=False)
        if size <= losses.shape.rank and all(None in pair or pair[0] in (1, pair[1]) for pair in pairs):
            ones = [1] * (losses.shape.rank - size)
            return losses * tf.cast(tf.reshape(weights, [*tf.unstack(tf.shape(weights)), *ones]), losses.dtype)
    given = weights.shape[1:].as_list() if isinstance(weights, tf.Tensor) else "several arrays"
    raise ValueError(
        f"the loss of the user's file returned the shape {losses.shape.as_list()}, and the weights of an example are "
        f"{given}: return a loss for each weight, or take them as loss(y, outputs, weight=None)"
    )


def _one_each(losses: tf.Tensor, outputs: Nest) -> tf.Tensor:
    """Returns the losses, unless labels and outputs of different shapes have been combined, each with every other.

    Raises:
        ValueError: for losses [N, N] of outputs that are not.
    """
    losses = tf.convert_to_tensor(losses)
    shape = losses.shape
    is_square = shape.rank == 2 and shape[0] is not None and shape[0] == shape[1] > 1
    if is_square and all(one.shape.rank != 2 or one.shape[1] != shape[1] for one in tf.nest.flatten(outputs)):
        raise ValueError(f"loss returns {list(shape)}, each label with every output; return one number per example")
    return losses
