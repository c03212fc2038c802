"""Runs a plan as containers of this machine's Docker engine."""

from collections.abc import Sequence
from dataclasses import replace

import docker

from trainer.config.schema import RunConfig
from trainer.launch.containers.spec import container_specs, inside
from trainer.launch.containers.tasks import ContainerTasks
from trainer.launch.run import supervise
from trainer.launch.signals import Signals
from trainer.plan.plan import Plan
from trainer.storage.lease import Lease
from trainer.storage.run_directory import RunDirectory


def run(
    config: RunConfig,
    plan: Plan,
    directory: RunDirectory,
    client: docker.DockerClient,
    inputs: Sequence[str],
    *,
    started_at: float,
) -> int:
    """Starts the plan's tasks as containers, and makes sure that all of them end; arguments and result as `supervise`.

    Args:
        inputs: paths of this host that tasks read.

    Raises:
        DockerError: if Docker does not do what a run needs.
    """
    path = str(directory.path)
    specs = container_specs(config, plan, run=path, inputs=inputs)
    # Signals and the lease are held until everything is removed; `supervise` obeys signals during the run.
    with Signals(), Lease(directory), ContainerTasks(client, specs, path) as tasks:
        plan_here = replace(plan, tasks=tuple(replace(task, control=tasks.control(task.name)) for task in plan.tasks))
        return supervise(config, plan_here, directory, tasks, started_at=started_at, plan_of_tasks=inside(plan))
