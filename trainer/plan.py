"""From a config to a plan: every task, device, shard and message of a run, before anything starts. Pure: no TensorFlow.

`check` finds what is wrong with a config on its own; `make_plan` needs the model's parameters too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from trainer import addresses
from trainer.config import ConfigError, DeviceConfig, Problem, RunConfig, StrategyName, check_read
from trainer.describe import Description
from trainer.placement import Shard, Slice, place

ANY_PORT = 0  # chosen when the tasks start


@dataclass(frozen=True)
class Machine:
    """What the tasks of this machine share."""

    cores: int
    gpus: int


@dataclass(frozen=True)
class Task:
    """One process of the cluster and what it may use."""

    job: str
    index: int
    address: str  # "host:port" of its TensorFlow server; port 0: chosen at start
    control: str  # "host:port" of its status page
    gpus: tuple[int, ...]  # visible ones, by their index on the host
    memory_fraction: float | None  # of each visible GPU; none: TensorFlow's default
    intra_op_threads: int
    inter_op_threads: int

    @property
    def name(self) -> str:
        return f"{self.job}:{self.index}"

    @property
    def is_chief(self) -> bool:
        return self.name == "worker:0"

    def environment(self) -> dict[str, str]:
        """Environment variables that must be set before TensorFlow touches a device."""
        return {"CUDA_VISIBLE_DEVICES": ",".join(map(str, self.gpus)) or "-1"}

    @property
    def log(self) -> str:
        """Below the run directory."""
        return f"logs/{self.job}-{self.index}.log"


@dataclass(frozen=True)
class Plan:
    """A run, frozen: what `mode=plan` shows is what the tasks do."""

    cluster: str
    strategy: str  # local or sync
    steps: int
    global_batch: int
    tasks: tuple[Task, ...]
    shards: tuple[Shard, ...]
    train_examples: int
    warnings: tuple[Problem, ...]

    @property
    def workers(self) -> tuple[Task, ...]:
        return tuple(task for task in self.tasks if task.job == "worker")

    @property
    def replicas(self) -> int:
        return len(self.workers)

    @property
    def replica_batch(self) -> int:
        return self.global_batch // self.replicas

    @property
    def nbytes(self) -> int:
        """Bytes of parameters, without padding."""
        return sum(4 * piece.size for shard in self.shards for piece in (*shard.trainable, *shard.state))

    def task(self, job: str, index: int) -> Task:
        return next(task for task in self.tasks if (task.job, task.index) == (job, index))

    def jobs(self) -> dict[str, list[str]]:
        """Addresses by job, in the form `tf.train.ClusterSpec` takes."""
        jobs: dict[str, list[str]] = {}
        for task in self.tasks:
            jobs.setdefault(task.job, []).append(task.address)
        return jobs

    def link_nbytes(self) -> dict[str, int]:
        """Bytes that cross each link `worker -> host` per step, pulls and pushes together."""
        return {
            f"{worker.name} - {shard.host}": 2 * shard.nbytes
            for worker in self.workers
            for shard in self.shards
            if worker.name != shard.host
        }

    def in_words(self) -> str:
        """What was chosen, and what it means."""
        each = f"global batch {self.global_batch}"
        if self.strategy == "local":
            return f"local, one process, {each}"
        where = f"shards on {len(self.shards)} ps" if self.shards[0].host.startswith("ps") else "shards on the workers"
        if self.replicas == 1:
            return f"sync, 1 replica, {each}, {where}"
        return f"sync, {self.replicas} replicas, {each}, {where}, every update waits for all {self.replicas}"

    def to_json(self) -> dict[str, Any]:
        derived = {
            "replicas": self.replicas,
            "replica_batch": self.replica_batch,
            "bytes_per_step": sum(self.link_nbytes().values()),
            "bytes_per_link": self.link_nbytes(),
        }
        tasks = [asdict(task) | {"name": task.name, "log": task.log} for task in self.tasks]
        shards = [_shard_to_json(shard) for shard in self.shards]
        return asdict(self) | derived | {"tasks": tasks, "shards": shards}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Plan:
        fields = {name: value[name] for name in ("cluster", "strategy", "steps", "global_batch", "train_examples")}
        tasks = [{k: v for k, v in task.items() if k not in ("name", "log")} for task in value["tasks"]]
        return cls(
            **fields,
            tasks=tuple(Task(**task | {"gpus": tuple(task["gpus"])}) for task in tasks),
            shards=tuple(_shard_from_json(shard) for shard in value["shards"]),
            warnings=tuple(Problem(**warning) for warning in value["warnings"]),
        )


def check(config: RunConfig, machine: Machine) -> list[Problem]:
    """Everything wrong with a config that can be told without building the model."""
    return [
        *_check_strategy(config),
        *_check_batch(config),
        *check_read(config.optimizer, "optimizer."),
        *check_read(config.optimizer.schedule, "optimizer.schedule."),
        *addresses.check(config),
        *_check_devices(config, machine),
    ]


def make_plan(config: RunConfig, description: Description, machine: Machine) -> Plan:
    """Decides what runs where.

    Args:
        config: without problems, as `check` finds them.

    Raises:
        ConfigError: if the config does not fit the model or the data.
    """
    strategy = strategy_of(config)
    tasks = _make_tasks(config, machine, strategy)
    job = "ps" if config.cluster.ps else "worker"
    hosts = [task.name for task in tasks if task.job == job]
    problems = list(_check_examples(config, description))
    try:
        shards = place(description.parameters, hosts, pins=config.placement.pins, strategy=config.placement.name.value)
    except ValueError as error:
        problems.append(Problem("placement.pins", str(error), "e.g. 'placement.pins={dense/*:0}'"))
    if problems:
        raise ConfigError(problems)
    return Plan(
        cluster=config.cluster.name,
        strategy=strategy,
        steps=config.train.steps,
        global_batch=config.train.batch_size,
        tasks=tasks,
        shards=shards,
        train_examples=description.train_examples,
        warnings=tuple(_warnings(shards, tasks, machine)),
    )


def strategy_of(config: RunConfig) -> str:
    """local for one process, sync otherwise, unless the config says."""
    if config.strategy.name is not StrategyName.auto:
        return config.strategy.name.value
    return "local" if config.cluster.name == "local" else "sync"


def _make_tasks(config: RunConfig, machine: Machine, strategy: str) -> tuple[Task, ...]:
    cluster, device = config.cluster, config.device
    here = 1 if config.job is not None else cluster.worker  # workers that share this machine's cores
    worker_threads = device.intra_op_threads or max(1, machine.cores // here)
    tasks = []
    for job in ("ps", "worker"):
        for index in range(getattr(cluster, job)):
            listed = cluster.addresses.get(job)
            host, port = addresses.split(listed[index]) if listed else ("127.0.0.1", ANY_PORT)
            host = f"[{host}]" if ":" in host else host  # IPv6
            control = port + addresses.CONTROL_PORT_OFFSET if listed else ANY_PORT
            tasks.append(
                Task(
                    job=job,
                    index=index,
                    address="" if strategy == "local" else f"{host}:{port}",
                    control=f"{host}:{control}",
                    gpus=tuple(_of_task(device.gpus, job, index) or ()),
                    memory_fraction=_of_task(device.memory_fraction, job, index),
                    intra_op_threads=1 if job == "ps" else worker_threads,
                    inter_op_threads=device.inter_op_threads,
                )
            )
    return tuple(tasks)


def _of_task(setting: Mapping[str, Any], job: str, index: int) -> Any:
    """What a mapping says of a task: its own entry before its job's."""
    return setting.get(f"{job}:{index}", setting.get(job))


