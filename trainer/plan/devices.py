"""The resources of its machine that each task may use: GPUs, memory, threads, logical CPUs, replicas' devices.

Pure: no TensorFlow. `checks/devices.py` checks a config's devices; `checks/gpu_memory.py` adds up what tasks
that share a GPU take.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from trainer.config.schema import AUTO, ClusterConfig, DeviceConfig, Launch, TrainConfig
from trainer.config.typed import Mode
from trainer.plan import addresses

THIS_HOST = "127.0.0.1"  # of tasks without an address
CPU, GPU = "/cpu:", "/gpu:"
ON_HOSTS = (Launch.ssh, Launch.slurm)  # that start tasks on several machines


@dataclass(frozen=True)
class Machine:
    """The resources that the tasks of this machine share; None: unknown, or no limit."""

    cores: int
    gpus: int
    gpu_mib: tuple[int, ...] = ()  # memory of each GPU; empty: not known
    files: int | None = None  # that a process may have open
    threads: int | None = None  # that may run
    memory_bytes: int | None = None
    cores_of: Mapping[str, int] = field(default_factory=dict)  # of other machines, by host, where they are known
    cores_of_task: int | None = None  # that each task has for itself, where a scheduler says so
    libraries: Mapping[str, str] = field(default_factory=dict)  # installed version by distribution


def tasks_of(cluster: ClusterConfig) -> list[tuple[str, int]]:
    """Returns (job, index) of every task, in the plan's order."""
    return [(job, index) for job in addresses.JOBS for index in range(getattr(cluster, job))]


def of_task(setting: Mapping[str, Any], job: str, index: int) -> Any:
    """Returns a task's entry in a mapping: its own, or else its job's; None if it has neither."""
    key = key_of(setting, job, index)
    return None if key is None else setting[key]


def key_of(setting: Mapping[str, Any], job: str, index: int) -> str | None:
    """Returns the key of the mapping's entry for a task."""
    return next((key for key in (f"{job}:{index}", job) if key in setting), None)


def host_of(cluster: ClusterConfig, job: str, index: int) -> str:
    """Returns the host a task runs on, as the cluster's addresses name it."""
    listed = cluster.addresses.get(job, [])
    host = addresses.host_of(listed[index]) if index < len(listed) else THIS_HOST
    return THIS_HOST if host in ("localhost", "::1") else host


def is_on_hosts(launch: Launch, cluster: ClusterConfig) -> bool:
    """Whether the launcher starts tasks on several machines."""
    return launch in ON_HOSTS or (launch is Launch.docker and bool(cluster.hosts))


class Role(NamedTuple):
    """The task of this process, assigned by a scheduler."""

    cluster: ClusterConfig  # with the address of every task
    job: str
    task: int
    gpus: Sequence[int] = ()  # of a worker


def tasks_here(
    cluster: ClusterConfig, mode: Mode, launch: Launch, job: str | None, task: int | None
) -> set[tuple[str, int]]:
    """Returns (job, index) of every task that runs on this machine, as far as the config shows it.

    Args:
        job, task: the only task of this process; None: a launcher starts all tasks.
    """
    tasks = tasks_of(cluster)
    if job is not None:
        here = host_of(cluster, job, task or 0)
    elif mode is Mode.render or is_on_hosts(launch, cluster):  # for whatever machine it is started on
        return set()
    elif mode in (Mode.train, Mode.chaos):  # the launcher starts every task here, and refuses other machines
        return set(tasks)
    else:  # a plan may be of machines elsewhere
        here = THIS_HOST
    return {one for one in tasks if host_of(cluster, *one) == here}


