"""Losses that are means over a count which parts of a batch have more or less of, against Keras on the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

from trainer.workload import step, tracing
from trainer.workload.compiling import Wanted, make_objective
from trainer.workload.data.examples import ArraySpec, Batch, Spec
from trainer.workload.probe import probe

layers, losses = keras.layers, keras.losses
COUNT, STEPS = 8, 5  # examples, and steps of each
SEED = tf.constant([7, 1], tf.int64)
DRAWN = np.random.default_rng(4)
LENGTHS = np.array([5, 1, 2, 1, 3, 1, 1, 4])
IS_STEP = np.arange(STEPS) < LENGTHS[:, None]
WORDS = np.where(IS_STEP, DRAWN.integers(1, 9, (COUNT, STEPS)), 0).astype("int32")
EMPTY = WORDS * (np.arange(COUNT) >= 4)[:, None].astype("int32")  # none in the first half of the batch
NUMBERS = np.where(IS_STEP[:, :, None], DRAWN.normal(size=(COUNT, STEPS, 3)), 0).astype("float32")
CLASSES = DRAWN.integers(0, 3, (COUNT, STEPS)).astype("int64")
SOME_CLASSES = np.where(IS_STEP, CLASSES, -1)
TARGETS = DRAWN.normal(size=(COUNT, STEPS, 1)).astype("float32")
WEIGHTS = DRAWN.random(COUNT).astype("float32") * (np.arange(COUNT) < 6)
STEP_WEIGHTS = DRAWN.random((COUNT, STEPS)).astype("float32")


class Case(NamedTuple):
    """A model, its data, and what a probe finds."""

    model: Callable[[], keras.Model]
    loss: Any
    data: tuple[Any, ...]
    counts: int = 1
    is_one_mean: bool = True
    scalars: int = 0
    loss_weights: Any = None


def tagger(*, kind: type[keras.Model] = keras.Model, heads: int = 1, **options: Any) -> keras.Model:
    inputs = keras.Input((STEPS,), dtype="int32")
    hidden = layers.Dense(4, "tanh", name="body")(layers.Embedding(9, 4, mask_zero=True, name="words")(inputs))
    made = [layers.Dense(3, name=f"tag{number}", **options)(hidden) for number in range(heads)]
    return kind(inputs, made[0] if heads == 1 else made)


def plain(units: int = 3) -> keras.Model:
    inputs = keras.Input((STEPS, 3))
    return keras.Model(inputs, layers.Dense(units, name="head")(inputs))


def masking() -> keras.Model:
    inputs = keras.Input((STEPS, 3))
    hidden = layers.Dense(4, "tanh", name="body")(layers.Masking(name="masking")(inputs))
    return keras.Model(inputs, layers.Dense(1, name="head")(hidden))


def of_sentence(*, is_masked: bool) -> keras.Model:
    """Tags of words, and a number for the sentence or, with a mask of its own, for each word of another."""
    inputs = [keras.Input((STEPS,), dtype="int32") for _ in range(2)]
    embedded = [layers.Embedding(9, 4, mask_zero=True, name=f"words{number}")(one) for number, one in enumerate(inputs)]
    tags = layers.Dense(3, name="tags")(layers.Dense(4, "tanh", name="body")(embedded[0]))
    other = embedded[1] if is_masked else layers.GlobalAveragePooling1D()(embedded[1])
    return keras.Model(inputs, [tags, layers.Dense(1, name="number")(other)])


class Own(losses.Loss):
    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(tf.abs(tf.cast(y_true, tf.float32)[..., None] - y_pred), -1)


class Computing(keras.Model):
    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):  # type: ignore[no-untyped-def]
        return super().compute_loss(x, y, y_pred, sample_weight, training=training) * 2.0


class Adding(layers.Layer):
    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        self.add_loss(tf.reduce_mean(tf.square(inputs)))
        return inputs


def adding() -> keras.Model:
    inputs = keras.Input((STEPS, 3))
    return keras.Model(inputs, layers.Dense(1, name="head")(Adding()(inputs)))


def scalar(labels: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(tf.square(labels - outputs))


def crossentropy(**options: Any) -> losses.Loss:
    return losses.SparseCategoricalCrossentropy(from_logits=True, **options)


MEAN_OF_WEIGHTS = "mean_with_sample_weight"
HALF = TARGETS[:, 0]
CASES = {
    "a mask": Case(tagger, crossentropy(), (WORDS, CLASSES)),
    "a mask and weights": Case(tagger, crossentropy(), (WORDS, CLASSES, STEP_WEIGHTS)),
    "a mask that leaves nothing of a part": Case(tagger, crossentropy(), (EMPTY, CLASSES)),
    "a mask that leaves nothing": Case(lambda: tagger(kernel_regularizer="l2"), crossentropy(), (WORDS * 0, CLASSES)),
    "a regularizer": Case(lambda: tagger(kernel_regularizer="l2"), crossentropy(), (WORDS, CLASSES)),
    "a Masking layer": Case(masking, "mse", (NUMBERS, TARGETS)),
    "ignored classes": Case(plain, crossentropy(ignore_class=-1), (NUMBERS, SOME_CLASSES)),
    "ignored classes and a mask": Case(tagger, crossentropy(ignore_class=1), (WORDS, CLASSES)),
    "a mean over weights": Case(
        lambda: plain(1), losses.MeanSquaredError(reduction=MEAN_OF_WEIGHTS), (NUMBERS, TARGETS, WEIGHTS[:, None])
    ),
    "a mean over weights of steps": Case(
        plain, crossentropy(reduction=MEAN_OF_WEIGHTS), (NUMBERS, CLASSES, STEP_WEIGHTS)
    ),
    "a mean over weights and a mask": Case(
        tagger, crossentropy(reduction=MEAN_OF_WEIGHTS), (WORDS, CLASSES, STEP_WEIGHTS)
    ),
    "a loss of one's own": Case(tagger, Own(), (WORDS, CLASSES)),
    "two outputs with one mask": Case(
        lambda: tagger(heads=2), [crossentropy(), crossentropy()], (WORDS, (CLASSES, CLASSES)), loss_weights=[1.0, 0.3]
    ),
    "two outputs, one with a mask": Case(
        lambda: of_sentence(is_masked=False),
        [crossentropy(), "mse"],
        ((WORDS, WORDS[::-1]), (CLASSES, HALF)),
        is_one_mean=False,
    ),
    "two outputs with two masks": Case(
        lambda: of_sentence(is_masked=True),
        [crossentropy(), "mse"],
        ((WORDS, WORDS[::-1]), (CLASSES, TARGETS)),
        counts=2,
        is_one_mean=False,
    ),
    "weights, a mean over examples": Case(lambda: plain(1), "mse", (NUMBERS, TARGETS, WEIGHTS[:, None]), counts=0),
    "no weights for a mean over them": Case(
        lambda: plain(1), losses.MeanSquaredError(reduction=MEAN_OF_WEIGHTS), (NUMBERS, TARGETS), counts=0
    ),
    "a number for a batch": Case(lambda: plain(1), scalar, (NUMBERS, TARGETS), counts=0, scalars=1),
    "a loss added by a layer": Case(adding, "mse", (NUMBERS, TARGETS), counts=0, scalars=1),
}
SAID = {
    "compute_loss": Case(lambda: tagger(kind=Computing), crossentropy(), (WORDS, CLASSES), counts=0, scalars=1),
    "a loss of pairs": Case(
        lambda: keras.Sequential([keras.Input((3,)), layers.Dense(2)]),
        losses.Circle(),
        (NUMBERS[:, 0], CLASSES[:, 0]),
        counts=0,
        scalars=1,
    ),
    "dice": Case(lambda: plain(1), losses.Dice(), (NUMBERS, TARGETS), counts=0, scalars=1),
}


def made(case: Case) -> tuple[keras.Model, Any, Spec, Batch]:
    keras.utils.set_random_seed(3)
    model = case.model()
    model.compile("sgd", loss=case.loss, loss_weights=case.loss_weights)
    batch = Batch(*case.data).map(tf.constant)
    features, labels, weights = batch.map(lambda one: ArraySpec(tuple(one.shape[1:]), one.dtype.name))
    spec = Spec(features, labels, weights, 3)
    objective = make_objective(model, spec, Wanted())
    tracing.trace(objective, spec)
    return model, objective, spec, batch


def of_keras(case: Case, batch: Batch) -> tuple[float, list[tf.Tensor]]:
    """Loss and gradients of an equal model."""
    keras.utils.set_random_seed(3)
    model = case.model()
    model.compile("sgd", loss=case.loss, loss_weights=case.loss_weights)
    with tf.GradientTape() as tape:
        outputs = model(list(batch.features) if isinstance(batch.features, tuple) else batch.features, training=True)
        loss = model._compute_loss(batch.features, batch.labels, outputs, batch.weights, training=True)
    return float(loss), tape.gradient(loss, [v.value for v in model.trainable_variables])


def trained(model: keras.Model, objective: Any, batch: Batch, **options: Any) -> step.StepOutput:
    values = {v.path: tf.convert_to_tensor(v.value) for v in model.trainable_variables}
    run = tf.function(step.make_step(objective, **options), autograph=False)
    return run(values, {}, SEED, batch)


def check(found: Any, model: keras.Model, loss: float, gradients: list[tf.Tensor], what: str) -> None:
    np.testing.assert_allclose(found.loss, loss, rtol=1e-5, atol=1e-7, err_msg=what)
    for variable, gradient in zip(model.trainable_variables, gradients, strict=True):
        ours, theirs = found.gradients[variable.path], tf.convert_to_tensor(gradient)
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6, err_msg=f"{what}: {variable.path}")


@pytest.mark.parametrize("name", {**CASES, **SAID})
def test_what_losses_are_means_over_is_found(name):
    case = {**CASES, **SAID}[name]
    _, objective, spec, _ = made(case)
    probed = probe(objective, spec)
    assert (probed.counts, probed.is_one_mean or not probed.counts) == (case.counts, case.is_one_mean)
    assert len(probed.scalars) == case.scalars


@pytest.mark.long(but=["a mask", "two outputs with two masks", "a mean over weights", "a mask that leaves nothing"])
@pytest.mark.parametrize("name", CASES)
def test_a_batch_in_parts_and_on_replicas_has_the_loss_and_the_gradients_of_the_whole(name):
    case = CASES[name]
    model, objective, _, batch = made(case)
    loss, gradients = of_keras(case, batch)
    whole = trained(model, objective, batch, accumulate=4, counts=case.counts)
    check(whole, model, loss, gradients, "in parts")
    assert float(whole.divisor) == 1
    if case.counts == 1 and case.is_one_mean:
        halves = [batch.map(lambda one, rows=rows: one[rows]) for rows in (slice(0, 4), slice(4, None))]
        outputs = [trained(model, objective, half, accumulate=2, counts=1, is_counted=True) for half in halves]
        check(mean_of(outputs), model, loss, gradients, "on replicas, in parts each")


def mean_of(outputs: Sequence[step.StepOutput]) -> step.StepOutput:
    """What shard hosts make of the outputs of replicas."""
    divisor = sum(output.divisor for output in outputs)
    paths = outputs[0].gradients
    gradients = {path: sum(output.gradients[path] for output in outputs) / divisor for path in paths}
    return outputs[0]._replace(gradients=gradients, loss=sum(output.loss for output in outputs) / divisor)
