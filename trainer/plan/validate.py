"""Finds everything wrong with a config that shows without building the model; changes nothing."""

from __future__ import annotations

from trainer.config.limits import check_read
from trainer.config.schema import RunConfig
from trainer.faults.problems import Problem
from trainer.plan import addresses
from trainer.plan.checks import capacity, containers, devices, versions
from trainer.plan.checks.strategy import check_batch, check_buckets, check_rollback, check_size, check_strategy
from trainer.plan.devices import Machine


def validate(config: RunConfig, machine: Machine) -> list[Problem]:
    """Returns every problem of a resolved config on this machine."""
    return [
        *containers.check(config),
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
        *devices.check(config, machine),
        *devices.check_restarts(config),
    ]
