"""Layers on other devices: the requested devices of the operations of a traced step, and where they ran."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from objectives import make_step
from tensorflow.core.protobuf.rewriter_config_pb2 import RewriterConfig

from trainer.workload import step as replica
from trainer.workload.data.examples import Batch

pytestmark = pytest.mark.slow

v1 = tf.compat.v1

FEATURES = np.random.default_rng(3).random((6, 4), np.float32)
LABELS = np.random.default_rng(4).random((6, 3), np.float32)
SEED = np.int64([7, 1])
ONE, TWO = "/device:CPU:1", "/device:CPU:2"

# Every layer has another activation, because TensorFlow numbers scopes: their names do not identify the layers.
RELU, TANH, SIGMOID = ("Relu", "ReluGrad"), ("Tanh", "TanhGrad"), ("Sigmoid", "SigmoidGrad")


def dense(activation: str, name: str, units: int = 5) -> keras.layers.Layer:
    return keras.layers.Dense(units, activation=activation, name=name)


def prefixes() -> keras.Model:
    """Three layers whose names begin with each other's, and are the scopes that TensorFlow makes of each other's."""
    inputs = keras.Input((4,))
    hidden = dense("relu", "dense")(inputs)
    hidden = dense("tanh", "dense_1")(hidden)
    return keras.Model(inputs, dense("sigmoid", "dense_1_1", 3)(hidden))


class Block(keras.layers.Layer):
    """A layer with two inner layers."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.first, self.second = dense("relu", "first"), dense("tanh", "second")

    def build(self, shape: Any) -> None:
        self.first.build(shape)
        self.second.build((*shape[:-1], 5))
        self.built = True

    def call(self, features: Any) -> Any:
        return self.second(self.first(features))


def nested() -> keras.Model:
    inputs = keras.Input((4,))
    return keras.Model(inputs, dense("sigmoid", "out", 3)(Block(name="block")(inputs)))


def shared() -> keras.Model:
    """One layer that is called twice."""
    inputs = keras.Input((4,))
    twice = dense("tanh", "twice", 4)
    return keras.Model(inputs, dense("sigmoid", "out", 3)(twice(twice(inputs))))


class Trap(keras.layers.Layer):
    """Raises while it is armed."""

    armed = False

    def call(self, features: Any) -> Any:
        if self.armed:
            raise RuntimeError("the trap is armed")
        return features


def inputs_of(model: keras.Model) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """(parameters, state, seed) of a step."""
    values = replica.initial_values(model)
    kinds = {p.path: p.trainable for p in replica.parameters_of(model)}
    return {p: v for p, v in values.items() if kinds[p]}, {p: v for p, v in values.items() if not kinds[p]}, SEED


def trace(
    model: keras.Model, pins: Mapping[str, str], *, accumulate: int = 1, features: Any = FEATURES
) -> list[tuple[str, str, str]]:
    """(name, type, device) of every operation of a traced step, in loops too."""
    step = make_step(model, "mean_squared_error", labels=LABELS.shape[1:], layers=pins, accumulate=accumulate)
    function = tf.function(step, autograph=False)
    fed = (*tf.nest.map_structure(tf.constant, inputs_of(model)), Batch(tf.constant(features), tf.constant(LABELS)))
    graph = function.get_concrete_function(*fed).graph.as_graph_def()
    nodes = [*graph.node, *(node for inner in graph.library.function for node in inner.node_def)]
    return [(node.name, node.op, node.device) for node in nodes]


def devices(model: keras.Model, pins: Mapping[str, str], *types: tuple[str, str], **options: Any) -> list[set[str]]:
    """For each (forward, backward) type of operation, the device requested for all of that type."""
    traced = trace(model, pins, **options)
    found = []
    for forward, backward in types:
        assert {forward, backward} <= {kind for _, kind, _ in traced}
        found.append({device for _, kind, device in traced if kind in (forward, backward)})
    return found


def test_all_operations_of_a_pinned_layer_and_of_its_gradients_get_its_device():
    pinned = sorted(kind for _, kind, device in trace(prefixes(), {"dense_1": ONE}) if device == ONE)
    forward, backward = ["BiasAdd", "MatMul", "Tanh"], ["BiasAddGrad", "MatMul", "MatMul", "TanhGrad"]
    assert pinned == sorted(forward + backward)


