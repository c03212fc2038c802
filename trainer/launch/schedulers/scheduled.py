"""Describes a run for a scheduler: its tasks by name, with the command of each.

No launcher follows such a run: every task finds its role in TF_CONFIG, and the scheduler restarts those that end.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath

from trainer.config import shell
from trainer.config.schema import RunConfig
from trainer.launch.containers.spec import CPU_IMAGE, GPU_IMAGE
from trainer.plan.addresses import JOBS, port_of
from trainer.plan.devices import of_task
from trainer.plan.environment import for_tasks
from trainer.plan.plan import Plan, Task

RUNS = "/runs"  # where tasks see the folder of all runs
USER_CODE = "/trainer/user"  # where they see the file of user=
COMMAND = ("python3", "-m", "trainer")
NOT_OF_TASKS = re.compile(r"\+*(mode|target|run|user|launch|cluster\.hosts|device\.gpus|plan\.json)=.*")
ROLL_CALL = "timeouts.roll_call_secs"
PATIENCE_SECS = 600  # of tasks for each other: Kubernetes starts a task again after up to 360 s, and may pull its image
LONGEST_NAME = 40  # of a run: with that of a task behind it, a host name has 63 characters at most


@dataclass(frozen=True)
class ScheduledTask:
    """One task that a scheduler starts."""

    name: str  # worker-0
    job: str
    index: int
    port: int  # of its TensorFlow server
    image: str
    gpus: int
    memory_mib: int | None
    cpus: float | None
    tmp_mib: int
    writes: bool  # into the run directory
    stop_grace_secs: float


@dataclass(frozen=True)
class ScheduledRun:
    """A run that a scheduler starts."""

    name: str
    tasks: tuple[ScheduledTask, ...]
    command: tuple[str, ...]
    user_file: str | None  # path here of the file that all tasks must have in USER_CODE

    def of_job(self, job: str) -> list[ScheduledTask]:
        return [task for task in self.tasks if task.job == job]


def describe(config: RunConfig, plan: Plan, overrides: Sequence[str]) -> ScheduledRun:
    """Describes a run for a scheduler.

    Args:
        overrides: of the command that renders it; each task gets those that concern it.
    """
    name = name_of(config)
    own = [text for text in overrides if not NOT_OF_TASKS.fullmatch(text)]
    if not any(text.lstrip("+").startswith(f"{ROLL_CALL}=") for text in own):
        own.append(f"{ROLL_CALL}={max(PATIENCE_SECS, config.timeouts.roll_call_secs):g}")
    if config.user is not None:
        own.append(f"user={USER_CODE}/{PurePath(config.user).name}")
    if gpus := {len(task.gpus) for task in plan.workers if task.gpus}:
        own.append(f"device.gpus={{worker:[{','.join(map(str, range(max(gpus))))}]}}")  # counted from 0 in each pod
    command = (*COMMAND, *own, f"run={RUNS}/{name}")
    return ScheduledRun(
        name, tuple(_task(config, task, port_of(n)) for n, task in enumerate(plan.tasks)), command, config.user
    )


def name_of(config: RunConfig) -> str:
    """Returns a name that may be part of a host name."""
    given = PurePath(config.run).name if config.run else f"{config.name}-{config.cluster.name}"
    return re.sub(r"[^a-z0-9-]+", "-", given.lower()).strip("-")[:LONGEST_NAME].strip("-") or "run"


def _task(config: RunConfig, task: Task, port: int) -> ScheduledTask:
    return ScheduledTask(
        name=f"{task.job}-{task.index}",
        job=task.job,
        index=task.index,
        port=port,
        image=config.container.image or (GPU_IMAGE if task.gpus else CPU_IMAGE),
        gpus=len(task.gpus),
        memory_mib=of_task(config.container.memory_mib, task.job, task.index),
        cpus=of_task(config.container.cpus, task.job, task.index),
        tmp_mib=config.container.tmp_mib,
        writes=task.is_chief or task.job == "evaluator",
        stop_grace_secs=config.timeouts.stop_grace_secs
        + 30,  # the workers wait for the chief, and a save takes a while
    )


def tf_config(run: ScheduledRun, addresses: Mapping[str, str], job: str, index: int | str) -> str:
    """Returns the TF_CONFIG of a task.

    Args:
        addresses: "host:port" by the name of a task.
        index: a number, or a text that the scheduler replaces by one.
    """
    cluster = {name: [addresses[task.name] for task in run.of_job(name)] for name in JOBS if run.of_job(name)}
    return json.dumps({"cluster": cluster, "task": {"type": job, "index": index}})


def environment(run: ScheduledRun, task: ScheduledTask, addresses: Mapping[str, str]) -> dict[str, str]:
    """Returns variables of a task that has its own host name."""
    return for_tasks(os.environ) | {"TF_CONFIG": tf_config(run, addresses, task.job, task.index)}


def header(words: str, overrides: Sequence[str]) -> str:
    """Returns the first lines of a rendered file."""
    return f"# {words}\n# Made by `python -m trainer {shell.joined(overrides)}`.\n"
