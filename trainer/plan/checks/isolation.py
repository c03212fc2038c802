"""Checks whether the tasks of a config can use an isolated network. Pure."""

from collections.abc import Iterator

from trainer.config.schema import Isolate, Launch, RunConfig
from trainer.config.typed import Mode
from trainer.faults.problems import Problem
from trainer.plan.devices import ON_HOSTS


def why_not(config: RunConfig, mode: Mode) -> str:
    """Returns why the tasks must reach others, or others them; empty if an isolated network is enough."""
    if config.launch.name is Launch.docker or mode is Mode.render:
        return "containers always have their own network"
    if config.launch.name in ON_HOSTS:
        return "the tasks of several machines must reach each other"
    if config.job is not None:
        return "this process runs one task, which must reach the others"
    if config.cluster.addresses or config.cluster.hosts:
        return "cluster.addresses says where others reach the tasks"
    return ""


def check_isolation(config: RunConfig, mode: Mode) -> Iterator[Problem]:
    """Yields a problem if an isolated network is asked for but impossible."""
    if config.security.isolate is Isolate.always and (reason := why_not(config, mode)):
        message = f"this machine cannot isolate runs: {reason}"
        yield Problem("security.isolate", "not-available", message, "leave it out")