def test_no_other_operation_has_a_device():
    assert {device for *_, device in trace(prefixes(), {"dense_1": ONE})} == {"", ONE}


def test_without_pins_no_operation_has_a_device():
    assert {device for *_, device in trace(prefixes(), {})} == {""}


@pytest.mark.parametrize("traces", [1, 2])
@pytest.mark.parametrize(
    ("layer", "expected"),
    [("dense", [{ONE}, {""}, {""}]), ("dense_1", [{""}, {ONE}, {""}]), ("dense_1_1", [{""}, {""}, {ONE}])],
)
def test_a_layer_is_not_taken_for_one_whose_name_begins_with_its_own(layer, expected, traces):
    model = prefixes()
    for _ in range(traces - 1):
        trace(model, {})
    assert devices(model, {layer: ONE}, RELU, TANH, SIGMOID) == expected


def test_two_layers_have_two_devices():
    found = devices(prefixes(), {"dense": ONE, "dense_1_1": TWO}, RELU, TANH, SIGMOID)
    assert found == [{ONE}, {""}, {TWO}]


def test_a_layer_in_a_pinned_layer_goes_with_it():
    assert devices(nested(), {"block": ONE}, RELU, TANH, SIGMOID) == [{ONE}, {ONE}, {""}]


def test_a_layer_in_a_pinned_layer_follows_its_own_pin():
    assert devices(nested(), {"block": ONE, "block/second": TWO}, RELU, TANH, SIGMOID) == [{ONE}, {TWO}, {""}]


def test_a_pinned_layer_in_a_layer_without_a_pin_goes_alone():
    assert devices(nested(), {"block/first": ONE}, RELU, TANH, SIGMOID) == [{ONE}, {""}, {""}]


def test_a_layer_that_is_used_twice_is_on_its_device_both_times():
    traced = trace(shared(), {"twice": ONE})
    assert [device for _, kind, device in traced if kind == "Tanh"] == [ONE, ONE]
    assert [device for _, kind, device in traced if kind == "TanhGrad"] == [ONE, ONE]


def test_a_layer_of_a_model_in_the_model_has_its_device():
    inputs = keras.Input((4,))
    inner = keras.Sequential([dense("relu", "first"), dense("tanh", "second")], name="inner")
    model = keras.Model(inputs, dense("sigmoid", "out", 3)(inner(inputs)))
    assert devices(model, {"inner/second": ONE}, RELU, TANH, SIGMOID) == [{""}, {ONE}, {""}]


@pytest.mark.parametrize(
    ("build", "pins", "expected"),
    [
        pytest.param(prefixes, {"dense_1": ONE}, [{""}, {ONE}, {""}], id="prefixes"),
        pytest.param(nested, {"block": ONE, "block/second": TWO}, [{ONE}, {TWO}, {""}], id="nested"),
    ],
)
def test_a_layer_has_its_device_where_the_batch_is_computed_in_parts(build, pins, expected):
    assert devices(build(), pins, RELU, TANH, SIGMOID, accumulate=2) == expected


def test_the_loop_of_a_recurrent_layer_is_on_its_device_forward_and_backward():
    inputs = keras.Input((4, 2))
    model = keras.Model(inputs, dense("relu", "out", 3)(keras.layers.LSTM(5, name="lstm")(inputs)))
    found = devices(model, {"lstm": ONE}, RELU, TANH, SIGMOID, features=FEATURES.repeat(2).reshape(6, 4, 2))
    assert found == [{""}, {ONE}, {ONE}]


def test_a_pin_overrides_the_device_of_the_replica():
    model = prefixes()
    step = make_step(model, "mean_squared_error", labels=LABELS.shape[1:], layers={"dense_1": ONE})
    fed = (*tf.nest.map_structure(tf.constant, inputs_of(model)), Batch(tf.constant(FEATURES), tf.constant(LABELS)))

    def on_device(*given: Any) -> Any:
        with tf.device("/cpu:0"):
            return step(*given)

    graph = tf.function(on_device, autograph=False).get_concrete_function(*fed).graph
    found = {op.type: op.device for op in graph.get_operations() if op.type in (*RELU, *TANH)}
    assert found == {"Relu": "/device:CPU:0", "ReluGrad": "/device:CPU:0", "Tanh": ONE, "TanhGrad": ONE}


