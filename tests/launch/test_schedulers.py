"""What trainer render writes for Kubernetes and for Docker Swarm."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml
from forks import Forks
from jobset_schema import SCHEMA

pytestmark = pytest.mark.slow

VERSIONS = ("1.31", "1.34", "1.37")
GIVEN_UP = [2, 65, 66, 73, 74, 76]  # exit codes of what would fail again
PATIENCE = "timeouts.roll_call_secs=600"  # Kubernetes' longest delay before it starts a task again is 360 s
OPTIONS = ["container.memory_mib={worker:2048}", "container.cpus={ps:0.5}", "kubernetes.queue=mine", "name=digits"]


@pytest.fixture(scope="module")
def rendered(python: Forks, tmp_path_factory: pytest.TempPathFactory):
    """rendered(target, *overrides) -> the objects of 2ps4w1e, with GPUs and a file of the user."""
    folder = tmp_path_factory.mktemp("render")
    (folder / "mine.py").write_text(MODEL)
    texts: dict[tuple[str, ...], str] = {}

    def make(target: str, *overrides: str) -> list[dict[str, Any]]:
        words = ["mode=render", f"target={target}", "cluster=2ps4w1e", "train.steps=300", *OPTIONS, *overrides]
        key = tuple(words)
        if key not in texts:
            ended = python.run("-m", "trainer", *words, cwd=folder)
            assert ended.returncode == 0, ended.stderr
            texts[key] = ended.stdout
        return list(yaml.safe_load_all(texts[key]))

    return make


MODEL = """
import keras


def model(input_shape, classes):
    return keras.Sequential([keras.Input(input_shape), keras.layers.Flatten(), keras.layers.Dense(classes)])
"""


def by_kind(objects: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [one for one in objects if one["kind"] == kind]


def job_specs(objects: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The spec of every job, those of a JobSet too."""
    for job in by_kind(objects, "Job"):
        yield job["spec"]
    for jobset in by_kind(objects, "JobSet"):
        for replicated in jobset["spec"]["replicatedJobs"]:
            yield replicated["template"]["spec"]


def validate(objects: list[dict[str, Any]], version: str) -> None:
    """Raises an error if Kubernetes, or JobSet, would refuse an object, or ignore a key."""
    for one in objects:
        if one["kind"] == "JobSet":
            jsonschema.validate(one, SCHEMA)
        else:
            kubernetes_validate.validate(one, version, strict=True)
    for spec in job_specs(by_kind(objects, "JobSet")):
        job = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "child"}, "spec": spec}
        kubernetes_validate.validate(job, version, strict=True)


TARGETS = ("kubernetes", "kubernetes_jobs")


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("target", TARGETS)
def test_every_object_has_the_form_that_kubernetes_takes(rendered, target: str, version: str):
    validate(rendered(target), version)
    validate(rendered(target, "user=mine.py", "device.gpus={worker:[0]}"), version)


@pytest.mark.parametrize("target", TARGETS)
def test_a_wrong_key_at_any_depth_would_be_noticed(rendered, target: str):
    def places(value: Any) -> Iterator[dict[str, Any]]:
        if isinstance(value, dict):
            yield value
            for name, inner in value.items():
                if name not in ("labels", "selector", "matchLabels", "data", "limits"):  # of any keys
                    yield from places(inner)
        elif isinstance(value, list):
            for inner in value:
                yield from places(inner)

    for one in {one["kind"]: copy.deepcopy(one) for one in rendered(target)}.values():
        if one["kind"] == "JobSet":  # its replicated jobs are alike
            del one["spec"]["replicatedJobs"][1:]
        for number, _ in enumerate(places(one)):
            broken = copy.deepcopy(one)
            [*places(broken)][number]["wrong"] = "key"
            with pytest.raises((jsonschema.ValidationError, kubernetes_validate.ValidationError)):
                validate([broken], VERSIONS[-1])


def test_each_task_is_a_job_with_a_role_of_its_own(rendered):
    objects = rendered("kubernetes_jobs")
    jobs = {job["metadata"]["name"]: job for job in by_kind(objects, "Job")}
    names = ["ps-0", "ps-1", "worker-0", "worker-1", "worker-2", "worker-3", "evaluator-0"]
    assert list(jobs) == [f"digits-2ps4w1e-{name}" for name in names]
    pod = jobs["digits-2ps4w1e-worker-2"]["spec"]["template"]["spec"]
    assert (pod["hostname"], pod["subdomain"]) == ("worker-2", "digits-2ps4w1e")
    (container,) = pod["containers"]
    role = json.loads({one["name"]: one["value"] for one in container["env"]}["TF_CONFIG"])
    assert role["task"] == {"type": "worker", "index": 2}
    assert role["cluster"]["ps"] == ["ps-0.digits-2ps4w1e:2222", "ps-1.digits-2ps4w1e:2223"]
    assert role["cluster"]["evaluator"] == ["evaluator-0.digits-2ps4w1e:2228"]
    assert [port["containerPort"] for port in container["ports"]] == [2226, 3226]
    assert container["command"] == [
        *("python3", "-m", "trainer", "cluster=2ps4w1e", "train.steps=300", *OPTIONS, PATIENCE),
        "run=/runs/digits-2ps4w1e",
    ]
    (service,) = by_kind(objects, "Service")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"] is True


