"""Completes a config with what a scheduler's variables, `cluster.hosts`, trainer selftest and the model imply. Pure."""

from collections.abc import Iterator, Mapping

from trainer.config.cluster_size import parse_size
from trainer.config.limits import check_limits, check_read
from trainer.config.schema import (
    ClusterConfig,
    Launch,
    Mode,
    OptimizerConfig,
    OptimizerName,
    RunConfig,
    ScheduleConfig,
    ScheduleName,
    Target,
    TrainConfig,
)
from trainer.faults.problems import Problem
from trainer.plan import environment, slurm
from trainer.plan.description import CompiledOptimizer
from trainer.plan.devices import key_of
from trainer.plan.hosts import each_alone, resolve_hosts
from trainer.plan.tf_config import resolve_tf_config

SELFTEST_CLUSTER, SELFTEST_STEPS, SELFTEST_BATCH = "1ps1w", 20, 64


def resolve(config: RunConfig, environ: Mapping[str, str]) -> list[Problem]:
    """Fills in cluster, role, addresses and GPUs, so that a validated config says everything itself.

    Args:
        environ: variables, in which a scheduler may say who this process is.

    Returns:
        What is wrong with these sources, or contradicts the command line.
    """
    if config.mode is Mode.selftest:
        size = parse_size(SELFTEST_CLUSTER)
        config.cluster = ClusterConfig(name=SELFTEST_CLUSTER, ps=size.ps, worker=size.worker)
        config.train.steps, config.train.epochs, config.train.batch_size = SELFTEST_STEPS, None, SELFTEST_BATCH
    problems = _resolve_role(config, environ)
    if config.launch.name is Launch.slurm and config.job is None and not config.cluster.hosts:
        config.cluster.hosts = slurm.hosts(environ)
    if config.mode is Mode.render and config.target is not Target.compose and not config.cluster.addresses:
        config.cluster.addresses = each_alone(config.cluster)
    return [*problems, *resolve_hosts(config)]


def _resolve_role(config: RunConfig, environ: Mapping[str, str]) -> list[Problem]:
    """Takes the one task that this process is to run from what a scheduler says."""
    if tf_config := environ.get("TF_CONFIG"):
        problems = resolve_tf_config(config, tf_config)
    elif config.mode is Mode.train and config.job is None and slurm.is_step(environ):
        problems = slurm.resolve_step(config, environ)
    else:
        problems = []
    allotted = environment.allotted_gpus(environ)
    if config.job == "worker" and allotted and key_of(config.device.gpus, config.job, config.task or 0) is None:
        config.device.gpus[f"worker:{config.task or 0}"] = list(range(len(allotted)))
    return problems


def resolve_optimizer(section: OptimizerConfig, compiled: CompiledOptimizer | None) -> list[Problem]:
    """Fills in the optimizer that the model was compiled with, but for the keys that the config gives.

    Returns:
        What is wrong with the two together.
    """
    if compiled is not None and is_taken(section, compiled):
        if left_out := [*_check_left_out(section, compiled)]:
            return left_out
        for key, value in {"name": OptimizerName(compiled.name), **compiled.settings}.items():
            if key == "schedule" and key not in section.given:
                section.schedule = ScheduleConfig(**{**value, "name": ScheduleName(value["name"])})
            elif key not in section.given:
                setattr(section, key, value)
    return [*check_limits(section, "optimizer."), *check_optimizer(section)]


def resolve_steps(train: TrainConfig, examples: int, *, updates_of_batch: int = 1) -> list[Problem]:
    """Converts `train.epochs` to steps; the last step may reach into the next epoch.

    Args:
        examples: to train on; 0 if unknown.
        updates_of_batch: updates that each batch makes.

    Returns:
        Why the epochs cannot be converted, if so.
    """
    if train.epochs is None:
        return []
    if not examples:
        message = "the training data is a stream, so the number of examples in an epoch is unknown"
        remedy = "type train.steps=N instead; N = epochs x examples / train.batch_size"
        return [Problem("train.epochs", "conflict", message, remedy)]
    train.steps = -(-train.epochs * examples * updates_of_batch // train.batch_size)
    return []


def _check_left_out(section: OptimizerConfig, compiled: CompiledOptimizer) -> Iterator[Problem]:
    """Refuses settings of compile() that would be left out, unless the config replaces them."""
    for left_out in compiled.left_out:
        if left_out.key not in section.given:
            message = f"compile() was given {left_out.text}, which cannot be reproduced here"
            yield Problem(f"optimizer.{left_out.key}", "not-supported", message, left_out.remedy)


def check_optimizer(section: OptimizerConfig) -> Iterator[Problem]:
    """The keys must be those that the optimizer and its schedule read, and fit its rate."""
    yield from check_read(section, "optimizer.")
    yield from check_read(section.schedule, "optimizer.schedule.")
    least = section.plateau.min_rate
    if section.plateau.patience is not None and least >= section.learning_rate:
        message = f"{least} is not below optimizer.learning_rate={section.learning_rate}"
        remedy = f"type optimizer.plateau.min_rate={section.learning_rate / 100:g}"
        yield Problem("optimizer.plateau.min_rate", "out-of-range", message, remedy)


def is_taken(section: OptimizerConfig, compiled: CompiledOptimizer | None) -> bool:
    """Whether the model is trained by its own optimizer, because the config does not choose one."""
    return compiled is not None and "name" not in section.given
