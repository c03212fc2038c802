"""What TensorFlow executes for a step contains no sum whose order varies between runs."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from tests.objectives import make_step
from trainer.task.server import session_config
from trainer.workload import step
from trainer.workload.data.examples import Batch

v1 = tf.compat.v1
BINARY = "binary_crossentropy"
TASK: Any = SimpleNamespace(
    name="worker:0", intra_op_threads=1, inter_op_threads=2, soft_placement=True, cpus=1, gpus=(), growth=False,
    memory_fraction=None, memory_mib=None,
)  # fmt: skip


def binary() -> keras.Model:
    return keras.Sequential([layers.Input((5,)), layers.Dense(4, activation="relu"), layers.Dense(1)])


def with_three_way_skip() -> keras.Model:
    inputs = layers.Input((5,))
    x = layers.Dense(4, activation="tanh")(inputs)
    branches = [layers.Dense(4, activation="relu")(x) for _ in range(3)]
    return keras.Model(inputs, layers.Dense(1)(layers.Add()([x, *branches])))


def with_shared_layer() -> keras.Model:
    inputs = layers.Input((5,))
    shared = layers.Dense(4)
    return keras.Model(inputs, layers.Dense(1)(shared(inputs) + shared(inputs * 2) + shared(inputs * 3)))


def executed(graph: tf.Graph, fetches: Any, feeds: Any = None, *, is_optimized: bool = False) -> list[Any]:
    """The operations that a session of a task executes, those of functions included.

    Args:
        is_optimized: whether the session has TensorFlow's own choice of optimizations instead of the task's.
    """
    config = session_config(TASK, peers=[])
    config.ClearField("device_filters")
    if is_optimized:
        config.graph_options.ClearField("rewrite_options")
    options, metadata = v1.RunOptions(output_partition_graphs=True), v1.RunMetadata()
    with v1.Session(graph=graph, config=config) as session:
        session.run(fetches, feeds, options=options, run_metadata=metadata)
    graphs = metadata.partition_graphs
    functions = [function for one in graphs for function in one.library.function]
    return [node for one in graphs for node in one.node] + [node for one in functions for node in one.node_def]


def sums_of_three(model: keras.Model) -> int:
    """Counts the operations of a step that sum more than two tensors."""
    with tf.Graph().as_default() as graph:
        parameters = {v.path: v1.placeholder(tf.float32, v.shape) for v in model.trainable_variables}
        batch = Batch(v1.placeholder(tf.float32, [8, 5]), v1.placeholder(tf.float32, [8]), None)
        run = tf.function(make_step(model, BINARY), autograph=False)
        output = run(parameters, {}, tf.zeros([2], tf.int64), batch)
        feeds = {one: np.ones(one.shape, np.float32) for one in [*parameters.values(), *batch.tensors]}
    nodes = executed(graph, [*output.gradients.values(), output.loss], feeds)
    assert any("MatMul" in node.op for node in nodes)  # the step itself, not a call of it
    return sum(node.op == "AddN" and node.attr["N"].i > 2 for node in nodes)


@pytest.mark.parametrize("model", [binary, with_three_way_skip, with_shared_layer])
def test_a_step_sums_two_tensors_at_a_time(model, monkeypatch):
    assert sums_of_three(model()) == 0
    monkeypatch.setattr(step, "ordered_sums", contextlib.nullcontext)
    assert sums_of_three(model()) > 0


def test_a_step_that_uses_add_n_sums_two_tensors_at_a_time():
    inputs = layers.Input((5,))
    x = [layers.Dense(4)(inputs) for _ in range(4)]
    assert sums_of_three(keras.Model(inputs, layers.Dense(1)(layers.Lambda(tf.add_n)(x)))) == 0


@pytest.mark.parametrize("is_optimized", [False, True])
def test_a_session_of_a_task_does_not_join_sums_of_two(is_optimized):
    """With the optimizer's default TensorFlow joins them: the reason for the task's setting."""
    with tf.Graph().as_default() as graph:
        a, b, c, d = (v1.random_uniform([8, 5]) for _ in range(4))
        total = tf.exp((a + b) + (c + d))
    nodes = executed(graph, total, is_optimized=is_optimized)
    assert any(node.op == "AddN" for node in nodes) is is_optimized
