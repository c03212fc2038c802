"""Connects to Docker, and explains its errors to users."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import docker
import docker.errors
import requests.exceptions

from trainer.faults import exit_codes
from trainer.faults.exit_codes import TrainerError

REMEDIES = (  # pattern, meaning, remedy; the first that matches the error counts
    (
        "permission denied",
        "this user may not use the Docker engine",
        "sudo usermod -aG docker $USER, then log in again",
    ),
    (
        "no such image|image .*not found",
        "there is no image {image} on this machine",
        "type make image, or name another: container.image=NAME",
    ),
    (
        "could not select device driver|nvidia|unresolvable CDI",
        "the engine cannot give a container GPUs ({message})",
        "install nvidia-container-toolkit, then sudo nvidia-ctk runtime configure --runtime=docker && "
        "sudo systemctl restart docker",
    ),
    (
        "is already in use by container",
        "another container has the name that a task needs ({message})",
        "docker rm it, or choose another run=PATH",
    ),
    (
        "cannot allocate memory|memory limit|out of memory",
        "the engine has too little memory for a container ({message})",
        "choose another container.memory_mib, or a smaller cluster=",
    ),
    ("address pools", "the engine has no free network left", "type docker network prune, or python -m trainer clean"),
    ("no space left", "the engine's disk is full", "type docker system prune"),
    (
        "mounts denied|bind source path does not exist|not shared",
        "the engine cannot see a path that a task reads or writes ({message})",
        "is the engine on this machine? Share the path with it, or choose another",
    ),
    (
        "connection aborted|connection refused|no such file|error while fetching server api",
        "no Docker engine answers ({message})",
        "sudo systemctl start docker, or leave launch=docker out: processes need no Docker",
    ),
)


class DockerError(TrainerError):
    """Docker does not answer, or refuses what a run needs."""

    exit_code = exit_codes.UNAVAILABLE


def connect() -> docker.DockerClient:
    """Connects to the Docker engine at DOCKER_HOST or at this machine's usual socket.

    Raises:
        DockerError: if none answers, or it may be another machine's.
    """
    host = os.environ.get("DOCKER_HOST", "")
    if host and not host.startswith(("unix://", "npipe://")):
        raise DockerError(
            f"DOCKER_HOST={host} may be another machine's engine, whose containers cannot see this run's directory; "
            "unset it, or type trainer render there"
        )
    with explain_errors():
        client = docker.from_env()
        client.ping()
        return client


@contextmanager
def explain_errors(image: str = "") -> Iterator[None]:
    """Turns Docker's errors into a `DockerError` with their meaning and a remedy."""
    try:
        yield
    except (docker.errors.DockerException, requests.exceptions.RequestException) as error:
        raise DockerError(explain(error, image=image)) from error


def explain(error: Exception, *, image: str = "") -> str:
    """Returns the meaning of an error and its remedy, in one sentence."""
    message = _message(error)
    for pattern, meaning, remedy in REMEDIES:
        if re.search(pattern, message, re.IGNORECASE):
            return f"{meaning.format(message=message, image=image)}; {remedy}"
    return f"the Docker engine says: {message}"


def _message(error: Exception) -> str:
    """Returns the text of an error without the wrapping of libraries."""
    explanation: Any = getattr(error, "explanation", None) or error
    text = " ".join(str(explanation).split())
    inner = re.findall(r"(?:PermissionError|FileNotFoundError|ConnectionRefusedError)\((\d+, '[^']*')\)", text)
    return inner[-1].partition(", ")[2].strip("'") if inner else text.removeprefix("Error response from daemon: ")
