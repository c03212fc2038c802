"""The loss scale of float16 training: part of a run's state, adjusted by each update as in Keras's LossScaleOptimizer.

float16 has no numbers below 6e-8, so small gradients would vanish: the loss is multiplied by a scale, and the gradients
are divided by it. If they overflow, the update is skipped and the scale is halved; it doubles after many good updates.
"""

import tensorflow as tf

from trainer.plan.layout import Parameter

PARAMETER = Parameter("trainer/loss_scale", (2,), trainable=False)  # the scale, and the good updates since it moved
FIRST = (2.0**15, 0.0)
LOWEST = 1.0  # if gradients overflow at this scale, it is not the cause
GROWTH_STEPS = 2000


def moved(scale: tf.Tensor, overflow: tf.Tensor, used: tf.Tensor) -> tf.Tensor:
    """Returns the scale [2] after an update.

    Args:
        scale: [2] before it.
        overflow: [] bool: a gradient was not finite, so the update was skipped.
        used: [] the factor of the gradient's loss; if the scale has been halved since, it is not halved again.
    """
    factor, good = tf.unstack(scale)
    grows = good + 1 >= GROWTH_STEPS
    up = tf.stack([tf.where(grows, factor * 2, factor), tf.where(grows, 0.0, good + 1)])
    down = tf.stack([tf.where(used > factor, factor, tf.maximum(factor / 2, LOWEST)), 0.0])
    return tf.where(overflow, down, up)
