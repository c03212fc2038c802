"""Counts the floating-point operations of a model from the shapes of its layers; nothing is computed.

A multiplication and the addition after it are two operations. As in the literature, element-wise operations are left
out: activations, normalization, pooling, dropout.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import keras

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


def flops_of(model: keras.Model, input_shape: Sequence[int]) -> Flops:
    """Counts the forward pass of one example.

    Args:
        input_shape: [...] of one example.
    """
    calls = _calls_in_graph(model)
    if calls is None:
        calls = _traced_calls(model, input_shape)
    counted = [(call.layer, _forward(call)) for call in calls]
    uncounted = dict.fromkeys(layer.path for layer, flops in counted if flops is None)
    return Flops(sum(flops or 0 for _, flops in counted), tuple(uncounted))


def _forward(call: _Call) -> int | None:
    """Operations of one use; None if no rule counts them."""
    import keras
    from keras.src.layers.convolutional.base_conv import BaseConv
    from keras.src.layers.convolutional.base_conv_transpose import BaseConvTranspose
    from keras.src.layers.convolutional.base_depthwise_conv import BaseDepthwiseConv
    from keras.src.layers.convolutional.base_separable_conv import BaseSeparableConv

    layer, out = call.layer, math.prod(call.outputs[0])
    if isinstance(layer, keras.layers.Dense):
        return 2 * out * int(call.inputs[0][-1])
    if isinstance(layer, keras.layers.EinsumDense):
        contracted = set(layer.equation.split(",")[1].split("->")[0]) - set(layer.equation.split("->")[1])
        kernel = dict(zip(layer.equation.split(",")[1].split("->")[0], layer.kernel.shape, strict=True))
        return 2 * out * math.prod(kernel[label] for label in contracted)
    if isinstance(layer, BaseConv):
        return 2 * out * math.prod(layer.kernel.shape[:-1])
    if isinstance(layer, BaseConvTranspose):
        return 2 * math.prod(call.inputs[0]) * math.prod(layer.kernel.shape[:-1])
    if isinstance(layer, BaseDepthwiseConv):
        return 2 * out * math.prod(layer.kernel.shape[:-2])
    if isinstance(layer, BaseSeparableConv):
        between = out // layer.filters * layer.pointwise_kernel.shape[-2]
        return 2 * between * math.prod(layer.depthwise_kernel.shape[:-2]) + 2 * out * layer.pointwise_kernel.shape[-2]
    if isinstance(
        layer, keras.layers.MultiHeadAttention
    ):  # besides its inner layers: scores, and the values they weigh
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
    import keras

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


def _traced_calls(model: keras.Model, input_shape: Sequence[int]) -> list[_Call]:
    """The uses in a symbolic call of the model."""
    import tensorflow as tf

    calls: list[_Call] = []
    layers = list(model._flatten_layers(include_self=False))
    own = [vars(layer).get("call") for layer in layers]
    for layer in layers:
        object.__setattr__(layer, "call", _recording(layer, calls))
    try:
        tf.function(lambda features: model(features), autograph=False).get_concrete_function(
            tf.TensorSpec((1, *input_shape), tf.float32)
        )
    finally:
        for layer, call in zip(layers, own, strict=True):
            if call is None:
                object.__delattr__(layer, "call")
            else:
                object.__setattr__(layer, "call", call)
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
    return tuple(_tensor_shapes(tensors))


def _tensor_shapes(tensors: Any) -> Iterator[tuple[int, ...]]:
    for one in tensors if isinstance(tensors, list | tuple) else [tensors]:
        if isinstance(one, list | tuple):
            yield from _tensor_shapes(one)
        elif getattr(one, "shape", None) is not None:
            yield tuple(int(size or 1) for size in tuple(one.shape)[1:])
