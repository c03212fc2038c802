"""One cluster on two hosts: two Docker engines, each in a network of its own."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import LONGEST_SECS, Run, wait_until

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


@pytest.fixture(scope="module")
def other_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """DOCKER_HOST of a second Docker engine that has the image, in a network namespace behind a virtual cable."""
    folder = tmp_path_factory.mktemp("engine")
    socket = f"/run/{NETWORK}.sock"
    command(str(ROOT / "compose/cluster.sh"), "image", "cpu")
    subprocess.run(["ip", "netns", "delete", NETWORK], capture_output=True, check=False)  # of a test that was killed
    subprocess.run(["ip", "link", "delete", "trainer-a"], capture_output=True, check=False)
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


# Stands for `ssh -N -L HERE:THERE HOST`: each host's engine is behind a socket of this machine.
FORWARD = """\
import socket, sys, threading
words = sys.argv[1:]
here, there = words[words.index("-L") + 1].split(":")
there = {sockets}[words[-1]]
def pump(source, sink):
    while data := source.recv(1 << 16):
        sink.sendall(data)
    sink.shutdown(socket.SHUT_WR)
listener = socket.socket(socket.AF_UNIX)
listener.bind(here)
listener.listen(16)
while True:
    near, far = listener.accept()[0], socket.socket(socket.AF_UNIX)
    far.connect(there)
    for pair in ((near, far), (far, near)):
        threading.Thread(target=pump, args=pair, daemon=True).start()
"""


@pytest.mark.long
def test_the_launcher_of_containers_on_two_hosts_survives_a_kill_and_a_lost_host(other_engine, tmp_path, start, finish):
    options = [*SHORT, "train.steps=800", "checkpoint.every=50"]
    sockets = {HERE: "/var/run/docker.sock", THERE: other_engine.removeprefix("unix://")}
    forward = tmp_path / "forward.py"
    forward.write_text(FORWARD.format(sockets=sockets))
    hosts = [f"cluster.hosts=[{HERE},{THERE}]", f"launch.ssh={sys.executable} {forward}"]
    run = start(*options, "launch=docker", *hosts)
    events = run.directory / "events.jsonl"
    run.wait_for_step(60)
    containers = command("docker", "ps", "-q", "--filter", "label=trainer.task=worker:1", DOCKER_HOST=other_engine)
    command("docker", "kill", *containers.split(), DOCKER_HOST=other_engine)
    wait_until(lambda: '"task": "worker:1", "attempt": 1' in events.read_text(), explain=run.kill_and_explain)
    run.wait_for_step(run.history()[-1]["step"] + 50)
    for pid in pids_of(f"{forward} .*{THERE}"):
        os.kill(pid, signal.SIGKILL)
    assert run.wait() == 0, run.output
    assert f"{THERE} was lost" in run.output
    assert run.summary()["restarts_of"] == {"worker:1": 1, "ps:1": 1}, run.output
    assert run.summary()["params_sha256"] == finish(*options, "run=one").summary()["params_sha256"]
    for engine in ("unix:///var/run/docker.sock", other_engine):
        label = f"label=trainer.run={run.directory}"
        assert command("docker", "ps", "-aq", "--filter", label, DOCKER_HOST=engine) == ""
    assert pids_of(str(forward)) == []


def pids_of(pattern: str) -> list[int]:
    listed = subprocess.run(["pgrep", "-f", pattern], capture_output=True, text=True, check=False)
    return [int(pid) for pid in listed.stdout.split()]


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
