"""trainer render: writes or prints the files from which Docker Compose starts a run."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from trainer.config import shell
from trainer.config.command_line import spelled, typed
from trainer.config.schema import RunConfig
from trainer.config.typed import KubernetesConfig, Mode, Target
from trainer.faults import exit_codes
from trainer.launch.containers import compose_file
from trainer.launch.containers.inputs import with_absolute_paths
from trainer.launch.containers.owners import check_readable, lend, user_of_tasks
from trainer.launch.containers.spec import NOBODY, ContainerSpec, container_specs, inside, project_of
from trainer.launch.planning import make
from trainer.launch.schedulers import jobs, scheduled, stack_file
from trainer.plan.hosts import host_by_task
from trainer.plan.plan import Plan
from trainer.storage import changes, foreign, resume
from trainer.storage.atomic import write_atomically
from trainer.storage.lease import Lease
from trainer.storage.run_directory import RunDirectory, choose, description_folder

UP = "docker compose -f {} up --abort-on-container-failure"


def run(config: RunConfig, target: Target, kubernetes: KubernetesConfig) -> int:
    """Writes the run into run=PATH, or prints its Compose file; always prints other targets; returns 0."""
    if target is not Target.compose:
        return show_for_scheduler(config, target, kubernetes)
    config, inputs = with_absolute_paths(config)
    hosts = host_by_task(config.cluster)
    if config.run is None:
        return show(*make(config, mode=Mode.render), inputs, hosts)
    check_readable([*inputs, *config.container.mounts])
    foreign.check(Path(config.run).resolve())
    with description_folder() as described:
        config, plan = make(config, described, mode=Mode.render)
        return write(config, plan, choose(config, described), inputs, hosts)


def show(config: RunConfig, plan: Plan, inputs: Sequence[str], hosts: Mapping[str, str]) -> int:
    """Prints the Compose file of a run, for any directory with its config.yaml and plan.json; returns 0."""
    specs = container_specs(config, plan, run=".", inputs=inputs, hosts=hosts)
    print(_text(specs, plan, name=f"trainer-{plan.cluster}", user=(NOBODY, NOBODY)), end="")
    return exit_codes.OK


def show_for_scheduler(config: RunConfig, target: Target, kubernetes: KubernetesConfig) -> int:
    """Prints the objects of a run for a scheduler; returns 0."""
    with description_folder() as described:
        config, plan = make(config, described, mode=Mode.render)
    run = scheduled.describe(config, plan, typed())
    if target is Target.stack:
        folder = str(Path(config.run).resolve().parent if config.run else Path("runs").resolve())
        objects = [stack_file.render(run, folder)]
    else:
        objects_of = jobs.of_jobset if target is Target.kubernetes else jobs.of_jobs
        objects = objects_of(run, kubernetes)
    print(scheduled.header(f"{plan.cluster}: {plan.describe()}", spelled(typed())), end="")
    print(yaml.safe_dump_all(objects, sort_keys=False, width=120), end="")
    return exit_codes.OK


def write(
    config: RunConfig, plan: Plan, directory: RunDirectory, inputs: Sequence[str], hosts: Mapping[str, str]
) -> int:
    """Writes config, plan and Compose file into the run directory, and says how to start it; returns 0.

    Raises:
        RunInUseError: if a run uses that directory.
    """
    path = str(directory.path)
    specs = container_specs(config, plan, run=".", inputs=inputs, hosts=hosts)
    with Lease(directory):
        checkpoint = resume.find(config.resume, directory, steps=plan.steps)
        if checkpoint is not None:
            resume.check_model(checkpoint, config, plan)
            changes.check(checkpoint, config, directory, steps=plan.steps)
            resume.check_data(checkpoint, config, plan)
        directory.write_inputs(config, inside(plan, on_hosts=bool(hosts)))
        for host in dict.fromkeys(container.host for container in specs):
            of_host = [container for container in specs if container.host == host]
            text = _text(of_host, plan, name=project_of(path), user=user_of_tasks())
            write_atomically(directory.path / _file(host), text)
    lend(path)
    for line in _commands(path, specs):
        print(line)
    return exit_codes.OK


def _file(host: str | None) -> str:
    return "compose.yaml" if host is None else f"compose.{host}.yaml"


def _text(specs: Sequence[ContainerSpec], plan: Plan, *, name: str, user: tuple[int, int]) -> str:
    overrides = shell.joined(spelled(typed()))
    return compose_file.render(
        specs, name=name, words=f"{plan.cluster}: {plan.describe()}", overrides=overrides, user=user
    )


def _commands(path: str, specs: Sequence[ContainerSpec]) -> list[str]:
    hosts = list(dict.fromkeys(container.host for container in specs if container.host))
    if not hosts:
        return [f"{path}/compose.yaml", f"start it: {UP.format(shell.joined([f'{path}/compose.yaml']))}"]
    folder = path.rpartition("/")[2]
    images = " and ".join(sorted({container.image for container in specs}))
    lines = [
        f"{path}: copy it to each host, which must have {images} (make image, or docker save | ssh HOST docker load),",
        "and start all of them:",
    ]
    for host in hosts:
        up = UP.format(shell.joined([f"{folder}/{_file(host)}"]))
        command = f"TRAINER_UID=$(id -u) TRAINER_GID=$(id -g) {up}"
        to = f"[{host}]" if ":" in host else host
        lines.append(f"    scp -r {shell.joined([path])} {to}: && ssh -t {host} {shell.joined([command])}")
    return [*lines, f"{_chiefs_host(specs)} has the chief, and keeps the results"]


def _chiefs_host(specs: Sequence[ContainerSpec]) -> str:
    return next(str(container.host) for container in specs if container.task == "worker:0")
