"""device.log_placement=true on real runs: what ran where is written down, and a run that went elsewhere fails."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tensorflow as tf
from runs import Run

pytestmark = pytest.mark.cluster

SHORT = ["train.steps=6", "train.batch_size=48", "model=mlp", "device.log_placement=true"]
PLACED = {
    "sync": (
        ["cluster=2ps2w", "device.deterministic=true"],
        ["ps:0 update", "ps:1 update", "worker:0 step", "worker:1 step"],
    ),
    "async": (
        ["cluster=2w", "strategy=async"],
        ["worker:0 step", "worker:0 update", "worker:1 step", "worker:1 update"],
    ),
    "all_reduce": (
        ["cluster=2w", "strategy=all_reduce", "device.deterministic=true"],
        ["worker:0 step", "worker:1 step"],
    ),
    "local": (
        ["device.replicas=[/cpu:0,/cpu:1]", "device.layers={dense0:/cpu:2}", "device.deterministic=true"],
        ["worker:0 step"],
    ),
    "compiled": (["cluster=1ps1w", "train.jit=true"], ["ps:0 update", "worker:0 step"]),
}
USER_FILE = """
import keras, tensorflow as tf


class Elsewhere(keras.layers.Layer):
    def call(self, inputs):
        with tf.device("/cpu:1"):
            return tf.nn.tanh(inputs)


def willful(input_shape, classes):
    inputs = keras.Input(input_shape)
    hidden = Elsewhere(name="elsewhere")(keras.layers.Flatten(name="flatten")(inputs))
    return keras.Model(inputs, keras.layers.Dense(classes, name="logits")(hidden))
"""


@pytest.mark.long(but=["sync"])
@pytest.mark.parametrize("name", PLACED)
def test_everything_ran_where_it_was_planned(finish: Callable[..., Run], name):
    """And where a run is deterministic, it has no operation that TensorFlow refuses then."""
    command, records = PLACED[name]
    run = finish(*command, *SHORT)
    placed = json.loads((run.directory / "placement.json").read_text())
    assert placed["as_planned"]
    assert [f"{record['task']} {record['run']}" for record in placed["records"]] == records
    nodes = _nodes_in_events(run)
    devices = {node.device for node in nodes} - {""}
    assert devices >= {"/cpu:0", "/cpu:1", "/cpu:2"} if name == "local" else devices
    operations = {node.op for node in nodes}
    assert "PyFunc" in operations
    assert ("Timestamp" in operations) is ("device.deterministic=true" not in command)


def _nodes_in_events(run: Run) -> list[Any]:
    (events,) = (run.directory / "events").iterdir()
    graph = tf.compat.v1.GraphDef()
    for event in tf.compat.v1.train.summary_iterator(str(events)):
        graph.MergeFromString(event.graph_def)
    return [*graph.node, *(node for function in graph.library.function for node in function.node_def)]


def test_a_run_that_went_elsewhere_fails_with_what_did(start: Callable[..., Run], tmp_path: Path):
    (tmp_path / "mine.py").write_text(USER_FILE)
    run = start("user=mine.py", "model=willful", "device.replicas=[/cpu:0,/cpu:1]", *SHORT[:2], SHORT[3])
    assert run.wait() == 70
    assert "as planned" in run.output
    assert "of replica 0" in run.output
    assert "ran on /cpu:1" in run.output
    assert "Traceback" not in run.output
    assert not json.loads((run.directory / "placement.json").read_text())["as_planned"]
