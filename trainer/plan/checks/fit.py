"""Checks whether a config fits the model and the data, and warns of unusual ones."""

import difflib
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from trainer.config.groups import match_faults
from trainer.config.schema import OptimizerConfig, RunConfig
from trainer.faults.problems import Problem
from trainer.plan.checks.strategy import batch_parts
from trainer.plan.description import Description
from trainer.plan.placement import pin_faults
from trainer.plan.plan import Task


def check_fit(config: RunConfig, tasks: Sequence[Task], description: Description, *, shards: int) -> Iterator[Problem]:
    """Yields the problems of a config that does not fit the model or the data."""
    yield from _check_examples(config, description)
    yield from _check_model_batch(config, description)
    yield from _check_division(config, tasks, description)
    yield from _check_written(tasks, description)
    yield from _check_order(config, tasks, description)
    yield from _check_layers(config.device.layers, description)
    yield from _check_best_metric(config.evaluate.best_metric, description)
    yield from _check_pins(config.placement.pins, description, shards)
    yield from _check_groups(config.optimizer, description)


def _check_examples(config: RunConfig, description: Description) -> Iterator[Problem]:
    examples, parts = description.train_examples, batch_parts(config.cluster, config.device, config.train)
    if 0 < examples < config.train.batch_size:
        message = f"one global batch takes {config.train.batch_size} examples, but the data has {examples}"
        remedy = f"type train.batch_size={max(1, examples // parts * parts)}"
        yield Problem("train.batch_size", "over-capacity", message, remedy)


def _check_model_batch(config: RunConfig, description: Description) -> Iterator[Problem]:
    """Checks batch sizes for a model that computes batches of only one size."""
    size, parts = description.model_batch, batch_parts(config.cluster, config.device, config.train)
    if not size:
        return
    takes = f"the model only takes batches of {size} examples"
    if config.train.batch_size != size * parts:
        each = f"{config.train.batch_size} examples per step make batches of {config.train.batch_size // parts}"
        yield Problem("train.batch_size", "mismatch", f"{each}; {takes}", f"type train.batch_size={size * parts}")
    if config.evaluate.batch_size != size:
        message = f"evaluates {config.evaluate.batch_size} at once; {takes}"
        yield Problem("evaluate.batch_size", "mismatch", message, f"type evaluate.batch_size={size}")
    if rest := description.evaluate_examples % size:
        message = f"the last batch of the {description.evaluate_examples} examples to evaluate on has {rest}; {takes}"
        yield Problem("data.name", "mismatch", message, f"leave {rest} of them out")


def _check_division(config: RunConfig, tasks: Sequence[Task], description: Description) -> Iterator[Problem]:
    if description.is_divided and any(len(task.replicas) > 1 for task in tasks):
        key = "device.replicas" if config.train.replicas is None else "train.replicas"
        message = "replicas of one worker cannot share a tf.data.Dataset or an iterable: passes may differ in order"
        remedy = "return a function (context) with batches of context.replica, or arrays; or use as many workers"
        yield Problem(key, "not-supported", message, remedy)


def _check_written(tasks: Sequence[Task], description: Description) -> Iterator[Problem]:
    """Refuses pipelines that write files if several tasks, which each read the whole pipeline, would write them."""
    readers = [task for task in tasks if task.job in ("worker", "evaluator")]
    if description.written and len(readers) > 1:
        message = f"the pipeline writes files as it is read ({', '.join(description.written)}); {len(readers)} tasks"
        remedy = "use cache() without a file, or write the data once with dataset.save and return tf.data.Dataset.load"
        yield Problem("data.name", "over-capacity", f"{message} would write them at once", remedy)


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
        yield Problem("evaluate.every", "not-supported", message, remedy)


def _check_best_metric(name: str | None, description: Description) -> Iterator[Problem]:
    names = ("loss", *description.metrics)
    if name is not None and name not in names:
        message = f"unknown metric {name!r}; available: {', '.join(names)}"
        yield Problem("evaluate.best_metric", "unknown-choice", message, f"e.g. evaluate.best_metric={names[-1]}")


def _check_pins(pins: Mapping[str, int], description: Description, shards: int) -> Iterator[Problem]:
    for pattern, shard in pins.items():
        for fault, better in pin_faults(description.parameters, shards, pattern, shard):
            yield Problem("placement.pins", "no-match", fault, f"e.g. 'placement.pins={{{better}}}'")


def _check_groups(section: OptimizerConfig, description: Description) -> Iterator[Problem]:
    trained = [p.path for p in description.parameters if p.trainable]
    yield from match_faults(section, [*trained, *description.frozen.paths])


def _check_layers(pins: Mapping[str, str], description: Description) -> Iterator[Problem]:
    for pattern, device in pins.items():
        if not any(fnmatchcase(path, pattern) for path in description.layers):
            near = difflib.get_close_matches(pattern, description.layers, n=3, cutoff=0.3) or description.layers[:3]
            message = f"pin {pattern!r} matches no layer; the nearest are {', '.join(near)}"
            remedy = f"e.g. 'device.layers={{{near[0] if near else 'dense'}:{device}}}'"
            yield Problem("device.layers", "no-match", message, remedy)


def warn_of_model(description: Description) -> Iterator[Problem]:
    if description.unreached:
        message = f"the loss does not depend on {', '.join(description.unreached)}, which training does not change"
        yield Problem("model", "no-effect", message, "give each output that is to be trained a loss in compile()")
    for message, remedy in description.doubts:
        yield Problem("model", "doubtful", message, remedy)
    for text in description.warnings:
        remedy = 'to hide it: warnings.filterwarnings("ignore", ...) in the code that warns'
        yield Problem("model", "doubtful", text, remedy)
    for path in description.not_adapted:
        message = f"layer {path} was never adapted, so it returns its input unchanged"
        remedy = "give the model's function an argument train, and call adapt(train)"
        yield Problem("model", "no-effect", message, remedy)
