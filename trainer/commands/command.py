"""What a command does: compose the config, then what its mode says; most often make the plan, and run it."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import sys
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from trainer.commands import selftest
from trainer.commands.chaos import check as chaos_check
from trainer.config import compose
from trainer.config.schema import Launch, Mode, RunConfig
from trainer.faults import exit_codes
from trainer.faults.problems import ConfigError, Problem
from trainer.launch.describe import describe
from trainer.observe.machine import this_machine
from trainer.plan import hosts, make, plan, validate
from trainer.plan.checks import containers as render_checks
from trainer.plan.description import DescriptionError, Question
from trainer.plan.tf_config import adopt_tf_config

if TYPE_CHECKING:
    from trainer.launch.processes.tasks import ProcessTasks


def run(started_at: float, early: ProcessTasks | None) -> NoReturn:
    """Does what the command line says, and ends the process.

    Args:
        started_at: when the command was typed (Unix time, seconds).
        early: a nursery, for the first run.
    """
    first = iter([(started_at, early)])  # of several runs, the others start when the one before has ended
    compose.run(lambda config: main(config, *next(first, (time.time(), None))), check)


def check(config: RunConfig) -> list[Problem]:
    """What keeps a config from being used, beyond its single keys; a scheduler's TF_CONFIG is taken in."""
    if config.mode in (Mode.doctor, Mode.clean):  # the doctor tells them beside what it finds wrong with the machine
        return []
    if config.mode is Mode.selftest:
        selftest.adapt(config)
    if config.mode is Mode.bench:
        bench = _import_bench()
        message = "bench is a part of the trainer's checkout, and this trainer was installed without it"
        lacking = Problem("mode", message, "type make bench in a checkout")
        return [lacking] if bench is None else list(bench.check(config))
    if config.mode is Mode.check:  # whose config is the one that the run left
        lacking = Problem("run", "mode=check reads what a run left, and none is named", "type run=PATH, its directory")
        return [] if config.run else [lacking]
    return find_problems(config)


def _import_bench() -> Any:
    """The package `bench` of the checkout that this package is of; none where the trainer was installed without it."""
    root = Path(__file__).resolve().parents[2]
    if not (root / "bench" / "contestants.py").is_file():
        return None
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return importlib.import_module("bench")


def find_problems(config: RunConfig) -> list[Problem]:
    tf_config = os.environ.get("TF_CONFIG")
    problems = adopt_tf_config(config, tf_config) if tf_config else []
    problems += [*hosts.adopt(config), *render_checks.check(config)]
    problems += validate.check(config, this_machine(with_gpu_memory=bool(config.device.gpus)))
    if config.mode is Mode.chaos:
        problems += chaos_check.check(config)
    return problems


def main(config: RunConfig, started_at: float, early: ProcessTasks | None = None) -> int:
    """Does what the config says; returns the exit code."""
    logging.basicConfig(stream=sys.stdout, format="%(message)s")
    logging.getLogger("trainer").setLevel(logging.INFO)
    try:
        return act(config, started_at, early)
    except (ConfigError, DescriptionError) as error:
        print(f"trainer: {error}", file=sys.stderr)
        return exit_codes.CONFIG if isinstance(error, ConfigError) else error.exit_code
    except KeyboardInterrupt:
        return exit_codes.INTERRUPTED
    except Exception as error:
        code = exit_codes.exit_code_of(error)
        if code == exit_codes.INTERNAL:
            traceback.print_exc()
        print(f"trainer: {error}", file=sys.stderr)
        return code


def act(config: RunConfig, started_at: float, early: ProcessTasks | None) -> int:
    trains_here = config.mode in (Mode.train, Mode.selftest) and config.job is None and config.launch is Launch.local
    if early is not None and not trains_here:
        early.discard()
    if config.mode is Mode.plan:
        return show_plan(config)
    if config.mode is Mode.doctor:
        return look_at_machine(config)
    if config.mode is Mode.matpow:
        from trainer.commands.matpow import run

        return run(config.matpow, seed=config.seed)
    if config.mode is Mode.check:
        from trainer.commands.check.claims import run as check_run

        assert config.run is not None
        return check_run(config.run)
    if config.mode is Mode.chaos:
        return train_under_faults(config)
    if config.mode is Mode.bench:
        return int(_import_bench().run(config))
    if config.mode is Mode.render:
        return write_down(config)
    if config.mode is Mode.clean:
        from trainer.launch.containers.launcher import clean

        return clean()
    if config.mode is Mode.selftest:
        return selftest.run(config, lambda adapted: train(adapted, started_at, early))
    return train(config, started_at, early)


