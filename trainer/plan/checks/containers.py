"""Checks a config whose tasks are containers; of the machine, it only reads whether paths exist."""

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path, PurePath

from trainer.config.schema import Launch, RunConfig
from trainer.config.typed import Mode, Target
from trainer.faults.problems import Problem
from trainer.plan.checks.devices import check_keys

MODES = (Mode.train, Mode.render, Mode.plan)
TMP = PurePath("/tmp")  # memory in a container; what lies below can be shown
OWN_PATHS = (
    TMP,
    *map(PurePath, ("/opt/libraries", "/opt/trainer", "/trainer", "/usr", "/etc", "/proc", "/sys", "/dev")),
)
LEAST_MIB = 512  # of a task: TensorFlow alone takes 400


def check_containers(config: RunConfig, mode: Mode, target: Target) -> Iterator[Problem]:
    """Yields the problems of a config that asks for containers; `target` is that of trainer render."""
    if config.launch.name is Launch.docker:
        yield from _check_launch(config, mode)
    if config.launch.name is Launch.docker or mode is Mode.render:
        yield from _check_mounts(config.container.mounts)
    finds_addresses = mode is Mode.render and target is Target.compose
    if finds_addresses and config.cluster.addresses and not config.cluster.hosts:
        remedy = "leave it out, or give the machines: cluster.hosts=[10.0.0.1,10.0.0.2]"
        yield Problem("cluster.addresses", "conflict", "a rendered run finds its own addresses", remedy)
    yield from check_keys(config.cluster, "container.memory_mib", config.container.memory_mib, least=LEAST_MIB)
    yield from check_keys(config.cluster, "container.cpus", config.container.cpus, least=0.1)


def _check_launch(config: RunConfig, mode: Mode) -> Iterator[Problem]:
    key, instead = "launch", "leave launch=docker out"
    if mode not in MODES:
        yield Problem(key, "not-supported", f"trainer {mode.value} runs processes on this machine", instead)
    if config.job is not None:
        message = f"job={config.job} runs one task in this process and starts no containers"
        yield Problem(key, "conflict", message, instead)
    elif config.cluster.addresses and not config.cluster.hosts:
        message = "cluster.addresses has no effect with launch=docker; containers get their own network"
        yield Problem(key, "no-effect", message, "leave out one of the two")


def _check_mounts(mounts: Sequence[str]) -> Iterator[Problem]:
    for path in mounts:
        if not Path(path).is_absolute() or ".." in Path(path).parts:
            message = f"{path!r} is not the absolute path of a file or directory"
            yield Problem("container.mounts", "malformed", message, f"e.g. container.mounts=[{Path(path).absolute()}]")
        elif not Path(path).exists():
            yield Problem("container.mounts", "not-found", f"{path} does not exist", "give a path of this machine")
    yield from check_paths("container.mounts", mounts)


def check_paths(key: str, paths: Iterable[str]) -> Iterator[Problem]:
    """Yields a problem for every path of the host that would hide a path of the container."""
    for path in map(PurePath, paths):
        hidden = [
            own for own in OWN_PATHS if path == own or path in own.parents or (own in path.parents and own != TMP)
        ]
        if hidden:
            message = f"{path} would hide {hidden[0]}, which is part of the container"
            yield Problem(key, "conflict", message, "put what tasks read into a folder of its own, e.g. below /data")
