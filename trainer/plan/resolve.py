"""Completes a config with what a scheduler's TF_CONFIG, `cluster.hosts`, mode=selftest and the model imply. Pure."""

from collections.abc import Iterator

from trainer.config.cluster_size import parse_size
from trainer.config.limits import check_limits, check_read
from trainer.config.schema import (
    ClusterConfig,
    Mode,
    OptimizerConfig,
    OptimizerName,
    RunConfig,
    ScheduleConfig,
    ScheduleName,
)
from trainer.faults.problems import Problem
from trainer.plan.description import CompiledOptimizer
from trainer.plan.hosts import resolve_hosts
from trainer.plan.tf_config import resolve_tf_config

SELFTEST_CLUSTER, SELFTEST_STEPS, SELFTEST_BATCH = "1ps1w", 20, 64


def resolve(config: RunConfig, tf_config: str | None) -> list[Problem]:
    """Fills in cluster, role, addresses and GPUs, so that a validated config says everything itself.

    Args:
        tf_config: the environment variable, where a scheduler has set it.

    Returns:
        What is wrong with these sources, or contradicts the command line.
    """
    if config.mode is Mode.selftest:
        size = parse_size(SELFTEST_CLUSTER)
        config.cluster = ClusterConfig(name=SELFTEST_CLUSTER, ps=size.ps, worker=size.worker)
        config.train.steps, config.train.batch_size = SELFTEST_STEPS, SELFTEST_BATCH
    problems = resolve_tf_config(config, tf_config) if tf_config else []
    return [*problems, *resolve_hosts(config)]


def resolve_optimizer(section: OptimizerConfig, compiled: CompiledOptimizer | None) -> list[Problem]:
    """Fills in the optimizer that the model was compiled with, but for the keys that the config gives.

    Returns:
        What is wrong with the two together.
    """
    if compiled is not None and is_taken(section, compiled):
        for key, value in {"name": OptimizerName(compiled.name), **(compiled.settings or {})}.items():
            if key == "schedule" and key not in section.given:
                section.schedule = ScheduleConfig(**{**value, "name": ScheduleName(value["name"])})
            elif key not in section.given:
                setattr(section, key, value)
    return [*check_limits(section, "optimizer."), *check_optimizer(section)]


def check_optimizer(section: OptimizerConfig) -> Iterator[Problem]:
    """The keys must be those that the optimizer and its schedule read, and fit its rate."""
    yield from check_read(section, "optimizer.")
    yield from check_read(section.schedule, "optimizer.schedule.")
    least = section.plateau.min_rate
    if section.plateau.patience is not None and least >= section.learning_rate:
        message = f"{least} is not below optimizer.learning_rate={section.learning_rate}"
        remedy = f"type optimizer.plateau.min_rate={section.learning_rate / 100:g}"
        yield Problem("optimizer.plateau.min_rate", message, remedy)


def is_taken(section: OptimizerConfig, compiled: CompiledOptimizer | None) -> bool:
    """Whether the model's own optimizer trains it: it is one of ours, and the config does not choose one."""
    return compiled is not None and compiled.settings is not None and "name" not in section.given
