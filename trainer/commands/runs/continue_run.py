"""trainer continue: starts a run again where it stopped, with its own config and the keys that are changed."""

import dataclasses
import os
from functools import reduce
from pathlib import Path
from typing import Any

from trainer.commands import train
from trainer.commands.runs.named import directory_of
from trainer.commands.start import Start
from trainer.config import keys
from trainer.config.command_line import typed
from trainer.config.schema import Launch, Mode, RunConfig
from trainer.faults.problems import ConfigError, Problem
from trainer.observe import runs
from trainer.observe.machine import this_machine
from trainer.plan import resolve, validate
from trainer.storage.lease import Lease
from trainer.storage.run_directory import RunDirectory

OF_THIS_COMMAND = ("mode", "run", "json")


def run(config: RunConfig, start: Start) -> int:
    """Trains on; returns the exit code of the run.

    Raises:
        ConfigError: if its config, with what was changed of it, cannot run here.
        RunInUseError: if it is running.
    """
    directory = directory_of(config.run)
    with Lease(directory):  # fails for a run that is under way before anything is planned
        pass
    stored = directory.read_config()
    if stored.job is not None:
        raise ConfigError([Problem("run", "not-supported", "a scheduler started its tasks", "start them there again")])
    if stored.cluster.hosts:
        stored.cluster.addresses = {}  # they follow from the hosts
    if stored.launch.name is Launch.slurm:
        stored.cluster.hosts = []  # the nodes of a job that has ended
    changed = [name for word in typed() if (name := word.partition("=")[0].lstrip("+")) not in OF_THIS_COMMAND]
    for name in changed:
        _change(stored, name, config)
    if "train.steps" in changed:
        stored.train.epochs = None
    stored.mode, stored.run, stored.resume = Mode.train, str(directory.path), "auto"
    _go_to_its_folder(directory)
    problems = resolve.resolve(stored, os.environ)
    problems += validate.validate(stored, this_machine(with_gpu_memory=bool(stored.device.gpus)))
    if problems:
        raise ConfigError(problems)
    return train.run(stored, Start(start.at))


def _change(stored: RunConfig, name: str, config: RunConfig) -> None:
    """Takes a key over from the config of the command line.

    Raises:
        ConfigError: if it is not a single key.
    """
    *sections, key = name.split(".")
    kind = keys.hint(name.split("."))
    if kind is None or dataclasses.is_dataclass(kind):
        raise ConfigError(
            [Problem(name, "malformed", "trainer continue changes single keys only", "e.g. train.steps=600")]
        )
    value: Any = reduce(getattr, [*sections, key], config)
    setattr(reduce(getattr, sections, stored), key, value)


def _go_to_its_folder(directory: RunDirectory) -> None:
    """Changes to the folder in which the run was started: paths of its config may be relative to that."""
    folder = (runs.read_status(directory).get("launcher") or {}).get("folder")
    if isinstance(folder, str) and folder and Path(folder).is_dir():
        os.chdir(folder)