def for_tasks(
    cluster: ClusterConfig, device: DeviceConfig, machine: Machine, replicas: int | None = None
) -> dict[tuple[str, int], dict[str, Any]]:
    """Returns the resources of each task, as fields of `Task`, by (job, index).

    Args:
        replicas: those of the run, as `train.replicas` has them.
    """
    cores = _cores_of_tasks(cluster, machine)
    found = {(job, index): _for_task(cluster, device, cores[job], job, index) for job, index in tasks_of(cluster)}
    if replicas is not None:
        each = max(1, _cores_of_workers(cluster, machine) // replicas)  # for any number of workers on these machines
        for index in range(cluster.worker):
            share = _share(replicas, cluster.worker, index)
            found["worker", index] |= _for_replicas(device, found["worker", index], index, share, cores["worker"], each)
    return found


def count_replicas(cluster: ClusterConfig, device: DeviceConfig, train: TrainConfig) -> int:
    """Returns the replicas of a run."""
    return train.replicas or cluster.worker * max(1, len(device.replicas))


def _share(replicas: int, workers: int, index: int) -> int:
    """Returns how many replicas a worker computes; if shares cannot be equal, the first workers have one more."""
    return replicas // workers + (index < replicas % workers)


def _for_replicas(
    device: DeviceConfig, task: Mapping[str, Any], index: int, share: int, cores: int, threads: int
) -> dict[str, Any]:
    """Returns the fields of a worker that depend on its share of the replicas, which take turns on each device."""
    threads = of_task(device.intra_op_threads, "worker", index) or threads
    devices = task["replicas"]
    if devices == (f"{CPU}0",):  # side by side, so that all cores are used
        devices = tuple(f"{CPU}{number}" for number in range(max(1, min(share, cores // threads))))
    return {
        "intra_op_threads": threads,
        "inter_op_threads": of_task(device.inter_op_threads, "worker", index) or max(2, len(devices)),
        "cpus": max(task["cpus"], len(devices)),
        "replicas": tuple(devices[number % len(devices)] for number in range(share)),
    }


def _cores_of_tasks(cluster: ClusterConfig, machine: Machine) -> dict[str, int]:
    """Returns the cores for each task of a job: the least that any has, because bits depend on threads.

    The jobs of a machine share its cores: a ps updates while the workers wait for it.
    """
    if machine.cores_of_task is not None:
        return dict.fromkeys(addresses.JOBS, machine.cores_of_task)
    alike = Counter((job, host_of(cluster, job, index)) for job, index in tasks_of(cluster))
    cores: dict[str, int] = {}
    for (job, host), count in alike.items():
        own = machine.cores_of.get(host, machine.cores) // count
        cores[job] = min(own, cores.get(job, own))
    return cores


def _cores_of_workers(cluster: ClusterConfig, machine: Machine) -> int:
    """Returns the cores of all machines with workers, each counted as having those of the smallest."""
    if machine.cores_of_task is not None:
        return machine.cores_of_task * cluster.worker
    hosts = {host_of(cluster, "worker", index) for index in range(cluster.worker)}
    return len(hosts) * min(machine.cores_of.get(host, machine.cores) for host in hosts)


def _for_task(cluster: ClusterConfig, device: DeviceConfig, cores: int, job: str, index: int) -> dict[str, Any]:
    replicas = replicas_of(device, job, index)
    threads = 1 if job == "evaluator" else max(1, cores // max(1, len(replicas)))  # an evaluator has time
    used = [name for names in uses(cluster, device, job, index).values() for name in names]
    cpus = [int(name.removeprefix(CPU)) for name in used if name.startswith(CPU)]
    return {
        "gpus": tuple(of_task(device.gpus, job, index) or ()),
        "memory_fraction": of_task(device.memory_fraction, job, index),
        "memory_mib": of_task(device.memory_mib, job, index),
        "growth": bool(of_task(device.growth, job, index)),
        "intra_op_threads": of_task(device.intra_op_threads, job, index) or threads,
        # Replicas wait in queues side by side, each holding a thread.
        "inter_op_threads": of_task(device.inter_op_threads, job, index) or max(2, len(replicas)),
        "soft_placement": of_task(device.soft_placement, job, index) is not False,
        "cpus": 1 + max(cpus, default=0),
        "replicas": replicas,
    }


def replicas_of(device: DeviceConfig, job: str, index: int) -> tuple[str, ...]:
    """Returns the devices of a task's replicas; only workers have any."""
    if job != "worker":
        return ()
    return tuple(device.replicas) or (f"{GPU}0" if of_task(device.gpus, job, index) else f"{CPU}0",)


def named_parameters(device: DeviceConfig) -> tuple[str, ...]:
    """Returns the device that device.parameters names, if it names one."""
    return () if device.parameters == AUTO else (device.parameters,)


def parameters_of(device: DeviceConfig, *, is_one_process: bool, has_tables: bool) -> str:
    """Returns the device of the parameters on each host; if nothing else needs them, the GPU that uses them."""
    if named := named_parameters(device):
        return named[0]
    first = replicas_of(device, "worker", 0)[0]
    return first if first.startswith(GPU) and is_one_process and not has_tables else f"{CPU}0"


def uses(cluster: ClusterConfig, device: DeviceConfig, job: str, index: int) -> dict[str, tuple[str, ...]]:
    """Returns the devices that a task needs, by the key that names them."""
    holder = "ps" if cluster.ps else "worker"
    return {
        "device.replicas": replicas_of(device, job, index),
        "device.parameters": named_parameters(device) if job == holder else (),
        "device.layers": tuple(device.layers.values()) if job == "worker" else (),
    }
