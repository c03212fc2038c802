"""Puts layers of a model on other devices than their replica's."""

import functools
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, nullcontext

import keras
import tensorflow as tf

from trainer.workload.patches import patched
from trainer.workload.paths import Paths


@contextmanager
def pinned(
    model: keras.Model, devices: Mapping[str, str], scopes: MutableMapping[str, str] | None = None
) -> Iterator[None]:
    """Puts the operations of some layers, and of their gradients, on other devices.

    The pin of a nested layer goes before that of its outer layer, as with nested `tf.device` blocks. A gradient is
    computed outside the block of its operation, but TensorFlow names its scope after it, so the scopes are recorded.
    The operations of a custom gradient (for example of silu) have no such name and stay on the replica's device.

    Args:
        devices: by layer path.
        scopes: receives the layer path of every name scope in which a layer was called; TensorFlow may number scopes,
            so their names alone do not identify the layer.
    """
    called: MutableMapping[str, str] = {} if scopes is None else scopes
    layers, paths = [layer for layer in model._flatten_layers(include_self=False) if layer.path], Paths(model)

    def place(operation: tf.Operation) -> str:
        device = tf.DeviceSpec.from_string(operation.device)
        _, is_backward, name = operation.name.rpartition("gradient_tape/")
        if is_backward and (
            inside := [scope for scope, path in called.items() if path in devices and name.startswith(f"{scope}/")]
        ):
            device = device.make_merged_spec(tf.DeviceSpec.from_string(devices[called[max(inside, key=len)]]))
        return str(device.to_string())

    placed = tf.compat.v1.device(place) if devices else nullcontext()
    calls = [(layer, "call", _call_on(devices.get(paths[layer]), layer, paths[layer], called)) for layer in layers]
    with patched(*calls), placed:
        yield


def _call_on(
    device: str | None, layer: keras.Layer, path: str, called: MutableMapping[str, str]
) -> Callable[..., tf.Tensor]:
    call = layer.call

    @functools.wraps(call)
    def on_device(*args: object, **options: object) -> tf.Tensor:
        called[tf.compat.v1.get_default_graph().get_name_scope()] = path
        with nullcontext() if device is None else tf.device(device):
            return call(*args, **options)

    return on_device
