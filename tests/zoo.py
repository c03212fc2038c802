"""A user's file with models, data, losses and metrics of many kinds, in the manner of Keras's own examples."""

import keras
import numpy as np
from keras import layers, ops

RANDOM = np.random.default_rng(0)
EVALUATED = 60  # examples; the last batch of 32 is smaller


def _split(x, *rest):
    """The same examples to train on, and the first of them to evaluate on."""

    def first(nest):
        if isinstance(nest, dict):
            return {name: first(one) for name, one in nest.items()}
        return type(nest)(map(first, nest)) if isinstance(nest, list | tuple) else nest[:EVALUATED]

    return {"train": (x, *rest), "evaluate": tuple(map(first, (x, *rest)))}


# Data


def pictures(*, examples=256):
    x = (RANDOM.random((examples, 12, 12, 1)) * 255).astype("uint8")
    return _split(x, (x.mean((1, 2, 3)) > 127).astype("int64"))


def one_hot(*, examples=256):
    x = RANDOM.normal(size=(examples, 6))
    return _split(x, np.eye(3)[np.argmax(x[:, :3], 1)])


def people(*, examples=256):
    x = {
        "age": RANDOM.normal(size=(examples, 1)),
        "city": RANDOM.integers(0, 20, (examples, 1)),
        "job": np.array([[f"job{i % 5}"] for i in range(examples)]),
    }
    return _split(x, (x["age"][:, 0] > 0).astype("float32"))


def two_targets(*, examples=256):
    x = RANDOM.normal(size=(examples, 6))
    return _split(x, {"a": (x[:, :1] > 0).astype("float32"), "b": x[:, 1:2] * 2})


def listed_targets(*, examples=256):
    x = RANDOM.normal(size=(examples, 6))
    return _split(x, ((x[:, :1] > 0).astype("float32"), x[:, 1:2] * 2))


def itself(*, examples=256):
    x = RANDOM.random((examples, 8)).astype("float32")
    return _split(x, x)


def unlabelled(*, examples=256):
    return _split(RANDOM.random((examples, 8)).astype("float32"))


def pixels(*, examples=128):
    x = RANDOM.random((examples, 8, 8, 3)).astype("float32")
    return _split(x, (x.mean(-1) > 0.5).astype("uint8")[..., None])


def sentences(*, examples=256):
    x = RANDOM.integers(1, 50, (examples, 20))
    x[:, 12:] = 0
    return _split(x, (x[:, 0] > 25).astype("int32"))


def tagged(*, examples=256):
    x = RANDOM.integers(1, 50, (examples, 20))
    x[::2, 15:] = 0
    return _split(x, x % 7)


def weighted(*, examples=256):
    x = RANDOM.normal(size=(examples, 6)).astype("float32")
    y = (x[:, 0] > 0).astype("int64")
    return _split(x, y, np.where(y, 3.0, 1.0))


def far(*, examples=256):
    """Large values, and so large gradients."""
    x = RANDOM.normal(size=(examples, 6)) * 30
    return _split(x, (x[:, 0] > x[:, 1]).astype("float32"))


def pairs(*, examples=256):
    x = [RANDOM.normal(size=(examples, 6)), RANDOM.normal(size=(examples, 6))]
    return _split(x, (x[0][:, 0] * x[1][:, 0] > 0).astype("int32"))


def numbers(*, examples=256):
    x = RANDOM.normal(size=(examples, 6)).astype("float32")
    return _split(x, x[:, 0] + x[:, 1])


# Models


