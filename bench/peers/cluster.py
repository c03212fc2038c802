"""A peer's processes: the script starts itself once for each task, and ends with the first that ends."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from typing import NoReturn

from bench import processes
from trainer.launch.processes.ports import HeldPorts
from trainer.launch.processes.tasks import REUSE_PORT
from trainer.plan.environment import for_tasks

LOOK_EVERY_SECS = 0.05


def arguments(description: str) -> argparse.ArgumentParser:
    """Returns what every peer is told."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--workload", required=True, help="a model of the trainer, or of bench/workloads.py")
    parser.add_argument("--directory", required=True, help="where the steps are counted")
    parser.add_argument("--cores", type=int, required=True, help="that the workers share")
    parser.add_argument("--task", help="play this task, e.g. worker:0, instead of starting all")
    parser.add_argument("--ports", help="of all tasks, in the order of the cluster")
    return parser


def start(module: str, tasks: Sequence[str], *, is_tuned: bool) -> NoReturn:
    """Starts a process for each task, with the command line of this one, and ends as the first of them does.

    Args:
        is_tuned: gives them the environment of the trainer's own tasks.
    """
    environment = os.environ | REUSE_PORT | (for_tasks(os.environ) if is_tuned else {})
    with HeldPorts(len(tasks)) as held:
        ports = ",".join(map(str, held.ports))
        command = [sys.executable, "-m", module, *sys.argv[1:], f"--ports={ports}"]
        started = [processes.start([*command, f"--task={task}"], env=environment) for task in tasks]
        while all(process.poll() is None for process in started):
            time.sleep(LOOK_EVERY_SECS)
    for process in started:
        if process.poll() is None:
            process.kill()
    sys.exit(max(abs(process.wait()) for process in started))


def addresses(tasks: Sequence[str], ports: str) -> dict[str, list[str]]:
    """Addresses by job, as tf.train.ClusterSpec takes them."""
    jobs: dict[str, list[str]] = {}
    for task, port in zip(tasks, ports.split(","), strict=True):
        jobs.setdefault(task.partition(":")[0], []).append(f"127.0.0.1:{port}")
    return jobs


def index_of(task: str) -> int:
    return int(task.partition(":")[2])


def threads(cores: int, workers: int) -> Mapping[str, int]:
    """Returns the threads of a tuned worker, as the trainer divides them: intra for one operation, inter across."""
    return {"intra": max(1, cores // workers), "inter": 2}
