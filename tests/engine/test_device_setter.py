"""The device function for between-graph replication, on hand-written graphs."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from trainer.engine.device_setter import device_setter
from trainer.plan.layout import Parameter
from trainer.plan.placement import place
from trainer.plan.plan import Plan, Task

v1 = tf.compat.v1

PARAMETERS = [Parameter("dense/kernel", (64, 10), True), Parameter("dense/bias", (10,), True)]
PLANNED = {"dense/kernel": 1, "dense/bias": 0}  # pins


def plan(ps: int, workers: int = 4, strategy: str = "sync", max_part_mib: float | None = None) -> Plan:
    jobs = [("ps", index) for index in range(ps)] + [("worker", index) for index in range(workers)]
    replicas = {"ps": (), "worker": ("/cpu:0",)}
    tasks = tuple(
        Task(job, index, "127.0.0.1:0", "127.0.0.1:0", (), None, 1, 2, replicas=replicas[job]) for job, index in jobs
    )
    hosts = [task.name for task in tasks if task.job == ("ps" if ps else "worker")]
    pins = {path: shard for path, shard in PLANNED.items() if len(hosts) > 1}
    shards = place(PARAMETERS, hosts, pins=pins, max_part_mib=max_part_mib)
    return Plan(f"{ps}ps{workers}w", strategy, 300, 64, tasks, shards, 8000, ())


def devices(device: Callable[[Any], str], build: Callable[[], Any]) -> dict[str, str]:
    """Of every operation, by name."""
    with tf.Graph().as_default() as graph:
        with v1.device(device):
            build()
        return {op.name: op.device for op in graph.get_operations()}


def of_variables(device: Callable[[Any], str], **shapes: tuple[int | None, ...]) -> list[str]:
    """Devices of float32 variables, made in this order."""

    def build() -> None:
        for name, shape in shapes.items():
            first = v1.placeholder_with_default(np.zeros([size or 1 for size in shape], np.float32), shape)
            v1.Variable(first, name=name, use_resource=True, validate_shape=None not in shape)

    placed = devices(device, build)
    return [placed[name] for name in shapes]


def variable(name: str, shape: tuple[int, ...] = (16,), use_resource: bool = True) -> Any:
    return v1.get_variable(name, shape, use_resource=use_resource)


def two_layers() -> Any:
    """A model as it was written by hand: variables of both kinds, a loss, an optimizer with slots."""
    x = v1.placeholder(tf.float32, [None, 8])
    hidden = tf.nn.relu(x @ variable("w0", (8, 6)) + variable("b0", (6,), use_resource=False), name="hidden")
    loss = tf.reduce_mean(hidden @ variable("w1", (6, 1)))
    return v1.train.AdamOptimizer().minimize(loss, v1.train.get_or_create_global_step())


def enclosing_scopes() -> None:
    jobs = ["/job:ps", "/job:ps/task:1", "/job:ps/gpu:0", "/job:worker", "/job:worker/task:1/gpu:0", "/job:other/cpu:0"]
    for number, scope in enumerate(["/cpu", "/cpu:0", "/gpu:1", "/task:1", "/replica:0", None, *jobs]):
        with tf.device(scope):
            kernel = variable(f"v{number}")
            tf.add(kernel, 1.0)
        variable(f"after{number}")


def scopes_in_scopes() -> None:
    with tf.device("/gpu:1"):
        variable("a")
        with tf.device("/cpu:0"), tf.device("/job:worker/task:3"):
            variable("b")
        with tf.device("/job:ps"), v1.name_scope("tower"):
            tf.Variable([1.0], name="c")


def control_dependencies() -> None:
    first = variable("first")
    with tf.control_dependencies([first.assign(tf.ones([16]))]):
        second = variable("second")
        with v1.colocate_with(first.op), tf.control_dependencies([second.initializer]):
            variable("third")
            tf.identity(first)
    tf.cond(tf.constant(True), lambda: first + 1.0, lambda: first)


def other_state() -> None:
    tf.raw_ops.MutableHashTableV2(key_dtype=tf.string, value_dtype=tf.int64)
    tf.raw_ops.MutableHashTableOfTensorsV2(key_dtype=tf.string, value_dtype=tf.int64)
    v1.ConditionalAccumulator(tf.float32, [16])
    v1.FIFOQueue(2, [tf.float32])
    variable("last")


GRAPHS = [two_layers, enclosing_scopes, scopes_in_scopes, control_dependencies, other_state]


@pytest.mark.parametrize("build", GRAPHS, ids=lambda build: build.__name__)
@pytest.mark.parametrize("ps", [1, 2, 3])
def test_every_operation_is_where_tensorflows_own_setter_puts_it(ps, build):
    own = v1.train.replica_device_setter(ps_tasks=ps, worker_device="/job:worker/task:2")
    ours = devices(device_setter(plan(ps), task="worker:2", strategy="round_robin"), build)
    assert ours == devices(own, build)


@pytest.mark.parametrize("build", GRAPHS, ids=lambda build: build.__name__)
def test_without_ps_the_workers_are_the_hosts(build):
    own = v1.train.replica_device_setter(ps_tasks=4, ps_device="/job:worker", worker_device="/job:worker/task:2")
    ours = devices(device_setter(plan(0), task="worker:2", strategy="round_robin"), build)
    assert ours == devices(own, build)


def test_two_setters_around_each_other_are_as_tensorflows_are():
    def build_in(inner: Callable[[Any], str]) -> Callable[[], None]:
        def build() -> None:
            with v1.device(inner):
                two_layers()

        return build

    def own() -> Callable[[Any], str]:
        return v1.train.replica_device_setter(ps_tasks=2, worker_device="/job:worker/task:0")

    def ours() -> Callable[[Any], str]:
        return device_setter(plan(2), strategy="round_robin")

    assert devices(ours(), build_in(ours())) == devices(own(), build_in(own()))


def test_the_example_in_the_docstring_is_right():
    setter = device_setter(plan(2), task="worker:3")

    def build() -> None:
        features = v1.placeholder(tf.float32, [None, 64], name="features")
        table = v1.get_variable("table", [64, 900], use_resource=True)
        v1.get_variable("scale", [900], use_resource=True)
        with tf.device("/gpu:1"):
            v1.get_variable("shift", [900], use_resource=True)
            tf.matmul(features, table, name="hidden")

    placed = devices(setter, build)
    assert {name: placed[name] for name in ("features", "table", "scale", "shift", "hidden")} == {
        "features": "/job:worker/task:3",
        "table": "/job:ps/task:0",
        "scale": "/job:ps/task:1",
        "shift": "/job:ps/task:1/device:GPU:1",
        "hidden": "/job:worker/task:3/device:GPU:1",
    }


def test_greedy_takes_the_host_with_the_fewest_bytes_and_of_equal_ones_the_first():
    # After each: 0 0 0, 400 0 0, 400 40 0, 400 40 80, 400 200 80, 400 200 120, 400 200 200, 400 204 200
    placed = of_variables(device_setter(plan(3)), a=(100,), b=(10,), c=(20,), d=(40,), e=(10,), f=(4, 5), g=(1,))
    assert [device[-1] for device in placed] == ["0", "1", "2", "1", "2", "2", "1"]


def test_greedy_knows_the_width_of_types():
    def build() -> None:
        v1.get_variable("bytes", [30], tf.int8, v1.zeros_initializer(), use_resource=True)  # 30 bytes
        v1.get_variable("floats", [8], tf.float32, use_resource=True)  # 32 bytes
        v1.get_variable("doubles", [8], tf.float64, use_resource=False)  # to the 30 bytes
        v1.get_variable("last", [1], use_resource=True)

    placed = devices(device_setter(plan(2)), build)
    assert [placed[name] for name in ("bytes", "floats", "doubles", "last")] == [
        "/job:ps/task:0",
        "/job:ps/task:1",
        "/job:ps/task:0",
        "/job:ps/task:1",
    ]


def test_a_variable_of_unknown_shape_weighs_nothing():
    assert of_variables(device_setter(plan(2)), unknown=(None, 4), known=(4,), last=(4,)) == [
        "/job:ps/task:0",
        "/job:ps/task:0",
        "/job:ps/task:1",
    ]


@pytest.mark.parametrize("strategy", ["greedy", "round_robin"])
@pytest.mark.parametrize("scope", ["", "tower/", "a/dense/"])
def test_a_parameter_of_the_plan_is_where_the_plan_has_it(strategy, scope):
    setter = device_setter(plan(2), strategy=strategy)
    assert of_variables(setter, **{f"{scope}dense/bias": (10,), f"{scope}dense/kernel": (64, 10)}) == [
        "/job:ps/task:0",
        "/job:ps/task:1",
    ]


def test_a_name_that_only_begins_or_ends_like_a_parameter_is_not_in_the_plan():
    names = ("dense/kernel/moment", "other_dense/kernel", "kernel")
    assert of_variables(device_setter(plan(2), strategy="round_robin"), **dict.fromkeys(names, (4,))) == [
        "/job:ps/task:0",
        "/job:ps/task:1",
        "/job:ps/task:0",
    ]


def test_others_make_room_for_the_parameters_of_the_plan():
    placed = of_variables(device_setter(plan(2)), **{"dense/bias": (10,), "moment": (20,), "count": (4,)})
    assert placed == ["/job:ps/task:0", "/job:ps/task:1", "/job:ps/task:0"]


def test_a_parameter_that_the_plan_cuts_is_where_its_first_part_is():
    cut = plan(1, max_part_mib=0.001)
    assert of_variables(device_setter(cut), **{"dense/kernel": (64, 10)}) == ["/job:ps/task:0"]


def test_one_process_holds_everything_and_runs_it():
    setter = device_setter(plan(0, workers=1, strategy="local"))
    placed = devices(setter, two_layers)
    assert {placed["w0"], placed["hidden"]} == {"/job:localhost/task:0"}
    with tf.Graph().as_default(), v1.device(setter):
        doubled = 2 * v1.get_variable("v", [], initializer=v1.ones_initializer())
        with v1.Session() as session:
            session.run(v1.global_variables_initializer())
            assert session.run(doubled) == 2.0


def test_where_every_worker_holds_all_parameters_each_keeps_its_own():
    placed = devices(device_setter(plan(0, strategy="all_reduce"), task="worker:1"), two_layers)
    assert {placed["w0"], placed["hidden"]} == {"/job:worker/task:1"}


def test_a_plan_that_was_read_back_decides_the_same():
    read = Plan.from_json(json.loads(json.dumps(plan(3).to_json())))
    assert devices(device_setter(read), two_layers) == devices(device_setter(plan(3)), two_layers)


def test_an_unknown_task_is_refused(raises):
    with raises(ValueError):
        device_setter(plan(1, workers=2), task="worker:4")


def test_an_unknown_strategy_is_refused(raises):
    with raises(ValueError):
        device_setter(plan(1), strategy="random")
