"""Distributes a cluster's tasks over the machines of `cluster.hosts`. Pure."""

import difflib
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from trainer.config.schema import ClusterConfig, DeviceConfig, Launch, RunConfig
from trainer.config.typed import Mode
from trainer.faults.problems import Problem
from trainer.plan import addresses
from trainer.plan.addresses import JOBS, USUAL_PORT
from trainer.plan.devices import ON_HOSTS, is_on_hosts, key_of, tasks_of

KEY = "cluster.hosts"
EXAMPLE = "cluster.hosts=[10.0.0.1,10.0.0.2]"


@dataclass(frozen=True)
class Host:
    """One machine of `cluster.hosts`."""

    address: str  # name or IP address by which the others reach it
    gpus: int = 0  # its workers take one each, in turn
    ps: int | None = None  # parameter servers on it; none: an equal share
    worker: int | None = None


def resolve_hosts(config: RunConfig, mode: Mode) -> tuple[RunConfig, list[Problem]]:
    """Returns the config with an address for every task on its host, and the problems of the hosts.

    Every worker gets a GPU of its host unless `device.gpus` says otherwise.
    """
    if not config.cluster.hosts:
        return config, [*_check_launch(config, mode)]
    problems = [*_check_use(config, mode), *_check_ssh(config.launch.ssh)]
    hosts = [_read(index, given, problems) for index, given in enumerate(config.cluster.hosts)]
    known = [host for host in hosts if host]
    listed = [host.address for host in known]
    for address in dict.fromkeys(address for address in listed if listed.count(address) > 1):
        problems.append(Problem(KEY, "duplicate", f"{address} is listed twice", "give one entry for each machine"))
    if problems:
        return config, problems
    by_job = {job: _share_out(config.cluster, job, known, problems) for job in JOBS}
    if problems:
        return config, problems
    tasks_at = _with_ports(by_job)
    gpus = _gpus_of_workers(config.device, tasks_at["worker"], known, config.slurm.gpus_per_worker)
    cluster = replace(config.cluster, addresses={job: listed for job, listed in tasks_at.items() if listed})
    return replace(config, cluster=cluster, device=replace(config.device, gpus=gpus)), []


def each_alone(cluster: ClusterConfig) -> dict[str, list[str]]:
    """Returns the addresses of tasks that each have their own host, as pods do."""
    named: dict[str, list[str]] = {}
    for number, (job, index) in enumerate(tasks_of(cluster)):
        named.setdefault(job, []).append(addresses.join(f"{job}-{index}", addresses.port_of(number)))
    return named


def host_by_task(cluster: ClusterConfig) -> dict[str, str]:
    """Returns the host of every task, if there are several hosts."""
    if not cluster.hosts:
        return {}
    of = cluster.addresses
    return {f"{job}:{index}": addresses.host_of(of[job][index]) for job, index in tasks_of(cluster)}


def _check_launch(config: RunConfig, mode: Mode) -> Iterator[Problem]:
    name = config.launch.name
    if name in ON_HOSTS and mode not in (Mode.train, Mode.plan, Mode.render):
        message = f"trainer {mode.value} runs processes on this machine"
        yield Problem("launch", "not-supported", message, f"leave launch={name.value} out")
    if config.launch.name is Launch.ssh and config.job is None and mode is Mode.train:
        yield Problem("launch", "not-set", "ssh starts the tasks on cluster.hosts, which is empty", f"e.g. {EXAMPLE}")
    if config.launch.name is Launch.slurm and not _are_words(config.slurm.args):
        message = f"{config.slurm.args!r} has a quotation that does not end"
        yield Problem("slurm.args", "malformed", message, "e.g. slurm.args='--partition=gpu --account=mine'")


def _check_ssh(command: str) -> Iterator[Problem]:
    if not command.strip() or not _are_words(command):
        yield Problem("launch.ssh", "malformed", f"{command!r} is no command", "e.g. launch.ssh='ssh -l training'")


def _are_words(text: str) -> bool:
    """Whether a shell could split a text, which needs balanced quotes."""
    try:
        shlex.split(text)
    except ValueError:
        return False
    return True


