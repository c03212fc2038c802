"""A run as a Docker Compose file, one service a task. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import yaml

from trainer.launch.containers.spec import (
    ENTRYPOINT,
    GPU_SHARED_MIB,
    INSIDE,
    NETWORK_OPTIONS,
    SECURITY,
    TASK_LABEL,
    ContainerSpec,
    Mount,
)
from trainer.plan.environment import REPORTS_PROGRESS

TENSORBOARD_IMAGE = "trainer:tensorboard"
TENSORBOARD_PORT = "127.0.0.1:${TENSORBOARD_PORT:-6006}:6006"


def render(containers: Sequence[ContainerSpec], *, name: str, words: str, overrides: str, user: tuple[int, int]) -> str:
    """The file's text, for a directory that also holds config.yaml and plan.json.

    Args:
        containers: of one host, or of all.
        name: of the project: what the engine calls its containers and networks begins with it.
        words: what the run does, in one line.
        overrides: of the command that made it.
        user: user and group of the tasks, and of what they write.
    """
    of_user = {"user": f"${{TRAINER_UID:-{user[0]}}}:${{TRAINER_GID:-{user[1]}}}"}
    services = {container.service: _service(container) | of_user for container in containers}
    networks: dict[str, Any] = {}
    if any(container.host is None for container in containers):
        networks["cluster"] = {"internal": True, "driver_opts": NETWORK_OPTIONS}
    if any(container.task == "worker:0" for container in containers):
        services["tensorboard"] = _tensorboard() | of_user
        networks["published"] = {}
    file = {"name": name, "services": services} | ({"networks": networks} if networks else {})
    header = (
        f"# {words}\n"
        f"# Made by `python -m trainer mode=render {overrides}`; paths are of the run directory.\n"
        "# TRAINER_UID and TRAINER_GID say whom the tasks are, and what they write belongs to.\n"
    )
    return header + yaml.dump(file, Dumper=_Dumper, sort_keys=False, width=120)


def _service(container: ContainerSpec) -> dict[str, Any]:
    told: dict[str, Any] = {"image": container.image}
    if container.is_our_image:
        told["pull_policy"] = "never"  # a registry's image of that name would be somebody else's
    told |= {
        "entrypoint": list(ENTRYPOINT),
        "command": list(container.arguments),
        "environment": {**container.environment, REPORTS_PROGRESS: "1"},
        "labels": {TASK_LABEL: container.task},
        **_hardened(container.tmp_mib),
        "volumes": [_bind(mount) for mount in container.mounts],
        **({"networks": ["cluster"]} if container.host is None else {"network_mode": "host"}),
        "stop_grace_period": f"{container.stop_grace_secs:g}s",
        "pids_limit": container.pids,
    }
    if container.memory_mib is not None:
        told["mem_limit"] = told["memswap_limit"] = f"{container.memory_mib}m"  # one that swaps is as good as gone
    if container.cpus is not None:
        told["cpus"] = container.cpus
    if container.gpus:
        device = {"driver": "nvidia", "device_ids": [str(gpu) for gpu in container.gpus], "capabilities": ["gpu"]}
        told["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
        told["shm_size"] = f"{GPU_SHARED_MIB}m"
    return told


def _hardened(tmp_mib: int) -> dict[str, Any]:
    return {
        "init": True,
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": list(SECURITY),
        "tmpfs": [f"/tmp:size={tmp_mib}m,mode=1777"],
    }


def _bind(mount: Mount) -> dict[str, Any]:
    """In the long form: what is missing on the host is an error, and not a new directory of root's."""
    told = {"type": "bind", "source": _literal(mount.source), "target": _literal(mount.target)}
    return told | ({} if mount.is_writable else {"read_only": True}) | {"bind": {"create_host_path": False}}


def _literal(text: str) -> str:
    """A text in which Compose sees no variable."""
    return text.replace("$", "$$")


def _tensorboard() -> dict[str, Any]:
    """Reads the events of the run; started only where it is asked for, and reached only from this host."""
    return {
        "profiles": ["tensorboard"],
        "image": TENSORBOARD_IMAGE,
        "pull_policy": "never",
        "command": [f"{INSIDE}/events"],
        **_hardened(64),
        "volumes": [_bind(Mount(".", INSIDE))],
        "networks": ["published"],
        "ports": [TENSORBOARD_PORT],
    }


class _Dumper(yaml.SafeDumper):
    """Indents lists, as people do, and writes out what is said twice."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return True
