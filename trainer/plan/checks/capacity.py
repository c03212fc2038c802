"""Checks whether a machine has room for the tasks that would start on it. Pure: no TensorFlow."""

from collections.abc import Iterator

from trainer.config.cluster_size import ClusterSize
from trainer.config.schema import ClusterConfig
from trainer.config.words import count
from trainer.faults.problems import Problem
from trainer.plan.devices import Machine, tasks_of

TASKS_OF_A_CORE = 64
FILES, FILES_OF_A_TASK = 32, 3  # open in the launcher: for each task two ports that it holds, and a page it reads
ENOUGH_FILES = 1024
THREADS_OF_A_TASK = 50  # 52 to 72 were counted


def check_capacity(cluster: ClusterConfig, here: int, machine: Machine) -> Iterator[Problem]:
    """Yields a problem for each resource that is too small for the `here` tasks of a cluster on this machine."""
    tasks = tasks_of(cluster)
    yield from _check_cores(cluster, here, machine)
    files = FILES + FILES_OF_A_TASK * len(tasks)  # also in a task: it may talk to all others
    if machine.files is not None and files > machine.files:
        message = f"a process may open {machine.files} files, and {count(len(tasks), 'task')} need about {files}"
        remedy = f"type ulimit -n {max(files, ENOUGH_FILES)}, or choose a smaller cluster="
        yield Problem("ulimit -n", "over-capacity", message, remedy, about="ulimit")
    threads = THREADS_OF_A_TASK * here
    if machine.threads is not None and threads > machine.threads:
        message = f"{count(machine.threads, 'thread')} may run here, and {count(here, 'task')} need about {threads:,}"
        remedy = (
            f"choose a smaller cluster=, or allow more: ulimit -u {threads}, docker run --pids-limit {threads}, "
            f"sysctl kernel.pid_max={threads}"
        )
        yield Problem("ulimit -u", "over-capacity", message, remedy, about="ulimit")


def _check_cores(cluster: ClusterConfig, here: int, machine: Machine) -> Iterator[Problem]:
    most = TASKS_OF_A_CORE * machine.cores
    if here > most and not cluster.addresses:
        smaller = ClusterSize(min(cluster.ps, machine.cores), 2 * machine.cores, min(cluster.evaluator, 1))
        message = (
            f"cluster={cluster.name} is {count(here, 'task')} on {count(machine.cores, 'core')}; this machine starts "
            f"at most {most:,}, {TASKS_OF_A_CORE} per core"
        )
        remedy = f"e.g. cluster={smaller}; for tasks on several machines give cluster.hosts"
        yield Problem("cluster", "over-capacity", message, remedy)
