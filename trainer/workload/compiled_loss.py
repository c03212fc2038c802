"""Builds the loss that Keras compiles a model with, and watches the loss of each output."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from trainer.workload.data.examples import Nest
from trainer.workload.patches import patched


class Use(NamedTuple):
    """The inputs of an output's loss."""

    loss: keras.losses.Loss
    labels: tf.Tensor
    outputs: tf.Tensor
    name: str  # of the output; empty if the model has one alone


class _Built(Exception):
    """Ends a call that should only build a loss."""


def build_loss(loss: Any, labels: Nest, outputs: Nest) -> None:
    """Builds a compiled loss as its first call does, after fitting labels to the structure of the outputs."""
    build = loss.build

    def build_alone(labels: Nest, outputs: Nest) -> None:
        build(labels, outputs)
        raise _Built

    with patched((loss, "build", build_alone)), suppress(_Built):
        loss.call(labels, outputs)


@contextmanager
def checked(compiled: Any, check: Callable[[Use], None] | None) -> Iterator[None]:
    """Calls `check` before each loss of a built, compiled loss."""
    if compiled is None or check is None:
        yield
        return
    before = compiled._flat_losses

    def with_check(loss: keras.losses.Loss, name: str) -> Callable[..., tf.Tensor]:
        def call(labels: tf.Tensor, outputs: tf.Tensor, weights: tf.Tensor | None = None) -> tf.Tensor:
            check(Use(loss, labels, outputs, name))
            return loss(labels, outputs, weights)

        return call

    named = [(one, one.name if len(before) > 1 else "") for one in before]
    watched = [one._replace(loss=with_check(one.loss, name)) for one, name in named]
    with patched((compiled, "_flat_losses", watched)):
        yield
