"""Configures and starts a task's TensorFlow server and sessions, with devices, threads and peers."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import tensorflow as tf

from trainer.config.schema import Precision, TrainConfig
from trainer.observe.machine import memory_of_gpus
from trainer.plan.plan import Plan, Task
from trainer.workload.tensorflow_internals import CoordinatedJob, RewriterConfig, context


def start_server(plan: Plan, task: Task) -> Any:
    """Starts the task's server. Its config fixes devices and threads: those given to a session alone are ignored.

    Raises:
        tf.errors.UnknownError: if the port is taken.
    """
    config = session_config(task, peers=[])
    return tf.distribute.Server(
        tf.train.ClusterSpec(plan.jobs()), job_name=task.job, task_index=task.index, config=config
    )


def can_fuse(train: TrainConfig) -> bool:
    """Whether TensorFlow may fuse a convolution and what follows it into one operation before a step runs.

    XLA does not know that operation, and in bfloat16 it has no kernel.
    """
    return not train.jit and train.precision is not Precision.mixed_bfloat16


def session_config(task: Task, *, peers: Iterable[str], fuses: bool = True) -> Any:
    """Returns the ConfigProto of a task.

    Args:
        peers: the tasks that a session talks to, besides its own; it neither waits for nor sees any other.
        fuses: see `can_fuse`.
    """
    config = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=task.intra_op_threads,
        inter_op_parallelism_threads=task.inter_op_threads,
        allow_soft_placement=task.soft_placement,
        device_count={"CPU": task.cpus},
        device_filters=["/job:{}/task:{}".format(*name.split(":")) for name in (task.name, *peers)],
    )
    rewrites = config.graph_options.rewrite_options
    rewrites.arithmetic_optimization = RewriterConfig.OFF  # it makes sums whose order varies; see ordered_sums.py
    if not fuses:
        rewrites.remapping = RewriterConfig.OFF
    config.experimental.disable_thread_spinning = True  # the tasks of one machine share its cores
    options = config.gpu_options
    options.allow_growth = task.growth
    if task.memory_fraction is not None:
        options.per_process_gpu_memory_fraction = task.memory_fraction
    if task.memory_mib is not None:
        for _ in task.gpus:
            options.experimental.virtual_devices.add(memory_limit_mb=[task.memory_mib])
    return config


def configure_eager(task: Task, *, fuses: bool = True) -> None:
    """Configures TF2's eager context as `session_config` does a server, first in a process without a server.

    Raises:
        RuntimeError: TensorFlow's own, if this process has made its devices already.
        ValueError: if a share of a GPU's memory is asked for and nvidia-smi does not report how much that is.
    """
    tf.config.optimizer.set_experimental_options({"remapping": fuses, "arithmetic_optimization": False})
    tf.config.threading.set_intra_op_parallelism_threads(task.intra_op_threads)
    tf.config.threading.set_inter_op_parallelism_threads(task.inter_op_threads)
    tf.config.set_soft_device_placement(task.soft_placement)
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * task.cpus)
    gpus = tf.config.list_physical_devices("GPU")
    for gpu, mib in zip(gpus, memory_limits(task, memory_of_gpus), strict=False):
        if task.growth:
            tf.config.experimental.set_memory_growth(gpu, True)
        if mib is not None:
            tf.config.set_logical_device_configuration(gpu, [tf.config.LogicalDeviceConfiguration(memory_limit=mib)])


def start_strategy(plan: Plan, task: Task, *, pack_mib: float, heartbeat_secs: float) -> Any:
    """Starts this worker's part of an all-reduce cluster and blocks until every worker's is up.

    Call it after `configure_eager` and before anything else of TensorFlow's: it takes part in making the eager context.

    Args:
        pack_mib: size of the gradients that travel as one message.
        heartbeat_secs: a worker that is silent for longer has failed, and so have the sums.

    Returns:
        The `tf.distribute.MultiWorkerMirroredStrategy`, with one device: a worker averages its replicas itself.
    """
    on_gpu = task.replicas[0].startswith("/gpu")
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
        tf.train.ClusterSpec(plan.jobs()),
        task_type=task.job,
        task_id=task.index,
        num_accelerators={"GPU": int(on_gpu)},
        rpc_layer="grpc",
    )
    # The strategy would configure the same, except for the heartbeat; it leaves an earlier configuration alone.
    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader="/job:worker/replica:0/task:0",
        coordinated_jobs=[CoordinatedJob(name="worker", num_tasks=len(plan.workers))],
        heartbeat_timeout_in_ms=int(1000 * heartbeat_secs),
    )
    options = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=int(pack_mib * 2**20))
    return tf.distribute.MultiWorkerMirroredStrategy(resolver, communication_options=options)


def memory_limits(task: Task, memory_of_gpus: Callable[[], Sequence[int]]) -> list[int | None]:
    """Returns the MiB that a task may use of each GPU it sees, None for no limit. The eager context has no fractions.

    Args:
        memory_of_gpus: MiB of every GPU of this machine, or nothing; called only where a fraction was given.

    Raises:
        ValueError: if a fraction was given and the memory of its GPU is not known.
    """
    if task.memory_fraction is None:
        return [task.memory_mib for _ in task.gpus]
    mibs = memory_of_gpus()
    if len(mibs) <= max(task.gpus, default=-1):
        raise ValueError(
            f"{task.name} uses {task.memory_fraction:g} of the memory of its GPUs, but nvidia-smi does not report how "
            "much they have; give device.memory_mib instead of device.memory_fraction"
        )
    return [int(task.memory_fraction * mibs[gpu]) for gpu in task.gpus]
