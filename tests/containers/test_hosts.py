"""One cluster on two hosts: two Docker engines, each in a network of its own."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import LONGEST_SECS, Run

ROOT = Path(__file__).resolve().parents[2]
SHORT = [
    "cluster=2ps2w",
    "model=mlp",
    "seed=4",
    "train.batch_size=48",
    "train.steps=30",
    "device.intra_op_threads={worker:1}",
]
HERE, THERE, NETWORK = "10.213.77.1", "10.213.77.2", "trainer-test"

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.docker,
    pytest.mark.skipif(
        os.geteuid() != 0 or not all(map(shutil.which, ("dockerd", "ip", "nsenter"))),
        reason="a second engine needs root, dockerd, ip and nsenter",
    ),
]


def command(*words: str, **options: str) -> str:
    environment = os.environ | options
    ended = subprocess.run(words, capture_output=True, text=True, timeout=LONGEST_SECS, env=environment, check=False)
    assert ended.returncode == 0, f"{words}: {ended.stdout}{ended.stderr}"
    return ended.stdout


@pytest.fixture
def other_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """DOCKER_HOST of a second Docker engine that has the image, in a network namespace behind a virtual cable."""
    folder = tmp_path_factory.mktemp("engine")
    socket = f"/run/{NETWORK}.sock"
    command(str(ROOT / "compose/cluster.sh"), "image", "cpu")
    command("ip", "netns", "add", NETWORK)
    dockerd = None
    try:
        command("ip", "link", "add", "trainer-a", "type", "veth", "peer", "name", "trainer-b", "netns", NETWORK)
        for end, address, within in (("a", HERE, []), ("b", THERE, ["-netns", NETWORK])):
            command("ip", *within, "addr", "add", f"{address}/24", "dev", f"trainer-{end}")
            command("ip", *within, "link", "set", f"trainer-{end}", "up")
        command("ip", "-netns", NETWORK, "link", "set", "lo", "up")
        daemon = ["dockerd", "--data-root", f"{folder}/data", "--exec-root", f"/run/{NETWORK}"]
        daemon += ["--pidfile", f"{folder}/pid"]
        daemon += ["--host", f"unix://{socket}", "--bridge=none", "--iptables=false", "--ip6tables=false"]
        with open(folder / "log", "wb") as log:
            dockerd = subprocess.Popen(["nsenter", f"--net=/run/netns/{NETWORK}", *daemon], stdout=log, stderr=log)
        wait_for_engine(socket, folder / "log", dockerd)
        with subprocess.Popen(["docker", "save", "trainer:cpu"], stdout=subprocess.PIPE) as saving:
            loading = subprocess.run(
                ["docker", "-H", f"unix://{socket}", "load"], stdin=saving.stdout, timeout=LONGEST_SECS, check=False
            )
            assert loading.returncode == 0
        yield f"unix://{socket}"
    finally:
        if dockerd is not None:
            dockerd.terminate()
            dockerd.wait(30)
        # dockerd holds its network namespace, and with it the cable.
        subprocess.run(["umount", f"/run/{NETWORK}/netns/default"], capture_output=True, check=False)
        subprocess.run(["ip", "link", "delete", "trainer-a"], capture_output=True, check=False)
        command("ip", "netns", "delete", NETWORK)


def wait_for_engine(socket: str, log: Path, dockerd: subprocess.Popen[bytes], within_secs: float = 40) -> None:
    deadline = time.monotonic() + within_secs
    while subprocess.run(["docker", "-H", f"unix://{socket}", "info"], capture_output=True, check=False).returncode:
        if time.monotonic() > deadline or dockerd.poll() is not None:
            pytest.fail(f"the second engine does not answer\n{log.read_text()[-2000:]}")
        time.sleep(0.2)


@pytest.mark.long
def test_a_cluster_on_two_hosts_computes_the_bits_of_one(other_engine, tmp_path):
    rendered = tmp_path / "run"
    render = ["mode=render", f"cluster.hosts=[{HERE},{THERE}]", f"run={rendered}"]
    output = command(sys.executable, "-m", "trainer", *SHORT, *render)
    assert f"docker compose -f run/compose.{THERE}.yaml up --abort-on-container-failure" in output
    assert f"{HERE} has the chief" in output
    shutil.copytree(rendered, tmp_path / "there/run")  # as scp would
    ups = [
        subprocess.Popen(
            ["docker", "compose", "-f", f"{folder}/compose.{host}.yaml", "up", "--abort-on-container-failure"],
            env=os.environ | engine,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for host, folder, engine in (
            (HERE, rendered, {}),
            (THERE, tmp_path / "there/run", {"DOCKER_HOST": other_engine}),
        )
    ]
    try:
        outputs = [up.communicate(timeout=LONGEST_SECS)[0] for up in ups]
    finally:
        for host, folder, engine in (
            (HERE, rendered, {}),
            (THERE, tmp_path / "there/run", {"DOCKER_HOST": other_engine}),
        ):
            command("docker", "compose", "-f", f"{folder}/compose.{host}.yaml", "down", "--timeout", "0", **engine)
    assert [up.returncode for up in ups] == [0, 0], "\n".join(outputs)
    assert "worker-1-1" in outputs[1]
    assert "worker-1-1" not in outputs[0]
    one = Run([*SHORT, "run=one"], tmp_path, {})
    assert one.wait() == 0, one.output
    sha = json.loads((rendered / "summary.json").read_text())["params_sha256"]
    assert sha == one.summary()["params_sha256"]
    assert not (tmp_path / "there/run/summary.json").exists()  # the chief's host has the results
