"""A multilayer perceptron."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import keras


def mlp(
    input_shape: tuple[int, ...], classes: int, *, depth: int = 2, width: int = 128, dropout: float = 0.0
) -> keras.Model:
    """Builds Flatten - depth x (Dense, relu - Dropout) - Dense.

    Args:
        input_shape: [...] of one example; any shape.
        classes: logits of one example.
        depth: hidden layers; 0 is a linear model.
        width: units of each hidden layer.
        dropout: share of each layer's activations dropped in training; 0 leaves the layers out.

    Returns:
        A model from [N, ...] to logits [N, classes].
    """
    import keras

    features = keras.Input(input_shape, name="features")
    x = keras.layers.Flatten(name="flatten")(features)
    for layer in range(depth):
        x = keras.layers.Dense(width, activation="relu", name=f"dense{layer}")(x)
        if dropout:
            x = keras.layers.Dropout(dropout, name=f"dropout{layer}")(x)
    return keras.Model(features, keras.layers.Dense(classes, name="logits")(x), name="mlp")
