"""Specifies the mounts, limits and rights of each task's container, for the Compose file and the Docker launcher.

TensorFlow's gRPC has no authentication, so the network is the boundary: it is internal, the host has no address on it,
and no port is published. A task runs as an unprivileged user without capabilities, on a read-only root file system.
"""

import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

from trainer.config.schema import RunConfig
from trainer.plan.addresses import CONTROL_PORT_OFFSET, port_of
from trainer.plan.description import FROZEN_FILE
from trainer.plan.devices import of_task
from trainer.plan.environment import CONTROL, for_tasks
from trainer.plan.plan import Plan, Task

INSIDE = "/trainer/run"  # the run directory, as tasks see it
ENTRYPOINT = ("python3", "-m", "trainer.task")
CPU_IMAGE, GPU_IMAGE = "trainer:cpu", "trainer:gpu"
TASK_LABEL = "trainer.task"  # every container has it
RUN_LABEL = "trainer.run"  # path of the run directory on the host
NETWORK_OPTIONS = {"com.docker.network.bridge.inhibit_ipv4": "true"}  # the host has no address there
SECURITY = ("no-new-privileges:true",)
NOBODY = 10001  # user and group of tasks that root starts
SLACK_SECS = 15.0  # beyond timeouts.stop_grace_secs before a kill: a save may be under way
GPU_SHARED_MIB = 1024  # of /dev/shm, which NCCL uses between GPUs; Docker's default is 64


@dataclass(frozen=True)
class Mount:
    """A file or directory of the host that a container sees."""

    source: str
    target: str  # path in the container
    is_writable: bool = False


@dataclass(frozen=True)
class ContainerSpec:
    """The container of one task."""

    service: str  # name by which others reach it
    task: str
    image: str
    is_our_image: bool  # built by `make image`; no registry has it
    arguments: tuple[str, ...]  # of ENTRYPOINT
    environment: Mapping[str, str]
    mounts: tuple[Mount, ...]
    gpus: tuple[int, ...]  # by their index on the host
    memory_mib: int | None  # limit; none: all of the host's
    cpus: float | None  # limit, cores; none: all of the host's
    pids: int  # limit: processes and threads
    tmp_mib: int  # of /tmp, which is memory
    stop_grace_secs: float
    host: str | None = None  # whose network it uses; none: the run has its own


def service_of(task: Task) -> str:
    return f"{task.job}-{task.index}"


def project_of(run: str) -> str:
    """Returns the Docker project name of a run, which is unique to its directory."""
    name = re.sub(r"[^a-z0-9-]+", "-", PurePath(run).name.lower()).strip("-")[:40] or "run"
    return f"{name}-{hashlib.sha256(run.encode()).hexdigest()[:6]}"


def inside(plan: Plan, *, on_hosts: bool = False) -> Plan:
    """Returns the plan as tasks see it in their containers, where GPUs are counted from 0.

    Args:
        on_hosts: tasks use the networks of their hosts, at the addresses that the plan already has.
    """

    def move(number: int, task: Task) -> Task:
        task = replace(task, gpus=tuple(range(len(task.gpus))))
        if on_hosts:
            return task
        name, port = service_of(task), port_of(number)
        address = f"{name}:{port}" if task.address else ""
        return replace(task, address=address, control=f"{name}:{port + CONTROL_PORT_OFFSET}")

    return replace(plan, tasks=tuple(move(number, task) for number, task in enumerate(plan.tasks)))


def container_specs(
    config: RunConfig, plan: Plan, *, run: str, inputs: Sequence[str] = (), hosts: Mapping[str, str] | None = None
) -> list[ContainerSpec]:
    """Specifies a container for each task.

    Args:
        plan: as it was made, with the GPUs' indices on their host.
        run: path of the run directory on the host.
        inputs: paths of the host that tasks read, besides `container.mounts`.
        hosts: host by task, where tasks use the networks of their hosts.
    """
    plan_inside = inside(plan, on_hosts=bool(hosts))
    return [
        ContainerSpec(
            service=service_of(task),
            task=task.name,
            image=config.container.image or (GPU_IMAGE if task.gpus else CPU_IMAGE),
            is_our_image=config.container.image is None,
            arguments=(INSIDE, task.job, str(task.index)),
            environment={CONTROL: task_inside.control} | task_inside.environment() | for_tasks(os.environ),
            mounts=tuple(_mounts(config, plan, task, run, inputs)),
            gpus=task.gpus,
            memory_mib=of_task(config.container.memory_mib, task.job, task.index),
            cpus=of_task(config.container.cpus, task.job, task.index),
            pids=config.container.pids,
            tmp_mib=config.container.tmp_mib,
            stop_grace_secs=config.timeouts.stop_grace_secs + SLACK_SECS,
            host=(hosts or {}).get(task.name),
        )
        for task, task_inside in zip(plan.tasks, plan_inside.tasks, strict=True)
    ]


def _mounts(config: RunConfig, plan: Plan, task: Task, run: str, inputs: Sequence[str]) -> Iterator[Mount]:
    writes = _writes(config, task)
    if writes:
        yield Mount(run, INSIDE, is_writable=True)
    for name in ("config.yaml", "plan.json", *([FROZEN_FILE] if plan.frozen.sha256 and not writes else [])):
        yield Mount(f"{run}/{name}", f"{INSIDE}/{name}")
    for path in dict.fromkeys([*config.container.mounts, *inputs]):
        yield Mount(path, path)


def _writes(config: RunConfig, task: Task) -> bool:
    """Whether a task writes into the run directory."""
    all_write = config.history.journal or config.device.log_placement or config.profile
    return task.is_chief or task.job == "evaluator" or all_write
