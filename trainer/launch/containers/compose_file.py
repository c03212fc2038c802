"""Renders a run as a Docker Compose file with one service for each task. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
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

Section = dict[str, Any]  # of a file whose keys are Docker's
TENSORBOARD_IMAGE = "trainer:tensorboard"
TENSORBOARD_PORT = "127.0.0.1:${TENSORBOARD_PORT:-6006}:6006"


def render(containers: Sequence[ContainerSpec], *, name: str, words: str, overrides: str, user: tuple[int, int]) -> str:
    """Returns the file's text, for a directory that also holds config.yaml and plan.json.

    Args:
        containers: of one host, or of all.
        name: of the project, with which the names of its containers and networks begin.
        words: a description of the run, in one line.
        overrides: of the command that made it.
        user: user and group that the tasks run as by default.
    """
    of_user = {"user": f"${{TRAINER_UID:-{user[0]}}}:${{TRAINER_GID:-{user[1]}}}"}
    services = {container.service: _service(container) | of_user for container in containers}
    shared, services = _factor_out(services) if len(services) > 1 else ({}, services)
    networks: Section = {}
    if any(container.host is None for container in containers):
        networks["cluster"] = {"internal": True, "driver_opts": NETWORK_OPTIONS}
    if any(container.task == "worker:0" for container in containers):
        services["tensorboard"] = _tensorboard() | of_user
        networks["published"] = {}
    file = {"name": name, **shared, "services": services} | ({"networks": networks} if networks else {})
    header = (
        f"# {words}\n"
        f"# Made by `python -m trainer {overrides}`; paths are of the run directory.\n"
        "# The tasks run as TRAINER_UID and TRAINER_GID, who own what they write.\n"
    )
    return header + yaml.dump(file, Dumper=_Dumper, sort_keys=False, width=120)


def _factor_out(services: Mapping[str, Section]) -> tuple[Section, Section]:
    """Moves the settings that all services share into `x-task` and `x-environment`, which each service merges.

    Compose merges shallowly, so the environment and each volume have their own anchors.
    """
    volumes: dict[str, _Anchored] = {}
    for service in services.values():
        texts = [str(volume) for volume in service["volumes"]]
        for text, volume in zip(texts, service["volumes"], strict=True):
            volumes.setdefault(text, _Anchored(f"volume-{len(volumes) + 1}", volume))
        service["volumes"] = [volumes[text] for text in texts]
    environment = _Anchored("environment", _common([service["environment"] for service in services.values()]))
    task = _Anchored("task", _common(list(services.values())))
    rest = {
        name: {
            _Merge("<<"): task,
            **{key: value for key, value in service.items() if key not in task},
            "environment": {
                _Merge("<<"): environment,
                **{key: value for key, value in service["environment"].items() if key not in environment},
            },
        }
        for name, service in services.items()
    }
    return {"x-environment": environment, "x-task": task}, rest


def _common(mappings: Sequence[Mapping[str, Any]]) -> Section:
    """Returns the items that all mappings have."""
    first, *others = mappings
    return {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}


def _service(container: ContainerSpec) -> Section:
    service: Section = {"image": container.image}
    if container.is_our_image:
        service["pull_policy"] = "never"  # a registry's image of that name would not be ours
    service |= {
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
        service["mem_limit"] = service["memswap_limit"] = (
            f"{container.memory_mib}m"  # no swap: a task that swaps blocks all
        )
    if container.cpus is not None:
        service["cpus"] = container.cpus
    if container.gpus:
        device = {"driver": "nvidia", "device_ids": [str(gpu) for gpu in container.gpus], "capabilities": ["gpu"]}
        service["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
        service["shm_size"] = f"{GPU_SHARED_MIB}m"
    return service


def _hardened(tmp_mib: int) -> Section:
    return {
        "init": True,
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": list(SECURITY),
        "tmpfs": [f"/tmp:size={tmp_mib}m,mode=1777"],
    }


def _bind(mount: Mount) -> Section:
    """Returns a mount in long form, so that a path missing on the host is an error, not a new directory of root."""
    bind = {"type": "bind", "source": literal(mount.source), "target": literal(mount.target)}
    return bind | ({} if mount.is_writable else {"read_only": True}) | {"bind": {"create_host_path": False}}


def literal(text: str) -> str:
    """Escapes a text so that Compose finds no variables in it."""
    return text.replace("$", "$$")


def _tensorboard() -> Section:
    """Returns a service that shows the run's events; it starts only on request, and only this host can reach it."""
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


class _Anchored(Section):
    """A mapping that is written once, with an anchor; later mentions are aliases."""

    def __init__(self, anchor: str, items: Mapping[str, Any]) -> None:
        super().__init__(items)
        self.anchor = anchor


class _Merge(str):
    """The key `<<`, which is quoted in any other string."""


class _Dumper(yaml.SafeDumper):
    """Indents lists, writes lists of strings on one line, and makes aliases only for `_Anchored`."""

    def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:
        super().increase_indent(flow, False)

    def ignore_aliases(self, data: Any) -> bool:
        return not isinstance(data, _Anchored)

    def represent_flat_list(self, data: Any) -> yaml.Node:
        is_flat = all(isinstance(item, str) for item in data)
        return self.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=is_flat)

    def represent_anchored(self, data: _Anchored) -> yaml.Node:
        node = self.represent_dict(data)
        node.anchor = data.anchor  # type: ignore[attr-defined]
        return node

    def generate_anchor(self, node: Any) -> str:
        return str(node.anchor)


_Dumper.add_representer(list, _Dumper.represent_flat_list)
_Dumper.add_representer(_Anchored, _Dumper.represent_anchored)
_Dumper.add_representer(_Merge, lambda dumper, key: dumper.represent_scalar("tag:yaml.org,2002:merge", key))
