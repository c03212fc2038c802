"""trainer continue: restarts a run where it stopped, with its own config and the changed keys."""

import dataclasses
import os
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any, cast

from trainer.commands import train
from trainer.commands.runs.named import directory_of
from trainer.commands.start import Start
from trainer.config import keys
from trainer.config.command_line import typed
from trainer.config.schema import Launch, RunConfig
from trainer.faults.problems import ConfigError, Problem
from trainer.observe import runs
from trainer.observe.machine import this_machine
from trainer.plan import resolve, validate
from trainer.storage.lease import Lease
from trainer.storage.run_directory import RunDirectory

OF_THIS_COMMAND = ("mode", "run", "json")


def run(config: RunConfig, start: Start, *, write_plan_to: str | None = None) -> int:
    """Continues the run; returns its exit code.

    Raises:
        ConfigError: if its config, with the changed keys, cannot run here.
        RunInUseError: if it is running.
    """
    directory = directory_of(config.run)
    with Lease(directory):  # fails for a run that is under way before anything is planned
        pass
    stored = directory.read_config()
    if stored.job is not None:
        raise ConfigError([Problem("run", "not-supported", "a scheduler started its tasks", "start them there again")])
    cluster = stored.cluster
    if cluster.hosts:
        cluster = replace(cluster, addresses={})  # they follow from the hosts
    if stored.launch.name is Launch.slurm:
        cluster = replace(cluster, hosts=[])  # the nodes of a job that has ended
    stored = replace(stored, cluster=cluster, run=str(directory.path), resume="auto")
    changed = [name for word in typed() if (name := word.partition("=")[0].lstrip("+")) not in OF_THIS_COMMAND]
    for name in changed:
        stored = _changed(stored, name, config)
    if "train.steps" in changed:
        stored = replace(stored, train=replace(stored.train, epochs=None))
    _go_to_its_folder(directory)
    stored, problems = resolve.resolve(stored, os.environ)
    problems += validate.validate(stored, this_machine(with_gpu_memory=bool(stored.device.gpus)))
    if problems:
        raise ConfigError(problems)
    return train.run(stored, Start(start.at), write_plan_to=write_plan_to)


def _changed(stored: RunConfig, name: str, config: RunConfig) -> RunConfig:
    """Returns the stored config with a key set as on the command line.

    Raises:
        ConfigError: if it is not a single key.
    """
    path = name.split(".")
    kind = keys.hint(path)
    if kind is None or dataclasses.is_dataclass(kind):
        message = "trainer continue changes single keys only"
        raise ConfigError([Problem(name, "malformed", message, "e.g. train.steps=600")])
    value: Any = reduce(getattr, path, config)
    for *sections, key in (path[:end] for end in range(len(path), 0, -1)):
        section: Any = reduce(getattr, sections, stored)
        value = replace(section, **{key: value})
    return cast(RunConfig, value)


def _go_to_its_folder(directory: RunDirectory) -> None:
    """Changes to the folder in which the run was started: paths in its config may be relative to it."""
    folder = (runs.read_status(directory).get("launcher") or {}).get("folder")
    if isinstance(folder, str) and folder and Path(folder).is_dir():
        os.chdir(folder)
