"""mode=train: trains as processes of this machine, as containers, or as the one task that the config names."""

import gc
import os
from typing import NoReturn

from trainer.commands import plan
from trainer.commands.start import Start
from trainer.config.schema import Launch, RunConfig
from trainer.faults import exit_codes
from trainer.launch.processes import launcher
from trainer.storage.lease import Lease
from trainer.storage.resume import check_exists, describe_finished
from trainer.storage.run_directory import choose, description_folder


def run(config: RunConfig, start: Start) -> int:
    """Trains; returns the exit code."""
    if config.job is not None:
        _run_task(config)
    if (finished := describe_finished(config)) is not None:
        print(finished)
        return exit_codes.OK
    check_exists(config.resume)
    if config.launch.name is Launch.docker:
        return _run_containers(config, start)
    # Importing TensorFlow overlaps with planning.
    with start.tasks(config.launch.warm_minutes or 0.0) as tasks, description_folder() as described:
        made = plan.announce(config, described, tasks)
        return launcher.run(config, made, choose(config, described), tasks, started_at=start.at)


def _run_containers(config: RunConfig, start: Start) -> int:
    from trainer.launch.containers import launcher as containers  # imports docker
    from trainer.launch.containers.docker_errors import connect
    from trainer.launch.containers.inputs import with_absolute_paths
    from trainer.launch.containers.owners import check_readable

    client = connect()
    config, inputs = with_absolute_paths(config)
    check_readable([*inputs, *config.container.mounts])
    with description_folder() as described:
        made = plan.announce(config, described)
        return containers.run(config, made, choose(config, described), client, inputs, started_at=start.at)


def _run_task(config: RunConfig) -> NoReturn:
    """Runs the task that the config, or TF_CONFIG, names as this process."""
    assert config.job is not None
    assert config.task is not None
    os.environ.setdefault("grpc_proxy", "")  # with http_proxy set, TensorFlow's gRPC would hang
    with description_folder() as described:  # the task removes it: it never returns
        made = plan.make(config, described)
        task, directory = made.task(config.job, config.task), choose(config, described)
        os.environ.update(task.environment(os.environ))
        gc.disable()  # a task collects from its first step on
        from trainer.task import process  # imports TensorFlow

        if not task.is_chief:  # only the chief writes
            process.run_task(config, made, directory, task.job, task.index)
        with Lease(directory):
            directory.write_inputs(config, made)
            process.run_task(config, made, directory, task.job, task.index)
