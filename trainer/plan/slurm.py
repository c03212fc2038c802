"""Reads Slurm's environment variables: the nodes of an allocation, and the role of this process of a step. Pure."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from trainer.config.schema import ClusterConfig
from trainer.faults.problems import ConfigError, Problem
from trainer.plan import addresses, environment
from trainer.plan.addresses import CONTROL_PORT_OFFSET
from trainer.plan.devices import Role, tasks_of

KEY = "SLURM_STEP_ID"
NODES, NODES_OF_STEP, TASKS_PER_NODE = "SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"
# Ports of a step, whose processes cannot agree on free ones: 20 on each node, and as many 1,000 above for status pages.
FIRST_PORT, PORTS_OF_STEP, STEPS_IN_ROW, ROWS = 15000, 20, 50, 8
RANKED = ("worker", "ps", "evaluator")  # ranks of a step in this order: the first group of a step has the GPUs

NODES_AT_MOST = 65536  # in a list, as in Slurm
TEXT, RANGES = r"[^\s,\[\]]+", r"\[[^\[\]]*\]"
ITEM = re.compile(rf"(?:{TEXT}|{RANGES})+")
RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")


@dataclass(frozen=True)
class Place:
    """The node of a rank of a step."""

    node: str
    number: int  # among the ranks of that node


def is_step(environ: Mapping[str, str]) -> bool:
    """Whether this process is one of several of a step, each of which may be a task."""
    return KEY in environ and int(environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1


def nodes(environ: Mapping[str, str]) -> list[str]:
    """Returns the nodes of the allocation that this process runs in; empty outside one."""
    return expand(environ.get(NODES, ""), NODES) if "SLURM_JOB_ID" in environ else []


def hosts(environ: Mapping[str, str]) -> list[dict[str, Any]]:
    """Returns the nodes of the allocation, as entries of `cluster.hosts`; empty outside one."""
    gpus = int(environ.get("SLURM_GPUS_ON_NODE", "0"))
    return [{"address": node, "gpus": gpus} for node in nodes(environ)]


def cpus_of_nodes(environ: Mapping[str, str]) -> list[int]:
    """Returns the CPUs of the allocation on each of its nodes."""
    return expand_counts(environ.get("SLURM_JOB_CPUS_PER_NODE", ""))


def expand_counts(text: str) -> list[int]:
    """Expands counts: "2(x3),1" -> [2, 2, 2, 1]."""
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(count) for count, times in parts for _ in range(int(times or 1))]


def places(environ: Mapping[str, str]) -> list[Place]:
    """Returns the node of every rank of a step; None if the environment does not tell how ranks are distributed."""
    listed, counted = expand(environ[NODES_OF_STEP], NODES_OF_STEP), expand_counts(environ[TASKS_PER_NODE])
    if len(listed) != len(counted):
        message = f"{environ[TASKS_PER_NODE]!r} is not a number of tasks for each of {environ[NODES_OF_STEP]}"
        raise ConfigError([Problem(TASKS_PER_NODE, "malformed", message, 'e.g. "2(x3),1" for four nodes')])
    counts = [*zip(listed, counted, strict=True)]
    distribution = environ.get("SLURM_DISTRIBUTION", "block").partition(":")[0].partition(",")[0]
    if distribution == "cyclic":
        rounds = range(max((count for _, count in counts), default=0))
        return [Place(node, number) for number in rounds for node, count in counts if number < count]
    return [Place(node, number) for node, count in counts for number in range(count)] if distribution == "block" else []


def cpus_of_task(environ: Mapping[str, str]) -> int | None:
    """Returns the CPUs of each task of a step (srun -c); None if not requested, or outside a step."""
    text = environ.get("SLURM_CPUS_PER_TASK", "") if is_step(environ) else ""
    return int(text) if text.isdigit() else None


def role_of(cluster: ClusterConfig, environ: Mapping[str, str]) -> Role:
    """Returns this process's role and the addresses of the others, from the variables of a Slurm step.

    Workers are the first ranks, so that rank 0 is the chief and the first group of a heterogeneous step, which has the
    GPUs, has the workers; ps are the last.

    Raises:
        ConfigError: if the step is not one that its processes can describe, or contradicts the cluster.
    """
    if problems := [*_check_step(cluster, environ)]:
        raise ConfigError(problems)
    ranks = sorted(tasks_of(cluster), key=lambda task: RANKED.index(task[0]))
    port = _first_port(int(environ["SLURM_JOB_ID"]), int(environ[KEY]))
    listed: dict[str, list[str]] = {}
    for (job, _), place in zip(ranks, places(environ), strict=True):
        listed.setdefault(job, []).append(addresses.join(place.node, port + place.number))
    rank = int(environ["SLURM_PROCID"])
    job, task = ranks[rank]
    gpus = _gpus_of_worker(rank, places(environ)[: cluster.worker], environ) if job == "worker" else []
    return Role(replace(cluster, addresses=listed), job, task, gpus)


def _gpus_of_worker(rank: int, workers: Sequence[Place], environ: Mapping[str, str]) -> list[int]:
    """Returns the GPUs for this process: its share, if all workers of its node may use the same GPUs.

    With --gpus-per-task or --gpu-bind each worker has its own GPUs, and takes them all.
    """
    count = len(environment.allotted_gpus(environ))
    beside = sum(place.node == workers[rank].node for place in workers)
    has_own = "SLURM_GPUS_PER_TASK" in environ or "SLURM_GPU_BIND" in environ
    if has_own or "gpu" in environ.get("SLURM_TRES_PER_TASK", "") or beside < 2:
        return list(range(count))
    number = sum(place.node == workers[rank].node for place in workers[:rank])
    each = max(1, count // beside)
    return [(number * each + n) % count for n in range(each)] if count else []


def _first_port(job: int, step: int) -> int:
    """Returns the first port of a step; every second thousand is for status pages."""
    row, place = divmod((job + 7 * step) % (STEPS_IN_ROW * ROWS), STEPS_IN_ROW)
    return FIRST_PORT + 2 * CONTROL_PORT_OFFSET * row + PORTS_OF_STEP * place


def _check_step(cluster: ClusterConfig, environ: Mapping[str, str]) -> Iterator[Problem]:
    count, wanted = int(environ["SLURM_STEP_NUM_TASKS"]), len(tasks_of(cluster))
    if count != wanted:
        other = f"cluster=1ps{count - 1}w, or another with {count} tasks"
        message = f"the step has {count} tasks, but cluster={cluster.name} has {wanted}"
        yield Problem(KEY, "mismatch", message, f"type srun -n{wanted}, or {other}")
    elif cluster.addresses or cluster.hosts:
        message = "a step says where its tasks listen"
        yield Problem(KEY, "conflict", message, "leave cluster.addresses and cluster.hosts out")
    elif max((place.number for place in places(environ)), default=0) >= PORTS_OF_STEP:
        message = f"more than {PORTS_OF_STEP} tasks on a node"
        yield Problem(KEY, "over-capacity", message, "use more nodes, or launch=slurm")
    elif not places(environ):
        distribution = environ.get("SLURM_DISTRIBUTION")
        message = f"the step is distributed by {distribution}, so its tasks do not know where the others are"
        yield Problem(KEY, "not-supported", message, "type srun --distribution=block")


def expand(names: str, key: str) -> list[str]:
    """Lists the nodes one by one: "node[1-2,07],gpu1" -> ["node1", "node2", "node07", "gpu1"].

    Several brackets in a name give every combination, the last varying fastest. Numbers are padded to the width of
    the first in their range.

    Args:
        key: the variable that holds the list.

    Raises:
        ConfigError: if it is malformed.
    """
    nodes: list[str] = []
    end = 0
    while end < len(names):
        item = ITEM.match(names, end)
        if item is None or names[item.end() : item.end() + 1] not in ("", ","):
            raise _malformed(names, key)
        parts = re.findall(f"{TEXT}|{RANGES}", item[0])
        options = [_numbers(part, names, key) if part.startswith("[") else [part] for part in parts]
        nodes += ["".join(chosen) for chosen in itertools.product(*options)]
        end = item.end() + 1
    if names.endswith(",") or len(nodes) > NODES_AT_MOST:
        raise _malformed(names, key)
    return nodes


def _numbers(ranges: str, names: str, key: str) -> list[str]:
    """Expands a range: "[08-10,3]" -> ["08", "09", "10", "3"]."""
    numbers: list[str] = []
    for text in ranges[1:-1].split(","):
        if not (bounds := RANGE.fullmatch(text)):
            raise _malformed(names, key)
        low, high = int(bounds[1]), int(bounds[2] or bounds[1])
        if not low <= high < low + NODES_AT_MOST:
            raise _malformed(names, key)
        numbers += [f"{number:0{len(bounds[1])}d}" for number in range(low, high + 1)]
    return numbers


def _malformed(names: str, key: str) -> ConfigError:
    message = f"{names!r} is not a list of nodes"
    return ConfigError([Problem(key, "malformed", message, "e.g. node[1-3,07],rack[0-1]node[1-2],login")])