def test_a_pin_to_a_device_of_another_task_names_the_task():
    task = "/job:worker/replica:0/task:1/device:CPU:1"
    assert devices(prefixes(), {"dense": "/job:worker/replica:0/task:1/cpu:1"}, RELU) == [{task}]


@pytest.fixture(scope="module")
def ran() -> tuple[dict[str, set[str]], Any, Any]:
    """Where each type of operation ran in a session with three devices; and gradients with and without pins."""
    model, pins = prefixes(), {"dense": "/cpu:1", "dense_1": "/cpu:2"}
    inputs = (*inputs_of(model), FEATURES, LABELS)
    with tf.Graph().as_default() as graph:
        fed = tf.nest.map_structure(lambda value: v1.placeholder(value.dtype, value.shape), inputs)

        def gradients(pins: Mapping[str, str]) -> Any:
            step = make_step(model, "mean_squared_error", labels=LABELS.shape[1:], layers=pins)
            return tf.function(step, autograph=False)(*fed[:-2], Batch(*fed[-2:])).gradients

        pinned, plain = gradients(pins), gradients({})
    feeds = dict(zip(tf.nest.flatten(fed), tf.nest.flatten(inputs), strict=True))
    metadata, options = v1.RunMetadata(), v1.RunOptions(output_partition_graphs=True)
    config = v1.ConfigProto(device_count={"CPU": 3})
    config.graph_options.rewrite_options.remapping = RewriterConfig.OFF  # else activations are fused with products
    with v1.Session(graph=graph, config=config) as session:
        with_pins = session.run(pinned, feeds, options, metadata)
        without = session.run(plain, feeds)
    places: dict[str, set[str]] = {}
    for node in (node for partition in metadata.partition_graphs for node in partition.node):
        places.setdefault(node.op, set()).add(node.device[-len(ONE) :])
    return places, with_pins, without


@pytest.mark.parametrize(
    ("types", "device"),
    [(RELU, ONE), (TANH, TWO), (SIGMOID, "/device:CPU:0")],
    ids=["a pinned layer", "another pinned layer", "a layer without a pin"],
)
def test_a_session_runs_a_layer_where_it_is_pinned(ran, types, device):
    places, _, _ = ran
    assert [places[kind] for kind in types] == [{device}, {device}]


def test_pins_change_no_gradient(ran):
    _, pinned, plain = ran
    assert {path: value.tobytes() for path, value in pinned.items()} == {p: v.tobytes() for p, v in plain.items()}


def test_scopes_identify_their_layers_in_a_second_trace_too():
    model, scopes = prefixes(), {}
    trace(model, {})
    step = make_step(model, "mean_squared_error", labels=LABELS.shape[1:], scopes=scopes)
    fed = (*tf.nest.map_structure(tf.constant, inputs_of(model)), Batch(tf.constant(FEATURES), tf.constant(LABELS)))
    graph = tf.function(step, autograph=False).get_concrete_function(*fed).graph
    called = [op for op in graph.get_operations() if op.type in ("Relu", "Tanh", "Sigmoid")]
    whose = {op.type: scopes[op.name.rpartition("/")[0]] for op in called}
    assert whose == {"Relu": "dense", "Tanh": "dense_1", "Sigmoid": "dense_1_1"}


def instance_calls(model: keras.Model) -> list[str]:
    """The layers whose `call` is not that of their class."""
    return [layer.path for layer in model._flatten_layers() if "call" in vars(layer)]


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_model_is_left_as_it_was(accumulate):
    model = nested()
    trace(model, {"block": ONE, "block/second": TWO}, accumulate=accumulate)
    assert instance_calls(model) == []


def test_the_model_is_left_as_it_was_when_a_layer_raises():
    inputs = keras.Input((4,))
    model = keras.Model(inputs, dense("relu", "out", 3)(Trap(name="trap")(inputs)))
    model.get_layer("trap").armed = True
    with pytest.raises(RuntimeError, match="trap is armed"):
        trace(model, {"trap": ONE, "out": TWO})
    assert instance_calls(model) == []


def test_a_call_that_was_set_on_a_layer_stays():
    model = prefixes()
    layer = model.get_layer("dense_1")
    given = layer.call = tf.function(layer.call)
    trace(model, {"dense_1": ONE})
    assert vars(layer)["call"] is given
