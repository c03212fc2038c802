"""Makes the pod of a task. Pure.

It runs as an unprivileged user on a read-only root, without a token of the cluster. TensorFlow's gRPC has no
authentication, so a network policy admits the pods of the same run alone.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.config.typed import KubernetesConfig
from trainer.faults import exit_codes
from trainer.launch.containers.spec import GPU_SHARED_MIB, NOBODY
from trainer.launch.restarts import LASTING, LEFT_BEHIND
from trainer.launch.schedulers.scheduled import RUNS, USER_CODE, ScheduledRun, ScheduledTask
from trainer.plan.addresses import CONTROL_PORT_OFFSET

RUN_LABEL, TASK_LABEL = "trainer/run", "trainer/task"
QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
ATTEMPTS = 6  # of a task that failed by itself
CONTAINER = "task"
LOST_SECS = 30  # without its node before a pod is replaced; all tasks wait for it. Kubernetes' default is 300

Object = dict[str, Any]


def template(run: ScheduledRun, task: ScheduledTask, environment: list[Object], config: KubernetesConfig) -> Object:
    """Returns the template of a task's pod, without the fields that its controller adds."""
    volumes: list[Object] = [{"name": "tmp", "emptyDir": {"medium": "Memory", "sizeLimit": f"{task.tmp_mib}Mi"}}]
    mounts: list[Object] = [{"name": "tmp", "mountPath": "/tmp"}]
    if task.writes:
        volumes.append({"name": "runs", "persistentVolumeClaim": {"claimName": config.claim}})
        mounts.append({"name": "runs", "mountPath": RUNS})
    if run.user_file is not None:
        volumes.append({"name": "user", "configMap": {"name": run.name}})
        mounts.append({"name": "user", "mountPath": USER_CODE, "readOnly": True})
    if task.gpus:
        volumes.append({"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": f"{GPU_SHARED_MIB}Mi"}})
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})
    container: Object = {
        "name": CONTAINER,
        "image": task.image,
        "command": list(run.command),
        "env": environment,
        "ports": [
            {"name": "grpc", "containerPort": task.port},
            {"name": "status", "containerPort": task.port + CONTROL_PORT_OFFSET},
        ],
        "livenessProbe": {
            "httpGet": {"path": "/status", "port": "status"},
            "initialDelaySeconds": 120,
            "periodSeconds": 10,
            "timeoutSeconds": 5,
            "failureThreshold": 6,
        },
        "resources": _resources(task),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": mounts,
    }
    return {
        "metadata": {"labels": labels(run, task)},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": int(task.stop_grace_secs),
            "tolerations": [_until_replaced("not-ready"), _until_replaced("unreachable")],
            "enableServiceLinks": False,
            "automountServiceAccountToken": False,
            "securityContext": {
                "runAsNonRoot": True,
                "runAsUser": NOBODY,
                "runAsGroup": NOBODY,
                "fsGroup": NOBODY,
                "seccompProfile": {"type": "RuntimeDefault"},
            },
            "containers": [container],
            "volumes": volumes,
        },
    }


def labels(run: ScheduledRun, task: ScheduledTask | None = None) -> Object:
    return {RUN_LABEL: run.name} | ({TASK_LABEL: task.name} if task else {})


def job_spec(pod: Object) -> Object:
    """Returns the spec of a job for one task.

    A task that exits because another did, or that was evicted, has not failed; failures that would repeat end the job.
    """
    moved = [*LEFT_BEHIND, exit_codes.TERMINATED]
    return {
        "parallelism": 1,
        "completions": 1,
        "backoffLimit": ATTEMPTS,
        "podReplacementPolicy": "Failed",  # never two pods of one task
        "podFailurePolicy": {
            "rules": [
                _on_codes("FailJob", list(LASTING)),
                _on_codes("Ignore", moved),
                {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]},
            ]
        },
        "template": pod,
    }


def network_policy(run: ScheduledRun) -> Object:
    """Returns a policy that admits only the pods of the run."""
    selector = {"matchLabels": labels(run)}
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": {"name": run.name, "labels": labels(run)},
        "spec": {
            "podSelector": selector,
            "policyTypes": ["Ingress"],
            "ingress": [{"from": [{"podSelector": selector}]}],
        },
    }


def user_code(run: ScheduledRun) -> list[Object]:
    """Returns the file of user= for all tasks; None without one."""
    if run.user_file is None:
        return []
    path = Path(run.user_file)
    return [
        {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": run.name, "labels": labels(run)},
            "data": {path.name: path.read_text()},
        }
    ]


def variables(values: Mapping[str, str]) -> list[Object]:
    return [{"name": name, "value": value} for name, value in values.items()]


def _until_replaced(state: str) -> Object:
    key = f"node.kubernetes.io/{state}"
    return {"key": key, "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": LOST_SECS}


def _on_codes(action: str, codes: list[int]) -> Object:
    return {"action": action, "onExitCodes": {"containerName": CONTAINER, "operator": "In", "values": sorted(codes)}}


def _resources(task: ScheduledTask) -> Object:
    limits: Object = {}
    if task.cpus is not None:
        limits["cpu"] = f"{task.cpus:g}"
    if task.memory_mib is not None:
        limits["memory"] = f"{task.memory_mib}Mi"
    if task.gpus:
        limits["nvidia.com/gpu"] = task.gpus
    return {"limits": limits} if limits else {}
