"""Several machines that share a cluster's tasks out, as `cluster.hosts` names them. Pure."""

import difflib
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from trainer.config.schema import ClusterConfig, Launch, Mode, RunConfig
from trainer.faults.problems import Problem
from trainer.plan import addresses
from trainer.plan.addresses import JOBS, USUAL_PORT
from trainer.plan.devices import ON_HOSTS, is_on_hosts, key_of, tasks_of

KEY = "cluster.hosts"
EXAMPLE = "cluster.hosts=[10.0.0.1,10.0.0.2]"


@dataclass(frozen=True)
class Host:
    """One machine."""

    address: str  # name or IP address by which the others reach it
    gpus: int = 0  # its workers take one each, in turn
    ps: int | None = None  # parameter servers on it; none: an equal share
    worker: int | None = None


def resolve_hosts(config: RunConfig) -> list[Problem]:
    """Gives every task an address on its host, and every worker a GPU of it unless `device.gpus` says otherwise."""
    if not config.cluster.hosts:
        return [*_check_launch(config)]
    problems = [*_check_use(config), *_check_ssh(config)]
    hosts = [_read(index, given, problems) for index, given in enumerate(config.cluster.hosts)]
    known = [host for host in hosts if host]
    listed = [host.address for host in known]
    for address in dict.fromkeys(address for address in listed if listed.count(address) > 1):
        problems.append(Problem(KEY, "duplicate", f"{address} is listed twice", "give one entry for each machine"))
    if problems:
        return problems
    for job in JOBS:
        _share_out(config, job, known, problems)
    if problems:
        config.cluster.addresses = {}  # half of them would make problems of their own
    else:
        _give_gpus(config, known)
    return problems


def each_alone(cluster: ClusterConfig) -> dict[str, list[str]]:
    """Addresses of tasks each of which has a host of its own, as pods do."""
    named: dict[str, list[str]] = {}
    for number, (job, index) in enumerate(tasks_of(cluster)):
        named.setdefault(job, []).append(addresses.join(f"{job}-{index}", addresses.port_of(number)))
    return named


def host_by_task(cluster: ClusterConfig) -> dict[str, str]:
    """Returns the host of every task, where there are several."""
    if not cluster.hosts:
        return {}
    of = cluster.addresses
    return {f"{job}:{index}": addresses.host_of(of[job][index]) for job, index in tasks_of(cluster)}


def _check_launch(config: RunConfig) -> Iterator[Problem]:
    name, mode = config.launch.name, config.mode
    if name in ON_HOSTS and mode not in (Mode.train, Mode.plan, Mode.render):
        yield Problem(
            "launch",
            "not-supported",
            f"trainer {mode.value} runs processes on this machine",
            f"leave launch={name.value} out",
        )
    if config.launch.name is Launch.ssh and config.job is None and config.mode is Mode.train:
        yield Problem(
            "launch", "not-set", "ssh starts the tasks on cluster.hosts, and there are none", f"e.g. {EXAMPLE}"
        )
    if config.launch.name is Launch.slurm and not _are_words(config.slurm.args):
        message = f"{config.slurm.args!r} has a quotation that does not end"
        yield Problem("slurm.args", "malformed", message, "e.g. slurm.args='--partition=gpu --account=mine'")


def _check_ssh(config: RunConfig) -> Iterator[Problem]:
    if not config.launch.ssh.strip() or not _are_words(config.launch.ssh):
        yield Problem(
            "launch.ssh", "malformed", f"{config.launch.ssh!r} is no command", "e.g. launch.ssh='ssh -l training'"
        )


def _are_words(text: str) -> bool:
    """Whether a shell could split a text; it cannot where a quotation does not end."""
    try:
        shlex.split(text)
    except ValueError:
        return False
    return True