def test_a_deadline_that_is_given_stays(rendered):
    given = "timeouts.roll_call_secs=30"
    for job in job_specs(rendered("kubernetes_jobs", given)):
        (container,) = job["template"]["spec"]["containers"]
        assert [word for word in container["command"] if "roll_call_secs" in word] == [given]


def test_a_jobset_has_a_child_for_each_task(rendered):
    (jobset,) = by_kind(rendered("kubernetes"), "JobSet")
    replicas = {one["name"]: one["replicas"] for one in jobset["spec"]["replicatedJobs"]}
    assert replicas == {"ps": 2, "worker": 4, "evaluator": 1}
    (container,) = jobset["spec"]["replicatedJobs"][1]["template"]["spec"]["template"]["spec"]["containers"]
    index, *rest = container["env"]
    assert index["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.labels['jobset.sigs.k8s.io/job-index']"
    role = json.loads(next(one["value"] for one in rest if one["name"] == "TF_CONFIG"))
    assert role["task"] == {"type": "worker", "index": "$(JOB_INDEX)"}
    assert role["cluster"]["worker"][3] == "digits-2ps4w1e-worker-3-0.digits-2ps4w1e:2224"
    assert [port["containerPort"] for port in container["ports"]] == [2224, 3224]
    assert jobset["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "mine"


@pytest.mark.parametrize("target", TARGETS)
def test_what_would_fail_again_is_given_up_and_what_moved_is_not_counted(rendered, target: str):
    for spec in job_specs(rendered(target)):
        give_up, moved, evicted = spec["podFailurePolicy"]["rules"]
        assert (give_up["action"], give_up["onExitCodes"]["values"]) == ("FailJob", GIVEN_UP)
        assert (moved["action"], moved["onExitCodes"]["values"]) == ("Ignore", [69, 75, 143])
        assert (evicted["action"], evicted["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")
        assert spec["podReplacementPolicy"] == "Failed"


@pytest.mark.parametrize("target", TARGETS)
def test_a_pod_has_no_privileges_and_admits_the_run_alone(rendered, target: str):
    objects = rendered(target, "device.gpus={worker:[2,3]}")
    (policy,) = by_kind(objects, "NetworkPolicy")
    assert policy["spec"]["ingress"] == [
        {"from": [{"podSelector": {"matchLabels": {"trainer/run": "digits-2ps4w1e"}}}]}
    ]
    for spec in job_specs(objects):
        pod = spec["template"]["spec"]
        (container,) = pod["containers"]
        assert spec["template"]["metadata"]["labels"]["trainer/run"] == "digits-2ps4w1e"
        assert (pod["automountServiceAccountToken"], pod["restartPolicy"]) == (False, "Never")
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        role = json.loads(next(one["value"] for one in container["env"] if one["name"] == "TF_CONFIG"))
        limits = container["resources"].get("limits", {})
        assert limits.get("nvidia.com/gpu") == (2 if role["task"]["type"] == "worker" else None)
        assert "device.gpus={worker:[0,1]}" in container["command"]  # as they are counted in a pod
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        if target == "kubernetes_jobs":
            is_writer = role["task"] in ({"type": "worker", "index": 0}, {"type": "evaluator", "index": 0})
            assert ("/runs" in mounts) == is_writer


@pytest.mark.parametrize("target", TARGETS)
def test_the_file_of_the_user_comes_along(rendered, target: str):
    objects = rendered(target, "user=mine.py")
    (code,) = by_kind(objects, "ConfigMap")
    assert code["data"] == {"mine.py": MODEL}
    for spec in job_specs(objects):
        (container,) = spec["template"]["spec"]["containers"]
        assert "user=/trainer/user/mine.py" in container["command"]


def test_a_stack_has_a_service_that_ends_for_each_task(rendered, tmp_path: Path):
    (stack,) = rendered("stack", "user=mine.py", f"run={tmp_path}/runs/digits")
    assert list(stack["services"]) == ["ps-0", "ps-1", "worker-0", "worker-1", "worker-2", "worker-3", "evaluator-0"]
    for name, service in stack["services"].items():
        deploy = service["deploy"]
        assert (deploy["mode"], deploy["endpoint_mode"]) == ("replicated-job", "dnsrr")
        role = json.loads(service["environment"]["TF_CONFIG"])
        assert f"{role['task']['type']}-{role['task']['index']}" == name
        bound = [volume["source"] for volume in service["volumes"] if volume["type"] == "bind"]
        assert bound == ([f"{tmp_path}/runs"] if name in ("worker-0", "evaluator-0") else [])
    assert stack["networks"]["cluster"]["internal"] is True
    assert "run=/runs/digits" in stack["services"]["worker-0"]["entrypoint"]
