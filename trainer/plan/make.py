"""From a config and a description of the model to a plan. Pure: no TensorFlow."""

import contextlib
import copy
import difflib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from trainer.config.cluster_size import ClusterSize
from trainer.config.groups import match_faults, settings_of
from trainer.config.schema import (
    AUTO,
    ClusterConfig,
    DeviceConfig,
    OptimizerConfig,
    OptimizerName,
    PlacementConfig,
    PlacementName,
    RunConfig,
)
from trainer.faults.problems import ConfigError, Problem
from trainer.plan import addresses
from trainer.plan.checks.gpu_memory import warn_of_gpu_memory
from trainer.plan.checks.parts import averaged, check_exchanges, is_counted, warn_of_parts
from trainer.plan.checks.sparse import check_memory, warn_of_dense
from trainer.plan.checks.strategy import batch_parts, check_parts
from trainer.plan.description import Description
from trainer.plan.devices import THIS_HOST, Machine, for_tasks, parameters_of, tasks_here
from trainer.plan.layout import Shard, Slice
from trainer.plan.placement import SMALL_NBYTES, best_match, pin_faults, place
from trainer.plan.plan import Group, Plan, Task
from trainer.plan.resolve import is_taken
from trainer.plan.shared_memory import wire_of
from trainer.plan.strategy import Strategy, strategy_of
from trainer.plan.tables import TableLayout, blocks_of

PS_AT_MOST = 16  # that are tried
ANY_PORT = 0  # chosen when the tasks start


