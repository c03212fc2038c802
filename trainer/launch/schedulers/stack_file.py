"""Renders a run as a stack of Docker Swarm, with a one-off service for each task."""

from trainer.launch.containers.compose_file import Section, literal
from trainer.launch.containers.spec import NOBODY, TASK_LABEL
from trainer.launch.schedulers import scheduled
from trainer.launch.schedulers.scheduled import RUNS, USER_CODE, ScheduledRun, ScheduledTask

ATTEMPTS = 10  # a task that leaves because another did counts too


def render(run: ScheduledRun, folder: str) -> Section:
    """Returns the file's content.

    Args:
        folder: of all runs, which the hosts of the chief and of the evaluator share.
    """
    at = {task.name: f"{task.name}:{task.port}" for task in run.tasks}
    services = {task.name: _service(run, task, scheduled.environment(run, task, at), folder) for task in run.tasks}
    file: Section = {
        "version": "3.9",
        "services": services,
        "networks": {"cluster": {"driver": "overlay", "internal": True}},
    }
    if run.user_file is not None:
        file["configs"] = {"user": {"file": literal(run.user_file)}}
    return file


def _service(run: ScheduledRun, task: ScheduledTask, environment: dict[str, str], folder: str) -> Section:
    service: Section = {
        "image": task.image,
        "entrypoint": [literal(word) for word in run.command],
        "environment": environment,
        "user": f"{NOBODY}:{NOBODY}",
        "init": True,
        "read_only": True,
        "cap_drop": ["ALL"],
        "networks": ["cluster"],
        "volumes": [{"type": "tmpfs", "target": "/tmp", "tmpfs": {"size": task.tmp_mib * 2**20, "mode": 0o1777}}],
        # Swarm gives a task its name only once it is healthy, and a task that finds no name waits.
        "healthcheck": {"disable": True},
        "stop_grace_period": f"{task.stop_grace_secs:g}s",
        "labels": {TASK_LABEL: f"{task.job}:{task.index}"},
        "deploy": {
            "mode": "replicated-job",  # the form of a service that has an end
            "endpoint_mode": "dnsrr",  # a virtual address would need IPVS, and hide that a task is another one
            "restart_policy": {"condition": "on-failure", "max_attempts": ATTEMPTS, "delay": "1s"},
            "resources": _resources(task),
        },
    }
    if task.writes:
        service["volumes"].append({"type": "bind", "source": literal(folder), "target": RUNS})
    if run.user_file is not None:
        name = run.user_file.rpartition("/")[2]
        service["configs"] = [{"source": "user", "target": f"{USER_CODE}/{name}"}]
    return service


def _resources(task: ScheduledTask) -> Section:
    limits: Section = {}
    if task.cpus is not None:
        limits["cpus"] = f"{task.cpus:g}"
    if task.memory_mib is not None:
        limits["memory"] = f"{task.memory_mib}M"
    resources: Section = {"limits": limits} if limits else {}
    if task.gpus:
        generic = [{"discrete_resource_spec": {"kind": "NVIDIA-GPU", "value": task.gpus}}]
        resources["reservations"] = {"generic_resources": generic}
    return resources
