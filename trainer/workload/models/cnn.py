"""A small convolutional network."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trainer.workload.models.images import check_image_shape

if TYPE_CHECKING:
    import keras


def cnn(
    input_shape: tuple[int, ...],
    classes: int,
    *,
    filters: int = 32,
    units: int = 128,
    dropout: float = 0.0,
    l2: float = 0.0,
) -> keras.Model:
    """Builds Conv 3x3, relu - Flatten - Dense, relu - Dropout - Dense.

    Args:
        input_shape: [height, width, channels] of one example.
        classes: logits of one example.
        filters: channels of the convolution.
        units: width of the hidden dense layer.
        dropout: share of the hidden activations dropped in training; 0 leaves the layer out.
        l2: times the sum of the squares of all kernels is added to the loss; biases are left alone.

    Returns:
        A model from [N, height, width, channels] to logits [N, classes].
    """
    import keras

    check_image_shape("cnn", input_shape)
    penalty = keras.regularizers.L2(l2) if l2 else None
    features = keras.Input(input_shape, name="features")
    x = keras.layers.Conv2D(filters, 3, activation="relu", kernel_regularizer=penalty, name="conv")(features)
    x = keras.layers.Flatten(name="flatten")(x)
    x = keras.layers.Dense(units, activation="relu", kernel_regularizer=penalty, name="dense")(x)
    if dropout:
        x = keras.layers.Dropout(dropout, name="dropout")(x)
    logits = keras.layers.Dense(classes, kernel_regularizer=penalty, name="logits")(x)
    return keras.Model(features, logits, name="cnn")
