"""An exported model names its inputs and outputs as its author does."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from trainer.workload import serving, tracing
from trainer.workload.compiling import Wanted, make_objective
from trainer.workload.data.arrays import from_arrays

A, B = np.ones((8, 2), "float32"), np.arange(8)[:, None].astype("int64")
Y, Z = np.ones((8, 1), "float32"), np.zeros((8, 1), "float32")


def functional(inputs: Any, outputs: Any, *, names: tuple[str | None, str | None] = ("size", "day")) -> keras.Model:
    """A model of two inputs in a structure, and two outputs in another."""
    size, day = keras.Input((2,), name=names[0]), keras.Input((1,), dtype="int64", name=names[1])
    joined = layers.Concatenate()([size, layers.Flatten()(layers.Embedding(8, 2)(day))])
    sold, amount = layers.Dense(1, name="sold")(joined), layers.Dense(1, name="amount")(joined)
    return keras.Model(inputs(size, day), outputs(sold, amount))


class Subclassed(keras.Model):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = layers.Dense(1), layers.Dense(1)

    def call(self, inputs: Any) -> Any:
        size, day = inputs
        return self.one(size), self.two(keras.ops.cast(day, "float32"))


def listed(*tensors: Any) -> Any:
    return list(tensors)


def in_other_order(first: Any, second: Any) -> Any:
    return [second, first]


def first_alone(first: Any, _: Any) -> Any:
    return first


def same_layer() -> keras.Model:
    size, dense = keras.Input((2,), name="size"), layers.Dense(1, name="score")
    return keras.Model(size, [dense(size), dense(size + 1.0)])


def unnamed_outputs() -> keras.Model:
    size = keras.Input((2,))
    return keras.Model(size, [layers.Dense(1)(size), layers.Dense(1, name="named")(size)])


# The model, features, labels, and the names of inputs and outputs.
MODELS: dict[str, tuple[Callable[[], keras.Model], Any, Any, set[str], set[str]]] = {
    "lists": (lambda: functional(listed, listed), (A, B), (Y, Z), {"size", "day"}, {"sold", "amount"}),
    "lists in another order": (
        lambda: functional(in_other_order, in_other_order),
        (B, A),
        (Y, Z),
        {"size", "day"},
        {"sold", "amount"},
    ),
    "mappings": (
        lambda: functional(lambda a, b: {"a": a, "b": b}, lambda a, b: {"x": a, "y": b}, names=("a", "b")),
        {"a": A, "b": B},
        {"x": Y, "y": Z},
        {"a", "b"},
        {"x", "y"},
    ),
    "names of nobody": (
        lambda: functional(listed, listed, names=(None, None)),
        (A, B),
        (Y, Z),
        {"input_0", "input_1"},
        {"sold", "amount"},
    ),
    "names that programs do not take": (
        lambda: functional(listed, first_alone, names=("size.m2", "week-day")),
        (A, B),
        Y,
        {"size_m2", "week_day"},
        {"outputs"},
    ),
    "one of a list": (lambda: functional(listed, lambda a, b: [a]), (A, B), Y, {"size", "day"}, {"outputs"}),
    "one layer twice": (same_layer, A, (Y, Z), {"inputs"}, {"score", "score_1"}),
    "one without a name": (unnamed_outputs, A, (Y, Z), {"inputs"}, {"output_0", "named"}),
    "a class": (Subclassed, (A, B), (Y, Z), {"input_0", "input_1"}, {"output_0", "output_1"}),
}


@pytest.mark.parametrize("name", MODELS)
def test_inputs_and_outputs_are_named(name, tmp_path: Path):
    build, features, labels, inputs, outputs = MODELS[name]
    data = from_arrays((features, labels), (features, labels), source="mine")
    model = build()
    if not model.built:
        model(features)
    objective = make_objective(model, data.spec, Wanted("mse"))
    tracing.trace(objective, data.spec)
    written = serving.write(objective, data, tmp_path, ["saved_model"], ())
    assert written.failures == ()
    signature = tf.saved_model.load(str(tmp_path / "saved_model/1")).signatures["serving_default"]
    taken = signature.structured_input_signature[1]
    assert (set(taken), set(signature.structured_outputs)) == (inputs, outputs)
    assert (set(written.served.names.values()), set(written.served.outputs)) == (inputs, outputs)
    flat = (
        [features]
        if isinstance(features, np.ndarray)
        else [*(features.values() if isinstance(features, dict) else features)]
    )
    given = dict(zip(written.served.names.values(), flat, strict=True))
    answer = signature(**{name: tf.constant(value) for name, value in given.items()})
    assert all(value.shape == (8, 1) for value in answer.values())


def test_the_losses_of_a_mapping_are_those_of_listed_outputs(tmp_path: Path):
    data = from_arrays(((A, B), (Y, Z)), ((A, B), (Y, Z)), source="mine")
    model = functional(listed, listed)
    losses = {"sold": keras.losses.BinaryCrossentropy(from_logits=True), "amount": "mse"}
    model.compile("sgd", losses)
    objective = make_objective(model, data.spec, Wanted())
    tracing.trace(objective, data.spec)
    served = serving.write(objective, data, tmp_path, ["saved_model"], ()).served
    assert served is not None
    assert served.outputs["sold"] == "probabilities" != served.outputs["amount"]
