"""Checks that cluster, strategy and batch agree. Pure."""

from collections.abc import Iterator

from trainer.config.cluster_size import SIZE, ClusterSize, parse_size
from trainer.config.limits import check_read
from trainer.config.schema import (
    AUTO,
    ClusterConfig,
    DeviceConfig,
    EvaluateConfig,
    NotFinitePolicy,
    OptimizerConfig,
    PlacementConfig,
    PlateauConfig,
    RestartConfig,
    StrategyConfig,
    StrategyName,
    TrainConfig,
    Wire,
)
from trainer.config.words import count
from trainer.faults.problems import Problem
from trainer.plan.addresses import JOBS
from trainer.plan.devices import count_replicas
from trainer.plan.strategy import Strategy, strategy_of


def check_size(cluster: ClusterConfig) -> Iterator[Problem]:
    """Checks that the choice of a cluster agrees with its single keys, because all output of a run bears its name."""
    size = ClusterSize(cluster.ps, cluster.worker, cluster.evaluator)
    is_size = SIZE.fullmatch(cluster.name) is not None
    chosen = parse_size(cluster.name) if is_size else ClusterSize(0, 1, 0) if cluster.is_local else size
    if chosen != size and cluster.worker > 0:
        given = " ".join(f"cluster.{job}={getattr(size, job)}" for job in JOBS if getattr(size, job))
        message = f"cluster={cluster.name} and {given} contradict each other"
        yield Problem("cluster", "conflict", message, f"type cluster={size}")


def check_patience(section: EvaluateConfig, optimizer: OptimizerConfig, cluster: ClusterConfig) -> Iterator[Problem]:
    """Checks that settings that count evaluations have some to count."""
    plateau = optimizer.plateau
    for key, patience in (("evaluate.patience", section.patience), ("optimizer.plateau.patience", plateau.patience)):
        if patience is not None and section.every == 0 and cluster.evaluator == 0:
            yield Problem(key, "no-effect", "nothing is evaluated during training", "type evaluate.every=100 too")
    if section.export_best and cluster.evaluator:
        message = "the evaluator may not have scored every checkpoint when training ends"
        remedy = "leave it out, and export best/ with resume=RUN/best afterwards"
        yield Problem("evaluate.export_best", "conflict", message, remedy)
    if plateau.patience is None:
        for name, value in vars(plateau).items():
            if value != getattr(PlateauConfig, name):
                message = "the learning rate is never reduced without a patience"
                remedy = "type optimizer.plateau.patience=10 too"
                yield Problem(f"optimizer.plateau.{name}", "no-effect", message, remedy)


def check_parts(placement: PlacementConfig, optimizer: OptimizerConfig) -> Iterator[Problem]:
    """Refuses parts of parameters for an optimizer that measures whole parameters."""
    if optimizer.measures_parameters and placement.max_part_mib not in (AUTO, None):
        message = f"{optimizer.name.value} measures whole parameters, so none can be split into parts"
        yield Problem("placement.max_part_mib", "not-supported", message, "leave it out")


def check_strategy(
    section: StrategyConfig, cluster: ClusterConfig, device: DeviceConfig, train: TrainConfig
) -> Iterator[Problem]:
    """Checks that a strategy has the tasks it needs, and only keys that it reads."""
    strategy = strategy_of(section, cluster)
    name, tasks = strategy.name, cluster.ps + cluster.worker
    if strategy.is_one_process and tasks > 1 and not cluster.is_local:
        message = f"local is one process, but cluster={cluster.name} has {tasks} tasks"
        yield Problem("strategy", "conflict", message, "leave strategy out")
    if strategy.has_shard_hosts and cluster.is_local:
        message = f"{name} needs tasks that hold the shards, but cluster=local has neither ps nor other workers"
        yield Problem("strategy", "conflict", message, "type cluster=1ps2w or cluster=2w, or leave strategy out")
    if strategy.has_ring and cluster.is_local:
        message = "all_reduce runs between workers, but cluster=local has none"
        yield Problem("strategy", "conflict", message, "type cluster=2w")
    if strategy.has_ring and cluster.ps:
        message = f"all_reduce has no parameter servers, but cluster={cluster.name} has {cluster.ps}"
        yield Problem("strategy", "conflict", message, f"type cluster={cluster.worker}w, or leave strategy out")
    if cluster.evaluator > 1:
        message = f"a cluster has at most one evaluator, but cluster={cluster.name} has {cluster.evaluator}"
        remedy = f"type cluster={cluster.name.removesuffix(f'{cluster.evaluator}e')}1e"
        yield Problem("cluster", "out-of-range", message, remedy)
    yield from _check_quorum(section.quorum, cluster, count_replicas(cluster, device, train), strategy)
    yield from _check_replicas(cluster, train, strategy)
    yield from (p for p in check_read(section, "strategy.") if section.name is not StrategyName.auto)
    if section.name is StrategyName.auto and section.max_staleness is not None:
        message = f"{name} has no stale gradients; async does"
        yield Problem("strategy.max_staleness", "no-effect", message, "type strategy=async")
    if section.name is StrategyName.auto and strategy.is_one_process and section.wire is not Wire.auto:
        yield Problem("strategy.wire", "no-effect", "one process sends nothing", "leave it out, or type cluster=1ps2w")


