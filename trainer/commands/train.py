"""trainer train: trains as processes of this machine, as containers, or as the one task that the config names."""

import gc
import os
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from trainer.commands.start import Start, restart_as_task
from trainer.config.command_line import typed
from trainer.config.schema import Launch, RunConfig
from trainer.faults import exit_codes
from trainer.launch import planning
from trainer.launch.attempts import PlannedRun
from trainer.launch.processes import launcher
from trainer.observe.machine import this_machine
from trainer.plan import slurm
from trainer.plan.checks.installed import require_tensorflow
from trainer.plan.devices import ON_HOSTS
from trainer.storage import foreign
from trainer.storage.lease import Lease
from trainer.storage.resume import check_exists, describe_finished
from trainer.storage.run_directory import choose, description_folder


def run(config: RunConfig, start: Start, *, write_plan_to: str | None = None) -> int:
    """Trains; returns the exit code. The plan is also written as JSON where `write_plan_to` says."""
    if config.job is not None:
        _run_task(config)
    if (finished := describe_finished(config)) is not None:
        print(finished)
        return exit_codes.OK
    check_exists(config.resume)
    _check_directory(config)
    if config.launch.name is Launch.docker:
        return _run_containers(config, start, write_plan_to)
    if config.launch.name is Launch.slurm and not config.cluster.hosts:
        return _submit(config, write_plan_to)
    if config.launch.name in ON_HOSTS:
        return _run_on_hosts(config, start, write_plan_to)
    # Importing TensorFlow overlaps with planning.
    with start.tasks(config.launch.warm_minutes) as tasks, description_folder() as described:
        config, made = planning.announce(config, described, tasks, write_to=write_plan_to)
        return launcher.run(PlannedRun(config, made, choose(config, described), start.at), tasks)


def _check_directory(config: RunConfig) -> None:
    if config.run is not None:
        foreign.check(Path(config.run).resolve())


def _run_containers(config: RunConfig, start: Start, write_plan_to: str | None) -> int:
    from trainer.launch.containers import launcher as containers  # imports docker
    from trainer.launch.containers.docker_errors import connect
    from trainer.launch.containers.inputs import with_absolute_paths
    from trainer.launch.containers.on_hosts import Engines
    from trainer.launch.containers.owners import check_readable

    client = None if config.cluster.hosts else connect()
    config, inputs = with_absolute_paths(config)
    check_readable([*inputs, *config.container.mounts])
    if client is None:
        with Engines(config.launch, config.cluster) as engines, description_folder() as described:
            config, made = planning.announce(config, described, machine=engines.machine(), write_to=write_plan_to)
            planned = PlannedRun(config, made, choose(config, described), start.at)
            return containers.run_on_hosts(planned, engines, inputs)
    with description_folder() as described:
        config, made = planning.announce(config, described, write_to=write_plan_to)
        return containers.run(PlannedRun(config, made, choose(config, described), start.at), client, inputs)


def _run_on_hosts(config: RunConfig, start: Start, write_plan_to: str | None) -> int:
    from trainer.launch.hosts import launcher as hosts

    with description_folder() as described:
        directory = choose(config, described)
        with hosts.connected(config, directory) as tasks:
            machine = hosts.machine_of(config, tasks)
            config, made = planning.announce(config, described, machine=machine, write_to=write_plan_to)
            return hosts.run(PlannedRun(config, made, directory, start.at), tasks)


def _submit(config: RunConfig, write_plan_to: str | None) -> int:
    from trainer.launch.slurm import launcher as jobs

    with description_folder() as described:
        # What is wrong with the model is said here, and not after a queue.
        config, _ = planning.announce(config, described, write_to=write_plan_to)
        return jobs.run(config.slurm, config.cluster, typed(), choose(config))


def _run_task(config: RunConfig) -> NoReturn:
    """Runs in this process the task that the config, or TF_CONFIG, names."""
    assert config.job is not None
    assert config.task is not None
    require_tensorflow()
    restart_as_task()
    with description_folder() as described:  # the task removes it: it never returns
        machine = replace(this_machine(), cores_of_task=slurm.cpus_of_task(os.environ))
        job, index = config.job, config.task
        config, made = planning.make(config, described, machine=machine)
        task, directory = made.task(job, index), choose(config, described)
        os.environ.update(task.environment(os.environ))
        gc.disable()  # a task collects from its first step on
        from trainer.task import process  # imports TensorFlow

        if not task.is_chief:  # only the chief writes
            process.run_task(config, made, directory, task.job, task.index)
        _check_directory(config)
        with Lease(directory):
            directory.write_inputs(config, made)
            process.run_task(config, made, directory, task.job, task.index)
