"""The strategies, and which one, over which wire, a config means."""

from __future__ import annotations

from trainer.config.schema import Launch, Mode, RunConfig, StrategyName, Wire
from trainer.plan import addresses, shared_memory

SHARDED = ("sync", "async", "backup")  # strategies with shard hosts


def strategy_of(config: RunConfig) -> str:
    """local for one process, sync otherwise, unless the config says."""
    if config.strategy.name is not StrategyName.auto:
        return str(config.strategy.name.value)
    return "local" if config.cluster.name == "local" else "sync"


def wire_of(config: RunConfig) -> str:
    if config.strategy.wire is not Wire.auto:
        return str(config.strategy.wire.value)
    return Wire.memory.value if not why_not_memory(config) else Wire.float32.value


def why_not_memory(config: RunConfig) -> str:
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