def train(config: RunConfig, started_at: float, early: ProcessTasks | None) -> int:
    """Runs all tasks, on this machine; or, where the config says who this process is, plays that task."""
    if config.job is not None:
        return train_one(config)
    if config.launch is Launch.docker:
        return train_in_containers(config, started_at)
    return train_all(config, started_at, early)


def train_all(config: RunConfig, started_at: float, early: ProcessTasks | None) -> int:
    from trainer.launch.processes import launcher
    from trainer.launch.processes.tasks import ProcessTasks
    from trainer.storage.run_directory import choose

    with early or ProcessTasks() as tasks:  # its import of TensorFlow overlaps with the planning
        made = _make_plan(config, tasks)
        return launcher.run(config, made, choose(config), tasks, started_at=started_at)


def train_in_containers(config: RunConfig, started_at: float) -> int:
    from trainer.launch.containers import launcher
    from trainer.launch.containers.docker_errors import connect
    from trainer.launch.containers.inputs import with_absolute_paths
    from trainer.launch.containers.owners import check_readable
    from trainer.storage.run_directory import choose

    client = connect()
    config, inputs = with_absolute_paths(config)
    check_readable([*inputs, *config.container.mounts])
    made = _make_plan(config)
    return launcher.run(config, made, choose(config), client, inputs, started_at=started_at)


def write_down(config: RunConfig) -> int:
    from trainer.commands import render
    from trainer.launch.containers.inputs import with_absolute_paths
    from trainer.launch.containers.owners import check_readable
    from trainer.storage.run_directory import choose

    config, inputs = with_absolute_paths(config)
    of = hosts.host_by_task(config)
    made = make.make_plan(config, describe(_question(config)), this_machine())
    if config.run is None:
        return render.show(config, made, inputs, of)
    check_readable([*inputs, *config.container.mounts])
    return render.write(config, made, choose(config), inputs, of)


def train_under_faults(config: RunConfig) -> int:
    from trainer.commands.chaos import runner
    from trainer.launch.processes.tasks import ProcessTasks
    from trainer.storage.run_directory import choose

    config = chaos_check.adapted(config)
    with ProcessTasks() as tasks:  # one for all runs
        return runner.run(config, _make_plan(config, tasks), choose(config), tasks)


def _make_plan(config: RunConfig, tasks: ProcessTasks | None = None) -> plan.Plan:
    """The plan of a run, told in words."""
    child = tasks.describe if tasks and tasks.can_describe else None
    made = make.make_plan(config, describe(_question(config), child), this_machine())
    if config.plan.json is not None:
        from trainer.plan import page

        page.write_json(made, config.plan.json)
    print(made.describe(), flush=True)
    return made


def train_one(config: RunConfig) -> NoReturn:
    from trainer.storage.lease import Lease
    from trainer.storage.run_directory import choose

    assert config.job is not None
    assert config.task is not None
    os.environ.setdefault("grpc_proxy", "")  # with http_proxy set, TensorFlow's gRPC would hang
    made = make.make_plan(config, describe(_question(config)), this_machine())
    me, directory = made.task(config.job, config.task), choose(config)
    os.environ.update(me.environment(os.environ))
    gc.disable()  # a task collects from its first step on
    from trainer.task import process  # imports TensorFlow

    if not me.is_chief:  # only the chief writes
        process.play(config, made, directory, me.job, me.index)
    with Lease(directory):
        directory.write_inputs(config, made)
        process.play(config, made, directory, me.job, me.index)


def show_plan(config: RunConfig) -> int:
    from trainer.plan import page
    from trainer.plan.forecast import step_time

    description, machine = describe(_question(config)), this_machine()
    made = make.make_plan(config, description, machine)
    expected, workload = step_time.expect(config, made, description, machine)
    page.show(made, (expected, workload))
    if config.plan.json is not None:
        page.write_json(made, config.plan.json, expected)
    return exit_codes.OK


def look_at_machine(config: RunConfig) -> int:
    from trainer.commands.doctor import probe

    problems = find_problems(config)  # takes the cluster of TF_CONFIG in
    cluster, gpus = config.cluster, any(config.device.gpus.values())
    task = f"{config.job}:{config.task}"
    return probe.run(probe.Wanted(problems, cluster.name, cluster.addresses, task, config.run, gpus))


def _question(config: RunConfig) -> Question:
    return Question.about(
        config.model, config.data, user=config.user, seed=config.seed, precision=config.train.precision.value
    )
