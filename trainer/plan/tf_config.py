"""Reads the cluster and this process's role from a scheduler's `TF_CONFIG`. Pure."""

import json
import re
from collections.abc import Mapping
from typing import Any

from trainer.config.cluster_size import ClusterSize
from trainer.config.schema import ClusterConfig
from trainer.faults.problems import ConfigError, Problem
from trainer.plan.addresses import JOBS
from trainer.plan.devices import Role

_KINDS = {list: "list", str: "text", int: "number", float: "number", bool: "boolean", type(None): "null"}


def role_of(chosen: ClusterConfig, text: str) -> Role:
    """Returns the cluster and this process's role from a scheduler's `TF_CONFIG`.

    `chief` (or `master`) becomes worker 0 and the workers follow it. An evaluator need not be listed, as it is not part
    of the training cluster. Then only its own process knows of it, and the chief evaluates too, unless the command says
    so in every process: `cluster=2ps4w1e`.

    Args:
        chosen: the cluster of the command line.

    Raises:
        ConfigError: if the variable is malformed, or contradicts the command line.
    """
    try:
        jobs, job, index = _read_tf_config(text)
    except ValueError as error:
        example = (
            '{"cluster": {"ps": ["ps-0:2222"], "worker": ["worker-0:2222"]}, "task": {"type": "worker", "index": 0}}'
        )
        remedy = f"write {example}; unset it to start the tasks from here"
        raise ConfigError([Problem("TF_CONFIG", "malformed", str(error), remedy)]) from error
    sizes = {name: len(jobs.get(name, [])) for name in JOBS}
    if not jobs.get("evaluator"):
        sizes["evaluator"] = max(chosen.evaluator, int(job == "evaluator"))
    if not sizes["worker"]:
        remedy = "add worker, or chief, with a list of addresses"
        raise ConfigError([Problem("TF_CONFIG", "not-set", "the cluster has no worker", remedy)])
    size = str(ClusterSize(**sizes))
    if not chosen.is_local and not _agrees(sizes, chosen, job):
        message = f"describes cluster {size}, but the command line says cluster={chosen.name}"
        remedy = f"leave cluster= out, or type cluster={size}"
        raise ConfigError([Problem("TF_CONFIG", "conflict", message, remedy)])
    return Role(ClusterConfig(size, sizes["ps"], sizes["worker"], sizes["evaluator"], jobs), job, index)


def _agrees(sizes: Mapping[str, int], chosen: ClusterConfig, job: str) -> bool:
    """Whether the command line and the scheduler agree on the cluster; an evaluator may be listed in only one."""
    typed = {name: getattr(chosen, name) for name in JOBS}
    return sizes == typed or (job == "evaluator" and sizes == typed | {"evaluator": 1})


def _read_tf_config(text: str) -> tuple[dict[str, list[str]], str, int]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not valid JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"is a JSON {_KINDS[type(value)]}, not an object with cluster and task")
    cluster, task = value.get("cluster"), value.get("task")
    if not isinstance(cluster, dict) or not all(_is_address_list(v) for v in cluster.values()):
        raise ValueError("cluster must be an object that maps each job to a list of addresses")
    if not isinstance(task, dict) or not isinstance(task.get("type"), str):
        raise ValueError("has no task with a type and an index, so this process does not know its role")
    index = json.dumps(task.get("index", 0)).strip('"')
    if not re.fullmatch(r"-?\d{1,9}", index, re.ASCII):
        raise ValueError(f"the task's index is {index!r}, not a number")
    return _with_chief_as_worker(cluster, task["type"], int(index))


def _is_address_list(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _with_chief_as_worker(cluster: dict[str, list[str]], job: str, index: int) -> tuple[dict[str, list[str]], str, int]:
    if job not in cluster and job != "evaluator":
        raise ValueError(
            f"the task is {job}:{index}, but the cluster has only {', '.join(sorted(cluster)) or 'no jobs'}"
        )
    count = len(cluster.get(job, [""]))  # an evaluator that is not listed is the only one
    if not 0 <= index < count:
        there = f"{job} tasks 0..{count - 1}" if count else f"no {job} tasks"
        raise ValueError(f"the task is {job}:{index}, but the cluster has {there}")
    chiefs = [*cluster.get("chief", []), *cluster.get("master", [])]
    jobs = {"ps": cluster.get("ps", []), "worker": [*chiefs, *cluster.get("worker", [])]}
    jobs |= {"evaluator": cluster["evaluator"]} if cluster.get("evaluator") else {}
    known = (*JOBS, "chief", "master")
    unknown = sorted(set(cluster) - set(known))
    if unknown:
        raise ValueError(f"the cluster has unknown jobs {', '.join(unknown)}; available: {', '.join(known)}")
    if job in ("chief", "master"):
        return jobs, "worker", index
    return jobs, job, index + len(chiefs) if job == "worker" else index
