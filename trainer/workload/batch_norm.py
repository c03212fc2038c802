"""Replaces BatchNorm by TensorFlow's fused kernel while a replica step is traced.

Keras 3 composes a BatchNormalization of about ten operations, each of which reads and writes all activations in both
passes. The kernel gives the same result up to rounding, in one operation for each pass; its bits depend on its number
of threads, as those of a convolution's gradient do.

Steps that XLA compiles do not use it: XLA computes the variance as E[x^2] - E[x]^2 (tensorflow/tensorflow#118701),
which loses all digits for a channel whose mean is far above its deviation.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import keras
import tensorflow as tf

from trainer.workload.patches import patched


@contextmanager
def fused(model: keras.Model) -> Iterator[None]:
    """Lets the model's BatchNormalization layers use the kernel in training; some stay as they are.

    These are subclassed, frozen or synchronized, have renorm or a mask, normalize another axis than the last, or
    compute in another type than float32 (layers of a lower precision compute BatchNorm in float32).
    """
    layers = [layer for layer in model._flatten_layers(include_self=False) if _can_fuse(layer)]
    with patched(*((layer, "call", _call_fused(layer)) for layer in layers)):
        yield


def _can_fuse(layer: keras.Layer) -> bool:
    if type(layer) is not keras.layers.BatchNormalization or "call" in vars(layer):
        return False
    return layer.trainable and not layer.synchronized and not getattr(layer, "renorm", False)


def _call_fused(layer: keras.layers.BatchNormalization) -> Callable[..., tf.Tensor]:
    call = layer.call

    @functools.wraps(call)
    def on_kernel(inputs: tf.Tensor, training: bool | None = None, mask: tf.Tensor | None = None) -> tf.Tensor:
        values = tf.cast(inputs, keras.backend.result_type(inputs.dtype, "float32"))
        is_last = layer.axis in (-1, len(inputs.shape) - 1)
        if not training or mask is not None or not is_last or values.dtype != tf.float32:
            return call(inputs, training=training, mask=mask)
        channels, rank = layer.moving_mean.shape[0], len(inputs.shape)
        outer = [-1, 1] if rank == 2 else [tf.shape(inputs)[0], -1]
        normalized, mean, variance = _normalize(
            values if rank == 4 else tf.reshape(values, [*outer, 1, channels]),
            keras.ops.cast(layer.gamma, "float32") if layer.scale else tf.ones([channels]),
            keras.ops.cast(layer.beta, "float32") if layer.center else tf.zeros([channels]),
            layer.epsilon,
        )
        for moving, of_batch in ((layer.moving_mean, mean), (layer.moving_variance, variance)):
            moving.assign(keras.ops.cast(moving, "float32") * layer.momentum + of_batch * (1.0 - layer.momentum))
        if rank != 4:  # otherwise it may feed a relu, which TensorFlow then fuses into the kernel
            normalized = tf.reshape(normalized, tf.shape(inputs))
        return tf.cast(normalized, layer.compute_dtype)

    return on_kernel


def _normalize(
    values: tf.Tensor, scale: tf.Tensor, offset: tf.Tensor, epsilon: float
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns [N, H, W, C] normalized, and mean and variance [C] of each channel."""
    normalized, mean, unbiased, *_ = tf.raw_ops.FusedBatchNormV3(
        x=values, scale=scale, offset=offset, mean=[], variance=[], epsilon=epsilon, is_training=True
    )
    count = tf.cast(tf.size(values) // tf.size(scale), tf.float32)
    # Keras wants the variance of the batch, the kernel returns the unbiased one, which one value does not have.
    return normalized, mean, tf.math.multiply_no_nan(unbiased, (count - 1.0) / count)