def _check_use(config: RunConfig, mode: Mode) -> Iterator[Problem]:
    starts_them = mode is Mode.train and is_on_hosts(config.launch.name, config.cluster)
    if mode not in (Mode.render, Mode.plan) and not starts_them:
        message = f"trainer {mode.value} with launch={config.launch.name.value} runs on this machine alone"
        remedy = "type launch=ssh, or launch=docker; or trainer render, which writes a file and a command for each host"
        yield Problem(KEY, "conflict", message, remedy)
    if config.cluster.addresses:
        yield Problem(KEY, "conflict", "cluster.addresses already says where every task is", "leave out one of the two")
    if config.cluster.is_local:
        yield Problem(KEY, "conflict", "cluster=local is one process on one machine", "e.g. cluster=2ps4w")


def _read(index: int, given: Any, problems: list[Problem]) -> Host | None:
    """Reads one entry: an address, or a mapping of Host's fields."""
    key = f"{KEY}[{index}]"
    entry = {"address": given} if isinstance(given, str) else given
    if not isinstance(entry, Mapping) or "address" not in entry:
        message = f"{given!r} is neither an address nor a mapping with one"
        remedy = f"e.g. {EXAMPLE} or [{{address:10.0.0.1,gpus:4,ps:1,worker:4}}]"
        problems.append(Problem(key, "malformed", message, remedy))
        return None
    names = [field.name for field in fields(Host)]
    before = len(problems)
    for name, value in entry.items():
        if name not in names:
            near = (*difflib.get_close_matches(str(name), names, n=1), "worker")[0]
            message = f"there is no {name}; available: {', '.join(names)}"
            problems.append(Problem(key, "unknown-key", message, f"e.g. {near}"))
        elif name == "address":
            problems += _check_address(key, value)
        elif value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 0):
            message = f"{name}={value!r} is not a whole number of at least 0"
            problems.append(Problem(key, "out-of-range", message, f"e.g. {name}:1"))
    return Host(**entry) if len(problems) == before else None


def _check_address(key: str, address: Any) -> Iterator[Problem]:
    """Checks that an address has no port: every task of a host gets its own."""
    if not isinstance(address, str) or not address.strip() or "/" in address or address.count(":") == 1:
        host = str(address).rpartition("://")[2].partition(":")[0].partition("/")[0] or "10.0.0.1"
        message = f"{address!r} is not a host name or IP address"
        yield Problem(key, "malformed", message, f"e.g. {host}; ports are assigned")


def _share_out(cluster: ClusterConfig, job: str, hosts: Sequence[Host], problems: list[Problem]) -> list[str]:
    """Distributes the tasks of a job; returns the host of each."""
    total = getattr(cluster, job)
    wanted = [getattr(host, job, None) for host in hosts]
    if job == "evaluator":
        counts = [total, *[0] * (len(hosts) - 1)]  # beside the chief, whose checkpoints it reads
    elif any(count is not None for count in wanted):
        counts = [count or 0 for count in wanted]
    else:
        counts = [total // len(hosts) + (index < total % len(hosts)) for index in range(len(hosts))]
    if sum(counts) != total:
        message = f"the hosts have {sum(counts)} {job} tasks in total, but cluster={cluster.name} has {total}"
        remedy = f"give {job} numbers that add up to {total}, or leave {job} out"
        problems.append(Problem(KEY, "mismatch", message, remedy))
    return [host.address for host, count in zip(hosts, counts, strict=True) for _ in range(count)]


def _with_ports(by_job: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """Returns an address for each task; on a host the ports of a job come after those of the jobs before it."""
    taken: Counter[str] = Counter()
    listed: dict[str, list[str]] = {}
    for job, hosts in by_job.items():
        listed[job] = []
        for host in hosts:
            listed[job].append(addresses.join(host, USUAL_PORT + taken[host]))
            taken[host] += 1
    return listed


def _gpus_of_workers(
    device: DeviceConfig, listed: Sequence[str], hosts: Sequence[Host], per_worker: int
) -> dict[str, list[int]]:
    """Returns `device.gpus` with a share of its host's GPUs for each worker that has none yet."""
    on = {host.address: host for host in hosts}
    gpus, workers_on, each = dict(device.gpus), Counter[str](), max(1, per_worker)
    for index, address in enumerate(listed):
        host = on[addresses.host_of(address)]
        if host.gpus and key_of(device.gpus, "worker", index) is None:
            first = workers_on[host.address] * each
            gpus[f"worker:{index}"] = [(first + n) % host.gpus for n in range(min(each, host.gpus))]
            workers_on[host.address] += 1
    return gpus
