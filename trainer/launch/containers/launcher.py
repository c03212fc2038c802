"""Runs a plan as containers of this machine's Docker engine, or of those of several hosts."""

from collections.abc import Sequence
from dataclasses import replace

import docker

from trainer.launch.attempts import PlannedRun
from trainer.launch.containers.on_hosts import ContainersOnHosts, Engines, marked
from trainer.launch.containers.owners import given_back
from trainer.launch.containers.spec import container_specs, inside
from trainer.launch.containers.tasks import ContainerTasks
from trainer.launch.run import supervise
from trainer.launch.signals import Signals
from trainer.plan.hosts import host_by_task
from trainer.storage.lease import Lease


def run(planned: PlannedRun, client: docker.DockerClient, inputs: Sequence[str]) -> int:
    """Starts the plan's tasks as containers, and makes sure that all of them end; returns the code of `supervise`.

    Args:
        inputs: paths of this host that tasks read.

    Raises:
        DockerError: if Docker refuses what a run needs.
    """
    plan, directory, path = planned.plan, planned.directory, str(planned.directory.path)
    specs = container_specs(planned.config, plan, run=path, inputs=inputs)
    # Signals and the lease are held until everything is removed; `supervise` obeys signals during the run.
    with Signals(), Lease(directory), given_back(path), ContainerTasks(client, specs, path) as tasks:
        plan_here = replace(plan, tasks=tuple(replace(task, control=tasks.control(task.name)) for task in plan.tasks))
        return supervise(planned._replace(plan=plan_here), tasks, plan_of_tasks=inside(plan))


def run_on_hosts(planned: PlannedRun, engines: Engines, inputs: Sequence[str]) -> int:
    """Starts the plan's tasks on the engines of their hosts; otherwise like `run`."""
    config, plan, directory, _ = planned
    path, hosts = str(directory.path), host_by_task(config.cluster)
    specs = container_specs(config, plan, run=path, inputs=inputs, hosts=hosts)
    inside_plan = inside(plan, on_hosts=True)
    with (
        Signals(),
        Lease(directory),
        given_back(path),
        marked(specs, path) as containers,
        ContainersOnHosts(engines, containers, path) as tasks,
    ):
        return supervise(planned, tasks, plan_of_tasks=inside_plan)
