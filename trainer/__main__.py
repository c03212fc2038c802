"""`python -m trainer`: compose the config, make the plan, show it or run it."""

from __future__ import annotations

import time

STARTED_AT = time.time()

import os
import sys
import traceback
from typing import NoReturn

from trainer import addresses, compose, exit_codes, plan
from trainer.config import ConfigError, Mode, Problem, RunConfig
from trainer.describe import DescriptionError, Question, describe
from trainer.machine import this_machine


def check(config: RunConfig) -> list[Problem]:
    """What is wrong with a config beyond its single keys; a scheduler's TF_CONFIG is taken in."""
    tf_config = os.environ.get("TF_CONFIG")
    problems = addresses.adopt_tf_config(config, tf_config) if tf_config else []
    return problems + plan.check(config, this_machine())


def main(config: RunConfig, *, started_at: float) -> int:
    """Does what the config says; returns the exit code."""
    try:
        return show_plan(config) if config.mode is Mode.plan else train(config, started_at)
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


def train(config: RunConfig, started_at: float) -> int:
    """Runs all tasks as processes of this machine; or, where the config says who this process is, plays that task."""
    return train_one(config) if config.job is not None else train_all(config, started_at)


def train_all(config: RunConfig, started_at: float) -> int:
    from trainer import plan_page
    from trainer.launch import local
    from trainer.launch.tasks import Tasks
    from trainer.run_directory import choose

    with Tasks() as tasks:  # its import of TensorFlow overlaps with the planning
        child = tasks.describe if tasks.can_describe else None
        made = plan.make_plan(config, describe(_question(config), child), this_machine())
        if config.plan.json is not None:
            plan_page.write_json(made, config.plan.json)
        print(made.in_words(), flush=True)
        return local.run(config, made, choose(config), tasks, started_at=started_at)


def train_one(config: RunConfig) -> NoReturn:
    from trainer.run_directory import Lease, choose

    assert config.job is not None
    assert config.task is not None
    os.environ.setdefault("grpc_proxy", "")  # with http_proxy set, TensorFlow's gRPC would hang
    made = plan.make_plan(config, describe(_question(config)), this_machine())
    me, directory = made.task(config.job, config.task), choose(config)
    os.environ.update(me.environment())
    from trainer import task  # imports TensorFlow

    if not me.is_chief:  # only the chief writes
        task.play(config, made, directory, me.job, me.index)
    with Lease(directory):
        directory.write_inputs(config, made)
        task.play(config, made, directory, me.job, me.index)


def show_plan(config: RunConfig) -> int:
    from trainer import plan_page

    made = plan.make_plan(config, describe(_question(config)), this_machine())
    plan_page.show(made)
    if config.plan.json is not None:
        plan_page.write_json(made, config.plan.json)
    return exit_codes.OK


def _question(config: RunConfig) -> Question:
    return Question.about(config.model, config.data, user=config.user, seed=config.seed)


def console() -> None:
    """The command line, for `python -m trainer` and the console script."""
    first = iter([STARTED_AT])  # of several runs, the others start when the one before has ended
    compose.run(lambda config: main(config, started_at=next(first, None) or time.time()), check)


if __name__ == "__main__":
    console()
