"""A run as a headless service and one job for each task, which any Kubernetes has."""

from trainer.config.schema import KubernetesConfig
from trainer.launch.schedulers import scheduled
from trainer.launch.schedulers.pods import (
    QUEUE_LABEL,
    Object,
    job_spec,
    labels,
    network_policy,
    template,
    user_code,
    variables,
)
from trainer.launch.schedulers.scheduled import ScheduledRun, ScheduledTask


def objects(run: ScheduledRun, config: KubernetesConfig) -> list[Object]:
    """Returns all objects of the run, in the order in which they are to be made."""
    service: Object = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": run.name, "labels": labels(run)},
        # Names are there before the pods are ready, which they are when they have found each other.
        "spec": {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": labels(run)},
    }
    addresses = {task.name: f"{task.name}.{run.name}:{task.port}" for task in run.tasks}
    jobs = [_job(run, task, variables(scheduled.environment(run, task, addresses)), config) for task in run.tasks]
    return [*user_code(run), service, network_policy(run), *jobs]


def _job(run: ScheduledRun, task: ScheduledTask, environment: list[Object], config: KubernetesConfig) -> Object:
    pod = template(run, task, environment, config)
    pod["spec"] |= {"hostname": task.name, "subdomain": run.name}
    queue = {QUEUE_LABEL: config.queue} if config.queue else {}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": f"{run.name}-{task.name}", "labels": labels(run, task) | queue},
        "spec": job_spec(pod),
    }
