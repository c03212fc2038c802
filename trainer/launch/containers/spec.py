"""What the container of a task may see and do. Pure: the Compose file and the Docker launcher are made from it.

TensorFlow's gRPC knows no password, so its network is the border: it is internal, the host has no address on it, and no
port is published. A task is a user without a name and without capabilities, on a root that cannot be written.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath

from trainer.config.schema import RunConfig
from trainer.plan.addresses import CONTROL_PORT_OFFSET, USUAL_PORT
from trainer.plan.devices import of_task
from trainer.plan.environment import CONTROL, QUIET
from trainer.plan.plan import Plan, Task

INSIDE = "/trainer/run"  # the run directory, as tasks see it
ENTRYPOINT = ("python3", "-m", "trainer.task")
CPU_IMAGE, GPU_IMAGE = "trainer:cpu", "trainer:gpu"
TASK_LABEL = "trainer.task"  # every container has it
RUN_LABEL = "trainer.run"  # path of the run directory on the host
NETWORK_OPTIONS = {"com.docker.network.bridge.inhibit_ipv4": "true"}  # no address on the host: it cannot reach them
SECURITY = ("no-new-privileges:true",)
NOBODY = 10001  # user and group of a task whose caller is root
SLACK_SECS = 15.0  # of a stop, beyond timeouts.stop_grace_secs: a save may be under way
GPU_SHARED_MIB = 1024  # of /dev/shm: NCCL takes it between GPUs; Docker gives 64


@dataclass(frozen=True)
class Mount:
    """A file or directory of the host."""

    source: str
    target: str  # path in the container
    is_writable: bool = False


@dataclass(frozen=True)
class Container:
    """One task as a container."""

    service: str  # by which others reach it
    task: str
    image: str
    is_our_image: bool  # one that `make image` builds, and that no registry has
    arguments: tuple[str, ...]  # of ENTRYPOINT
    environment: Mapping[str, str]
    mounts: tuple[Mount, ...]
    gpus: tuple[int, ...]  # by their index on the host
    memory_mib: int | None  # limit; none: the host's
    cpus: float | None  # limit, cores; none: the host's
    pids: int  # limit: processes and threads
    tmp_mib: int  # of /tmp, which is memory
    stop_grace_secs: float
    host: str | None = None  # whose network it uses; none: one of the run's own


def service_of(task: Task) -> str:
    return f"{task.job}-{task.index}"


def project_of(run: str) -> str:
    """What everything of a run is called at the engine: two run directories never share it."""
    name = re.sub(r"[^a-z0-9-]+", "-", PurePath(run).name.lower()).strip("-")[:40] or "run"
    return f"{name}-{hashlib.sha256(run.encode()).hexdigest()[:6]}"


def inside(plan: Plan, *, on_hosts: bool = False) -> Plan:
    """The plan as its tasks see it from their containers, where GPUs are counted from 0.

    Args:
        on_hosts: they use the networks of their hosts, with the addresses that the plan has already.
    """

    def moved(task: Task) -> Task:
        task = replace(task, gpus=tuple(range(len(task.gpus))))
        if on_hosts:
            return task
        name = service_of(task)
        address = f"{name}:{USUAL_PORT}" if task.address else ""
        return replace(task, address=address, control=f"{name}:{USUAL_PORT + CONTROL_PORT_OFFSET}")

    return replace(plan, tasks=tuple(map(moved, plan.tasks)))


def containers(
    config: RunConfig, plan: Plan, *, run: str, inputs: Sequence[str] = (), hosts: Mapping[str, str] | None = None
) -> list[Container]:
    """A container for each task.

    Args:
        plan: as it was made, with the GPUs' indices on their host.
        run: path of the run directory on the host.
        inputs: paths of the host that tasks read, besides `container.mounts`.
        hosts: host by task, where each uses the network of its own.
    """
    within = inside(plan, on_hosts=bool(hosts))
    return [
        Container(
            service=service_of(task),
            task=task.name,
            image=config.container.image or (GPU_IMAGE if task.gpus else CPU_IMAGE),
            is_our_image=config.container.image is None,
            arguments=(INSIDE, task.job, str(task.index)),
            environment={CONTROL: seen.control} | seen.environment() | QUIET,
            mounts=tuple(_mounts(config, task, run, inputs)),
            gpus=task.gpus,
            memory_mib=of_task(config.container.memory_mib, task.job, task.index),
            cpus=of_task(config.container.cpus, task.job, task.index),
            pids=config.container.pids,
            tmp_mib=config.container.tmp_mib,
            stop_grace_secs=config.timeouts.stop_grace_secs + SLACK_SECS,
            host=(hosts or {}).get(task.name),
        )
        for task, seen in zip(plan.tasks, within.tasks, strict=True)
    ]


def _mounts(config: RunConfig, task: Task, run: str, inputs: Sequence[str]) -> Iterator[Mount]:
    if _writes(config, task):
        yield Mount(run, INSIDE, is_writable=True)
    for name in ("config.yaml", "plan.json"):
        yield Mount(f"{run}/{name}", f"{INSIDE}/{name}")
    for path in dict.fromkeys([*config.container.mounts, *inputs]):
        yield Mount(path, path)


def _writes(config: RunConfig, task: Task) -> bool:
    """Whether a task writes into the run directory."""
    all_write = config.summary.journal or config.device.log_placement or config.profile
    return task.is_chief or task.job == "evaluator" or all_write