def _check_use(config: RunConfig) -> Iterator[Problem]:
    starts_them = config.mode is Mode.train and is_on_hosts(config.launch.name, config.cluster)
    if config.mode not in (Mode.render, Mode.plan) and not starts_them:
        message = f"trainer {config.mode.value} with launch={config.launch.name.value} runs on this machine alone"
        yield Problem(
            KEY,
            "conflict",
            message,
            "type launch=ssh, or launch=docker; or trainer render, which writes a file and a command for each host",
        )
    if config.cluster.addresses:
        yield Problem(KEY, "conflict", "cluster.addresses already says where every task is", "leave out one of the two")
    if config.cluster.is_local:
        yield Problem(KEY, "conflict", "cluster=local is one process on one machine", "e.g. cluster=2ps4w")


def _read(index: int, given: Any, problems: list[Problem]) -> Host | None:
    """One entry: an address, or a mapping of Host's fields."""
    key = f"{KEY}[{index}]"
    entry = {"address": given} if isinstance(given, str) else given
    if not isinstance(entry, Mapping) or "address" not in entry:
        message = f"{given!r} is neither an address nor a mapping with one"
        problems.append(
            Problem(key, "malformed", message, f"e.g. {EXAMPLE} or [{{address:10.0.0.1,gpus:4,ps:1,worker:4}}]")
        )
        return None
    names = [field.name for field in fields(Host)]
    before = len(problems)
    for name, value in entry.items():
        if name not in names:
            near = (*difflib.get_close_matches(str(name), names, n=1), "worker")[0]
            problems.append(
                Problem(key, "unknown-key", f"there is no {name}; available: {', '.join(names)}", f"e.g. {near}")
            )
        elif name == "address":
            problems += _check_address(key, value)
        elif value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
            problems.append(
                Problem(key, "out-of-range", f"{name}={value!r} is not a whole number of at least 0", f"e.g. {name}:1")
            )
    return Host(**entry) if len(problems) == before else None


def _check_address(key: str, address: Any) -> Iterator[Problem]:
    """Addresses have no ports here: every task of a host gets its own."""
    if not isinstance(address, str) or not address.strip() or "/" in address or address.count(":") == 1:
        host = str(address).rpartition("://")[2].partition(":")[0].partition("/")[0] or "10.0.0.1"
        yield Problem(
            key, "malformed", f"{address!r} is not a host name or IP address", f"e.g. {host}; ports are assigned"
        )


def _share_out(config: RunConfig, job: str, hosts: Sequence[Host], problems: list[Problem]) -> None:
    """Gives a job's tasks addresses, host by host; its ports come after those of the jobs before it."""
    total = getattr(config.cluster, job)
    wanted = [getattr(host, job, None) for host in hosts]
    if job == "evaluator":
        counts = [total, *[0] * (len(hosts) - 1)]  # beside the chief, whose checkpoints it reads
    elif any(count is not None for count in wanted):
        counts = [count or 0 for count in wanted]
    else:
        counts = [total // len(hosts) + (index < total % len(hosts)) for index in range(len(hosts))]
    if sum(counts) != total:
        message = f"the hosts have {sum(counts)} {job} tasks in total, but cluster={config.cluster.name} has {total}"
        problems.append(
            Problem(KEY, "mismatch", message, f"give {job} numbers that add up to {total}, or leave {job} out")
        )
        return
    first = {host.address: USUAL_PORT for host in hosts}
    for other in JOBS[: JOBS.index(job)]:
        for address in config.cluster.addresses.get(other, []):
            first[addresses.host_of(address)] += 1
    listed = [
        addresses.join(host.address, first[host.address] + n)
        for host, count in zip(hosts, counts, strict=True)
        for n in range(count)
    ]
    if listed:
        config.cluster.addresses[job] = listed


def _give_gpus(config: RunConfig, hosts: Sequence[Host]) -> None:
    on = {host.address: host for host in hosts}
    workers_on: Counter[str] = Counter()
    for index, address in enumerate(config.cluster.addresses.get("worker", [])):
        host = on[addresses.host_of(address)]
        if host.gpus and key_of(config.device.gpus, "worker", index) is None:
            each = max(1, config.slurm.gpus_per_worker)
            first = workers_on[host.address] * each
            config.device.gpus[f"worker:{index}"] = [(first + n) % host.gpus for n in range(min(each, host.gpus))]
            workers_on[host.address] += 1
