"""Where tasks listen: addresses given in the config, or by a scheduler's `TF_CONFIG`. Pure: it opens no socket."""

from __future__ import annotations

import ipaddress
import json
from collections.abc import Iterator, Mapping
from typing import Any

from trainer.config import ClusterConfig, Problem, RunConfig

JOBS = ("ps", "worker", "evaluator")
CONTROL_PORT_OFFSET = 1000  # the status page of a task with a fixed address listens this much above its TensorFlow port


def split(address: str) -> tuple[str, int]:
    """ "host:port" -> (host, port); an IPv6 host may stand in brackets.

    Raises:
        ValueError: if it is not of that form, or the port is not one that a task can listen on.
    """
    if "://" in address:
        raise ValueError(f"{address!r} has a scheme; write host:port, without {address.split('://')[0]}://")
    host, colon, port = address.rpartition(":")
    if not colon or not host:
        raise ValueError(f"{address!r} is not host:port, e.g. {address.strip(':') or '10.0.0.1'}:2222")
    highest = 65535 - CONTROL_PORT_OFFSET
    if not (port.isascii() and port.isdigit() and 1 <= int(port) <= highest):
        raise ValueError(f"{address!r} has port {port!r}; a port is a number from 1 to {highest}, e.g. {host}:2222")
    return host.strip("[]"), int(port)


def host_of(address: str) -> str:
    """The host of an address that `split` accepted, without brackets."""
    return address.rpartition(":")[0].strip("[]")


def check(config: RunConfig) -> Iterator[Problem]:
    """Yields what is wrong with the addresses of a cluster, and with the task chosen by `job` and `task`."""
    cluster = config.cluster
    for job in cluster.addresses:
        if job not in JOBS:
            message = f"{job!r} is not a job; there are {', '.join(JOBS)}"
            yield Problem(f"cluster.addresses.{job}", message, "move its addresses to one of them")
    taken: dict[tuple[str, int], str] = {}  # what listens there
    for job, addresses in cluster.addresses.items():
        for index, address in enumerate(addresses):
            key = f"cluster.addresses.{job}[{index}]"
            problem = _check_address(key, address, config.security.allow_untrusted_network)
            if problem is not None:
                yield problem
            else:
                yield from _check_free(key, address, taken)
    yield from _check_counts(cluster)
    yield from _check_role(config)


def _check_address(key: str, address: str, untrusted_allowed: bool) -> Problem | None:
    try:
        host, _ = split(address)
    except ValueError as error:
        return Problem(key, str(error), "an address is host:port")
    try:
        public = ipaddress.ip_address(host).is_global
    except ValueError:  # a name; whoever resolves it answers for it
        return None
    if not public or untrusted_allowed:
        return None
    return Problem(
        key,
        f"{address} is a public address, and TensorFlow's gRPC has no authentication: who reaches it can run code",
        "use a private address, or security.allow_untrusted_network=true if a firewall stands before it",
    )


def _check_free(key: str, address: str, taken: dict[tuple[str, int], str]) -> Iterator[Problem]:
    """Enters a task's two ports into `taken`; yields a problem for one that is there already."""
    host, port = split(address)
    host = "127.0.0.1" if host == "localhost" else host
    for number, what in ((port, key), (port + CONTROL_PORT_OFFSET, f"the status page of {key}")):
        if (host, number) in taken:
            message = f"{host}:{number} of {what} is also {taken[host, number]}"
            remedy = f"give every task an address of its own, {CONTROL_PORT_OFFSET} away from the others"
            yield Problem(key, message, remedy)
        taken[host, number] = what


def _check_counts(cluster: ClusterConfig) -> Iterator[Problem]:
    if not cluster.addresses:
        return
    for job in JOBS:
        given, wanted = len(cluster.addresses.get(job, [])), getattr(cluster, job)
        needs_none = job == "evaluator" and not given  # nobody asks for it
        if given != wanted and not needs_none:
            yield Problem(
                f"cluster.addresses.{job}",
                f"{given} addresses for {wanted} {job} tasks",
                f"give {wanted} addresses, or cluster.{job}={given}",
            )


def _check_role(config: RunConfig) -> Iterator[Problem]:
    job, task = config.job, config.task
    if job is None and task is None:
        return
    sizes = {name: getattr(config.cluster, name) for name in JOBS}
    if job not in sizes:
        yield Problem("job", f"{job!r} is not a job; there are {', '.join(sizes)}", "e.g. job=worker task=0")
    elif task is None or task >= sizes[job]:
        last = sizes[job] - 1
        allowed = f"{job} has tasks 0..{last}" if last >= 0 else f"the cluster has no {job}"
        yield Problem(
            "task", f"{task} is not a task of {job}; {allowed}", f"e.g. job=worker task={sizes['worker'] - 1}"
        )
    elif not config.cluster.addresses:
        yield Problem(
            "job",
            "a task on its own must know where the others listen, and the cluster has no addresses",
            "set cluster.addresses.ps=[host:port,...] cluster.addresses.worker=[...], or leave job and task out",
        )
    elif job == "evaluator" and config.run is None:
        yield Problem(
            "run",
            "evaluator:0 reads the checkpoints where the chief writes them, and no directory is given",
            "give run=PATH, of a directory that all tasks share, to every task",
        )


