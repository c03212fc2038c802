"""The models of the comparison that are not shipped: the `user=` file of our own runs, and what peers build from."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

MLP_POOL = (2, 3)  # pixels that become one input: 126 inputs of an image of 28x28
RESNET50_BLOCKS = ((64, 3), (128, 4), (256, 6), (512, 3))  # width and number of bottleneck blocks of each stage


def noop(input_shape: tuple[int, ...], classes: int) -> keras.Model:
    """Builds a model with nothing to compute: the logits are one small parameter, the same for every example."""
    features = keras.Input(input_shape)
    return keras.Model(features, _Constant(classes, name="logits")(features), name="noop")


def mlp40(input_shape: tuple[int, ...], classes: int, *, depth: int = 40, width: int = 128) -> keras.Model:
    """Builds a model with many small messages: 40 hidden dense layers, 82 parameters, 2.6 MB in total.

    Args:
        input_shape: [height, width, channels] of one example.
        classes: logits of one example.
        depth: hidden layers.
        width: units of each.
    """
    features = keras.Input(input_shape)
    x = keras.layers.Flatten()(keras.layers.AveragePooling2D(MLP_POOL)(features))
    for layer in range(depth):
        x = keras.layers.Dense(width, activation="relu", kernel_initializer="he_normal", name=f"dense{layer}")(x)
    return keras.Model(features, keras.layers.Dense(classes, name="logits")(x), name="mlp40")


def resnet50(input_shape: tuple[int, ...], classes: int) -> keras.Model:
    """Builds a model with much to send and little to compute: the 161 trainable shapes of ResNet-50, 25.6 M parameters.

    The convolutions themselves would take seconds a step on a CPU. Each parameter enters the logits by the sum of its
    squares instead, so that every gradient exists, in its shape, and depends on the batch.
    """
    features = keras.Input(input_shape)
    x = keras.layers.Flatten()(features)
    return keras.Model(features, _Products(resnet50_shapes(), classes, name="products")(x), name="resnet50")


def resnet50_shapes(classes: int = 1000) -> dict[str, tuple[int, ...]]:
    """Returns the parameters of He et al. 2015 (arXiv:1512.03385), table 1: 53 convolutions, 53 BatchNorms, a dense.

    Returns:
        Shapes by name: [height, width, in, out] of kernels, [channels] of gamma and beta.
    """
    shapes: dict[str, tuple[int, ...]] = {}

    def convolve(name: str, size: int, inputs: int, outputs: int) -> None:
        shapes[f"{name}_kernel"] = (size, size, inputs, outputs)
        shapes[f"{name}_gamma"] = shapes[f"{name}_beta"] = (outputs,)

    convolve("stem", 7, 3, 64)
    channels = 64
    for stage, (width, blocks) in enumerate(RESNET50_BLOCKS, start=1):
        for block in range(blocks):
            name = f"stage{stage}_block{block}"
            if block == 0:
                convolve(f"{name}_shortcut", 1, channels, 4 * width)
            convolve(f"{name}_conv1", 1, channels, width)
            convolve(f"{name}_conv2", 3, width, width)
            convolve(f"{name}_conv3", 1, width, 4 * width)
            channels = 4 * width
    return shapes | {"dense_kernel": (channels, classes), "dense_bias": (classes,)}


class _Constant(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """[N, ...] -> [N, size], a parameter [size] for each example."""

    def __init__(self, size: int, **options: Any) -> None:
        super().__init__(**options)
        self._size = size

    def build(self, input_shape: tuple[int, ...]) -> None:
        self._constant = self.add_weight(shape=(self._size,), initializer="zeros", name="constant")

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return tf.zeros([tf.shape(inputs)[0], self._size]) + self._constant


class _Products(keras.layers.Layer):  # type: ignore[misc]
    """[N, features] -> [N, classes]: the first features, scaled by the sum of the squares of all parameters."""

    def __init__(self, shapes: dict[str, tuple[int, ...]], classes: int, **options: Any) -> None:
        super().__init__(**options)
        self._shapes, self._classes = shapes, classes

    def build(self, input_shape: tuple[int, ...]) -> None:
        small = keras.initializers.RandomNormal(stddev=0.01)
        self._parameters = [
            self.add_weight(shape=shape, initializer=small, name=name) for name, shape in self._shapes.items()
        ]

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        scale = tf.add_n([tf.nn.l2_loss(tf.convert_to_tensor(parameter)) for parameter in self._parameters])
        shown = inputs[:, inputs.shape[1] // 2 :][:, : self._classes]  # the middle of an image, where it is not empty
        return shown * scale * 1e-3
