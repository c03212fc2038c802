"""Parses and checks the addresses of tasks, from the config or a scheduler's `TF_CONFIG`. Pure: it opens no socket."""

import ipaddress
from collections.abc import Iterator, Mapping
from contextlib import suppress

from trainer.config.cluster_size import ClusterSize
from trainer.config.schema import ClusterConfig
from trainer.faults.problems import Problem

JOBS = ("ps", "worker", "evaluator")
CONTROL_PORT_OFFSET = 1000  # the status page of a task with a fixed address listens this much above its TensorFlow port
HIGHEST_PORT = 65535 - CONTROL_PORT_OFFSET
USUAL_PORT = 2222  # the first one that tasks are given


def split(address: str) -> tuple[str, int]:
    """Splits "host:port" into (host, port); an IPv6 host may be in brackets.

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


def port_of(number: int) -> int:
    """Returns the port of the task with this index in a plan, for tasks that each have their own host.

    Pods and containers restart at another address and leave theirs to others. With a port for each task, an address
    that a task has left leads to no other one: connecting fails, and the name is resolved again.
    """
    return USUAL_PORT + number


def _is_port(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) < 6 and 1 <= int(text) <= HIGHEST_PORT


def _nearest(address: str) -> str:
    """Returns the probable meaning of a text that is not an address: its host, and its port if it has one."""
    place = address.rpartition("://")[2].partition("/")[0]
    host, _, port = place.rpartition(":") if ":" in place else (place, "", "")
    return f"{host or '10.0.0.1'}:{port if _is_port(port) else USUAL_PORT}"


def join(host: str, port: int) -> str:
    """Returns "host:port", with an IPv6 host in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_of(address: str) -> str:
    """Returns the host of an address that `split` accepted, without brackets."""
    return address.rpartition(":")[0].strip("[]")


def check_addresses(cluster: ClusterConfig, *, untrusted_allowed: bool) -> Iterator[Problem]:
    """Yields the problems of a cluster's addresses."""
    for job in cluster.addresses:
        if job not in JOBS:
            message = f"{job!r} is not a job; available: {', '.join(JOBS)}"
            yield Problem(f"cluster.addresses.{job}", "unknown-choice", message, "move its addresses to one of them")
    taken: dict[tuple[str, int], str] = {}  # what listens there
    for job, addresses in cluster.addresses.items():
        for index, address in enumerate(addresses):
            key = f"cluster.addresses.{job}[{index}]"
            problems = [*_check_address(key, address, untrusted_allowed)]
            yield from problems or _check_free(key, address, taken)
    yield from _check_counts(cluster)


def _check_address(key: str, address: str, untrusted_allowed: bool) -> Iterator[Problem]:
    try:
        host, _ = split(address)
    except ValueError as error:
        yield Problem(key, "malformed", str(error), f"e.g. {_nearest(address)}")
        return
    with suppress(ValueError):  # a name, which is not checked
        if ipaddress.ip_address(host).is_global and not untrusted_allowed:
            what = f"{address} is a public address, and TensorFlow's gRPC has no authentication"
            remedy = "use a private address, or security.allow_untrusted_network=true if a firewall protects it"
            yield Problem(key, "unsafe", f"{what}: anyone who reaches it can run code", remedy)


def _check_free(key: str, address: str, taken: dict[tuple[str, int], str]) -> Iterator[Problem]:
    """Adds a task's two ports to `taken`; yields a problem for one that is taken already."""
    host, port = split(address)
    host = "127.0.0.1" if host == "localhost" else host
    needed = {(host, port): key, (host, port + CONTROL_PORT_OFFSET): f"the status page of {key}"}
    clashes = [place for place in needed if place in taken]
    if clashes:
        message = f"{host}:{clashes[0][1]} of {needed[clashes[0]]} is also {taken[clashes[0]]}"
        free = f"{host}:{_free_port(host, taken)}"
        yield Problem(key, "taken", message, f"e.g. {free}; the status page is {CONTROL_PORT_OFFSET} above")
    taken |= needed


def _free_port(host: str, taken: Mapping[tuple[str, int], str]) -> int:
    """Returns the lowest usual port that no task and no status page uses."""
    used = {number for place, number in taken if place == host}
    return next(p for p in range(USUAL_PORT, HIGHEST_PORT) if not {p, p + CONTROL_PORT_OFFSET} & used)


def _check_counts(cluster: ClusterConfig) -> Iterator[Problem]:
    if not cluster.addresses:
        return
    for job in JOBS:
        given, wanted = len(cluster.addresses.get(job, [])), getattr(cluster, job)
        needs_none = job == "evaluator" and not given  # no task connects to it
        if given != wanted and not needs_none:
            remedy = f"give {wanted} addresses, or type cluster={_with_addresses(cluster)}"
            yield Problem(f"cluster.addresses.{job}", "mismatch", f"{job} has {given} of {wanted} addresses", remedy)


def _with_addresses(cluster: ClusterConfig) -> ClusterSize:
    """Returns the size of a cluster whose tasks all have addresses."""
    given = {job: len(cluster.addresses.get(job, [])) for job in JOBS}
    return ClusterSize(given["ps"], max(given["worker"], 1), given["evaluator"] or cluster.evaluator)


def check_role(cluster: ClusterConfig, job: str | None, task: int | None, run: str | None) -> Iterator[Problem]:
    """Yields the problems of the task chosen by `job` and `task`, whose run directory is `run`."""
    if job is None and task is None:
        return
    sizes = {name: getattr(cluster, name) for name in JOBS}
    if job not in sizes:
        what = f"task={task} was set without job" if job is None else f"{job!r} is not a job"
        message = f"{what}; available: {', '.join(sizes)}"
        yield Problem("job", "unknown-choice", message, f"e.g. job=worker task={task or 0}")
    elif task is None or task >= sizes[job]:
        last = sizes[job] - 1
        allowed = f"{job} has tasks 0..{last}" if last >= 0 else f"the cluster has no {job}"
        what = f"job={job} was set without task" if task is None else f"{task} is not a task of {job}"
        other, there = (job, last) if last >= 0 else ("worker", sizes["worker"] - 1)
        yield Problem("task", "out-of-range", f"{what}; {allowed}", f"e.g. job={other} task={there}")
    elif not cluster.addresses:
        message = "a task started alone must know where the others listen, but the cluster has no addresses"
        remedy = "set cluster.addresses.ps=[host:port,...] cluster.addresses.worker=[...], or leave job and task out"
        yield Problem("job", "not-set", message, remedy)
    elif job == "evaluator" and run is None:
        message = "evaluator:0 reads the checkpoints that the chief writes, but run is not set"
        yield Problem("run", "not-set", message, "give every task the same run=PATH, a directory that all tasks share")