def _check_strategy(config: RunConfig) -> Iterator[Problem]:
    cluster, strategy = config.cluster, config.strategy
    replicas = cluster.worker
    tasks = cluster.ps + cluster.worker
    if strategy.name is StrategyName.local and tasks > 1:
        yield Problem(
            "strategy", f"local trains in one process, cluster={cluster.name} has {tasks} tasks", "leave strategy out"
        )
    if strategy.name is StrategyName.sync and cluster.name == "local":
        yield Problem(
            "strategy",
            "sync needs tasks that hold the shards, cluster=local has neither ps nor other workers",
            "type cluster=1ps2w or cluster=2w, or leave strategy out",
        )
    if cluster.evaluator:
        size = cluster.name.removesuffix(f"{cluster.evaluator}e")
        yield Problem(
            "cluster", "there are no evaluator tasks in this version; the chief evaluates", f"type cluster={size}"
        )
    if strategy.quorum is not None and not 1 <= strategy.quorum <= replicas:
        yield Problem(
            "strategy.quorum", f"{strategy.quorum} of {replicas} replicas; pick 1..{replicas}", "leave it out for all"
        )
    elif strategy.quorum is not None and strategy.quorum < replicas:
        yield Problem(
            "strategy.quorum",
            f"{strategy.quorum} is fewer than the {replicas} replicas, and sync waits for all of them",
            f"type strategy.quorum={replicas}, or leave it out",
        )


