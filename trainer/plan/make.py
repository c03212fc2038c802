"""Makes a plan from a config and a description of the model. Pure: no TensorFlow."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from trainer.config.groups import settings_of
from trainer.config.schema import (
    AUTO,
    ClusterConfig,
    OptimizerConfig,
    OptimizerName,
    PlacementConfig,
    PlacementName,
    RunConfig,
)
from trainer.config.typed import Mode
from trainer.faults.problems import ConfigError
from trainer.plan import addresses
from trainer.plan.checks.fit import check_fit, warn_of_model
from trainer.plan.checks.gpu_memory import warn_of_gpu_memory
from trainer.plan.checks.parts import averaged, check_exchanges, is_counted, warn_of_parts
from trainer.plan.checks.shards import warn_of_shards
from trainer.plan.checks.sparse import check_memory, warn_of_dense
from trainer.plan.checks.strategy import check_parts, warn_of_shares
from trainer.plan.description import Description
from trainer.plan.devices import THIS_HOST, Machine, count_replicas, for_tasks, parameters_of, tasks_here
from trainer.plan.placement import best_match, place
from trainer.plan.plan import Group, Plan, Task
from trainer.plan.resolve import is_taken
from trainer.plan.shared_memory import wire_of
from trainer.plan.strategy import Strategy, strategy_of

ANY_PORT = 0  # chosen when the tasks start


def make_plan(config: RunConfig, description: Description, machine: Machine, mode: Mode = Mode.train) -> Plan:
    """Decides what runs where.

    Args:
        config: validated.

    Raises:
        ConfigError: if the config does not fit the model or the data.
    """
    strategy = strategy_of(config.strategy, config.cluster)
    tasks = _make_tasks(config, machine, strategy)
    hosts = _hosts(config.cluster, strategy)
    here = tasks_here(config.cluster, mode, config.launch.name, config.job, config.task)
    problems = [
        *check_fit(config, tasks, description, shards=len(hosts)),
        *check_exchanges(tasks, description),
        *check_parts(config.placement, config.optimizer),
    ]
    if problems:
        raise ConfigError(problems)
    placed = place(
        description.parameters,
        hosts,
        pins=config.placement.pins,
        strategy=config.placement.name.value,
        max_part_mib=_max_part_mib(config.placement, config.optimizer),
        buckets=config.placement.buckets,
        sums=description.sums,
        sums_every=config.history.every,
    )
    replicas = averaged([task for task in tasks if task.job == "worker"], strategy)
    counted = is_counted(replicas, description)
    shards = tuple(replace(shard, unreached=description.unreached, is_counted=counted) for shard in placed)
    plan = Plan(
        cluster=config.cluster.name,
        strategy=strategy.name,
        steps=config.train.steps,
        global_batch=config.train.batch_size,
        tasks=tasks,
        shards=shards,
        train_examples=description.train_examples,
        warnings=(
            *warn_of_model(description),
            *warn_of_dense(description, config.train.batch_size),
            *warn_of_shares(count_replicas(config.cluster, config.device, config.train), config.cluster.worker),
            *warn_of_parts(replicas, config.train.accumulate, description),
            *warn_of_shards(
                shards, tasks, config.placement.pins, machine, can_cut=not config.optimizer.measures_parameters
            ),
            *warn_of_gpu_memory(config.cluster, config.device, machine, here),
        ),
        quorum=config.strategy.quorum if strategy.waits_for_quorum else None,
        parameters=parameters_of(
            config.device, is_one_process=strategy.is_one_process, has_tables=bool(description.tables)
        ),
        layers=_pin_layers(config.device.layers, description.layers),
        wire=wire_of(config, shards, mode, has_tables=bool(description.tables)),
        objective=description.objective,
        optimizer=_describe_optimizer(config.optimizer, config.given, description),
        is_stream=description.is_stream,
        frozen=description.frozen,
        groups=_group(config.optimizer, description),
        initial=description.initial,
        tables=description.tables,
        slots=tuple(config.optimizer.row_slots()) if description.tables else (),
        counts=description.counts if counted or config.train.accumulate > 1 else 0,
        epochs=config.train.epochs,
        fingerprint=description.fingerprint,
    )
    if faults := [*check_memory(plan.table_layout, machine)]:
        raise ConfigError(faults)
    return plan


def _hosts(cluster: ClusterConfig, strategy: Strategy) -> list[str]:
    """Returns the tasks that hold a shard each; under all_reduce every worker holds the only one."""
    if strategy.has_ring:
        return ["worker"]
    job = "ps" if cluster.ps else "worker"
    return [f"{job}:{index}" for index in range(getattr(cluster, job))]


def _max_part_mib(placement: PlacementConfig, optimizer: OptimizerConfig) -> float | str | None:
    if placement.max_part_mib != AUTO:
        return None if placement.max_part_mib is None else float(placement.max_part_mib)
    # The size that auto finds depends on the hosts, and the norm of clipped gradients, summed part by part, on it.
    depends_on_parts = optimizer.clip_norm is not None or optimizer.measures_parameters
    return AUTO if placement.name is PlacementName.greedy and not depends_on_parts else None


def _pin_layers(pins: Mapping[str, str], layers: Sequence[str]) -> dict[str, str]:
    """Returns devices by path of layer; of several matching patterns, that with the most fixed characters wins."""
    return {path: pins[pattern] for path in layers if (pattern := best_match(path, pins)) is not None}


def _make_tasks(config: RunConfig, machine: Machine, strategy: Strategy) -> tuple[Task, ...]:
    tasks, cluster = [], config.cluster
    for (job, index), fields in for_tasks(cluster, config.device, machine, config.train.replicas).items():
        listed = cluster.addresses.get(job)
        host, port = addresses.split(listed[index]) if listed else (THIS_HOST, ANY_PORT)
        control = addresses.join(host, port + addresses.CONTROL_PORT_OFFSET if listed else ANY_PORT)
        has_server = not strategy.is_one_process and job != "evaluator"
        tasks.append(Task(job, index, addresses.join(host, port) if has_server else "", control, **fields))
    return tuple(tasks)


def _group(section: OptimizerConfig, description: Description) -> tuple[Group, ...]:
    """Groups the parameters by their settings, if the config has groups."""
    paths: dict[str, list[str]] = {}
    trained = [p.path for p in description.parameters if p.trainable]
    for path in [*trained, *description.frozen.paths] if section.groups else ():
        settings = settings_of(section, path)
        if path in trained or settings.is_frozen:
            paths.setdefault(settings.describe(), []).append(path)
    return tuple(Group(text, tuple(members)) for text, members in paths.items())


def _describe_optimizer(section: OptimizerConfig, given: Sequence[str], description: Description) -> str:
    """Describes the optimizer, and where it comes from."""
    others = [key for key in given if key not in ("name", "groups")]
    if is_taken(given, description.compiled_optimizer):
        origin = "from compile()" + (f"; {', '.join(others)} from the config" if others else "")
    else:
        origin = "from the config" if others or "name" in given else "by default"
    text = f"optimizer: {section.describe()}, {origin}"
    if description.lookups and section.name not in (OptimizerName.sgd, OptimizerName.lion):
        # Keras on TensorFlow squares each of them alone; Keras on JAX and PyTorch does as here.
        text += "; gradients of an id that a batch has more than once are summed, then squared"
    return text
