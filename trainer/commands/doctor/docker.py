"""Judges Docker's answers for runs in containers: the engine, Compose and the NVIDIA runtime. Pure."""

import json
from collections.abc import Mapping
from typing import Any

from trainer.commands.doctor.finding import Answer, Finding, ok, warning
from trainer.plan.checks.versions import is_in_range, release

OLDEST_ENGINE, OLDEST_COMPOSE = "20.10", "2.27"
START_ENGINE = "sudo systemctl start docker   (runs without containers need none)"
INSTALL_ENGINE = "install the package docker-ce from Docker's own repository"
INSTALL_COMPOSE = "install the package docker-compose-plugin from Docker's own repository"


def docker(info: Answer | None, compose: Answer | None, gpu_count: int) -> list[Finding]:
    """Judges Docker and Compose by `docker info --format '{{json .}}'` and `docker compose version --short`."""
    if info is None:
        return [ok("docker", "not installed; only runs in containers need it")]
    if info.code is None:
        return [warning("docker", "the engine does not answer", "sudo systemctl restart docker"), _compose(compose)]
    try:
        facts = dict(json.loads(info.out))
    except (ValueError, TypeError):
        facts = {}
    if not facts.get("ServerVersion"):
        return [_no_engine(info, facts), _compose(compose)]
    findings = [_engine(facts["ServerVersion"]), _compose(compose)]
    return [*findings, _gpu_support(facts)] if gpu_count else findings


def _no_engine(info: Answer, facts: Mapping[str, Any]) -> Finding:
    reason = " ".join(facts.get("ServerErrors") or []) or info.last_words()
    if "permission denied" in f"{reason} {info.err}".lower():
        message = "this user may not use the engine"
        return warning("docker", message, "sudo usermod -aG docker $USER, then log in again")
    if info.code == 0:
        return warning("docker", "the command does not behave like Docker's (podman?)", "docker version")
    return warning("docker", f"no engine: {reason}", START_ENGINE)


def _engine(version: str) -> Finding:
    if not is_in_range(version, f">={OLDEST_ENGINE}"):
        return warning("docker", f"engine {version}; containers need {OLDEST_ENGINE} or newer", INSTALL_ENGINE)
    return ok("docker", f"engine {version}")


def _compose(compose: Answer | None) -> Finding:
    if compose is None or compose.code != 0 or release(compose.out) is None:
        return warning("compose", f"not installed; containers need Compose {OLDEST_COMPOSE} or newer", INSTALL_COMPOSE)
    version = compose.out.strip()
    if not is_in_range(version, f">={OLDEST_COMPOSE}"):
        return warning("compose", f"{version}; containers need {OLDEST_COMPOSE} or newer", INSTALL_COMPOSE)
    return ok("compose", version)


def _gpu_support(facts: Mapping[str, Any]) -> Finding:
    runtimes = facts.get("Runtimes") or {}
    devices = [device.get("ID", "") for device in facts.get("DiscoveredDevices") or []]  # CDI, since Docker 28.3
    if "nvidia" in runtimes or any(name.startswith("nvidia.com/gpu") for name in devices):
        return ok("docker GPUs", "available to containers")
    message = f"no nvidia runtime, only {', '.join(sorted(runtimes)) or 'none'}"
    configure = "sudo nvidia-ctk runtime configure --runtime=docker && sudo systemctl restart docker"
    return warning("docker GPUs", message, f"install nvidia-container-toolkit, then {configure}")
