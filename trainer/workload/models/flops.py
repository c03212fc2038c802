"""Counts the floating-point operations of a model from the shapes of its layers; nothing is computed.

A multiplication and the addition after it are two operations. As in the literature, element-wise operations are left
out: activations, normalization, pooling, dropout.
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import keras
import tensorflow as tf
from keras.src.layers.convolutional.base_conv import BaseConv
from keras.src.layers.convolutional.base_conv_transpose import BaseConvTranspose
from keras.src.layers.convolutional.base_depthwise_conv import BaseDepthwiseConv
from keras.src.layers.convolutional.base_separable_conv import BaseSeparableConv

from trainer.workload.data.examples import Nest, map_nest
from trainer.workload.layer_devices import replaced_calls
from trainer.workload.paths import Paths

Shapes = tuple[tuple[int, ...], ...]  # without the examples' dimension


class Flops(NamedTuple):
    """Of one example."""

    forward: int
    uncounted: tuple[str, ...]  # paths of layers with weights but without a rule; `forward` lacks them


class _Call(NamedTuple):
    """One use of a layer."""

    layer: Any
    inputs: Shapes
    outputs: Shapes


def flops_of(model: keras.Model, features: Nest) -> Flops:
    """Counts the forward pass of one example, of arrays like `features`."""
    calls, paths = _calls_in_graph(model), Paths(model)
    try:
        calls = _traced_calls(model, features) if calls is None else calls
    except Exception:  # of a layer's code, e.g. of one that takes batches of one size only
        layers = model._flatten_layers(include_self=False)
        return Flops(0, tuple(paths[layer] for layer in layers if _own_weights(layer)))
    counted = [(call.layer, _forward(call)) for call in calls]
    uncounted = dict.fromkeys(paths[layer] for layer, flops in counted if flops is None)
    return Flops(sum(flops or 0 for _, flops in counted), tuple(uncounted))


def _forward(call: _Call) -> int | None:
    """Operations of one use; None if no rule counts them."""
    layer = call.layer
    if not call.inputs or not call.outputs:  # of nothing, or None
        return None if _own_weights(layer) else 0
    out = math.prod(call.outputs[0])
    if isinstance(layer, keras.layers.Dense):
        return 2 * out * int(call.inputs[0][-1])
    if isinstance(layer, keras.layers.EinsumDense):
        labels, output = layer.equation.split(",")[1].split("->")
        sizes = dict(zip(labels, layer.kernel.shape, strict=True))
        return 2 * out * math.prod(size for label, size in sizes.items() if label not in output)
    if isinstance(layer, BaseConv):
        return 2 * out * math.prod(layer.kernel.shape[:-1])
    if isinstance(layer, BaseConvTranspose):
        return 2 * math.prod(call.inputs[0]) * math.prod(layer.kernel.shape[:-1])
    if isinstance(layer, BaseDepthwiseConv):
        return 2 * out * math.prod(layer.kernel.shape[:-2])
    if isinstance(layer, BaseSeparableConv):
        between = out // layer.filters * layer.pointwise_kernel.shape[-2]
        return 2 * between * math.prod(layer.depthwise_kernel.shape[:-2]) + 2 * out * layer.pointwise_kernel.shape[-2]
    if isinstance(layer, keras.layers.MultiHeadAttention):  # besides its inner layers: scores, and a weighted sum
        queries, keys = math.prod(call.inputs[0][:-1]), math.prod(call.inputs[min(1, len(call.inputs) - 1)][:-1])
        return 2 * queries * keys * layer.num_heads * (layer.key_dim + layer.value_dim)
    by_element = (keras.layers.BatchNormalization, keras.layers.LayerNormalization, keras.layers.GroupNormalization)
    if isinstance(layer, (*by_element, keras.layers.Embedding, keras.layers.PReLU, keras.layers.Normalization)):
        return 0
    return None if _own_weights(layer) else 0


def _own_weights(layer: keras.Layer) -> bool:
    """Whether a layer has weights besides those of its inner layers."""
    inner = {id(v) for other in layer._flatten_layers(include_self=False) for v in other.trainable_variables}
    return any(id(v) not in inner for v in layer.trainable_variables)


def _calls_in_graph(model: keras.Model) -> list[_Call] | None:
    """The uses in a functional model's graph; None if a layer in it calls others in its own code."""
    graph = getattr(model, "_functional", None) or model
    calls: list[_Call] = []
    if not hasattr(graph, "_nodes_by_depth"):
        return None
    for node in itertools.chain(*(nodes for _, nodes in sorted(graph._nodes_by_depth.items(), reverse=True))):
        layer = node.operation
        if not isinstance(layer, keras.Layer) or node.is_input:
            continue
        if next(iter(layer._flatten_layers(include_self=False)), None) is None:
            calls.append(_Call(layer, _shapes(node.arguments.keras_tensors), _shapes(node.outputs)))
            continue
        inner = _calls_in_graph(layer)
        if inner is None:
            return None
        calls += inner
    return calls


def _traced_calls(model: keras.Model, features: Nest) -> list[_Call]:
    """The uses in a symbolic call of the model."""
    calls: list[_Call] = []
    with replaced_calls(list(model._flatten_layers(include_self=False)), lambda layer: _recording(layer, calls)):
        tf.function(lambda features: model(features), autograph=False).get_concrete_function(
            map_nest(lambda one: tf.TensorSpec((1, *one.shape), one.dtype), features)
        )
    return calls


def _recording(layer: keras.Layer, calls: list[_Call]) -> Callable[..., Any]:
    call = layer.call

    @functools.wraps(call)
    def record(*args: Any, **options: Any) -> Any:
        outputs = call(*args, **options)
        calls.append(_Call(layer, _shapes([*args, *options.values()]), _shapes(outputs)))
        return outputs

    return record


def _shapes(tensors: Any) -> Shapes:
    if isinstance(tensors, dict):
        tensors = list(tensors.values())
    if isinstance(tensors, list | tuple):
        return tuple(itertools.chain.from_iterable(map(_shapes, tensors)))
    shape = getattr(tensors, "shape", None)
    return () if shape is None else (tuple(int(size or 1) for size in tuple(shape)[1:]),)
