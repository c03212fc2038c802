"""The strategies: how gradients become updates, and what follows from that."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from trainer.config.schema import ClusterConfig, StrategyConfig, StrategyName
from trainer.config.words import count


@dataclass(frozen=True)
class Strategy:
    """How gradients become updates; code uses its properties, never its name."""

    name: str
    waits_for: Literal["all", "quorum", "one"]  # replicas whose gradients an update averages
    sentence: str  # what an update takes
    where: str  # who has the parameters
    when_slow: str = "every step waits for it"  # what a slow worker means for the others
    dropped_as: str = ""  # why a gradient may be dropped
    has_shard_hosts: bool = True  # tasks that hold parameters for others
    has_ring: bool = False  # every worker holds all parameters, and gradients are summed from worker to worker

    @property
    def waits_for_all(self) -> bool:
        return self.waits_for == "all"

    @property
    def waits_for_quorum(self) -> bool:
        return self.waits_for == "quorum"

    @property
    def waits_for_one(self) -> bool:
        """Whether every gradient is an update."""
        return self.waits_for == "one"

    @property
    def is_exact(self) -> bool:
        """Whether the weights depend on config, seed and data alone, not on timing."""
        return self.waits_for_all

    @property
    def is_one_process(self) -> bool:
        return not (self.has_shard_hosts or self.has_ring)

    def describe(self, *, replicas: int, batch: str, hosts: str, quorum: int | None) -> str:
        """Describes the strategy of a run in one line.

        Args:
            batch: of an update, e.g. "global batch 256".
            hosts: of the shards, e.g. "2 ps".
            quorum: replicas that an update of backup waits for.
        """
        sentence = [self.sentence.format(replicas=replicas, quorum=quorum)] if self.sentence and replicas > 1 else []
        return ", ".join([self.name, count(replicas, "replica"), batch, self.where.format(hosts=hosts), *sentence])


_WAITS_FOR_ALL, _ON_HOSTS = "every update waits for all {replicas} replicas", "shards on {hosts}"
STRATEGIES: Mapping[str, Strategy] = {
    strategy.name: strategy
    for strategy in (
        Strategy("local", "all", "", "one process", has_shard_hosts=False),
        Strategy("sync", "all", _WAITS_FOR_ALL, _ON_HOSTS),
        Strategy(
            "async",
            "one",
            "every gradient is an update, no worker waits for another",
            _ON_HOSTS,
            when_slow="the others do not wait, and its gradients are stale when they arrive",
            dropped_as="stale",
        ),
        Strategy(
            "backup",
            "quorum",
            "every update waits for {quorum} of {replicas}, later gradients are dropped",
            _ON_HOSTS,
            when_slow="the others do not wait, and its late gradients are dropped",
            dropped_as="late",
        ),
        Strategy(
            "all_reduce",
            "all",
            _WAITS_FOR_ALL,
            "every worker holds all parameters",
            has_shard_hosts=False,
            has_ring=True,
        ),
    )
}


def updates_of_batch(section: StrategyConfig, cluster: ClusterConfig) -> int:
    """Returns the updates that `train.batch_size` examples make: one, or one per worker if none waits."""
    return cluster.worker if strategy_of(section, cluster).waits_for_one else 1


def strategy_of(section: StrategyConfig, cluster: ClusterConfig) -> Strategy:
    """Returns the strategy of a config; by default local for one process, sync otherwise."""
    if section.name is not StrategyName.auto:
        return STRATEGIES[section.name.value]
    return STRATEGIES["local" if cluster.is_local else "sync"]
