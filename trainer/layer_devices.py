"""Layers of a model on devices of their own, inside one replica."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext

import keras
import tensorflow as tf


@contextmanager
def pinned(model: keras.Model, devices: Mapping[str, str]) -> Iterator[None]:
    """Puts the operations of some layers on devices of their own, those of their gradients too.

    A layer inside a layer with a pin of its own goes where its own says, as nested `tf.device` blocks do. A gradient is
    computed outside the block of its operation, but TensorFlow names its scope after it; so the scopes are remembered.

    Args:
        devices: by layer path.
    """
    scopes: dict[str, str] = {}
    layers = [layer for layer in model._flatten_layers(include_self=False) if layer.path in devices]

    def place(operation: tf.Operation) -> str:
        name = operation.name.rpartition("gradient_tape/")[2] if "gradient_tape/" in operation.name else ""
        inside = [scope for scope in scopes if name.startswith(f"{scope}/")]
        if not inside:
            return str(operation.device)
        return str(tf.DeviceSpec.from_string(operation.device).make_merged_spec(_spec(scopes[max(inside, key=len)])))

    for layer in layers:
        object.__setattr__(layer, "call", _call_on(devices[layer.path], layer.call, scopes))
    try:
        with tf.compat.v1.device(place) if layers else nullcontext():
            yield
    finally:
        for layer in layers:
            object.__delattr__(layer, "call")


def _call_on(device: str, call: Callable[..., tf.Tensor], scopes: dict[str, str]) -> Callable[..., tf.Tensor]:
    @functools.wraps(call)
    def on_device(*args: object, **options: object) -> tf.Tensor:
        scopes[tf.compat.v1.get_default_graph().get_name_scope()] = device
        with tf.device(device):
            return call(*args, **options)

    return on_device


def _spec(device: str) -> tf.DeviceSpec:
    return tf.DeviceSpec.from_string(device)
