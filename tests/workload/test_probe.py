"""What a training pass does, found by tracing it: which variables have a gradient, and who talks to other replicas."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import pytest
import tensorflow as tf

from trainer.plan.tables import SparsePattern
from trainer.workload import lookups
from trainer.workload.compiling import Wanted, make_objective
from trainer.workload.data.examples import ArraySpec, Spec
from trainer.workload.probe import probe

layers = keras.layers
ONE = Spec(ArraySpec((4,), "float32"), ArraySpec((1,), "float32"), None, 0)
TWO = Spec(ArraySpec((4,), "float32"), (ArraySpec((1,), "float32"), ArraySpec((1,), "float32")), None, 0)
IDS = Spec(ArraySpec((4,), "int32"), ArraySpec((1,), "float32"), None, 0)


def heads(loss: Any, *, between: Callable[[Any], Any] = lambda x: x, regularizer: Any = None) -> keras.Model:
    """A body with two heads; what is between it and the second."""
    inputs = keras.Input((4,))
    hidden = layers.Dense(3, name="body")(inputs)
    first = layers.Dense(1, name="first")(hidden)
    second = layers.Dense(1, name="second", kernel_regularizer=regularizer)(between(hidden))
    model = keras.Model(inputs, [first, second])
    model.compile("sgd", loss=loss)
    return model


def chain(*parts: Any, loss: Any = "mse") -> keras.Model:
    model = keras.Sequential([keras.Input((4,)), *parts])
    model.compile("sgd", loss=loss)
    return model


class Unused(keras.Model):
    """Makes a layer that it uses when it is built, and never again."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = layers.Dense(1, name="used"), layers.Dense(2, name="unused")

    def build(self, shape: Any) -> None:
        self.used.build(shape)
        self.unused.build(shape)

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return self.used(inputs)


def unused() -> keras.Model:
    model = Unused()
    model.build((None, 4))
    model.compile("sgd", "mse")
    return model


def stopped() -> keras.Model:
    inputs = keras.Input((4,))
    hidden = keras.ops.stop_gradient(layers.Dense(3, name="body")(inputs))
    model = keras.Model(inputs, layers.Dense(1, name="head")(hidden))
    model.compile("sgd", "mse")
    return model


def rounded() -> keras.Model:
    """Indices have no gradient."""
    inputs = keras.Input((4,))
    chosen = keras.ops.argmax(layers.Dense(3, name="chooser")(inputs), -1)
    model = keras.Model(inputs, layers.Dense(1, name="head")(layers.Embedding(3, 2, name="emb")(chosen)))
    model.compile("sgd", "mse")
    return model


class Talking(layers.Layer):
    """Sums over the replicas of a tf.distribute strategy."""

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return tf.distribute.get_replica_context().all_reduce("sum", inputs)


class Merging(layers.Layer):
    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return tf.distribute.get_replica_context().merge_call(lambda strategy, value: value, args=(inputs,))


def talking_loss(labels: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    total = tf.distribute.get_replica_context().all_reduce("sum", tf.reduce_mean(outputs))
    return tf.reduce_mean(tf.square(labels - outputs)) + total


SECOND = ("second/kernel", "second/bias")
UNREACHED: dict[str, tuple[Callable[[], keras.Model], Spec, tuple[str, ...]]] = {
    "all are reached": (lambda: heads("mse"), TWO, ()),
    "a head without a loss": (lambda: heads(["mse", None]), TWO, SECOND),
    "the first head without": (lambda: heads([None, "mse"]), TWO, ("first/kernel", "first/bias")),
    "a norm before it": (
        lambda: heads(["mse", None], between=layers.BatchNormalization(name="norm")),
        TWO,
        ("norm/gamma", "norm/beta", *SECOND),
    ),
    "a regularizer reaches it": (lambda: heads(["mse", None], regularizer="l2"), TWO, ("second/bias",)),
    "a layer that is not called": (unused, ONE, ("unused/unused/kernel", "unused/unused/bias")),
    "a stopped gradient": (stopped, ONE, ("body/kernel", "body/bias")),
    "an index": (rounded, ONE, ("chooser/kernel", "chooser/bias")),
}
EXCHANGING: dict[str, tuple[Callable[[], keras.Model], tuple[str, ...]]] = {
    "none": (lambda: chain(layers.BatchNormalization(name="norm"), layers.Dense(1)), ()),
    "norm": (lambda: chain(layers.BatchNormalization(name="norm", synchronized=True), layers.Dense(1)), ("norm",)),
    "frozen": (lambda: chain(layers.BatchNormalization(synchronized=True, trainable=False), layers.Dense(1)), ()),
    "inner": (
        lambda: chain(
            layers.Dense(4), chain(layers.BatchNormalization(name="norm", synchronized=True)), layers.Dense(1)
        ),
        ("norm",),
    ),
    "own": (lambda: chain(layers.Dense(1), Talking(name="talking")), ("talking",)),
    "merge": (lambda: chain(layers.Dense(1), Merging(name="merging")), ("merging",)),
    "loss": (lambda: chain(layers.Dense(1), loss=talking_loss), ("LossFunctionWrapper talking_loss",)),
}


def objective_of(model: keras.Model, spec: Spec) -> Any:
    return make_objective(model, spec, Wanted())


@pytest.mark.parametrize("case", UNREACHED)
def test_variables_that_the_loss_does_not_reach_are_those_that_keras_has_no_gradient_for(case):
    make, spec, expected = UNREACHED[case]
    keras.utils.set_random_seed(1)
    model = make()
    assert probe(objective_of(model, spec), spec).unreached == expected


@pytest.mark.parametrize("case", EXCHANGING)
def test_who_talks_to_other_replicas_is_found(case):
    make, expected = EXCHANGING[case]
    found = probe(objective_of(make(), ONE), ONE).exchanging
    assert tuple(name.split("/")[-1] for name in found) == expected


def test_names_that_keras_takes_inside_of_a_model_are_taken():
    model = chain(layers.Dense(3, name="_hidden"), layers.Dense(1, name="_out"))
    assert not probe(objective_of(model, ONE), ONE).unreached


def of_ids(*, head_of: str) -> keras.Model:
    inputs = keras.Input((4,), dtype="int32")
    tables = {name: layers.Flatten()(layers.Embedding(9, 2, name=name)(inputs)) for name in ("used", "unused")}
    outputs = [layers.Dense(1, name=f"of_{name}")(values) for name, values in tables.items()]
    model = keras.Model(inputs, outputs)
    model.compile("sgd", ["mse" if name == head_of else None for name in tables])
    return model


def test_a_table_that_the_loss_does_not_reach_is_refused_and_another_is_not():
    with lookups.building([SparsePattern("used")]):
        model = of_ids(head_of="used")
    spec = Spec(IDS.features, (IDS.labels, IDS.labels), None, 0)
    expected = ("unused/embeddings", "of_unused/kernel", "of_unused/bias")
    assert probe(objective_of(model, spec), spec).unreached == expected
    with lookups.building([SparsePattern("used")]):
        model = of_ids(head_of="unused")
    with pytest.raises(ValueError, match="used/embeddings"):
        probe(objective_of(model, spec), spec)


def test_a_loss_that_reaches_nothing_is_refused():
    model = chain(layers.Dense(1), loss=lambda labels, outputs: tf.reduce_mean(tf.stop_gradient(outputs)))
    with pytest.raises(ValueError, match="nothing to train"):
        probe(objective_of(model, ONE), ONE)
