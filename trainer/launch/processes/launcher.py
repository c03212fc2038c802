"""Runs a plan as processes on this machine."""

import itertools
from contextlib import ExitStack
from dataclasses import replace

from trainer.faults.problems import ConfigError, Problem
from trainer.launch.attempts import PlannedRun
from trainer.launch.fault_hooks import FaultHooks
from trainer.launch.processes import isolation
from trainer.launch.processes.ports import HeldPorts
from trainer.launch.processes.tasks import ProcessTasks
from trainer.launch.run import supervise
from trainer.observe.machine import is_local
from trainer.observe.peers import UNIX, PeerError
from trainer.plan import addresses
from trainer.plan.devices import THIS_HOST
from trainer.plan.make import ANY_PORT
from trainer.plan.plan import Plan, Task
from trainer.plan.shared_memory import lay_out
from trainer.storage import cache
from trainer.storage.lease import Lease
from trainer.storage.run_directory import RunDirectory


def run(planned: PlannedRun, tasks: ProcessTasks, *, faults: FaultHooks | None = None) -> int:
    """Starts the plan's tasks as processes, and makes sure that all of them end; returns the code of `supervise`.

    Raises:
        ConfigError: if a task's address is on another machine, or the tasks must be isolated and cannot.
        PeerError: if a port that the config names is taken.
    """
    plan, directory = planned.plan, planned.directory
    with Lease(directory), ExitStack() as stack:
        stack.callback(isolation.remove_sockets, directory.pages)
        reason = isolation.why_not(planned.config, directory.pages)
        if reason == isolation.USER_CODE and cache.is_news("not-isolated"):
            print(f"not isolated: {reason}", flush=True)
        if reason:
            plan = _with_ports(plan, stack.enter_context(HeldPorts(2 * len(plan.tasks))))
        else:
            tasks.isolate()
            plan = _in_own_network(plan, directory)
        if plan.wire_format.is_shared:
            assert tasks.memory is not None
            sizes = plan.shards, plan.effective_strategy, plan.pushes
            stack.enter_context(lay_out(tasks.memory, *sizes, plan.table_layout))
        return supervise(planned._replace(plan=plan), tasks, faults=faults)


def _in_own_network(plan: Plan, directory: RunDirectory) -> Plan:
    """Gives each task a port of its isolated network, where all are free, and a socket for its status page."""
    ports = itertools.count(addresses.USUAL_PORT)

    def place(task: Task) -> Task:
        page = f"{UNIX}{directory.pages}/{task.job}-{task.index}"
        return replace(task, address=f"{THIS_HOST}:{next(ports)}" if task.address else "", control=page)

    return replace(plan, tasks=tuple(map(place, plan.tasks)))


def _with_ports(plan: Plan, ports: HeldPorts) -> Plan:
    """Gives a free port to every task without one; ports that the config names must be free, and on this machine."""
    free = iter(ports.ports)
    remote = [task for task in plan.tasks if not is_local(addresses.host_of(_address_of(task)))]
    if remote:
        raise ConfigError([_remote_address(task) for task in remote])

    def assign(address: str) -> str:
        host, _, port = address.rpartition(":")
        if port == str(ANY_PORT):
            return f"{host}:{next(free)}"
        try:
            ports.hold(int(port))
        except OSError as error:
            raise PeerError(
                f"{address} is taken ({error.strerror}); stop the program that listens there, or choose another"
            ) from error
        return address

    return replace(
        plan,
        tasks=tuple(
            replace(task, address=assign(task.address) if task.address else "", control=assign(task.control))
            for task in plan.tasks
        ),
    )


def _address_of(task: Task) -> str:
    """Returns where a task listens: an evaluator, or a single process, only has a status page."""
    return task.address or task.control


def _remote_address(task: Task) -> Problem:
    message = f"{_address_of(task)} is not an address of this machine, where all tasks would start"
    remedy = f"on the machine that has it, type the same command with job={task.job} task={task.index}"
    return Problem(f"cluster.addresses.{task.job}[{task.index}]", "not-available", message, remedy)
