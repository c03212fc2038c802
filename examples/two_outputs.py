"""Two outputs with losses and metrics of their own: which digit is it, and how much ink has it?

    python -m trainer examples/two_outputs.yaml   half a minute on 2 cores; eval_digit_accuracy 0.92, eval_ink_mae 0.05

The ink is the mean of a picture's pixels, in 0..1.
"""

import keras
import numpy as np
from keras import layers

from trainer.workload.data.idx import mnist_10k


def digits_and_ink():
    """Labels are a dict: the digit, and the share of ink in 0..1."""
    digits = mnist_10k()
    return {"train": _part(digits.train), "evaluate": _part(digits.evaluate)}


def _part(examples):
    images, labels = (np.asarray(array) for array in examples.arrays)
    return images, {"digit": labels, "ink": images.mean((1, 2, 3))[:, None] / 255}


def reader(spec, *, width=64):
    inputs = keras.Input(spec.features.shape)
    x = layers.Rescaling(1 / 255)(inputs)
    x = layers.MaxPooling2D()(layers.Conv2D(16, 3, activation="relu")(x))
    x = layers.Dense(width, activation="relu")(layers.Flatten()(x))
    outputs = {"digit": layers.Dense(10, activation="softmax", name="digit")(x), "ink": layers.Dense(1, name="ink")(x)}
    model = keras.Model(inputs, outputs)
    model.compile(
        loss={"digit": "sparse_categorical_crossentropy", "ink": "mse"},
        loss_weights={"digit": 1.0, "ink": 10.0},
        metrics={"digit": ["accuracy"], "ink": ["mae"]},
    )
    return model