def softmax():
    model = keras.Sequential(
        [
            keras.Input((12, 12, 1)),
            layers.Rescaling(1 / 255),
            layers.Conv2D(4, 3, activation="relu"),
            layers.Flatten(),
            layers.Dense(2, activation="softmax"),
        ]
    )
    model.compile("adam", "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def softmax_not_compiled(spec):
    return keras.Sequential([keras.Input(spec.features.shape), layers.Flatten(), layers.Dense(2, activation="softmax")])


def smoothed():
    model = keras.Sequential([keras.Input((6,)), layers.Dense(3)])
    loss = keras.losses.CategoricalCrossentropy(from_logits=True, label_smoothing=0.1)
    model.compile("adam", loss, metrics=["accuracy", keras.metrics.TopKCategoricalAccuracy(2)])
    return model


def wide_and_deep():
    age, city = keras.Input((1,), name="age"), keras.Input((1,), dtype="int64", name="city")
    job = keras.Input((1,), dtype="string", name="job")
    jobs = layers.StringLookup(vocabulary=[f"job{i}" for i in range(5)])(job)
    deep = [layers.Flatten()(layers.Embedding(20, 4)(city)), layers.Flatten()(layers.Embedding(6, 3)(jobs))]
    hidden = layers.Dense(8, "relu")(layers.Concatenate()([age, *deep]))
    model = keras.Model({"age": age, "city": city, "job": job}, layers.Dense(1, activation="sigmoid")(hidden))
    model.compile("adam", "binary_crossentropy", metrics=["accuracy", keras.metrics.AUC(name="auc")])
    return model


def two_outputs():
    x = keras.Input((6,))
    hidden = layers.Dense(8, "relu")(x)
    outputs = {"a": layers.Dense(1, activation="sigmoid", name="a"), "b": layers.Dense(1, name="b")}
    model = keras.Model(x, {name: layer(hidden) for name, layer in outputs.items()})
    model.compile(
        "adam",
        loss={"a": "binary_crossentropy", "b": "mse"},
        loss_weights={"a": 1.0, "b": 0.5},
        metrics={"a": ["accuracy"], "b": ["mae"]},
    )
    return model


def one_of_two_losses():
    x = keras.Input((6,))
    hidden = layers.Dense(8, "relu")(x)
    outputs = [layers.Dense(1, activation="sigmoid", name="a")(hidden), layers.Dense(1, name="b")(hidden)]
    model = keras.Model(x, outputs)
    model.compile("adam", loss=["binary_crossentropy", None])
    return model


def autoencoder():
    return keras.Sequential([keras.Input((8,)), layers.Dense(3, "relu"), layers.Dense(8)])


def one_labelled_output():
    """Labels for the first of two outputs alone."""
    x = keras.Input((6,))
    hidden = layers.Dense(8, "relu")(x)
    model = keras.Model(x, [layers.Dense(3)(hidden), hidden])
    model.compile("adam", loss=[keras.losses.CategoricalCrossentropy(from_logits=True), None])
    return model


def listed_outputs():
    """Labels by name, outputs in a list."""
    x = keras.Input((6,))
    hidden = layers.Dense(8, "relu")(x)
    outputs = [layers.Dense(1, activation="sigmoid", name="a")(hidden), layers.Dense(1, name="b")(hidden)]
    model = keras.Model(x, outputs)
    model.compile("adam", loss={"a": "binary_crossentropy", "b": "mse"}, loss_weights={"a": 1.0, "b": 0.5})
    return model


class Variational(keras.Model):
    """Overrides `compute_loss`, and has a metric of its own and no labels."""

    def __init__(self, latent=2):
        super().__init__()
        self.encoder, self.decoder = layers.Dense(2 * latent), layers.Dense(8)
        self.divergence = keras.metrics.Mean(name="divergence")

    def call(self, x):
        mean, variance = ops.split(self.encoder(x), 2, axis=-1)
        return self.decoder(mean), mean, variance

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        outputs, mean, variance = y_pred
        divergence = -0.5 * ops.mean(1 + variance - mean**2 - ops.exp(variance))
        self.divergence.update_state(divergence)
        return ops.mean((outputs - x) ** 2) + 0.1 * divergence


class Plain(keras.Model):
    """Its `call` takes no `training`; it has arguments and no `get_config`, and keeps a tensor."""

    def __init__(self, width, classes=2):
        super().__init__()
        self.flatten, self.hidden, self.out = layers.Flatten(), layers.Dense(width, "relu"), layers.Dense(classes)
        self.scale = ops.ones((1,)) / 255

    def call(self, x):
        return self.out(self.hidden(self.flatten(ops.cast(x, "float32")) * self.scale))


def segmentation():
    x = keras.Input((8, 8, 3))
    hidden = layers.Conv2D(8, 3, padding="same", activation="relu")(x)
    model = keras.Model(x, layers.Conv2D(2, 1, activation="softmax")(hidden))
    metrics = ["accuracy", keras.metrics.MeanIoU(2, sparse_y_pred=False, name="iou")]
    model.compile("adam", "sparse_categorical_crossentropy", metrics=metrics)
    return model


def recurrent():
    embedded = layers.Embedding(50, 8, mask_zero=True)
    model = keras.Sequential(
        [keras.Input((20,), dtype="int64"), embedded, layers.LSTM(6), layers.Dense(1, activation="sigmoid")]
    )
    model.compile("adam", "binary_crossentropy", metrics=["accuracy"])
    return model


def of_tokens(y, outputs):
    return keras.losses.sparse_categorical_crossentropy(y, outputs, from_logits=True)


def tagger():
    """Masked steps count neither in the loss, which is a function, nor in the metrics."""
    embedded = layers.Embedding(50, 8, mask_zero=True)
    model = keras.Sequential(
        [keras.Input((20,), dtype="int64"), embedded, layers.LSTM(6, return_sequences=True), layers.Dense(7)]
    )
    model.compile("adam", of_tokens, metrics=["accuracy"], weighted_metrics=["accuracy"])
    return model


def small(spec, *, width=8):
    return keras.Sequential([keras.Input(spec.features.shape), layers.Dense(width, "relu"), layers.Dense(2)])


def one_number(spec):
    """Its outputs are [N], not [N, 1]."""
    inputs = keras.Input(spec.features.shape)
    return keras.Model(inputs, layers.Dense(1)(inputs)[:, 0])


def one_sized():
    """It takes batches of 4 alone."""
    inputs = keras.Input((6,), batch_size=4)
    model = keras.Model(inputs, layers.Dense(1)(keras.ops.reshape(inputs, (4, 6))))
    model.compile(loss="mse")
    return model


def one_sized_within():
    """Only its code shows that it takes batches of 4 alone."""
    inputs = keras.Input((6,))
    model = keras.Model(inputs, layers.Dense(1)(layers.Lambda(lambda x: keras.ops.reshape(x, (4, 6)))(inputs)))
    model.compile(loss="mse")
    return model


def built_later():
    model = keras.Sequential([layers.Dense(4, "relu"), layers.Dense(1)])
    model.compile(loss="mse")
    return model


def binary():
    model = keras.Sequential([keras.Input((6,)), layers.Dense(16, "relu"), layers.Dense(1)])
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=[keras.metrics.BinaryAccuracy(threshold=0)])
    return model


