"""From a config to a plan: every task, device, shard and message of a run, before anything starts. Pure: no TensorFlow.

`check` finds what is wrong with a config on its own; `make_plan` needs the model's parameters too.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

from trainer.config.cluster_size import SIZE, ClusterSize, parse_size
from trainer.config.schema import (
    ConfigError,
    Launch,
    Mode,
    NotFinitePolicy,
    Problem,
    RunConfig,
    StrategyName,
    Wire,
    check_read,
)
from trainer.plan import addresses, shared_memory
from trainer.plan.checks import capacity, gpu_memory, versions
from trainer.plan.checks import devices as checks
from trainer.plan.description import Description
from trainer.plan.devices import JOBS, Machine, for_tasks
from trainer.plan.placement import Shard, Slice, best_match, message_nbytes, pin_faults, place

ANY_PORT = 0  # chosen when the tasks start
SHARDED = ("sync", "async", "backup")  # strategies with shard hosts
# XLA's newer code for CPUs takes longer to make, and where a task has several threads an update that is shared out over
# them takes many times as long as on one.
OLDER_CODE = "--xla_cpu_use_fusion_emitters=false"


@dataclass(frozen=True)
class Task:
    """One process of the cluster and what it may use."""

    job: str
    index: int
    address: str  # "host:port" of its TensorFlow server; port 0: chosen at start
    control: str  # "host:port" of its status page
    gpus: tuple[int, ...]  # visible ones, by their index on the host
    memory_fraction: float | None  # of each visible GPU; with no memory_mib and no growth either: nearly all of it
    intra_op_threads: int
    inter_op_threads: int
    memory_mib: int | None = None  # MiB of each visible GPU, instead of a share
    growth: bool = False  # takes GPU memory as it is needed
    soft_placement: bool = True
    cpus: int = 1  # logical CPU devices
    replicas: tuple[str, ...] = ()  # devices of this task's replicas; ("/gpu:0", "/gpu:1"): its first two GPUs

    @property
    def name(self) -> str:
        return f"{self.job}:{self.index}"

    @property
    def is_chief(self) -> bool:
        return self.name == "worker:0"

    def environment(self, given: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
        """Environment variables that must be set before TensorFlow touches a device.

        Args:
            given: the environment that they come into; XLA's flags there are kept, and win.
        """
        return {
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, self.gpus)) or "-1",
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # as nvidia-smi counts; CUDA on its own begins with the fastest
            "XLA_FLAGS": f"{OLDER_CODE} {given.get('XLA_FLAGS', '')}".strip(),
        }

    @property
    def log(self) -> str:
        """Below the run directory."""
        return f"logs/{self.job}-{self.index}.log"


@dataclass(frozen=True)
class Plan:
    """A run, frozen: what `mode=plan` shows is what the tasks do."""

    cluster: str
    strategy: str  # a StrategyName, never auto
    steps: int
    global_batch: int
    tasks: tuple[Task, ...]
    shards: tuple[Shard, ...]
    train_examples: int
    warnings: tuple[Problem, ...]
    quorum: int | None = None  # replicas an update waits for, of a backup strategy
    parameters: str = "/cpu:0"  # device of a shard on its host
    layers: Mapping[str, str] = field(default_factory=dict)  # device inside a replica by layer path
    wire: str = "float32"  # how vectors travel between shard hosts and workers
    memory: str | None = None  # path of a file where they lie, of a wire of `memory`; known when tasks start

    @property
    def workers(self) -> tuple[Task, ...]:
        return tuple(task for task in self.tasks if task.job == "worker")

    @property
    def replicas(self) -> int:
        """Copies of the model."""
        return sum(len(task.replicas) for task in self.workers)

    @property
    def trainers(self) -> tuple[Task, ...]:
        """The tasks that train: all but the evaluators."""
        return tuple(task for task in self.tasks if task.job != "evaluator")

    @property
    def intake(self) -> str:
        """How gradients become updates: all replicas' as one, a quorum's, or each on its own."""
        if self.strategy == "backup" and self.quorum != self.replicas:
            return "quorum"
        return "each" if self.strategy == "async" else "all"

    @property
    def has_shard_hosts(self) -> bool:
        """Whether tasks hold shards for others."""
        return self.strategy in SHARDED

    @property
    def replica_batch(self) -> int:
        return self.global_batch // self.replicas

    @property
    def update_batch(self) -> int:
        """Examples that one update averages."""
        if self.intake == "each":
            return self.global_batch // len(self.workers)
        return self.replica_batch * (self.quorum or self.replicas)

    @property
    def nbytes(self) -> int:
        """Bytes of parameters, without padding."""
        return sum(4 * piece.size for shard in self.shards for piece in (*shard.trainable, *shard.state))

    @property
    def hosts(self) -> tuple[str, ...]:
        """The tasks that hold shards for others."""
        return tuple(dict.fromkeys(shard.host for shard in self.shards)) if self.has_shard_hosts else ()

    def task(self, job: str, index: int) -> Task:
        return next(task for task in self.tasks if (task.job, task.index) == (job, index))

    def jobs(self) -> dict[str, list[str]]:
        """Addresses by job, in the form `tf.train.ClusterSpec` takes."""
        jobs: dict[str, list[str]] = {}
        for task in self.trainers:
            jobs.setdefault(task.job, []).append(task.address)
        return jobs

    def link_nbytes(self) -> dict[str, int]:
        """Bytes that cross each link per step: `worker - host`, pulls and pushes together; or round the ring."""
        if self.strategy == "all_reduce":
            count, nbytes = len(self.workers), sum(shard.nbytes for shard in self.shards)
            share = 2 * (count - 1) * nbytes // count
            return {f"worker:{i} - worker:{(i + 1) % count}": share for i in range(count) if count > 1}
        held = {
            host: sum(message_nbytes(shard, self.wire) for shard in self.shards if shard.host == host)
            for host in self.hosts
        }
        return {
            f"{worker.name} - {host}": 2 * nbytes
            for worker in self.workers
            for host, nbytes in held.items()
            if worker.name != host
        }

    def in_words(self) -> str:
        """What was chosen, and what it means."""
        replicas = f"{self.replicas} replica{'' if self.replicas == 1 else 's'}"
        each, waits = f"global batch {self.global_batch}", f"every update waits for all {self.replicas}"
        if self.strategy == "local":
            return ", ".join(["local, one process", *([replicas] if self.replicas > 1 else []), each])
        if self.strategy == "all_reduce":
            return f"all_reduce, {replicas}, {each}, every worker holds all parameters, {waits}"
        where = f"shards on {len(self.hosts)} ps" if self.shards[0].host.startswith("ps") else "shards on the workers"
        if self.strategy == "async":
            batch = f"batch {self.global_batch // len(self.workers)} each"
            return f"async, {replicas}, {batch}, {where}, every gradient is an update, no worker waits for another"
        if self.strategy == "backup":
            waits = f"every update waits for {self.quorum} of {self.replicas}, later gradients are dropped"
        return ", ".join([self.strategy, replicas, each, where, *([waits] if self.replicas > 1 else [])])

    def reached_by(self, links: Mapping[str, Mapping[str, str]]) -> Plan:
        """The plan with other addresses for some tasks: those by which one task reaches them."""

        def reached(task: Task) -> Task:
            link = links.get(task.name)
            return replace(task, address=link["address"], control=link["control"]) if link else task

        return replace(self, tasks=tuple(reached(task) for task in self.tasks))

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
        names = (
            "cluster",
            "strategy",
            "steps",
            "global_batch",
            "train_examples",
            "quorum",
            "parameters",
            "layers",
            "wire",
            "memory",
        )
        fields = {name: value[name] for name in names}
        tasks = [{k: v for k, v in task.items() if k not in ("name", "log")} for task in value["tasks"]]
        return cls(
            **fields,
            tasks=tuple(Task(**t | {"gpus": tuple(t["gpus"]), "replicas": tuple(t["replicas"])}) for t in tasks),
            shards=tuple(_shard_from_json(shard) for shard in value["shards"]),
            warnings=tuple(Problem(**warning) for warning in value["warnings"]),
        )


def check(config: RunConfig, machine: Machine) -> list[Problem]:
    """Everything wrong with a config that can be told without building the model."""
    return [
        *versions.check(machine.libraries),
        *capacity.check(config, machine),
        *_check_size(config),
        *_check_strategy(config),
        *_check_buckets(config),
        *_check_batch(config),
        *_check_rollback(config),
        *check_read(config.optimizer, "optimizer."),
        *check_read(config.optimizer.schedule, "optimizer.schedule."),
        *addresses.check(config),
        *checks.check(config, machine),
        *checks.check_restarts(config),
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
    hosts = _hosts(config, strategy)
    problems = [
        *_check_examples(config, description),
        *_check_layers(config, description),
        *_check_pins(config, description, len(hosts)),
    ]
    if problems:
        raise ConfigError(problems)
    shards = place(
        description.parameters,
        hosts,
        pins=config.placement.pins,
        strategy=config.placement.name.value,
        max_part_mib=config.placement.max_part_mib,
        buckets=config.placement.buckets,
    )
    return Plan(
        cluster=config.cluster.name,
        strategy=strategy,
        steps=config.train.steps,
        global_batch=config.train.batch_size,
        tasks=tasks,
        shards=shards,
        train_examples=description.train_examples,
        warnings=(*_warnings(shards, tasks, machine), *gpu_memory.warnings(config, machine)),
        quorum=config.strategy.quorum if strategy == "backup" else None,
        parameters=config.device.parameters,
        layers=_pin_layers(config.device.layers, description.layers),
        wire=_wire(config),
    )


def _wire(config: RunConfig) -> str:
    if config.strategy.wire is not Wire.auto:
        return str(config.strategy.wire.value)
    return Wire.memory.value if not _why_not_memory(config) else Wire.float32.value


def _why_not_memory(config: RunConfig) -> str:
    """Why vectors must travel; empty if they can stay in memory that all tasks share."""
    if (strategy := strategy_of(config)) not in SHARDED:
        return f"{strategy} has no shards"
    if config.launch is Launch.docker or config.mode is Mode.render:
        return "containers share no memory"
    if config.device.log_placement:
        return "device.log_placement follows vectors that travel"
    machines = {addresses.host_of(one) for told in config.cluster.addresses.values() for one in told}
    if config.job is not None or config.cluster.hosts or len(machines) > 1 or config.plan.link_gbps is not None:
        return "the tasks are on several machines"
    return shared_memory.why_not()


def strategy_of(config: RunConfig) -> str:
    """local for one process, sync otherwise, unless the config says."""
    if config.strategy.name is not StrategyName.auto:
        return str(config.strategy.name.value)
    return "local" if config.cluster.name == "local" else "sync"


def _hosts(config: RunConfig, strategy: str) -> list[str]:
    """The tasks that hold a shard each; under all_reduce every worker holds the only one."""
    if strategy == "all_reduce":
        return ["worker"]
    job = "ps" if config.cluster.ps else "worker"
    return [f"{job}:{index}" for index in range(getattr(config.cluster, job))]


def _pin_layers(pins: Mapping[str, str], layers: Sequence[str]) -> dict[str, str]:
    """Device by path of every layer that a pattern matches; of several, the one with the most fixed characters."""
    return {path: pins[pattern] for path in layers if (pattern := best_match(path, pins)) is not None}


def _make_tasks(config: RunConfig, machine: Machine, strategy: str) -> tuple[Task, ...]:
    cluster, devices = config.cluster, for_tasks(config, machine)
    tasks = []
    for job in JOBS:
        for index in range(getattr(cluster, job)):
            listed = cluster.addresses.get(job)
            host, port = addresses.split(listed[index]) if listed else ("127.0.0.1", ANY_PORT)
            host = f"[{host}]" if ":" in host else host  # IPv6
            control = port + addresses.CONTROL_PORT_OFFSET if listed else ANY_PORT
            has_server = strategy != "local" and job != "evaluator"
            tasks.append(
                Task(
                    job=job,
                    index=index,
                    address=f"{host}:{port}" if has_server else "",
                    control=f"{host}:{control}",
                    **devices[job, index],
                )
            )
    return tuple(tasks)


def _check_size(config: RunConfig) -> Iterator[Problem]:
    """The choice of a cluster and its single keys must agree, for the name stands in all that a run writes."""
    cluster = config.cluster
    size = ClusterSize(cluster.ps, cluster.worker, cluster.evaluator)
    is_size = SIZE.fullmatch(cluster.name) is not None
    chosen = parse_size(cluster.name) if is_size else ClusterSize(0, 1, 0) if cluster.name == "local" else size
    if chosen != size and cluster.worker > 0:
        given = " ".join(f"cluster.{job}={getattr(size, job)}" for job in JOBS if getattr(size, job))
        yield Problem("cluster", f"cluster={cluster.name} and {given} contradict each other", f"type cluster={size}")


def _check_strategy(config: RunConfig) -> Iterator[Problem]:
    cluster, strategy = config.cluster, config.strategy
    name, tasks = strategy_of(config), cluster.ps + cluster.worker
    if name == "local" and tasks > 1 and cluster.name != "local":
        yield Problem(
            "strategy", f"local trains in one process, cluster={cluster.name} has {tasks} tasks", "leave strategy out"
        )
    if name in SHARDED and cluster.name == "local":
        yield Problem(
            "strategy",
            f"{name} needs tasks that hold the shards, cluster=local has neither ps nor other workers",
            "type cluster=1ps2w or cluster=2w, or leave strategy out",
        )
    if name == "all_reduce" and cluster.name == "local":
        yield Problem("strategy", "all_reduce is between workers, cluster=local has none", "type cluster=2w")
    if name == "all_reduce" and cluster.ps:
        yield Problem(
            "strategy",
            f"all_reduce has no parameter servers, cluster={cluster.name} has {cluster.ps}",
            f"type cluster={cluster.worker}w, or leave strategy out",
        )
    if cluster.evaluator > 1:
        yield Problem(
            "cluster",
            f"one evaluator scores every checkpoint, cluster={cluster.name} has {cluster.evaluator}",
            f"type cluster={cluster.name.removesuffix(f'{cluster.evaluator}e')}1e",
        )
    yield from _check_quorum(config, name)
    yield from (p for p in check_read(strategy, "strategy.") if strategy.name is not StrategyName.auto)
    if strategy.name is StrategyName.auto and strategy.max_staleness is not None:
        yield Problem("strategy.max_staleness", f"{name} has no stale gradients; async has", "type strategy=async")
    if strategy.name is StrategyName.auto and name == "local" and strategy.wire is not Wire.auto:
        yield Problem("strategy.wire", "one process sends nothing", "leave it out, or type cluster=1ps2w")
    elif strategy.wire is Wire.memory and name in SHARDED and (reason := _why_not_memory(config)):
        yield Problem("strategy.wire", f"memory is not possible: {reason}", "leave it out")


def _check_buckets(config: RunConfig) -> Iterator[Problem]:
    """Several shards of a host move together, step by step, or not at all."""
    if config.placement.buckets == 1:
        return
    key, remedy, name = "placement.buckets", "leave it out", strategy_of(config)
    if name not in SHARDED:
        yield Problem(key, f"{name} has no tasks that hold shards for others", remedy)
    elif name != "sync":
        yield Problem(key, f"{name} takes gradients as they come, one shard a host", remedy)
    elif config.device.log_placement:
        yield Problem(key, "device.log_placement follows one shard a host", f"{remedy}, or log_placement")


def _check_quorum(config: RunConfig, strategy: str) -> Iterator[Problem]:
    quorum, here = config.strategy.quorum, max(1, len(config.device.replicas))
    replicas = config.cluster.worker * here
    if quorum is None:
        if strategy == "backup":
            remedy = f"type strategy.quorum={max(1, replicas - here)}"
            yield Problem("strategy.quorum", "backup needs the number of replicas that an update waits for", remedy)
    elif not 1 <= quorum <= replicas:
        yield Problem("strategy.quorum", f"{quorum} of {replicas} replicas; pick 1..{replicas}", "leave it out for all")
    elif strategy != "backup" and quorum < replicas:
        yield Problem(
            "strategy.quorum",
            f"{strategy} does not read it; backup does, and waits for {quorum} of the {replicas} replicas",
            f"type strategy=backup strategy.quorum={quorum}, or leave it out",
        )
    elif quorum % here:
        near = quorum // here * here or here
        yield Problem(
            "strategy.quorum",
            f"{quorum} cannot be reached: a worker sends the mean of its {here} replicas at once",
            f"type strategy.quorum={near}",
        )


def _parts(config: RunConfig) -> int:
    """How many equal parts a global batch is shared out in."""
    return config.cluster.worker * max(1, len(config.device.replicas)) * config.train.accumulate


def _check_batch(config: RunConfig) -> Iterator[Problem]:
    batch, accumulate, parts = config.train.batch_size, config.train.accumulate, _parts(config)
    replicas = parts // accumulate if accumulate > 0 else 0
    if batch > 0 and parts > 0 and batch % parts:
        lower, upper = batch // parts * parts, -(-batch // parts) * parts
        sizes = f"{lower} or {upper}" if lower else f"{upper}"
        yield Problem(
            "train.batch_size",
            f"{batch} examples cannot be shared out over {replicas} replicas"
            + (f" in {accumulate} parts" if accumulate > 1 else "")
            + f"; the nearest sizes are {sizes}",
            f"type train.batch_size={upper}",
        )


def _check_rollback(config: RunConfig) -> Iterator[Problem]:
    """To go back, all tasks start again: somebody must be there to do that, and may."""
    if config.train.on_not_finite is not NotFinitePolicy.rollback:
        return
    key, instead = "train.on_not_finite", "type train.on_not_finite=skip or stop"
    if config.job is not None:
        message = f"rollback is the launcher's, which starts all tasks again; job={config.job} plays one task alone"
        yield Problem(key, message, instead)
    most = config.restart.max_of.get("worker:0", config.restart.max_of.get("worker", config.restart.max))
    if most == 0:
        yield Problem(key, "rollback starts all tasks again, and worker:0 may never be", f"{instead}, or restart.max=3")


def _check_examples(config: RunConfig, description: Description) -> Iterator[Problem]:
    examples, parts = description.train_examples, _parts(config)
    if examples < config.train.batch_size:
        yield Problem(
            "train.batch_size",
            f"one global batch takes {config.train.batch_size} examples, the data has {examples}",
            f"type train.batch_size={max(1, examples // parts * parts)}",
        )


def _check_pins(config: RunConfig, description: Description, shards: int) -> Iterator[Problem]:
    for pattern, shard in config.placement.pins.items():
        for fault, better in pin_faults(description.parameters, shards, pattern, shard):
            yield Problem("placement.pins", fault, f"e.g. 'placement.pins={{{better}}}'")


def _check_layers(config: RunConfig, description: Description) -> Iterator[Problem]:
    for pattern, device in config.device.layers.items():
        if not any(fnmatchcase(path, pattern) for path in description.layers):
            near = difflib.get_close_matches(pattern, description.layers, n=3, cutoff=0.3) or description.layers[:3]
            message = f"pin {pattern!r} matches no layer; the nearest are {', '.join(near)}"
            yield Problem("device.layers", message, f"e.g. 'device.layers={{{near[0] if near else 'dense'}:{device}}}'")


def _warnings(shards: Sequence[Shard], tasks: Sequence[Task], machine: Machine) -> Iterator[Problem]:
    hosts = {shard.host for shard in shards}
    for shard in shards:
        if not any(other.trainable for other in shards if other.host == shard.host):
            yield Problem("cluster", f"{shard.host} holds no parameter", f"{len(hosts) - 1} shards would do")
    yield from _warn_of_imbalance(shards)
    workers = sum(task.job == "worker" for task in tasks)
    if workers > machine.cores:
        yield Problem("cluster", f"{workers} workers share {machine.cores} cores", "fewer workers may be faster here")


def _warn_of_imbalance(shards: Sequence[Shard]) -> Iterator[Problem]:
    held: dict[str, list[Slice]] = {}
    for shard in shards:
        held.setdefault(shard.host, []).extend([*shard.trainable, *shard.state])
    nbytes = {host: sum(piece.nbytes for piece in pieces) for host, pieces in held.items()}
    total, heaviest = sum(nbytes.values()), max(nbytes, key=nbytes.__getitem__)
    even = total / len(held)
    if nbytes[heaviest] > 1.5 * even:
        largest = max(held[heaviest], key=lambda piece: piece.nbytes)
        share, of_it = f"{nbytes[heaviest] / total:.0%}", f"{largest.nbytes / total:.0%}"
        yield Problem(
            "placement",
            f"{heaviest} holds {share} of the bytes, {largest.path} alone is {of_it}",
            f"type placement.max_part_mib={_round_up(even / 2**20)} to share it out in parts"
            if largest.nbytes > even
            else "type placement.name=greedy and leave out placement.pins",
        )


def _round_up(mib: float) -> str:
    """To a whole number, or to two digits of a share that is smaller: rounded down, it would make a part too many."""
    unit = 1.0 if mib >= 1 else 10.0 ** (math.floor(math.log10(mib)) - 1)
    return f"{math.ceil(mib / unit) * unit:g}"


def _shard_to_json(shard: Shard) -> dict[str, Any]:
    pieces = {"trainable": [p._asdict() for p in shard.trainable], "state": [p._asdict() for p in shard.state]}
    return {"index": shard.index, "host": shard.host, "nbytes": shard.nbytes} | pieces


def _shard_from_json(value: Mapping[str, Any]) -> Shard:
    def slices(pieces: Sequence[Mapping[str, Any]]) -> tuple[Slice, ...]:
        return tuple(Slice(**{**piece, "shape": tuple(piece["shape"])}) for piece in pieces)

    return Shard(value["index"], value["host"], slices(value["trainable"]), slices(value["state"]))
