"""trainer clean: ends warm processes, and removes the containers and networks of runs whose launcher has died."""

import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import docker

from trainer.faults import exit_codes
from trainer.faults.exit_codes import RunInUseError
from trainer.launch.containers.docker_errors import connect, explain_errors
from trainer.launch.containers.removal import remove
from trainer.launch.containers.spec import RUN_LABEL, TASK_LABEL
from trainer.launch.processes import warm
from trainer.storage.lease import Lease
from trainer.storage.run_directory import RunDirectory

COMPOSE_PROJECT, COMPOSE_FOLDER = "com.docker.compose.project", "com.docker.compose.project.working_dir"  # labels


def run() -> int:
    """Removes what no launcher uses and prints a line for each run; returns 0."""
    ended = [one.pid for one in warm.find() if warm.end(one)]
    if ended:
        print(f"ended: warm process {', '.join(map(str, ended))}")
    client = connect()
    with explain_errors():
        runs = list(_runs(client))
    for path, label in runs:
        with explain_errors():
            reason = _reason_to_keep(client, Path(path), label)
        if reason:
            print(f"kept: {path}: {reason}")
            continue
        try:
            with explain_errors(), Lease(RunDirectory(Path(path))) if Path(path).is_dir() else nullcontext():
                removed = remove(client, label)
        except RunInUseError as error:
            print(f"kept: {error}")
        else:
            print(f"removed from {path}: {', '.join(removed)}")
    if not runs and not ended:
        print("nothing to clean")
    return exit_codes.OK


def _runs(client: docker.DockerClient) -> Iterator[tuple[str, str]]:
    """Yields every run directory that has containers or networks, and the label that all of them carry."""
    tasks = client.containers.list(all=True, filters={"label": TASK_LABEL}, ignore_removed=True)
    networks = client.networks.list(filters={"label": RUN_LABEL})
    label_by_run = {}
    for labels in [*(task.labels for task in tasks), *(network.attrs["Labels"] for network in networks)]:
        if RUN_LABEL in labels:
            label_by_run[labels[RUN_LABEL]] = f"{RUN_LABEL}={labels[RUN_LABEL]}"
        elif COMPOSE_PROJECT in labels:
            label_by_run[labels.get(COMPOSE_FOLDER, "")] = f"{COMPOSE_PROJECT}={labels[COMPOSE_PROJECT]}"
    yield from label_by_run.items()


def _reason_to_keep(client: docker.DockerClient, run: Path, label: str) -> str | None:
    """Returns why running containers are left alone: a lease says nothing about those that were started by hand."""
    if not client.containers.list(filters={"label": label}, ignore_removed=True):
        return None
    if label.startswith(COMPOSE_PROJECT):
        return f"its containers are running; type make cluster-down RUN={run}"
    if not os.access(run, os.W_OK):
        return "its containers are running; its directory is not writable, so its launcher cannot be checked"
    return None
