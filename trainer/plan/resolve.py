"""Completes a config with what a scheduler's TF_CONFIG, `cluster.hosts` and mode=selftest imply. Pure."""

from trainer.config.cluster_size import parse_size
from trainer.config.schema import ClusterConfig, Mode, RunConfig
from trainer.faults.problems import Problem
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