def with_three_way_skip():
    x = keras.Input((6,))
    hidden = layers.Dense(16, "tanh")(x)
    branches = [layers.Dense(16, "relu")(hidden) for _ in range(3)]
    model = keras.Model(x, layers.Dense(1, activation="sigmoid")(layers.Add()([hidden, *branches])))
    model.compile("adam", "binary_crossentropy", metrics=["accuracy"])
    return model


def towers():
    one, two = keras.Input((6,)), keras.Input((6,))
    tower = keras.Sequential([layers.Dense(8, "relu"), layers.Dense(4)])
    return keras.Model([one, two], [tower(one), tower(two)])


def same_names():
    """Two towers with layers of the same names, each with a batch norm, and one of these names beside them."""

    def tower(name):
        x = keras.Input((6,))
        hidden = layers.BatchNormalization(name="norm")(layers.Dense(8, "relu", name="hidden")(x))
        return keras.Model(x, layers.Dense(4, name="out")(hidden), name=name)

    one, two = keras.Input((6,)), keras.Input((6,))
    both = layers.Concatenate()([tower("left")(one), tower("right")(two)])
    return keras.Model([one, two], layers.Dense(2, name="out")(both))


class Block(layers.Layer):
    """Takes no `training`; what is in it gets that of the model."""

    def __init__(self):
        super().__init__()
        self.dense, self.normalize = layers.Dense(8, "relu"), layers.BatchNormalization()

    def call(self, x):
        return self.normalize(self.dense(x))


class Unaware(keras.Model):
    """Does not pass `training` on."""

    def __init__(self):
        super().__init__()
        self.block, self.out = Block(), layers.Dense(2)

    def call(self, x, training=None):
        return self.out(self.block(x))


def with_blocks():
    x = keras.Input((6,))
    return keras.Model(x, layers.Dense(2)(Block()(Block()(x))))


class Counter(layers.Layer):
    """Counts its calls in training as an integer."""

    def build(self, shape):
        self.calls = self.add_weight(shape=(), dtype="int32", initializer="zeros", trainable=False, name="calls")

    def call(self, x, training=False):
        if training:
            self.calls.assign_add(1)
        return x


def fine_tuned():
    """A frozen backbone with BatchNorm, whose head is trained; inputs are normalized, and calls counted."""
    normalization = layers.Normalization()
    normalization.adapt(np.random.default_rng(3).normal(3.0, 2.0, (100, 6)))
    backbone = keras.Sequential([layers.Dense(16, "relu"), layers.BatchNormalization()], name="backbone")
    backbone.trainable = False
    x = keras.Input((6,))
    hidden = layers.BatchNormalization(name="norm")(backbone(normalization(x)))
    return keras.Model(x, layers.Dense(2, name="head")(Counter(name="counter")(hidden)))


class Trains(keras.Model):
    """Refused: nobody would call its `train_step`."""

    def train_step(self, data):
        return {}

    def call(self, x):
        return x


def constrained():
    return keras.Sequential([keras.Input((6,)), layers.Dense(2, kernel_constraint="unit_norm", name="out")])


def spectral():
    return keras.Sequential([keras.Input((6,)), layers.SpectralNormalization(layers.Dense(2, name="out"))])


def fails(spec):
    raise RuntimeError("no such width")


# A loss and metrics


def cosine(y, outputs):
    one, two = outputs
    return (ops.sum(ops.normalize(one) * ops.normalize(two), -1) - (ops.cast(y, "float32") * 2 - 1)) ** 2
