"""A siamese network with a loss of its own: do two pictures show the same digit?

    python -m trainer examples/siamese.yaml      half a minute on 2 cores; eval_accuracy 0.94

Both pictures go through one tower. The loss draws the vectors of a digit together, and pushes others apart.
"""

import keras
import numpy as np
from keras import layers, ops

from trainer.workload.data.idx import mnist_10k

MARGIN = 1.0  # others need not be farther apart than this


def pairs(*, times=4):
    """Two pictures and whether their digit is the same, which is so of half the pairs."""
    digits = mnist_10k()
    return {"train": _pairs(digits.train, times), "evaluate": _pairs(digits.evaluate, 1)}


def _pairs(examples, times):
    images, labels = (np.asarray(array) for array in examples.arrays)
    random, left = np.random.default_rng(0), np.tile(np.arange(len(labels)), times)
    right = random.permutation(left)
    for i in np.flatnonzero(random.random(len(left)) < 0.5 - 0.1):  # a tenth of the others are the same by chance
        right[i] = random.choice(np.flatnonzero(labels == labels[left[i]]))
    same = labels[left] == labels[right]
    return {"left": images[left], "right": images[right]}, same.astype("float32")


def towers(spec, *, width=32):
    """The distance between the vectors of two pictures."""
    shape = spec.features["left"].shape
    tower = keras.Sequential(
        [
            keras.Input(shape),
            layers.Rescaling(1 / 255),
            layers.Conv2D(16, 3, strides=2, activation="relu"),
            layers.Conv2D(32, 3, strides=2, activation="relu"),
            layers.Flatten(),
            layers.Dense(width),
            layers.UnitNormalization(),
        ]
    )
    inputs = {name: keras.Input(shape, name=name) for name in ("left", "right")}
    difference = tower(inputs["left"]) - tower(inputs["right"])
    distance = ops.sqrt(ops.sum(difference**2, axis=-1) + 1e-6)  # 0 would have no gradient
    return keras.Model(inputs, distance)


def loss(same, distance):
    """The contrastive loss of each pair [N]."""
    return same * distance**2 + (1 - same) * ops.maximum(MARGIN - distance, 0) ** 2


def metrics():
    return {"accuracy": keras.metrics.MeanMetricWrapper(_is_right)}


def _is_right(same, distance):
    return ops.cast(ops.equal(distance < MARGIN / 2, same > 0.5), "float32")
