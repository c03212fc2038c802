"""Runs a plan as processes of several hosts."""

import os
import secrets
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

from trainer.config import versions
from trainer.config.schema import Launch, RunConfig
from trainer.config.words import count
from trainer.faults.problems import ConfigError, Problem
from trainer.launch import ssh
from trainer.launch.attempts import PlannedRun
from trainer.launch.hosts.connection import Connection
from trainer.launch.hosts.tasks import HostTasks
from trainer.launch.messages import TOKEN, HostFacts, NurseryOrder
from trainer.launch.run import supervise
from trainer.observe.machine import this_machine
from trainer.plan import addresses, slurm
from trainer.plan.devices import Machine, of_task
from trainer.plan.environment import VISIBLE
from trainer.plan.hosts import KEY, host_by_task
from trainer.plan.plan import Plan, Task
from trainer.storage.lease import Lease
from trainer.storage.run_directory import RunDirectory

ANSWER_SECS = 30.0  # for a host to answer, which it does before it imports TensorFlow
PORTS_OF_TASK = 2  # of its server and of its status page


@contextmanager
def connected(config: RunConfig, directory: RunDirectory) -> Iterator[HostTasks]:
    """Holds the run directory and starts a nursery on each host of the config; all of them end with the block.

    Raises:
        RunInUseError: if another run uses the directory.
    """
    with Lease(directory), _token(directory.path) as token:
        counts = Counter(host_by_task(config.cluster).values())
        orders = [
            NurseryOrder(host, str(directory.path), token, PORTS_OF_TASK * count) for host, count in counts.items()
        ]
        # Each host says which GPUs its tasks may use; this machine's limit does not hold for them.
        os.environ.pop(VISIBLE, None)
        connect = _by_step if config.launch.name is Launch.slurm else partial(_by_ssh, ssh.command(config.launch.ssh))
        with HostTasks(orders, connect) as tasks:
            yield tasks


def machine_of(config: RunConfig, tasks: HostTasks) -> Machine:
    """Returns the resources of several hosts, once all have answered and meet the config's requirements.

    Raises:
        PeerError: if a host cannot be reached.
        ConfigError: if one has another trainer or too few GPUs, or does not see the run directory.
    """
    facts = tasks.hosts(ANSWER_SECS)
    if problems := [*_compare(facts), *_check_gpus(config, facts)]:
        raise ConfigError(problems)
    cores_of = {host: one.cores for host, one in facts.items()}
    return replace(this_machine(), cores=min(cores_of.values()), cores_of=cores_of)


def run(planned: PlannedRun, tasks: HostTasks) -> int:
    """Starts the plan's tasks on their hosts, and makes sure that all of them end; returns the code of `supervise`.

    The run directory is held by `connected`.
    """
    host_of = host_by_task(planned.config.cluster)
    tasks.place(host_of)
    facts = tasks.hosts(ANSWER_SECS)
    plan = _with_ports(planned.plan, host_of, {host: one.ports for host, one in facts.items()})
    return supervise(planned._replace(plan=plan), tasks)


def _by_step(order: NurseryOrder) -> Connection:
    """Returns the prefix that runs a command in a step of this Slurm job, with all its resources on the node."""
    cpus = dict(zip(slurm.nodes(os.environ), slurm.cpus_of_nodes(os.environ), strict=False)).get(order.host)
    one = [
        "--overlap",
        "--nodes=1",
        "--ntasks=1",
        "--mem=0",
        f"--nodelist={order.host}",
        "--quiet",
        "--kill-on-bad-exit",
    ]
    return Connection(["srun", *one, *([f"--cpus-per-task={cpus}"] if cpus else []), "sh", "-c"], order)


def _by_ssh(command: Sequence[str], order: NurseryOrder) -> Connection:
    return Connection([*command, order.host], order)


@contextmanager
def _token(run: Path) -> Iterator[str]:
    """Creates a file in the run directory, by which every host sees whether it is the same directory."""
    path, token = run / TOKEN, secrets.token_hex(8)
    path.parent.mkdir(exist_ok=True)
    path.write_text(token)
    try:
        yield token
    finally:
        path.unlink(missing_ok=True)
        with suppress(OSError):  # a host that cannot be reached has left a file there, by which its nursery is found
            path.parent.rmdir()


def _compare(facts: Mapping[str, HostFacts]) -> Iterator[Problem]:
    """Yields the differences between a host and this machine."""
    for host, one in facts.items():
        if not one.sees_run:
            message = f"{host} does not see this machine's run directory"
            yield Problem(KEY, "mismatch", message, "type run=PATH with a folder that all hosts share")
        if one.version != versions.describe():
            message = f"{host} has {one.version}, but this machine has {versions.describe()}"
            yield Problem(KEY, "mismatch", message, "install the same versions on all hosts")
        elif one.code != versions.code_hash():
            message = f"{host} runs different trainer code"
            yield Problem(KEY, "mismatch", message, "install the same version on all hosts")


def _check_gpus(config: RunConfig, facts: Mapping[str, HostFacts]) -> Iterator[Problem]:
    for name, host in host_by_task(config.cluster).items():
        job, _, index = name.partition(":")
        highest = max(of_task(config.device.gpus, job, int(index)) or [-1])
        if highest >= facts[host].gpus:
            has = count(facts[host].gpus, "GPU")
            message = f"{name} is assigned GPU {highest}, but {host} has only {has}"
            yield Problem("device.gpus", "not-available", message, "indices start at 0")


def _with_ports(plan: Plan, host_of: Mapping[str, str], ports: Mapping[str, Sequence[int]]) -> Plan:
    """Gives every task two of the ports that its host holds."""
    free = {host: iter(held) for host, held in ports.items()}

    def place(task: Task) -> Task:
        host = host_of[task.name]
        control = addresses.join(host, next(free[host]))
        address = addresses.join(host, next(free[host]))
        return replace(task, address=address if task.address else "", control=control)

    return replace(plan, tasks=tuple(map(place, plan.tasks)))
