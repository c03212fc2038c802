"""Finds every problem of a config that shows without building the model; changes nothing."""

from trainer.config.schema import RunConfig
from trainer.config.typed import Mode, Target
from trainer.faults.problems import Problem
from trainer.plan.addresses import check_addresses, check_role
from trainer.plan.checks.capacity import check_capacity
from trainer.plan.checks.containers import check_containers
from trainer.plan.checks.devices import check_devices, check_keys
from trainer.plan.checks.export import check_formats
from trainer.plan.checks.isolation import check_isolation
from trainer.plan.checks.loggers import check_loggers
from trainer.plan.checks.sparse import check_sparse_run
from trainer.plan.checks.strategy import (
    check_batch,
    check_buckets,
    check_patience,
    check_rollback,
    check_size,
    check_strategy,
)
from trainer.plan.checks.versions import check_versions
from trainer.plan.devices import Machine, tasks_here
from trainer.plan.resolve import check_optimizer
from trainer.plan.shared_memory import check_wire
from trainer.plan.strategy import strategy_of


def validate(
    config: RunConfig, machine: Machine, mode: Mode = Mode.train, target: Target = Target.compose
) -> list[Problem]:
    """Returns every problem of a resolved config on this machine; `target` is that of trainer render."""
    cluster, device, train = config.cluster, config.device, config.train
    is_known = config.user is None or "name" in config.given  # else the model may have another optimizer
    strategy = strategy_of(config.strategy, cluster)
    here = tasks_here(cluster, mode, config.launch.name, config.job, config.task)
    return [
        *check_containers(config, mode, target),
        *check_versions(machine.libraries),
        *check_capacity(cluster, len(here), machine),
        *check_size(cluster),
        *check_strategy(config.strategy, cluster, device, config.train),
        *check_wire(config, mode),
        *check_sparse_run(config.placement, config.optimizer, strategy),
        *check_buckets(config.placement.buckets, strategy, device),
        *check_batch(cluster, device, train),
        *check_patience(config.evaluate, config.optimizer, cluster),
        *check_rollback(train, config.restart, config.job),
        *(check_optimizer(config.optimizer) if is_known else ()),
        *check_formats(config.export.formats),
        *check_loggers(config.loggers),
        *check_isolation(config, mode),
        *check_addresses(cluster, untrusted_allowed=config.security.allow_untrusted_network),
        *check_role(cluster, config.job, config.task, config.run),
        *check_devices(cluster, device, machine, here, jit=train.jit),
        *check_keys(
            cluster, "restart.max_of", config.restart.max_of, least=0, why=", for a task that is never restarted"
        ),
    ]
