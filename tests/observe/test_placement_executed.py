"""What real sessions say of where they ran."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import tensorflow as tf

from trainer.launch.processes.ports import HeldPorts
from trainer.observe.placement.executed import Executed, Operation, Transfer, executed, short

v1 = tf.compat.v1
MATRIX = [[1.0, 2.0], [3.0, 4.0]]


def run(fetch: tf.Tensor, target: str = "", feed: Any = None) -> Executed:
    """Runs a tensor of the default graph with two logical CPUs."""
    metadata, options = v1.RunMetadata(), v1.RunOptions(output_partition_graphs=True)
    with v1.Session(target, config=v1.ConfigProto(device_count={"CPU": 2})) as session:
        session.run(v1.global_variables_initializer())
        session.run(fetch, feed, options=options, run_metadata=metadata)
    return executed(metadata, v1.get_default_graph().as_graph_def().library)


def types(ran: Executed) -> dict[str, str]:
    """Type by name, of what computes; a CPU has kernels of another name for some types."""
    return {o.name: o.type.replace("_Mkl", "") for o in ran.operations if o.computes}


@pytest.fixture(autouse=True)
def graph() -> Any:
    with tf.Graph().as_default() as graph:
        yield graph


@pytest.fixture
def matrix(graph: Any) -> Any:
    """A tensor that nothing can be folded into."""
    return v1.random_normal([2, 2], name="matrix")


@pytest.mark.parametrize(
    ("device", "inside", "expected"),
    [
        ("/job:ps/replica:0/task:1/device:CPU:0", "", "/job:ps/task:1/cpu:0"),
        ("/job:localhost/replica:0/task:0/device:GPU:1", "", "/gpu:1"),
        ("/device:CPU:1", "/job:worker/task:2/cpu:0", "/job:worker/task:2/cpu:1"),
        ("/job:worker/task:3", "/job:worker/task:2/cpu:1", "/job:worker/task:3/cpu:1"),
        ("", "/cpu:1", "/cpu:1"),
        ("/GPU:0", "", "/gpu:0"),
    ],
)
def test_devices_are_written_as_plans_write_them(device, inside, expected):
    assert short(device, inside) == expected


def test_a_session_that_was_not_asked_for_its_graphs_is_refused(raises):
    with raises(ValueError):
        executed(v1.RunMetadata())


def test_each_operation_has_its_device(matrix):
    with tf.device("/cpu:1"), tf.name_scope("one"):
        product = tf.tanh(matrix, name="tanh")
    with tf.device("/cpu:0"):
        total = tf.exp(product, name="exp")
    ran = run(total)
    assert Operation("one/tanh", "Tanh", "/cpu:1", computes=True) in ran.operations
    assert Operation("exp", "Exp", "/cpu:0", computes=True) in ran.operations
    assert ("/cpu:1", "/cpu:0", ("one/tanh",)) in ran.transfers


def test_bookkeeping_does_not_compute(matrix):
    rows = tf.add(tf.shape(tf.boolean_mask(matrix, matrix[:, 0] > 0))[0], 1, name="rows")
    ran = {o.name: o.computes for o in run([rows, tf.identity(matrix, name="same")]).operations}
    assert ran["matrix/RandomStandardNormal"]
    assert not ran["rows"]
    assert not ran["same"]


def test_a_function_is_listed_operation_by_operation(matrix):
    @tf.function(autograph=False)
    def inner(x: tf.Tensor) -> tf.Tensor:
        return tf.tanh(x, name="tanh")

    @tf.function(autograph=False)
    def outer(x: tf.Tensor) -> tf.Tensor:
        with tf.name_scope("model"):
            return tf.matmul(inner(x), x, name="product")

    with tf.device("/cpu:1"), tf.name_scope("replica0"):
        ran = run(outer(matrix))
    assert types(ran) == {
        "matrix/RandomStandardNormal": "RandomStandardNormal",
        "replica0/PartitionedCall/model/PartitionedCall/tanh": "Tanh",
        "replica0/PartitionedCall/model/product": "MatMul",
    }
    assert {o.device for o in ran.operations if o.name.startswith("replica0/")} == {"/cpu:1"}


def test_a_loop_and_a_branch_are_listed_operation_by_operation(matrix):
    @tf.function(autograph=False)
    def loop(x: tf.Tensor) -> tf.Tensor:
        x = tf.while_loop(lambda i, x: i < 3, lambda i, x: (i + 1, tf.tanh(x, name="tanh")), (0, x))[1]
        positive = tf.reduce_sum(x, name="sum") > 0
        return tf.cond(positive, lambda: tf.exp(x, name="exp"), lambda: tf.sin(x, name="sin"))

    with tf.device("/cpu:1"):
        ran = run(loop(matrix))
    found = {o.type: o.device for o in ran.operations if o.type in ("Tanh", "Exp", "Sin", "Sum")}
    assert found == {"Tanh": "/cpu:1", "Exp": "/cpu:1", "Sin": "/cpu:1", "Sum": "/cpu:1"}


def test_a_function_that_stays_a_call_is_expanded(matrix):
    @tf.function(autograph=False, experimental_attributes={"_noinline": True})
    def apart(x: tf.Tensor) -> tf.Tensor:
        return tf.tanh(x, name="tanh")

    with tf.device("/cpu:1"):
        ran = run(apart(matrix))
    assert Operation("PartitionedCall/tanh", "Tanh", "/cpu:1", computes=True) in ran.operations
    assert Operation("PartitionedCall", "PartitionedCall", "/cpu:1") in ran.operations


def test_a_compiled_function_is_one_operation(matrix):
    @tf.function(autograph=False, jit_compile=True)
    def compiled(x: tf.Tensor) -> tf.Tensor:
        return tf.tanh(tf.exp(x))

    with tf.device("/cpu:1"), tf.name_scope("replica0"):
        ran = run(compiled(matrix))
    told = [o for o in ran.operations if o.type == "compiled"]
    assert told == [Operation("replica0/PartitionedCall", "compiled", "/cpu:1", computes=True, holds=3)]


def test_input_pipelines_are_not_expanded():
    dataset = tf.data.Dataset.range(4).map(lambda x: tf.cast(x, tf.float32) * 2.0)
    element = v1.data.make_one_shot_iterator(dataset).get_next()
    assert {o.type for o in run(element).operations} == {"OneShotIterator", "IteratorGetNext"}


@pytest.mark.cluster
def test_operations_of_other_tasks_are_listed_too():
    with HeldPorts(2) as held:
        addresses = [f"127.0.0.1:{port}" for port in held.ports]
    spec = tf.train.ClusterSpec({"ps": addresses[:1], "worker": addresses[1:]})
    config = v1.ConfigProto(device_count={"CPU": 2})
    servers = [tf.distribute.Server(spec, job_name=job, task_index=0, config=config) for job in ("ps", "worker")]

    @tf.function(autograph=False, jit_compile=True)
    def compiled(x: tf.Tensor) -> tf.Tensor:
        return tf.tanh(tf.exp(x))

    with tf.device("/job:ps/task:0/cpu:0"):
        flat = v1.get_variable("shard0/flat", [4], use_resource=True)
        queue = v1.FIFOQueue(2, [tf.float32], [[4]], name="intake")
        pulled = flat.read_value()
    with tf.device("/job:worker/task:0/cpu:1"), tf.name_scope("replica0"):
        pushed = compiled(tf.tanh(pulled, name="tanh"))
    with tf.device("/job:ps/task:0/cpu:0"):
        push = queue.enqueue(pushed, name="push")
    ran = run(push, servers[1].target)
    ps, worker = "/job:ps/task:0/cpu:0", "/job:worker/task:0/cpu:1"
    assert {o.name: o.device for o in ran.operations} == {
        "shard0/flat": ps,
        "Read/ReadVariableOp": ps,
        "intake": ps,
        "push": ps,
        "replica0/tanh": worker,
        "replica0/PartitionedCall": worker,
    }
    assert ran.transfers == (
        Transfer(ps, worker, ("Read/ReadVariableOp",)),
        Transfer(worker, ps, ("replica0/PartitionedCall",)),
    )


def test_reading_and_checking_import_no_tensorflow():
    code = "import sys, trainer.observe.placement.verify; assert 'tensorflow' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
