"""Removes the remains of a run in a Docker engine: containers, networks and the folders of their sockets."""

import contextlib
import shutil
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import docker
import docker.errors
from docker.models.containers import Container as DockerContainer

SOCKETS_LABEL = "trainer.sockets"  # path on the host, to be removed with the container


def remove(client: docker.DockerClient, label: str) -> list[str]:
    """Removes all containers and networks with a label, and their sockets; returns their names."""
    containers = client.containers.list(all=True, filters={"label": label}, ignore_removed=True)
    networks = client.networks.list(filters={"label": label})
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(_remove_container, containers))
    for network in networks:
        with contextlib.suppress(docker.errors.NotFound):
            network.remove()
    for labels in [*(container.labels for container in containers), *(network.attrs["Labels"] for network in networks)]:
        folder = Path(labels.get(SOCKETS_LABEL, ""))
        if folder.name.startswith("trainer-") and folder.parent == Path(tempfile.gettempdir()):
            shutil.rmtree(folder, ignore_errors=True)
    return [str(container.name) for container in containers] + [str(network.name) for network in networks]


def _remove_container(container: DockerContainer) -> None:
    try:
        container.remove(force=True, v=True)
    except docker.errors.APIError as error:
        if error.status_code not in (404, 409):  # already removed, or being removed
            raise
