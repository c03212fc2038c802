"""A task's TensorFlow server and sessions: devices, threads, and whom they talk to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import tensorflow as tf

from trainer.plan import Plan, Task


def start_server(plan: Plan, task: Task) -> Any:
    """Starts the task's server. Its config fixes devices and threads: those given to a session alone are ignored.

    Raises:
        tf.errors.UnknownError: if the port is taken.
    """
    config = session_config(task, peers=[])
    return tf.distribute.Server(
        tf.train.ClusterSpec(plan.jobs()), job_name=task.job, task_index=task.index, config=config
    )


def session_config(task: Task, *, peers: Iterable[str]) -> Any:
    """The ConfigProto of a task.

    Args:
        peers: the tasks that a session talks to, besides its own; it neither waits for others nor sees them.
    """
    config = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=task.intra_op_threads,
        inter_op_parallelism_threads=task.inter_op_threads,
        allow_soft_placement=task.soft_placement,
        device_count={"CPU": task.cpus},
        device_filters=[_filter(name) for name in (task.name, *peers)],
    )
    config.experimental.disable_thread_spinning = True  # the tasks of one machine share its cores
    if task.memory_fraction is not None:
        config.gpu_options.per_process_gpu_memory_fraction = task.memory_fraction
    return config


def _filter(task: str) -> str:
    job, index = task.split(":")
    return f"/job:{job}/task:{index}"
