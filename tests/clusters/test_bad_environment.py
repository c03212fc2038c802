"""A machine that lacks something: refused with what to type, or of no consequence, by real commands."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import SMALL, Run

from trainer.observe.machine import this_machine
from trainer.plan.checks import versions

DEAD_PROXY = "http://user:secret@127.0.0.1:9"  # the port "discard", where nobody listens
PROXIES = {"no_proxy": "", "NO_PROXY": ""} | dict.fromkeys(
    ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), DEAD_PROXY
)
TINY = ["model=mlp", *SMALL]
HAS_SYS = os.path.isdir("/sys/kernel")


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """An empty working directory."""
    (tmp_path / "here").mkdir()
    return tmp_path / "here"


def typed(cwd: Path, *overrides: str, limits: str = "", **environment: str) -> subprocess.CompletedProcess[str]:
    """Types a command in a shell, after `limits`."""
    words = [sys.executable, "-m", "trainer", *overrides]
    return subprocess.run(
        ["bash", "-c", f'{limits} exec "$@"', "bash", *words],
        cwd=cwd,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
    )


# Versions


def install(site: Path, name: str, version: str) -> None:
    """Makes a folder of PYTHONPATH say that a library of that version is installed."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "version", "says"),
    [
        (
            "tensorflow",
            "2.15.1",
            "tensorflow: tensorflow 2.15.1 is installed; supported: >=2.21,<2.22\n"
            "    python -m pip install --require-hashes -r requirements/cpu.txt\n",
        ),
        (
            "keras",
            "2.15.0",
            "keras: keras 2.15.0 is installed; supported: >=3.12,<3.16\n"
            "    python -m pip install --require-hashes -r requirements/cpu.txt\n",
        ),
    ],
)
def test_another_tensorflow_or_keras_is_refused_before_it_is_imported(tmp_path, here, name, version, says):
    install(tmp_path / "site", name, version)
    ended = typed(here, "cluster=2ps4w", PYTHONPATH=str(tmp_path / "site"))
    assert (ended.returncode, ended.stdout, ended.stderr) == (2, "", says)
    assert list(here.iterdir()) == []


def test_a_library_that_is_listed_under_no_known_name_is_not_judged():
    assert list(versions.check_versions({})) == []
    assert list(versions.check_versions({"tensorflow": "2.21.3", "keras": "3.12.0"})) == []


def test_this_machine_reports_its_versions_files_and_threads():
    here = this_machine()
    assert here.libraries["keras"].startswith("3.")
    assert any(name in here.libraries for name in versions.TENSORFLOWS)
    assert here.files is None or here.files > 0
    assert here.threads is None or here.threads > 0


# Proxies


@pytest.mark.long
@pytest.mark.cluster
def test_a_task_that_a_scheduler_starts_does_not_either(start: Callable[..., Run]):
    with socket.socket() as one, socket.socket() as two:
        for free in (one, two):
            free.bind(("127.0.0.1", 0))
        ports = [20000 + free.getsockname()[1] % 30000 for free in (one, two)]
    cluster = {"ps": [f"127.0.0.1:{ports[0]}"], "worker": [f"127.0.0.1:{ports[1]}"]}
    runs = [
        start(
            "run=scheduled",
            *TINY,
            environment=PROXIES | {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": job, "index": 0}})},
        )
        for job in ("worker", "ps")
    ]
    assert [run.wait() for run in runs] == [0, 0], "\n".join(run.output for run in runs)


# The run directory


@pytest.mark.slow
@pytest.mark.skipif(not HAS_SYS, reason="there is no /sys, where nobody can make a folder")
def test_a_run_directory_that_cannot_be_written_is_refused(here):
    ended = typed(here, "cluster=1ps2w", "run=/sys/kernel/mine", *TINY)
    assert ended.returncode == 74, ended.stderr
    assert re.fullmatch(
        r"trainer: /sys/kernel/mine: the run directory cannot be written \([\w -]+\); choose another with run=PATH\n",
        ended.stderr,
    )
    assert list(here.iterdir()) == []


@pytest.mark.slow
@pytest.mark.skipif(not HAS_SYS, reason="there is no /sys, where nobody can make a folder")
def test_a_working_directory_that_cannot_be_written_is_refused():
    ended = typed(Path("/sys/kernel"), "cluster=1ps2w", *TINY)
    assert ended.returncode == 74, ended.stderr
    assert re.match(r"trainer: /sys/kernel/runs/run-1ps2w-.*: the run directory cannot be written", ended.stderr)
    assert ended.stderr.endswith("; choose another with run=PATH\n")


# Files and shared memory


@pytest.mark.slow
def test_too_few_open_files_are_reported_before_anything_starts(here):
    ended = typed(here, "cluster=2ps4w", limits="ulimit -n 48;")
    assert (ended.returncode, ended.stdout, ended.stderr) == (
        2,
        "",
        "ulimit -n: a process may open 48 files, and 6 tasks need about 50\n"
        "    type ulimit -n 1024, or choose a smaller cluster=\n",
    )
    assert list(here.iterdir()) == []


@pytest.mark.long
@pytest.mark.cluster
def test_as_few_open_files_as_are_accepted_are_enough(here):
    ended = typed(here, "cluster=2ps4w", *TINY, limits="ulimit -n 50;")
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.long(but=["<&- >&- 2>&-"])
@pytest.mark.cluster
@pytest.mark.parametrize("closed", ["<&-", ">&-", ">&- 2>&-", "<&- >&- 2>&-"])
def test_a_run_needs_neither_its_proxy_nor_the_standard_streams(here, closed):
    run = here / "run"
    ended = typed(here, "cluster=1ps2w", f"run={run}", *TINY, limits=f"exec {closed};", **PROXIES)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (run / "summary.json").exists()
    assert "secret" not in ended.stdout + ended.stderr + "".join(log.read_text() for log in run.glob("logs/*.log"))


@pytest.mark.cluster
def test_a_run_needs_no_shared_memory(here):
    """Only NCCL does, between the GPUs of one machine."""
    without = ["unshare", "--user", "--map-root-user", "--mount", "bash", "-c"]
    small = "mount -t tmpfs -o size=4k tmpfs /dev/shm"
    if shutil.which("unshare") is None or subprocess.run([*without, small], capture_output=True).returncode:
        pytest.skip("no file system can be mounted here")
    ended = subprocess.run(
        [*without, f'{small} && exec "$@"', "bash", sys.executable, "-m", "trainer", "cluster=1ps2w", *TINY],
        cwd=here,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
