"""A run as jobs of a real Kubernetes, with tasks that are evicted, killed, and lost with their node."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import Engine, engine
from runs import ON_HOSTS, Command, Run, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.docker]

ROOT = Path(__file__).parents[2]
NAME = "digits-2ps4w"
OPTIONS = [*ON_HOSTS, "train.steps=1800", "checkpoint.every=100"]
STALLED_SECS = 420.0  # Kubernetes waits longer before each new pod of a task, at last 360 s; then nothing moves
VOLUME = """
apiVersion: v1
kind: PersistentVolume
metadata: {name: runs}
spec: {capacity: {storage: 1Gi}, accessModes: [ReadWriteMany], hostPath: {path: FOLDER}, storageClassName: ""}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: runs}
spec: {accessModes: [ReadWriteMany], storageClassName: "", resources: {requests: {storage: 1Gi}}}
"""


@pytest.fixture
def kubernetes() -> Iterator[Engine]:
    with engine("kubernetes", nodes=3) as started:
        subprocess.run([ROOT / "compose/cluster.sh", "image", "cpu"], check=True, capture_output=True)
        started.call("load", "trainer:cpu")
        yield started


class Cluster:
    """The pods of a run."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self._engine, self._environment = engine, os.environ | engine.environment()
        self.directory = folder / NAME

    def kubectl(self, *words: str, given: str | None = None) -> str:
        ended = self._run(*words, given=given)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    def _run(self, *words: str, given: str | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["kubectl", *words], env=self._environment, input=given, capture_output=True, text=True, check=False
        )

    def pods(self, task: str) -> list[dict[str, Any]]:
        """The pods that a task has and had, the newest last."""
        items = json.loads(self.kubectl("get", "pods", "-l", f"trainer/task={task}", "-o", "json"))["items"]
        return sorted(items, key=lambda pod: pod["metadata"]["creationTimestamp"])

    def last_step(self) -> int:
        path = self.directory / "history.jsonl"
        lines = path.read_text().splitlines() if path.exists() else []
        return max((json.loads(line)["step"] for line in lines if line.endswith("}")), default=0)

    def wait_for(self, is_so: Callable[[], Any]) -> None:
        wait_until(is_so, progress=self.state, explain=self.explain, poll_secs=0.5, stalled_secs=STALLED_SECS)

    def wait_for_step(self, step: int) -> None:
        self.wait_for(lambda: self.last_step() >= step)

    def succeeded(self) -> int:
        return sum(
            job["status"].get("succeeded", 0) for job in json.loads(self.kubectl("get", "jobs", "-o", "json"))["items"]
        )

    def state(self) -> tuple[int, str]:
        """What changes as long as the run gets on: its step, and its pods."""
        return self.last_step(), self.kubectl("get", "pods", "-o", "custom-columns=:.metadata.name,:.status.phase")

    def explain(self) -> str:
        """The pods, the containers of each node's engine, and the ends of the logs."""
        said = [self.kubectl("get", "pods", "-o", "wide")]
        for node in self.kubectl("get", "nodes", "-o", "name").split():
            name = node.removeprefix("node/")
            said += [node, self._engine.call("docker", name, "ps", "--all", "--format", "{{.Names}} {{.Status}}")]
        for pod in self.kubectl("get", "pods", "-o", "name").split():
            logs = self._run("logs", pod, "--timestamps", "--tail=30")  # a pod may have none any more
            said += [pod, logs.stdout + logs.stderr]
        return "\n".join(said)


def test_a_run_survives_evictions_a_kill_and_a_lost_node(kubernetes, finish: Callable[..., Run], tmp_path: Path):
    expected = finish(*OPTIONS, "run=here").summary()["params_sha256"]
    folder = tmp_path / "runs"
    folder.mkdir()
    for path in (folder, tmp_path):
        path.chmod(0o777)
    cluster = Cluster(kubernetes, folder)
    words = ["mode=render", "target=kubernetes_jobs", "name=digits", *OPTIONS]
    render = Command([sys.executable, "-m", "trainer", *words], tmp_path, {})
    assert render.wait() == 0, render.output
    cluster.kubectl("apply", "-f", "-", given=VOLUME.replace("FOLDER", str(folder)))
    cluster.kubectl("apply", "--validate=false", "-f", "-", given=render.output)
    cluster.wait_for_step(50)

    cluster.kubectl("delete", "pod", "--wait=false", cluster.pods("worker-1")[-1]["metadata"]["name"])
    cluster.wait_for_step(cluster.last_step() + 300)
    # It left, and came back, alone.
    left_alone = [len(cluster.pods(task)) for task in ("ps-0", "worker-0")]
    assert left_alone == [1, 1], cluster.explain()

    # The chief saves before it leaves; then all resume.
    cluster.kubectl("delete", "pod", "--wait=false", cluster.pods("worker-0")[-1]["metadata"]["name"])
    cluster.wait_for_step(cluster.last_step() + 200)

    pod = cluster.pods("ps-0")[-1]
    container = pod["status"]["containerStatuses"][0]["containerID"].removeprefix("docker://")
    kubernetes.call("docker", pod["spec"]["nodeName"], "kill", container)
    cluster.wait_for(lambda: cluster.pods("ps-0")[-1]["metadata"]["name"] != pod["metadata"]["name"])
    cluster.wait_for_step(cluster.last_step() + 100)

    assert cluster.succeeded() == 0  # else the rest would show nothing
    node = cluster.pods("worker-2")[-1]["spec"]["nodeName"]
    kubernetes.call("stop", node)
    # As a cloud's controller does for a machine that is gone; without one, it takes Kubernetes minutes.
    cluster.kubectl("delete", "node", node)
    cluster.kubectl("delete", "pods", f"--field-selector=spec.nodeName={node}", "--force", "--grace-period=0")
    cluster.wait_for(lambda: cluster.succeeded() == 6)
    assert json.loads((cluster.directory / "summary.json").read_text())["params_sha256"] == expected
