"""The small residual network of He et al. 2015, "Deep Residual Learning for Image Recognition" (arXiv:1512.03385)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainer.workload.models.images import check_image_shape

if TYPE_CHECKING:
    import keras

STAGE_FILTERS = (16, 32, 64)


def resnet20(input_shape: tuple[int, ...], classes: int, *, blocks: int = 3) -> keras.Model:
    """Builds the ResNet for small images of section 4.2: three stages of 16, 32 and 64 filters, BatchNorm throughout.

    Shortcuts are the paper's option A, without parameters: every second pixel, and zeros for the new channels.

    Args:
        input_shape: [height, width, channels] of one example, [32, 32, 3] in the paper.
        classes: logits of one example.
        blocks: residual blocks a stage; the depth is 6 blocks + 2, so 3 gives ResNet-20.

    Returns:
        A model from [N, height, width, channels] to logits [N, classes].
    """
    import keras

    check_image_shape("resnet20", input_shape)
    if blocks < 1:
        raise ValueError(f"model resnet20 has blocks={blocks}; it must be at least 1, e.g. model.options.blocks=3")
    features = keras.Input(input_shape, name="features")
    x = _convolve(features, STAGE_FILTERS[0], strides=1, name="stem", number="")
    x = keras.layers.Activation("relu", name="stem_relu")(x)
    for stage, filters in enumerate(STAGE_FILTERS, start=1):
        for block in range(blocks):
            strides = 2 if stage > 1 and block == 0 else 1
            x = _residual_block(x, filters, strides=strides, name=f"stage{stage}_block{block}")
    x = keras.layers.GlobalAveragePooling2D(name="pool")(x)
    return keras.Model(features, keras.layers.Dense(classes, name="logits")(x), name=f"resnet{6 * blocks + 2}")


def _residual_block(inputs: Any, filters: int, *, strides: int, name: str) -> Any:
    """Adds two convolutions and the shortcut around them: [N, H, W, C] -> [N, H / strides, W / strides, filters]."""
    import keras

    x = _convolve(inputs, filters, strides=strides, name=name, number="1")
    x = keras.layers.Activation("relu", name=f"{name}_relu1")(x)
    x = _convolve(x, filters, strides=1, name=name, number="2")
    x = keras.layers.Add(name=f"{name}_add")([x, _shortcut(inputs, filters, strides=strides, name=name)])
    return keras.layers.Activation("relu", name=f"{name}_relu2")(x)


def _convolve(inputs: Any, filters: int, *, strides: int, name: str, number: str) -> Any:
    import keras

    # No bias: BatchNorm subtracts the mean, and has a bias (beta) of its own.
    conv = keras.layers.Conv2D(
        filters,
        3,
        strides=strides,
        padding="same",
        use_bias=False,
        kernel_initializer="he_normal",
        name=f"{name}_conv{number}",
    )
    # Keras's default momentum of 0.99 needs hundreds of steps before evaluation sees sensible statistics.
    norm = keras.layers.BatchNormalization(momentum=0.9, epsilon=1e-5, name=f"{name}_norm{number}")
    return norm(conv(inputs))


def _shortcut(inputs: Any, filters: int, *, strides: int, name: str) -> Any:
    """Applies option A of the paper: [N, H, W, C] -> [N, H / strides, W / strides, filters], new channels zero."""
    import keras

    x = inputs
    if strides > 1:
        x = keras.layers.MaxPooling2D(1, strides=strides, padding="same", name=f"{name}_subsample")(x)
    missing = filters - x.shape[-1]
    if missing:
        x = keras.ops.pad(x, [[0, 0], [0, 0], [0, 0], [missing // 2, missing - missing // 2]])
    return x
