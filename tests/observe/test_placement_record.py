"""Where a plan's parameters, replicas and layers ran, in real sessions; and what is said when it is elsewhere."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from objectives import make_step

from trainer.launch.processes.ports import HeldPorts
from trainer.observe.placement.differences import differences
from trainer.observe.placement.executed import Executed, Operation, executed
from trainer.observe.placement.record import STEP, UPDATE, PlacementRecord, layers, make_record, parameters, replicas
from trainer.plan.layout import Parameter
from trainer.plan.placement import place
from trainer.plan.plan import Plan, Task
from trainer.task.tensorboard import Events
from trainer.workload import step as replica
from trainer.workload.data.examples import Batch

pytestmark = pytest.mark.slow

v1 = tf.compat.v1


def task(job: str, index: int, *devices: str, address: str = "", **told: Any) -> Task:
    return Task(job, index, address, "", (), None, 1, 2, cpus=2, replicas=devices, **told)


def plan(
    *tasks: Task, held: Sequence[Parameter] = (), hosts: Sequence[str] = ("worker:0",), pins: Mapping[str, str] = {}
) -> Plan:
    shards, strategy = place(held, hosts, pins={}), "sync" if tasks[0].address else "local"
    return Plan("test", strategy, 3, 8, tasks, shards, 96, (), layers=pins)


def model() -> keras.Model:
    """TensorFlow calls the scope of the layer "dense" as the layer "dense_1" is named."""
    inputs = keras.Input((8,))
    hidden = keras.layers.Dense(6, activation="relu", name="dense")(inputs)
    hidden = keras.layers.Dense(6, activation="relu", name="dense_1")(hidden)
    return keras.Model(inputs, keras.layers.Dense(3, name="logits")(hidden))


SCOPES = {"model/dense_1": "dense", "model/dense_1_2": "dense_1", "model/logits_1": "logits"}


def step_of_replicas(
    devices: Sequence[str], *, pins: Mapping[str, str] | None = None, jit: bool = False, accumulate: int = 1
) -> tuple[tf.Graph, Executed]:
    """Really runs one step of the model on each device, with one vector of parameters."""
    built = model()
    step, held = (
        make_step(built, "mean_squared_error", labels=(3,), layers=pins, accumulate=accumulate),
        variables_of(built),
    )
    with tf.Graph().as_default() as graph:
        with tf.device("/cpu:0"):
            flat = v1.get_variable("flat", [512], initializer=v1.zeros_initializer(), use_resource=True)
            pulled = flat.read_value()
        # One each: TensorFlow computes what is the same on the same device once.
        features = [v1.placeholder(tf.float32, [4, 8]) for _ in devices]
        outcomes = [on_device(step, d, r, held, (pulled, features[r]), jit) for r, d in enumerate(devices)]
        metadata, options = v1.RunMetadata(), v1.RunOptions(output_partition_graphs=True)
        with v1.Session(config=v1.ConfigProto(device_count={"CPU": 2}, allow_soft_placement=True)) as session:
            session.run(v1.global_variables_initializer())
            session.run(outcomes, {feed: np.ones([4, 8]) for feed in features}, options=options, run_metadata=metadata)
    return graph, executed(metadata, graph.as_graph_def().library)


def on_device(
    step: Any, device: str, index: int, held: Sequence[Parameter], given: tuple[tf.Tensor, tf.Tensor], jit: bool
) -> tf.Tensor:
    """Every gradient of a replica, as the engines ask for them."""

    def run(pulled: tf.Tensor, features: tf.Tensor) -> list[tf.Tensor]:
        with tf.device(None if jit else device):  # else operations are fused to ones that XLA does not know
            values = {p.path: tf.reshape(pulled[: p.size], p.shape) for p in held}
            told = step(values, {}, tf.zeros([2], tf.int64), Batch(features, tf.zeros([4, 3])))
            return [*told.gradients.values(), told.loss]

    with tf.name_scope(f"replica{index}"), tf.device(device):
        return tf.function(run, autograph=False, jit_compile=jit or None)(*given)


def variables_of(built: keras.Model) -> list[Parameter]:
    return replica.parameters_of(built)


HELD = variables_of(model())


def record(devices: Sequence[str], scopes: Mapping[str, str] = SCOPES, **options: Any) -> PlacementRecord:
    return make_record("worker:0", STEP, step_of_replicas(devices, **options)[1], scopes=scopes)


def test_what_ran_as_planned_differs_in_nothing():
    ran, planned = record(["/cpu:0", "/cpu:1"]), plan(task("worker", 0, "/cpu:0", "/cpu:1"), held=HELD)
    assert differences(ran, planned) == []
    told = [(r["index"], r["planned"], list(r["devices"])) for r in replicas(ran, planned)]
    assert told == [(0, "/cpu:0", ["/cpu:0"]), (1, "/cpu:1", ["/cpu:1"])]
    assert parameters(ran, planned)[0] == {
        "path": "dense/kernel",
        "shape": [8, 6],
        "bytes": 192,
        "shard": 0,
        "device": "/cpu:0",
    }


def test_a_replica_on_another_device_is_one_difference():
    (told,) = differences(record(["/cpu:0", "/cpu:0"]), plan(task("worker", 0, "/cpu:0", "/cpu:1"), held=HELD))
    assert "operations of replica 1 were planned on /cpu:1 but ran on /cpu:0: replica1/PartitionedCall/" in told
    assert "more" in told
    assert "soft placement" not in told  # a CPU has every kernel


def test_a_replica_that_did_not_run_is_a_difference(snapshot):
    told = differences(record(["/cpu:0"]), plan(task("worker", 0, "/cpu:0", "/cpu:1"), held=HELD))
    assert told == snapshot


def test_a_replica_that_is_not_planned_is_a_difference(snapshot):
    told = differences(record(["/cpu:0", "/cpu:1"]), plan(task("worker", 0, "/cpu:0"), held=HELD))
    assert told == snapshot


def test_what_soft_placement_moved_is_a_difference_that_says_so(snapshot):
    ran = record(["/gpu:0"])
    (told,) = differences(ran, plan(task("worker", 0, "/gpu:0"), held=HELD))
    assert "of replica 0 were planned on /gpu:0 but ran on /cpu:0: " in told
    assert told == snapshot
    (strict,) = differences(ran, plan(task("worker", 0, "/gpu:0", soft_placement=False), held=HELD))
    assert "soft placement" not in strict


def test_a_compiled_replica_is_checked_as_one_operation():
    ran = record(["/cpu:0", "/cpu:1"], jit=True)
    assert differences(ran, plan(task("worker", 0, "/cpu:0", "/cpu:1"), held=HELD)) == []
    assert differences(ran, plan(task("worker", 0, "/cpu:0", "/cpu:0"), held=HELD)) == [
        "1 operation of replica 1 was planned on /cpu:0 but ran on /cpu:1: replica1/PartitionedCall (compiled)"
    ]


PIN = {"dense_1": "/cpu:1"}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_pinned_layer_ran_on_its_device_forward_and_backward(accumulate):
    ran = record(["/cpu:0"], pins=PIN, accumulate=accumulate)
    planned = plan(task("worker", 0, "/cpu:0"), held=HELD, pins=PIN)
    assert differences(ran, planned) == []
    told = {layer["path"]: (layer["planned"], list(layer["devices"])) for layer in layers(ran, planned)}
    assert told["dense"] == (None, ["/cpu:0"])
    assert told["dense_1"] == ("/cpu:1", ["/cpu:1"])
    assert told["logits"] == (None, ["/cpu:0"])


def test_a_pinned_layer_elsewhere_is_a_difference(snapshot):
    (told,) = differences(record(["/cpu:0"]), plan(task("worker", 0, "/cpu:0"), held=HELD, pins=PIN))
    assert told == snapshot
    assert "model/dense_1_2/" in told
    assert "model/dense_1/" not in told


def test_a_pinned_layer_that_was_compiled_with_the_rest_is_a_difference(snapshot):
    told = differences(record(["/cpu:0"], jit=True), plan(task("worker", 0, "/cpu:0"), held=HELD, pins=PIN))
    assert told == snapshot


def test_a_pinned_layer_without_operations_is_a_difference(snapshot):
    ran = record(["/cpu:0"], scopes={})
    told = differences(ran, plan(task("worker", 0, "/cpu:0"), held=HELD, pins=PIN))
    assert told == snapshot


def test_a_pinned_layer_without_parameters_need_not_be_seen():
    ran = record(["/cpu:0"], scopes={})
    assert differences(ran, plan(task("worker", 0, "/cpu:0"), held=HELD, pins={"flatten": "/cpu:1"})) == []


def ran_on(devices: Mapping[str, str], **types: str) -> Executed:
    """Operations that compute, or variables, by name."""
    operations = [Operation(n, types.get(n.rpartition("/")[2], "MatMul"), d, True) for n, d in devices.items()]
    return Executed(tuple(sorted(operations)), ())


def test_a_layer_inside_a_pinned_layer_follows_it_unless_it_has_a_pin_itself():
    ran = ran_on(
        {"replica0/model/block/one/MatMul": "/cpu:1", "replica0/model/block/two/MatMul": "/cpu:0", "flat": "/cpu:0"},
        flat="VarHandleOp",
    )
    scopes = {"model/block": "block", "model/block/one": "block/one", "model/block/two": "block/two"}
    pins = {"block": "/cpu:1", "block/two": "/cpu:0"}
    told = make_record("worker:0", STEP, ran, scopes=scopes)
    assert differences(told, plan(task("worker", 0, "/cpu:0"), pins=pins)) == []


CLUSTER = (task("ps", 0, address="a"), task("ps", 1, address="b"), task("worker", 0, "/cpu:0", address="c"))


def test_a_shard_on_another_host_is_a_difference():
    ran = ran_on(
        {
            "shard0/flat": "/job:ps/task:0/cpu:0",
            "shard1/flat": "/job:ps/task:0/cpu:0",
            "replica0/MatMul": "/job:worker/task:0/cpu:0",
        },
        flat="VarHandleOp",
    )
    told = differences(make_record("worker:0", STEP, ran), plan(*CLUSTER, held=HELD, hosts=["ps:0", "ps:1"]))
    assert told == ["shard1/flat of shard 1 was planned on /job:ps/task:1/cpu:0 but is on /job:ps/task:0/cpu:0"]


def test_a_shard_host_is_asked_for_its_own_shard_only(snapshot):
    ran = ran_on({"shard1/flat": "/job:ps/task:1/cpu:0"}, flat="VarHandleOp")
    planned = plan(*CLUSTER, held=HELD, hosts=["ps:0", "ps:1"])
    assert differences(make_record("ps:1", UPDATE, ran), planned) == []
    assert differences(make_record("ps:0", UPDATE, ran), planned) == snapshot


def test_variables_of_a_function_that_is_called_eagerly_are_listed_beside_it():
    flat = tf.Variable(tf.zeros([4]))
    ran = ran_on({"replica0/MatMul": "/cpu:0"})
    told = make_record("worker:0", STEP, ran, variables={"flat": flat.device})
    assert differences(told, plan(task("worker", 0, "/cpu:0"), held=HELD)) == []


@pytest.mark.cluster
def test_a_worker_records_where_in_the_cluster_shards_and_replica_are():
    with HeldPorts(2) as held:
        addresses = [f"127.0.0.1:{port}" for port in held.ports]
    spec = tf.train.ClusterSpec({"ps": addresses[:1], "worker": addresses[1:]})
    config = v1.ConfigProto(device_count={"CPU": 2})
    servers = [tf.distribute.Server(spec, job_name=job, task_index=0, config=config) for job in ("ps", "worker")]
    metadata, options = v1.RunMetadata(), v1.RunOptions(output_partition_graphs=True)
    with tf.Graph().as_default():
        with tf.device("/job:ps/task:0/cpu:1"):
            flat = v1.get_variable("shard0/flat", [4], use_resource=True).read_value()
        with tf.device("/job:worker/task:0/cpu:1"), tf.name_scope("replica0"):
            loss = tf.tanh(flat)
        with v1.Session(servers[1].target, config=config) as session:
            session.run(v1.global_variables_initializer())
            session.run(loss, options=options, run_metadata=metadata)
    ran = make_record("worker:0", STEP, executed(metadata))
    ps, worker = task("ps", 0, address=addresses[0]), task("worker", 0, "/cpu:0", address=addresses[1])
    assert differences(ran, plan(ps, worker, held=HELD, hosts=["ps:0"])) == [
        "shard0/flat of shard 0 was planned on /job:ps/task:0/cpu:0 but is on /job:ps/task:0/cpu:1",
        "1 operation of replica 0 was planned on /job:worker/task:0/cpu:0 but ran on /job:worker/task:0/cpu:1: "
        "replica0/Tanh (Tanh)",
    ]


def test_a_record_is_the_same_after_json():
    ran, planned = record(["/cpu:0", "/cpu:1"], jit=True), plan(task("worker", 0, "/cpu:0", "/cpu:1"), held=HELD)
    assert PlacementRecord.from_json(json.loads(json.dumps(ran.to_json(planned)))) == ran


# The same devices in the graph for TensorBoard.


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_graph_of_events_shows_where_operations_ran(tmp_path, accumulate):
    graph, ran = step_of_replicas(["/cpu:1"], accumulate=accumulate)
    written = graph_of(tmp_path, graph, {o.name: o.device for o in ran.operations})
    assert {node.name: node.device for node in written.node}["flat"] == "/cpu:0"
    functions = [node for function in written.library.function for node in function.node_def]
    products = [node for node in functions if node.op == "MatMul" and "gradient_tape" in node.name]
    assert products
    assert {node.device for node in products} == {"/cpu:1"}


def test_a_function_that_ran_on_several_devices_shows_none(tmp_path):
    @tf.function(autograph=False)
    def shared(x: tf.Tensor) -> tf.Tensor:
        return tf.tanh(x, name="tanh")

    with tf.Graph().as_default() as graph:
        shared(shared(v1.placeholder(tf.float32, [2])))
    both = {"PartitionedCall/tanh": "/cpu:0", "PartitionedCall_1/tanh": "/cpu:1"}
    same = dict.fromkeys(both, "/cpu:1")
    for devices, expected in ((both, ""), (same, "/cpu:1")):
        (function,) = graph_of(tmp_path / expected.strip("/"), graph, devices).library.function
        assert [node.device for node in function.node_def if node.name == "tanh"] == [expected]


def graph_of(folder: Path, graph: tf.Graph, devices: Mapping[str, str]) -> Any:
    """The graph that an event file holds."""
    events = Events(folder, start=0)
    events.graph(graph, devices)
    events.close()
    (path,) = folder.glob("events.*")
    told = [v1.Event.FromString(line.numpy()) for line in tf.data.TFRecordDataset(str(path))]
    return v1.GraphDef.FromString(next(event.graph_def for event in told if event.graph_def))
