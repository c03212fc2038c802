"""Runs a plan as containers of this machine's Docker engine, and removes what a killed launcher has left of one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import docker

from trainer.config.schema import RunConfig
from trainer.faults import exit_codes
from trainer.faults.exit_codes import RunInUseError
from trainer.launch.containers.docker_errors import connect, explain_errors
from trainer.launch.containers.spec import RUN_LABEL, TASK_LABEL, container_specs, inside
from trainer.launch.containers.tasks import ContainerTasks, remove
from trainer.launch.run import supervise
from trainer.launch.signals import Signals
from trainer.plan.plan import Plan
from trainer.storage.lease import Lease
from trainer.storage.run_directory import RunDirectory

COMPOSE_PROJECT, COMPOSE_FOLDER = "com.docker.compose.project", "com.docker.compose.project.working_dir"  # labels


def run(
    config: RunConfig,
    plan: Plan,
    directory: RunDirectory,
    client: docker.DockerClient,
    inputs: Sequence[str],
    *,
    started_at: float,
) -> int:
    """Starts the plan's tasks as containers, and makes sure that all of them end; returns as `supervise` does.

    Args:
        inputs: paths of this host that tasks read.
        started_at: when the command was typed (Unix time, seconds).

    Raises:
        DockerError: if Docker does not do what a run needs.
    """
    path = str(directory.path)
    specs = container_specs(config, plan, run=path, inputs=inputs)
    # Signals and the lease are held until everything is removed; `supervise` obeys signals during the run.
    with Signals(), Lease(directory), ContainerTasks(client, specs, path) as tasks:
        plan_here = replace(plan, tasks=tuple(replace(task, control=tasks.control(task.name)) for task in plan.tasks))
        return supervise(config, plan_here, directory, tasks, started_at=started_at, plan_of_tasks=inside(plan))


def clean() -> int:
    """Removes the containers and networks of runs whose launcher is gone, and says what it did; returns 0."""
    client = connect()
    with explain_errors():
        found = list(_runs(client))
    for run, label in found:
        with explain_errors():
            reason = _why_kept(client, Path(run), label)
        if reason:
            print(f"stays: {run}: {reason}")
            continue
        try:
            with explain_errors(), Lease(RunDirectory(Path(run))) if Path(run).is_dir() else nullcontext():
                removed = remove(client, label)
        except RunInUseError as error:
            print(f"stays: {error}")
        else:
            print(f"removed of {run}: {', '.join(removed)}")
    if not found:
        print("there is nothing to clean")
    return exit_codes.OK


def _runs(client: docker.DockerClient) -> Iterator[tuple[str, str]]:
    """Every run directory that something at the engine is of, and the label that all of it has."""
    tasks = client.containers.list(all=True, filters={"label": TASK_LABEL}, ignore_removed=True)
    networks = client.networks.list(filters={"label": RUN_LABEL})
    found = {}
    for labels in [*(task.labels for task in tasks), *(network.attrs["Labels"] for network in networks)]:
        if RUN_LABEL in labels:
            found[labels[RUN_LABEL]] = f"{RUN_LABEL}={labels[RUN_LABEL]}"
        elif COMPOSE_PROJECT in labels:
            found[labels.get(COMPOSE_FOLDER, "")] = f"{COMPOSE_PROJECT}={labels[COMPOSE_PROJECT]}"
    yield from found.items()


def _why_kept(client: docker.DockerClient, run: Path, label: str) -> str | None:
    """Why containers that run are left alone: no lease tells that of those which somebody started by hand."""
    if not client.containers.list(filters={"label": label}, ignore_removed=True):
        return None
    if label.startswith(COMPOSE_PROJECT):
        return f"its containers run; type make cluster-down RUN={run}"
    if not os.access(run, os.W_OK):
        return (
            "its containers run, and whether their launcher does cannot be told: its directory cannot be written here"
        )
    return None