def _check_batch(config: RunConfig) -> Iterator[Problem]:
    batch, replicas = config.train.batch_size, config.cluster.worker
    if batch > 0 and replicas > 0 and batch % replicas:
        lower, upper = batch // replicas * replicas, -(-batch // replicas) * replicas
        sizes = f"{lower} or {upper}" if lower else f"{upper}"
        yield Problem(
            "train.batch_size",
            f"{batch} examples cannot be shared out over {replicas} replicas; the nearest sizes are {sizes}",
            f"type train.batch_size={upper}",
        )


def _check_devices(config: RunConfig, machine: Machine) -> Iterator[Problem]:
    device, cluster = config.device, config.cluster
    names = [(job, index) for job in ("ps", "worker") for index in range(getattr(cluster, job))]
    known = {job for job, _ in names} | {f"{job}:{index}" for job, index in names}
    for setting in ("gpus", "memory_fraction"):
        for key in getattr(device, setting):
            if key not in known:
                some = ", ".join(sorted(known)[:6])
                yield Problem(
                    f"device.{setting}.{key}",
                    f"{key!r} is no job or task of the cluster; there are {some}",
                    "e.g. worker:0",
                )
    for key, fraction in device.memory_fraction.items():
        if not 0 < fraction <= 1:
            yield Problem(
                f"device.memory_fraction.{key}",
                f"{fraction:g} is not in (0, 1]",
                "two tasks that share one GPU want 0.45 each",
            )
        elif not any(_of_task(device.gpus, *name) for name in names if key in (name[0], f"{name[0]}:{name[1]}")):
            yield Problem(f"device.memory_fraction.{key}", "it sees no GPU", f"add 'device.gpus={{{key}:[0]}}'")
    mine = [(job, index) for job, index in names if config.job is None or (job, index) == (config.job, config.task)]
    yield from _check_gpus(device, mine, machine)


def _check_gpus(device: DeviceConfig, names: Sequence[tuple[str, int]], machine: Machine) -> Iterator[Problem]:
    shares: dict[int, list[float]] = {}
    for job, index in names:
        for gpu in _of_task(device.gpus, job, index) or ():
            shares.setdefault(gpu, []).append(_of_task(device.memory_fraction, job, index) or 0.0)
    for gpu, fractions in sorted(shares.items()):
        if not 0 <= gpu < machine.gpus:
            there = f"GPUs 0..{machine.gpus - 1}" if machine.gpus else "no GPU"
            yield Problem(
                "device.gpus", f"GPU {gpu} is not there; this machine has {there}", "type device=cpu for none"
            )
        if sum(fractions) > 1 + 1e-9:
            terms = " + ".join(f"{count} x {share:g}" for share, count in Counter(fractions).items())
            yield Problem(
                "device.memory_fraction",
                f"the tasks on GPU {gpu} take {terms} = {sum(fractions):g} > 1 of its memory",
                f"give each at most {math.floor(100 / len(fractions)) / 100:g}",
            )


def _check_examples(config: RunConfig, description: Description) -> Iterator[Problem]:
    examples, workers = description.train_examples, config.cluster.worker
    if examples < config.train.batch_size:
        yield Problem(
            "train.batch_size",
            f"one global batch takes {config.train.batch_size} examples, the data has {examples}",
            f"type train.batch_size={max(1, examples // workers * workers)}",
        )


def _warnings(shards: Sequence[Shard], tasks: Sequence[Task], machine: Machine) -> Iterator[Problem]:
    for shard in shards:
        if not shard.trainable:
            yield Problem("cluster", f"{shard.host} holds no parameter", f"{len(shards) - 1} shards would do")
    sizes = [shard.nbytes for shard in shards]
    if max(sizes) > 2 * sum(sizes) / len(sizes):
        heaviest = max(shards, key=lambda shard: shard.nbytes)
        share = 100 * heaviest.nbytes / sum(sizes)
        yield Problem(
            "placement",
            f"{heaviest.host} holds {share:.0f} % of the bytes; one parameter stays on one shard",
            f"cluster={len(tasks)}w or fewer ps move no more",
        )
    workers = sum(task.job == "worker" for task in tasks)
    if workers > machine.cores:
        yield Problem("cluster", f"{workers} workers share {machine.cores} cores", "fewer workers may be faster here")


def _shard_to_json(shard: Shard) -> dict[str, Any]:
    pieces = {"trainable": [p._asdict() for p in shard.trainable], "state": [p._asdict() for p in shard.state]}
    return {"index": shard.index, "host": shard.host, "nbytes": shard.nbytes} | pieces


def _shard_from_json(value: Mapping[str, Any]) -> Shard:
    def slices(pieces: Sequence[Mapping[str, Any]]) -> tuple[Slice, ...]:
        return tuple(Slice(**{**piece, "shape": tuple(piece["shape"])}) for piece in pieces)

    return Shard(value["index"], value["host"], slices(value["trainable"]), slices(value["state"]))
