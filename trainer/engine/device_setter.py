"""Places a hand-written TensorFlow 1 graph for between-graph replication, with a device function.

It places as `tf.compat.v1.train.replica_device_setter` does, on the hosts of a plan.
"""

from collections.abc import Callable, Collection
from typing import Any

import tensorflow as tf

from trainer.plan.placement import CHOOSERS
from trainer.plan.plan import Plan
from trainer.workload.tensorflow_internals import STANDARD_PS_OPS


def device_setter(plan: Plan, *, task: str = "worker:0", strategy: str = "greedy") -> Callable[[Any], str]:
    """Returns a device function: variables go to the tasks that hold shards, everything else to the task itself.

        # python -m trainer plan cluster=2ps4w plan.write_to=plan.json
        plan = Plan.from_json(json.loads(Path("plan.json").read_text()))
        with tf.compat.v1.device(device_setter(plan, task="worker:3")):
            features = tf.compat.v1.placeholder(tf.float32, [None, 64])  # /job:worker/task:3
            table = tf.compat.v1.get_variable("table", [64, 900])  # /job:ps/task:0, the first
            scale = tf.compat.v1.get_variable("scale", [900])  # /job:ps/task:1, the lightest
            with tf.device("/gpu:1"):
                shift = tf.compat.v1.get_variable("shift", [900])  # /job:ps/task:1/device:GPU:1
                hidden = tf.matmul(features, table)  # /job:worker/task:3/device:GPU:1

    A variable whose name is a parameter of the plan goes where the plan has that parameter (its first part, if it is
    cut), also below further scopes: "tower/dense/kernel" goes where "dense/kernel" is. An enclosed `tf.device` takes
    precedence. Without ps the hosts are the workers; where every process holds all parameters, variables stay on the
    task too.

    Args:
        plan: whose tasks and shards these are.
        task: the task that runs this graph.
        strategy: where other variables go: "greedy", to the host with the fewest bytes so far (a variable of unknown
            shape adds none); or "round_robin".

    Raises:
        ValueError: if the plan has no such task, or there is no such strategy.
    """
    names = [known.name for known in plan.trainers]
    if task not in names:
        raise ValueError(f"task={task!r} is not a task of {plan.cluster}; available: {', '.join(names)}")
    if strategy not in CHOOSERS:
        raise ValueError(f"strategy={strategy!r} places no variable; available: {', '.join(CHOOSERS)}")
    here = "/job:localhost/task:0" if plan.effective_strategy.is_one_process else _device_of(task)
    if not plan.has_shard_hosts:
        return lambda op: _merged(here, op)
    hosts_job, host_of = plan.shards[0].host.split(":")[0], _make_host_of(plan, strategy)

    def device_of(op: Any) -> str:
        node = getattr(op, "node_def", op)
        if node.op not in STANDARD_PS_OPS:
            return _merged(here, op)
        if tf.DeviceSpec.from_string(op.device).job not in (None, hosts_job):
            return _merged("", op)  # it is not counted, and its task stays open
        return _merged(host_of(node), op)

    return device_of


def _make_host_of(plan: Plan, strategy: str) -> Callable[[Any], str]:
    """Returns the host of a variable, by its NodeDef: the plan's if it has one, else the strategy's choice."""
    hosts = [_device_of(host) for host in plan.hosts]
    chooser = CHOOSERS[strategy](len(hosts))
    pieces = [
        (piece, plan.hosts.index(shard.host)) for shard in plan.shards for piece in (*shard.trainable, *shard.state)
    ]
    planned = {piece.path: index for piece, index in pieces if piece.begin == 0}

    def host_of(node: Any) -> str:
        path = _path_of(node.name, planned)
        if path is None:
            return hosts[chooser.choose(_nbytes(node))]
        chooser.hold(planned[path], _nbytes(node))
        return hosts[planned[path]]

    return host_of


def _device_of(task: str) -> str:
    job, index = task.split(":")
    return f"/job:{job}/task:{index}"


def _merged(device: str, op: Any) -> str:
    """Completes an operation's device with another one."""
    return tf.DeviceSpec.from_string(device).make_merged_spec(tf.DeviceSpec.from_string(op.device)).to_string()


def _path_of(name: str, paths: Collection[str]) -> str | None:
    """Returns the longest of the paths that a name ends with, as a whole or below scopes."""
    scopes = name.split("/")
    return next((path for start in range(len(scopes)) if (path := "/".join(scopes[start:])) in paths), None)


def _nbytes(node: Any) -> int:
    """Returns the bytes of a variable; 0 if its shape is unknown, as for hash tables."""
    if "shape" not in node.attr:
        return 0
    size = tf.TensorShape(node.attr["shape"].shape).num_elements()
    return 0 if size is None else size * tf.as_dtype(node.attr["dtype"].type).size