def check_buckets(buckets: int, strategy: Strategy, device: DeviceConfig) -> Iterator[Problem]:
    """Checks that a host may have several shards: they must move together, step by step."""
    if buckets == 1:
        return
    key, remedy = "placement.buckets", "leave it out"
    if not strategy.has_shard_hosts:
        yield Problem(key, "no-effect", f"{strategy.name} has no tasks that hold shards for others", remedy)
    elif not strategy.waits_for_all:
        message = f"{strategy.name} takes gradients as they arrive, with one shard per host"
        yield Problem(key, "not-supported", message, remedy)
    elif device.log_placement:
        message = "device.log_placement can follow only one shard per host"
        yield Problem(key, "not-supported", message, f"{remedy}, or leave out device.log_placement")


def _check_quorum(quorum: int | None, cluster: ClusterConfig, replicas: int, strategy: Strategy) -> Iterator[Problem]:
    here = max(1, replicas // max(1, cluster.worker))
    if quorum is None:
        if strategy.waits_for_quorum:
            remedy = f"type strategy.quorum={max(1, replicas - here)}"
            message = "backup needs the number of replicas that an update waits for"
            yield Problem("strategy.quorum", "not-set", message, remedy)
    elif not 1 <= quorum <= replicas:
        message = f"{quorum} is out of range; it must be 1..{replicas}"
        yield Problem("strategy.quorum", "out-of-range", message, f"type strategy.quorum={replicas}")
    elif not strategy.waits_for_quorum and quorum < replicas:
        message = f"{strategy.name} does not use it; backup does, and waits for {quorum} of the {replicas} replicas"
        remedy = f"type strategy=backup strategy.quorum={quorum}, or leave it out"
        yield Problem("strategy.quorum", "no-effect", message, remedy)
    elif quorum % here:
        near = quorum // here * here or here
        message = f"{quorum} cannot be reached: a worker sends the mean of its {here} replicas at once"
        yield Problem("strategy.quorum", "not-divisible", message, f"type strategy.quorum={near}")


def batch_parts(cluster: ClusterConfig, device: DeviceConfig, train: TrainConfig) -> int:
    """Returns the number of equal parts of a global batch."""
    return count_replicas(cluster, device, train) * train.accumulate


def _check_replicas(cluster: ClusterConfig, train: TrainConfig, strategy: Strategy) -> Iterator[Problem]:
    """Checks that every worker has a replica, and that workers which send means have equally many."""
    replicas, workers = train.replicas, cluster.worker
    if replicas is None or workers < 1:
        return
    if replicas < workers:
        message = f"{count(replicas, 'replica')} cannot be shared out to {workers} workers"
        yield Problem("train.replicas", "out-of-range", message, f"type train.replicas={workers}, or fewer workers")
    elif replicas % workers and not (strategy.waits_for_all and strategy.has_shard_hosts):
        message = f"{strategy.name} needs equally many replicas on all workers; {replicas} is no multiple of {workers}"
        remedy = f"type train.replicas={-(-replicas // workers) * workers}"
        yield Problem("train.replicas", "not-divisible", message, remedy)


def warn_of_shares(replicas: int, workers: int) -> Iterator[Problem]:
    """Warns if workers wait in every step for others that compute more replicas."""
    if rest := replicas % workers:
        few, most = replicas // workers, replicas // workers + 1
        message = f"{rest} of {workers} workers compute {most} replicas in every step; the others wait after {few}"
        equal = [number for number in range(1, replicas + 1) if replicas % number == 0]
        fewer, more = max(n for n in equal if n < workers), min(n for n in equal if n > workers)
        remedy = f"{fewer} or {more} workers, or train.replicas={most * workers}, would have equal shares"
        yield Problem("train.replicas", "slow", message, remedy)


def check_batch(cluster: ClusterConfig, device: DeviceConfig, train: TrainConfig) -> Iterator[Problem]:
    """Checks that the global batch can be divided into its parts."""
    batch, accumulate, parts = train.batch_size, train.accumulate, batch_parts(cluster, device, train)
    replicas = parts // accumulate if accumulate > 0 else 0
    if batch > 0 and parts > 0 and batch % parts:
        lower, upper = batch // parts * parts, -(-batch // parts) * parts
        nearest = f"nearest sizes are {lower} or {upper}" if lower else f"smallest size is {upper}"
        message = (
            f"{batch} examples cannot be divided evenly among {replicas} replicas"
            + (f" in {accumulate} parts" if accumulate > 1 else "")
            + f"; the {nearest}"
        )
        yield Problem("train.batch_size", "not-divisible", message, f"type train.batch_size={upper}")


def check_rollback(train: TrainConfig, restart: RestartConfig, job: str | None) -> Iterator[Problem]:
    """Checks that a launcher exists that can, and may, restart all tasks for a rollback."""
    if train.on_not_finite is not NotFinitePolicy.rollback:
        return
    key, instead = "train.on_not_finite", "type train.on_not_finite=skip or stop"
    if job is not None:
        message = f"rollback needs the launcher, which restarts all tasks; job={job} runs one task alone"
        yield Problem(key, "conflict", message, instead)
    most = restart.max_of.get("worker:0", restart.max_of.get("worker", restart.max))
    if most == 0:
        message = "rollback restarts all tasks, but worker:0 may not be restarted"
        yield Problem(key, "conflict", message, f"{instead}, or restart.max=3")
