"""Where tasks listen: addresses given in the config, or by a scheduler's `TF_CONFIG`. Pure: it opens no socket."""

from __future__ import annotations

import ipaddress
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from trainer.config.cluster_size import ClusterSize
from trainer.config.schema import ClusterConfig, Problem, RunConfig

JOBS = ("ps", "worker", "evaluator")
CONTROL_PORT_OFFSET = 1000  # the status page of a task with a fixed address listens this much above its TensorFlow port
HIGHEST_PORT = 65535 - CONTROL_PORT_OFFSET
USUAL_PORT = 2222
_KINDS = {list: "list", str: "text", int: "number", float: "number", bool: "boolean", type(None): "null"}


def split(address: str) -> tuple[str, int]:
    """ "host:port" -> (host, port); an IPv6 host may stand in brackets.

    Raises:
        ValueError: if it is not of that form, or the port is not one that a task can listen on.
    """
    if "://" in address:
        raise ValueError(f"{address!r} has a scheme; write host:port, without {address.split('://')[0]}://")
    host, colon, port = address.rpartition(":")
    if not colon or not host:
        raise ValueError(f"{address!r} is not host:port")
    if not _is_port(port):
        raise ValueError(f"{address!r} has port {port!r}; a port is a number from 1 to {HIGHEST_PORT}")
    return host.strip("[]"), int(port)


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 6 and 1 <= int(text) <= HIGHEST_PORT


def _nearest(address: str) -> str:
    """What was probably meant by a text that is no address: its host, and its port if it has one."""
    place = address.rpartition("://")[2].partition("/")[0]
    host, _, port = place.rpartition(":") if ":" in place else (place, "", "")
    return f"{host or '10.0.0.1'}:{port if _is_port(port) else USUAL_PORT}"


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
        return Problem(key, str(error), f"e.g. {_nearest(address)}")
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
    needed = {(host, port): key, (host, port + CONTROL_PORT_OFFSET): f"the status page of {key}"}
    clashes = [place for place in needed if place in taken]
    if clashes:
        message = f"{host}:{clashes[0][1]} of {needed[clashes[0]]} is also {taken[clashes[0]]}"
        yield Problem(
            key, message, f"e.g. {host}:{_free_port(host, taken)}; the status page is {CONTROL_PORT_OFFSET} above"
        )
    taken |= needed


def _free_port(host: str, taken: Mapping[tuple[str, int], str]) -> int:
    """The lowest usual one that no task has, nor its status page."""
    used = {number for place, number in taken if place == host}
    return next(p for p in range(USUAL_PORT, HIGHEST_PORT) if not {p, p + CONTROL_PORT_OFFSET} & used)


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
                f"give {wanted} addresses, or type cluster={_with_addresses(cluster)}",
            )


def _with_addresses(cluster: ClusterConfig) -> ClusterSize:
    """The size of a cluster whose tasks all have addresses."""
    given = {job: len(cluster.addresses.get(job, [])) for job in JOBS}
    return ClusterSize(given["ps"], max(given["worker"], 1), given["evaluator"] or cluster.evaluator)


def _check_role(config: RunConfig) -> Iterator[Problem]:
    job, task = config.job, config.task
    if job is None and task is None:
        return
    sizes = {name: getattr(config.cluster, name) for name in JOBS}
    if job not in sizes:
        what = f"task={task} is given without a job" if job is None else f"{job!r} is not a job"
        yield Problem("job", f"{what}; there are {', '.join(sizes)}", f"e.g. job=worker task={task or 0}")
    elif task is None or task >= sizes[job]:
        last = sizes[job] - 1
        allowed = f"{job} has tasks 0..{last}" if last >= 0 else f"the cluster has no {job}"
        what = f"job={job} is given without a task" if task is None else f"{task} is not a task of {job}"
        other, there = (job, last) if last >= 0 else ("worker", sizes["worker"] - 1)
        yield Problem("task", f"{what}; {allowed}", f"e.g. job={other} task={there}")
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
                f"it is of a cluster {ClusterSize(**sizes)}, the command line says cluster={chosen.name}",
                f"leave cluster= out, or type cluster={ClusterSize(**sizes)}",
            )
        ]
    config.cluster = ClusterConfig(str(ClusterSize(**sizes)), sizes["ps"], sizes["worker"], sizes["evaluator"], jobs)
    config.job, config.task = job, index
    return []


def _agrees(sizes: Mapping[str, int], chosen: ClusterConfig, job: str) -> bool:
    """Whether the cluster on the command line is the scheduler's; of an evaluator it may say nothing to itself."""
    told = {name: getattr(chosen, name) for name in JOBS}
    return sizes == told or (job == "evaluator" and sizes == told | {"evaluator": 1})


def _read_tf_config(text: str) -> tuple[dict[str, list[str]], str, int]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"it is not JSON ({error})") from error
    if not isinstance(value, dict):
        raise ValueError(f"it is a JSON {_KINDS[type(value)]}, not an object with cluster and task")
    cluster, task = value.get("cluster"), value.get("task")
    if not isinstance(cluster, dict) or not all(_is_address_list(v) for v in cluster.values()):
        raise ValueError("its cluster is not an object of address lists by job")
    if not isinstance(task, dict) or not isinstance(task.get("type"), str):
        raise ValueError("it has no task with a type and an index, so this process does not know who it is")
    index = json.dumps(task.get("index", 0)).strip('"')
    if not re.fullmatch(r"-?\d{1,9}", index, re.ASCII):
        raise ValueError(f"its task index is {index!r}, not a number")
    return _with_chief_as_worker(cluster, task["type"], int(index))


def _is_address_list(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(item, str) for item in value)


def _with_chief_as_worker(cluster: dict[str, list[str]], job: str, index: int) -> tuple[dict[str, list[str]], str, int]:
    if job not in cluster and job != "evaluator":
        raise ValueError(
            f"its task is {job}:{index}, and its cluster has only {', '.join(sorted(cluster)) or 'no jobs'}"
        )
    count = len(cluster.get(job, [""]))  # an evaluator that is not listed is the only one
    if not 0 <= index < count:
        there = f"{job} tasks 0..{count - 1}" if count else f"no {job} tasks"
        raise ValueError(f"its task is {job}:{index}, and its cluster has {there}")
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