def make_plan(config: RunConfig, description: Description, machine: Machine) -> Plan:
    """Decides what runs where.

    Args:
        config: without problems, as `validate` finds them.

    Raises:
        ConfigError: if the config does not fit the model or the data.
    """
    strategy = strategy_of(config.strategy, config.cluster)
    tasks = _make_tasks(config.cluster, config.device, machine, strategy)
    hosts = _hosts(config.cluster, strategy)
    here = tasks_here(config.cluster, config.mode, config.launch.name, config.job, config.task)
    problems = [
        *_check_examples(config, description),
        *_check_model_batch(config, description),
        *_check_division(tasks, description),
        *check_exchanges(tasks, description),
        *_check_written(tasks, description),
        *_check_order(config, tasks, description),
        *_check_layers(config.device.layers, description),
        *_check_best_metric(config.evaluate.best_metric, description),
        *_check_pins(config.placement.pins, description, len(hosts)),
        *_check_groups(config.optimizer, description),
        *check_parts(config.placement, config.optimizer),
    ]
    if problems:
        raise ConfigError(problems)
    tables = TableLayout(
        blocks_of(description.tables, 1 if strategy.is_one_process else len(hosts)),
        tuple(config.optimizer.row_slots()),
        len([task for task in tasks if task.job == "worker"]),
        config.train.batch_size,
    )
    if faults := [*check_memory(tables, machine)]:
        raise ConfigError(faults)
    placed = place(
        description.parameters,
        hosts,
        pins=config.placement.pins,
        strategy=config.placement.name.value,
        max_part_mib=_max_part_mib(config.placement, config.optimizer),
        buckets=config.placement.buckets,
        sums=description.sums,
        sums_every=config.summary.every,
    )
    replicas = averaged([task for task in tasks if task.job == "worker"], strategy)
    counted = is_counted(replicas, description)
    shards = tuple(replace(shard, unreached=description.unreached, is_counted=counted) for shard in placed)
    return Plan(
        cluster=config.cluster.name,
        strategy=strategy.name,
        steps=config.train.steps,
        global_batch=config.train.batch_size,
        tasks=tasks,
        shards=shards,
        train_examples=description.train_examples,
        warnings=(
            *_warn_of_model(description),
            *warn_of_dense(description, config.train.batch_size),
            *warn_of_parts(replicas, config.train.accumulate, description),
            *_warnings(shards, tasks, config.placement.pins, machine, can_cut=not config.optimizer.measures_parameters),
            *warn_of_gpu_memory(config.cluster, config.device, machine, here),
        ),
        quorum=config.strategy.quorum if strategy.waits_for_quorum else None,
        parameters=parameters_of(
            config.device, is_one_process=strategy.is_one_process, has_tables=bool(description.tables)
        ),
        layers=_pin_layers(config.device.layers, description.layers),
        wire=wire_of(config, shards, has_tables=bool(description.tables)),
        objective=description.objective,
        optimizer=_describe_optimizer(config.optimizer, description),
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


def with_other_ps(config: RunConfig, description: Description, machine: Machine) -> Iterator[Plan]:
    """Plans with 1 ps, 2 ps and so on, up to the number of workers, or of addresses for ps."""
    cluster = config.cluster
    most = len(cluster.addresses["ps"]) if cluster.addresses else min(PS_AT_MOST, max(cluster.ps, cluster.worker))
    for ps in range(1, most + 1) if cluster.ps else ():
        other = copy.deepcopy(config)
        other.cluster.ps, other.cluster.name = ps, str(ClusterSize(ps, cluster.worker, cluster.evaluator))
        if cluster.addresses:
            other.cluster.addresses["ps"] = cluster.addresses["ps"][:ps]
        with contextlib.suppress(ConfigError):  # a pin names a shard that this one would not have
            yield make_plan(other, description, machine)


def _hosts(cluster: ClusterConfig, strategy: Strategy) -> list[str]:
    """The tasks that hold a shard each; under all_reduce every worker holds the only one."""
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
    """Device by path of every layer that a pattern matches; of several, the one with the most fixed characters."""
    return {path: pins[pattern] for path in layers if (pattern := best_match(path, pins)) is not None}


def _make_tasks(cluster: ClusterConfig, device: DeviceConfig, machine: Machine, strategy: Strategy) -> tuple[Task, ...]:
    tasks = []
    for (job, index), fields in for_tasks(cluster, device, machine).items():
        listed = cluster.addresses.get(job)
        host, port = addresses.split(listed[index]) if listed else (THIS_HOST, ANY_PORT)
        control = addresses.join(host, port + addresses.CONTROL_PORT_OFFSET if listed else ANY_PORT)
        has_server = not strategy.is_one_process and job != "evaluator"
        tasks.append(Task(job, index, addresses.join(host, port) if has_server else "", control, **fields))
    return tuple(tasks)


def _check_examples(config: RunConfig, description: Description) -> Iterator[Problem]:
    examples, parts = description.train_examples, batch_parts(config.cluster, config.device, config.train)
    if 0 < examples < config.train.batch_size:
        message = f"one global batch takes {config.train.batch_size} examples, but the data has {examples}"
        yield Problem("train.batch_size", message, f"type train.batch_size={max(1, examples // parts * parts)}")


def _check_model_batch(config: RunConfig, description: Description) -> Iterator[Problem]:
    """A model may compute batches of one size only."""
    size, parts = description.model_batch, batch_parts(config.cluster, config.device, config.train)
    if not size:
        return
    takes = f"the model takes batches of {size} examples, and no others"
    if config.train.batch_size != size * parts:
        each = f"{config.train.batch_size} make batches of {config.train.batch_size // parts}"
        yield Problem("train.batch_size", f"{each}; {takes}", f"type train.batch_size={size * parts}")
    if config.evaluate.batch_size != size:
        message = f"evaluates {config.evaluate.batch_size} at once; {takes}"
        yield Problem("evaluate.batch_size", message, f"type evaluate.batch_size={size}")
    if rest := description.evaluate_examples % size:
        message = f"the last batch of the {description.evaluate_examples} examples to evaluate on has {rest}; {takes}"
        yield Problem("data.name", message, f"leave {rest} of them out")


def _check_division(tasks: Sequence[Task], description: Description) -> Iterator[Problem]:
    if description.is_divided and any(len(task.replicas) > 1 for task in tasks):
        message = "replicas of one worker cannot share a tf.data.Dataset or an iterable: passes may differ in order"
        yield Problem(
            "device.replicas", message, "return a function (context) with batches of context.replica, or arrays"
        )


def _check_written(tasks: Sequence[Task], description: Description) -> Iterator[Problem]:
    """Refuses pipelines that write files if several tasks, which each read the whole pipeline, would write them."""
    readers = [task for task in tasks if task.job in ("worker", "evaluator")]
    if description.written and len(readers) > 1:
        message = f"the pipeline writes files as it is read ({', '.join(description.written)}); {len(readers)} tasks"
        remedy = "use cache() without a file, or write the data once with dataset.save and return tf.data.Dataset.load"
        yield Problem("data.name", f"{message} would write them at once", remedy)


def _check_order(config: RunConfig, tasks: Sequence[Task], description: Description) -> Iterator[Problem]:
    """Refuses evaluations between steps that would reorder or change the training examples on the chief alone."""
    if description.shares_order and config.evaluate.every > 0 and all(task.job != "evaluator" for task in tasks):
        message = (
            f"{config.evaluate.every} evaluates between steps, but training and evaluation data share a shuffle(), a "
            "generator or a variable that every pass changes: the training examples would depend on the evaluations"
        )
        remedy = (
            "set reshuffle_each_iteration=False of the shuffle(), give each part a generator or variable of its own, "
            "or type evaluate.every=0"
        )
        yield Problem("evaluate.every", message, remedy)


def _check_best_metric(name: str | None, description: Description) -> Iterator[Problem]:
    names = ("loss", *description.metrics)
    if name is not None and name not in names:
        message = f"unknown metric {name!r}; available: {', '.join(names)}"
        yield Problem("evaluate.best_metric", message, f"e.g. evaluate.best_metric={names[-1]}")


def _check_pins(pins: Mapping[str, int], description: Description, shards: int) -> Iterator[Problem]:
    for pattern, shard in pins.items():
        for fault, better in pin_faults(description.parameters, shards, pattern, shard):
            yield Problem("placement.pins", fault, f"e.g. 'placement.pins={{{better}}}'")


def _check_groups(section: OptimizerConfig, description: Description) -> Iterator[Problem]:
    trained = [p.path for p in description.parameters if p.trainable]
    yield from match_faults(section, [*trained, *description.frozen.paths])


def _group(section: OptimizerConfig, description: Description) -> tuple[Group, ...]:
    """The parameters by what holds for them, where the config has groups."""
    paths: dict[str, list[str]] = {}
    trained = [p.path for p in description.parameters if p.trainable]
    for path in [*trained, *description.frozen.paths] if section.groups else ():
        settings = settings_of(section, path)
        if path in trained or settings.is_frozen:
            paths.setdefault(settings.describe(), []).append(path)
    return tuple(Group(text, tuple(members)) for text, members in paths.items())


def _check_layers(pins: Mapping[str, str], description: Description) -> Iterator[Problem]:
    for pattern, device in pins.items():
        if not any(fnmatchcase(path, pattern) for path in description.layers):
            near = difflib.get_close_matches(pattern, description.layers, n=3, cutoff=0.3) or description.layers[:3]
            message = f"pin {pattern!r} matches no layer; the nearest are {', '.join(near)}"
            yield Problem("device.layers", message, f"e.g. 'device.layers={{{near[0] if near else 'dense'}:{device}}}'")


def _warnings(
    shards: Sequence[Shard], tasks: Sequence[Task], pins: Mapping[str, int], machine: Machine, *, can_cut: bool
) -> Iterator[Problem]:
    hosts = {shard.host for shard in shards}
    for shard in shards:
        if not any(other.trainable for other in shards if other.host == shard.host):
            yield Problem("cluster", f"{shard.host} holds no parameter", f"{len(hosts) - 1} shards are enough")
    yield from _warn_of_imbalance(shards, pins, can_cut=can_cut)
    workers = sum(task.job == "worker" for task in tasks)
    if workers > machine.cores:
        yield Problem("cluster", f"{workers} workers share {machine.cores} cores", "fewer workers may be faster here")


def _describe_optimizer(section: OptimizerConfig, description: Description) -> str:
    """The optimizer, and where it comes from."""
    others = [key for key in section.given if key not in ("name", "groups")]
    if is_taken(section, description.compiled_optimizer):
        origin = "from compile()" + (f"; {', '.join(others)} from the config" if others else "")
    else:
        origin = "from the config" if others or "name" in section.given else "by default"
    text = f"optimizer: {section.describe()}, {origin}"
    if description.lookups and section.name not in (OptimizerName.sgd, OptimizerName.lion):
        # Keras on TensorFlow squares each of them alone; Keras on JAX and PyTorch does as here.
        text += "; gradients of an id that a batch has more than once are summed, then squared"
    return text


def _warn_of_model(description: Description) -> Iterator[Problem]:
    if description.unreached:
        message = f"the loss does not depend on {', '.join(description.unreached)}, which training does not change"
        yield Problem("model", message, "give each output that is to be trained a loss in compile()")
    for message, remedy in description.doubts:
        yield Problem("model", message, remedy)
    for text in description.warnings:
        yield Problem("model", text, 'to hide it: warnings.filterwarnings("ignore", ...) in the code that warns')
    for path in description.not_adapted:
        message = f"layer {path} has adapted to no data, so it changes nothing"
        yield Problem("model", message, "give the model's function an argument train, and call adapt(train)")


def _warn_of_imbalance(shards: Sequence[Shard], pins: Mapping[str, int], *, can_cut: bool) -> Iterator[Problem]:
    """Where `auto` does not cut: it is off, or a pin keeps parameters whole."""
    pieces_of: dict[str, list[Slice]] = {}
    for shard in shards:
        pieces_of.setdefault(shard.host, []).extend([*shard.trainable, *shard.state])
    nbytes = {host: sum(piece.nbytes for piece in pieces) for host, pieces in pieces_of.items()}
    total, heaviest = sum(nbytes.values()), max(nbytes, key=nbytes.__getitem__)
    even = total / len(pieces_of)
    if even >= SMALL_NBYTES and nbytes[heaviest] > 1.5 * even:
        largest = max(pieces_of[heaviest], key=lambda piece: piece.nbytes)
        share, of_it = f"{nbytes[heaviest] / total:.0%}", f"{largest.nbytes / total:.0%}"
        message = f"{heaviest} holds {share} of the bytes, and {largest.path} alone {of_it}"
        parts = f"type placement.max_part_mib={_round_up(even / 2**20)} to split it into parts"
        greedy = "type placement.name=greedy and leave out placement.pins"
        is_cut = can_cut and largest.nbytes > even and best_match(largest.path, pins) is None
        yield Problem("placement", message, parts if is_cut else greedy)


def _round_up(mib: float) -> str:
    """To a whole number, or to two digits of a share that is smaller: rounded down, it would make a part too many."""
    unit = 1.0 if mib >= 1 else 10.0 ** (math.floor(math.log10(mib)) - 1)
    return f"{math.ceil(mib / unit) * unit:g}"
