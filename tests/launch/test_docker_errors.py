"""The meaning of Docker's errors, and the status pages that tasks in containers serve at a socket."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pages
import pytest
from runs import free_ports

from trainer.faults import exit_codes
from trainer.launch.containers.docker_errors import DockerError, explain
from trainer.observe import health, status
from trainer.observe.page_server import LAUNCHER
from trainer.observe.peers import UNIX, read_status
from trainer.observe.task_page import TaskPage

pytestmark = pytest.mark.slow

# As Docker and its Python libraries word them.
ABORTED = "Error while fetching server API version: ('Connection aborted.', {})"
NO_SOCKET = ABORTED.format("FileNotFoundError(2, 'No such file or directory')")
NO_PERMISSION = ABORTED.format("PermissionError(13, 'Permission denied')")
REFUSED = ABORTED.format("ConnectionRefusedError(111, 'Connection refused')")
IN_USE = 'Conflict. The container name "/a1" is already in use by container "a0ca". You have to remove (or rename) it.'


@pytest.mark.parametrize(
    "error",
    [
        NO_SOCKET,
        REFUSED,
        NO_PERMISSION,
        "No such image: mine:1",
        'could not select device driver "nvidia" with capabilities: [[gpu]]',
        IN_USE,
        "Minimum memory limit allowed is 6MB",
        "OCI runtime create failed: cannot allocate memory",
        "all predefined address pools have been fully subnetted",
        "write /var/lib/docker/x: no space left on device",
        'invalid mount config for type "bind": bind source path does not exist: /x',
        "something new",
    ],
)
def test_an_error_of_docker_becomes_one_sentence_with_a_remedy(error, snapshot):
    text = explain(RuntimeError(error), image="mine:1")
    assert "\n" not in text
    assert text == snapshot


def test_a_docker_error_ends_a_run_with_69():
    assert exit_codes.exit_code_of(DockerError("stopped")) == exit_codes.UNAVAILABLE


@pytest.mark.parametrize("host", ["unix:///no/such.sock", "tcp://10.0.0.1:2375", "ssh://gpu-a"])
def test_without_docker_nothing_is_started(host, tmp_path: Path, snapshot):
    ended = subprocess.run(
        [sys.executable, "-m", "trainer", "cluster=1ps1w", "launch=docker"],
        cwd=tmp_path,
        env=os.environ | {"DOCKER_HOST": host},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert ended.returncode == 69, ended.stderr
    assert ended.stderr == snapshot
    assert list(tmp_path.iterdir()) == []


# Pages


@pytest.fixture
def page(tmp_path: Path) -> TaskPage:
    shown = pages.page("ps:0")
    status.serve_at(shown, str(tmp_path / "page"))
    return shown


def test_a_page_is_read_from_a_socket(page, tmp_path):
    page.step = 7
    assert read_status(f"{UNIX}{tmp_path}/page", timeout_secs=5).step == 7


def test_a_restarted_task_takes_over_its_socket(page, tmp_path):
    again = pages.page("ps:0", step=9)
    status.serve_at(again, str(tmp_path / "page"))
    assert read_status(f"{UNIX}{tmp_path}/page", timeout_secs=5).step == 9


def test_a_socket_may_have_a_longer_path_than_the_system_takes(tmp_path):
    folder = tmp_path / ("long" * 50)
    folder.mkdir()
    status.serve_at(pages.page("ps:0", step=3), str(folder / "page"))
    assert read_status(f"{UNIX}{folder}/page", timeout_secs=5).step == 3


def test_a_task_that_does_not_answer_is_silent_even_if_many_ask(tmp_path):
    with socket.socket(socket.AF_UNIX) as frozen:
        frozen.bind(str(tmp_path / "page"))
        frozen.listen(1)
        for _ in range(4):
            with pytest.raises(TimeoutError):
                read_status(f"{UNIX}{tmp_path}/page", timeout_secs=0.1)


def test_a_socket_where_nobody_answers_is_an_error(tmp_path):
    with pytest.raises(OSError, match="No such file"):
        read_status(f"{UNIX}{tmp_path}/page", timeout_secs=5)


def test_a_task_whose_page_is_no_longer_read_notices_that_its_launcher_has_died(tmp_path):
    alone = threading.Event()
    status.serve_at(pages.page("ps:0"), str(tmp_path / "page"), alone=alone.set, alone_secs=0.4)
    assert not alone.wait(1)  # nobody has read it yet
    for _ in range(10):
        read_status(f"{UNIX}{tmp_path}/page", timeout_secs=5, reader=LAUNCHER)
        assert not alone.wait(0.1)
    read_status(f"{UNIX}{tmp_path}/page", timeout_secs=5)  # by others
    assert alone.wait(10)


def test_a_container_is_healthy_while_its_task_answers():
    status.serve(pages.page("ps:0"), "127.0.0.1", port := free_ports(1)[0])
    assert health.is_healthy(f"127.0.0.1:{port}")
    assert not health.is_healthy("127.0.0.1:1")
    assert health.is_healthy(None)  # of a container without a task


def test_the_health_check_imports_nothing_heavy():
    code = (
        "import sys, trainer.observe.health; print({'tensorflow', 'hydra', 'omegaconf', 'docker'} & set(sys.modules))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
    assert result.stdout.strip() == "set()"
