"""Everything wrong with a config that can be found without building the model. Pure."""

from __future__ import annotations

from trainer.config.limits import check_read
from trainer.config.schema import RunConfig
from trainer.faults.problems import Problem
from trainer.plan import addresses
from trainer.plan.checks import capacity, versions
from trainer.plan.checks import devices as checks
from trainer.plan.checks.strategy import check_batch, check_buckets, check_rollback, check_size, check_strategy
from trainer.plan.devices import Machine


def check(config: RunConfig, machine: Machine) -> list[Problem]:
    """Everything wrong with a config that can be told without building the model."""
    return [
        *versions.check(machine.libraries),
        *capacity.check(config, machine),
        *check_size(config),
        *check_strategy(config),
        *check_buckets(config),
        *check_batch(config),
        *check_rollback(config),
        *check_read(config.optimizer, "optimizer."),
        *check_read(config.optimizer.schedule, "optimizer.schedule."),
        *addresses.check(config),
        *checks.check(config, machine),
        *checks.check_restarts(config),
    ]
