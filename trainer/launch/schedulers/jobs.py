"""Makes the Kubernetes objects of a run: a service and a job for each task, or a JobSet."""

import os

from trainer.config.typed import KubernetesConfig
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
from trainer.plan.environment import for_tasks

INDEX = "JOB_INDEX"  # variable with the number of a child job among those of its kind
INDEX_LABEL = "jobset.sigs.k8s.io/job-index"
RESTARTS_OF_ALL = 3


def of_jobs(run: ScheduledRun, config: KubernetesConfig) -> list[Object]:
    """Returns a headless service and a job for each task, in the order of creation."""
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


def of_jobset(run: ScheduledRun, config: KubernetesConfig) -> list[Object]:
    """Returns a JobSet, after the objects that it needs."""
    queue = {QUEUE_LABEL: config.queue} if config.queue else {}
    jobs = [job for job in ("ps", "worker", "evaluator") if run.of_job(job)]
    jobset: Object = {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": run.name, "labels": labels(run) | queue},
        "spec": {
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": run.name},
            # When these have ended, what still runs is deleted.
            "successPolicy": {"operator": "All", "targetReplicatedJobs": [job for job in jobs if job != "ps"]},
            "failurePolicy": {
                "maxRestarts": RESTARTS_OF_ALL,
                "rules": [{"name": "lasting", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}],
            },
            "replicatedJobs": [_replicated(run, job, config) for job in jobs],
        },
    }
    return [*user_code(run), network_policy(run), jobset]


def _replicated(run: ScheduledRun, job: str, config: KubernetesConfig) -> Object:
    """Returns a child job of one pod for each task of a job, so that each task is restarted alone.

    The children have the same pod, so the tasks of a job have the same port, that of the first. Kueue takes no more
    than a few kinds of pods in a JobSet.
    """
    hosts = {task.name: f"{run.name}-{task.job}-{task.index}-0.{run.name}" for task in run.tasks}
    addresses = {task.name: f"{hosts[task.name]}:{run.of_job(task.job)[0].port}" for task in run.tasks}
    tasks = run.of_job(job)
    index = {"name": INDEX, "valueFrom": {"fieldRef": {"fieldPath": f"metadata.labels['{INDEX_LABEL}']"}}}
    tf_config = scheduled.tf_config(run, addresses, job, f"$({INDEX})")
    pod = template(run, tasks[0], [index, *variables(for_tasks(os.environ) | {"TF_CONFIG": tf_config})], config)
    pod["metadata"]["labels"] = labels(run)
    return {"name": job, "replicas": len(tasks), "template": {"spec": job_spec(pod)}}