def adopt_tf_config(config: RunConfig, text: str) -> list[Problem]:
    """Takes the cluster and this process's role from a scheduler's `TF_CONFIG` into the config.

    `chief` (or `master`) becomes worker 0 and the workers follow it. An evaluator need not be listed, as it is not part
    of the training cluster. Then only its own process knows of it, and the chief evaluates too, unless the command says
    so in every process: `cluster=2ps4w1e`.

    Returns:
        What is wrong with it, or contradicts a cluster chosen on the command line.
    """
    try:
        jobs, job, index = _read_tf_config(text)
    except ValueError as error:
        example = (
            '{"cluster": {"ps": ["ps-0:2222"], "worker": ["worker-0:2222"]}, "task": {"type": "worker", "index": 0}}'
        )
        return [Problem("TF_CONFIG", str(error), f"it reads {example}; unset it to start the tasks from here")]
    chosen = config.cluster
    sizes = {name: len(jobs.get(name, [])) for name in JOBS}
    if not jobs.get("evaluator"):
        sizes["evaluator"] = max(chosen.evaluator, int(job == "evaluator"))
    if not sizes["worker"]:
        return [Problem("TF_CONFIG", "its cluster has no worker", "add worker, or chief, with a list of addresses")]
    if chosen.name != "local" and not _agrees(sizes, chosen, job):
        return [
            Problem(
                "TF_CONFIG",
                f"it is of a cluster {_name(sizes)}, the command line says cluster={chosen.name}",
                f"leave cluster= out, or type cluster={_name(sizes)}",
            )
        ]
    config.cluster = ClusterConfig(name=_name(sizes), addresses=jobs, **sizes)
    config.job, config.task = job, index
    return []


def _agrees(sizes: Mapping[str, int], chosen: ClusterConfig, job: str) -> bool:
    """Whether the cluster on the command line is the scheduler's; of an evaluator it may say nothing to itself."""
    told = {name: getattr(chosen, name) for name in JOBS}
    return sizes == told or (job == "evaluator" and sizes == told | {"evaluator": 1})


def _name(sizes: Mapping[str, int]) -> str:
    return "".join(f"{sizes[job]}{letters}" for job, letters in zip(JOBS, ("ps", "w", "e"), strict=True) if sizes[job])


def _read_tf_config(text: str) -> tuple[dict[str, list[str]], str, int]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"it is a JSON {type(value).__name__}, not an object with cluster and task")
    cluster, task = value.get("cluster"), value.get("task")
    if not isinstance(cluster, dict) or not all(_is_address_list(v) for v in cluster.values()):
        raise ValueError("its cluster is not an object of address lists by job")
    if not isinstance(task, dict) or not isinstance(task.get("type"), str):
        raise ValueError("it has no task with a type and an index, so this process does not know who it is")
    try:
        index = int(task.get("index", 0))
    except (TypeError, ValueError):
        raise ValueError(f"its task index is {task.get('index')!r}, not a number") from None
    return _with_chief_as_worker(cluster, task["type"], index)


def _is_address_list(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _with_chief_as_worker(cluster: dict[str, list[str]], job: str, index: int) -> tuple[dict[str, list[str]], str, int]:
    if job not in cluster and job != "evaluator":
        raise ValueError(
            f"its task is {job}:{index}, and its cluster has only {', '.join(sorted(cluster)) or 'no jobs'}"
        )
    count = len(cluster.get(job, [""]))  # an evaluator that is not listed is the only one
    if not 0 <= index < count:
        raise ValueError(f"its task is {job}:{index}, and its cluster has {job} tasks 0..{count - 1}")
    chiefs = [*cluster.get("chief", []), *cluster.get("master", [])]
    jobs = {"ps": cluster.get("ps", []), "worker": [*chiefs, *cluster.get("worker", [])]}
    jobs |= {"evaluator": cluster["evaluator"]} if cluster.get("evaluator") else {}
    known = (*JOBS, "chief", "master")
    unknown = sorted(set(cluster) - set(known))
    if unknown:
        raise ValueError(f"its cluster has unknown jobs {', '.join(unknown)}; there are {', '.join(known)}")
    if job in ("chief", "master"):
        return jobs, "worker", index
    return jobs, job, index + len(chiefs) if job == "worker" else index
