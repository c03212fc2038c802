"""Network namespaces of their own for tasks: which runs get one, and what a process in one can do."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from quick_config import load, validated_on
from runs import REFUSED, UNPRIVILEGED, can_be_unprivileged

from trainer.faults.problems import ConfigError
from trainer.launch.processes import isolation
from trainer.plan.devices import Machine

HERE = 'cluster.addresses={ps:["127.0.0.1:2222"],worker:["127.0.0.1:2223"]}'
CAN_BE_UNPRIVILEGED = can_be_unprivileged()
FACTS = """
import ctypes, json, os, signal, socket
from trainer.launch.processes import isolation

libc, signal_of_parent = ctypes.CDLL(None), ctypes.c_int()
libc.prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG
open("closed", "w").close()
os.chmod("closed", 0o400)
before = os.getuid(), os.getgid()
isolation.enter()
libc.prctl(2, ctypes.byref(signal_of_parent))  # PR_GET_PDEATHSIG
open("made", "w").close()
try:
    opened = bool(open("closed", "w"))
except PermissionError:
    opened = False
with socket.create_server(("127.0.0.1", 0)) as server:
    socket.create_connection(server.getsockname(), timeout=5).close()
print(json.dumps({
    "same_user": before == (os.getuid(), os.getgid()) == (os.stat("made").st_uid, os.stat("made").st_gid),
    "devices": [name for _, name in socket.if_nameindex()],
    "dies_with_parent": signal_of_parent.value == signal.SIGTERM,
    "opened": opened,
    "capabilities": int(open("/proc/self/status").read().partition("CapEff:")[2].split()[0], 16),
}))
"""


@pytest.fixture
def _allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "why_impossible", lambda: "")


@pytest.fixture
def _refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isolation, "why_impossible", lambda: "this system refuses it")


def why_not(*overrides: str, pages: Path | None = None) -> str:
    return isolation.why_not(load(list(overrides)), pages)


def user_file(folder: Path) -> str:
    (folder / "mine.py").write_text("def model(input_shape, classes): ...\n")
    return f"user={folder / 'mine.py'}"


# Which runs are isolated


@pytest.mark.usefixtures("_allowed")
@pytest.mark.parametrize("cluster", ["local", "2ps4w", "4w", "1ps2w1e"])
def test_a_run_that_needs_no_network_is_isolated(cluster, tmp_path):
    assert why_not(f"cluster={cluster}", pages=tmp_path / "pages") == ""
    assert why_not(f"cluster={cluster}", "security.isolate=always", pages=tmp_path / "pages") == ""
    assert list((tmp_path / "pages").iterdir()) == []
    assert (tmp_path / "pages").stat().st_mode & 0o777 == 0o700


@pytest.mark.usefixtures("_allowed")
def test_a_run_that_should_not_be_is_not(snapshot):
    assert why_not("security.isolate=never") == "security.isolate=never"
    assert why_not("cluster=1ps1w", HERE) == snapshot


@pytest.mark.usefixtures("_allowed")
def test_code_of_the_user_may_need_a_network(tmp_path):
    assert why_not(user_file(tmp_path), pages=tmp_path / "pages") == isolation.USER_CODE
    assert not (tmp_path / "pages").exists()
    assert why_not(user_file(tmp_path), "security.isolate=always") == ""


@pytest.mark.usefixtures("_refused")
def test_where_the_system_refuses_a_run_is_not_isolated_unless_it_must_be(tmp_path, raises, snapshot):
    assert why_not(pages=tmp_path / "pages") == snapshot
    assert why_not(user_file(tmp_path)) == snapshot
    assert not (tmp_path / "pages").exists()
    with raises(ConfigError):
        why_not("security.isolate=always")


@pytest.mark.usefixtures("_allowed")
def test_a_run_directory_that_cannot_hold_sockets_is_a_reason(tmp_path):
    (tmp_path / "file").write_text("")
    reason = f"{tmp_path}/file/pages cannot hold sockets (Not a directory)"
    assert why_not(pages=tmp_path / "file" / "pages") == reason
    with pytest.raises(ConfigError, match="cannot hold sockets"):
        why_not("security.isolate=always", pages=tmp_path / "file" / "pages")


def test_only_sockets_are_removed(tmp_path):
    for name in ("mine", "other"):
        (tmp_path / name).mkdir()
        with socket.socket(socket.AF_UNIX) as one:
            one.bind(str(tmp_path / name / "page"))
    (tmp_path / "mine" / "notes.txt").write_text("")
    for name in ("mine", "other", "missing"):
        isolation.remove_sockets(tmp_path / name)
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["mine", "notes.txt"]


@pytest.mark.usefixtures("_allowed")
def test_a_gpu_whose_files_are_missing_is_a_reason_unless_root_can_make_them(monkeypatch, snapshot):
    monkeypatch.setattr(isolation, "GPU_MEMORY", "/no/such/file")
    monkeypatch.setattr(os, "geteuid", lambda: 1234)
    assert why_not("device.gpus={worker:[0]}") == snapshot
    assert why_not() == ""
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert why_not("device.gpus={worker:[0]}") == ""


@pytest.mark.parametrize(
    "overrides",
    [["launch=docker"], ["mode=render"], ["cluster=1ps1w", HERE], ["cluster=1ps1w", HERE, "job=ps", "task=0"]],
)
def test_always_is_refused_where_it_makes_no_sense(refused, overrides):
    with pytest.raises(ConfigError) as raised:
        load([*overrides, "security.isolate=always"], validated_on(Machine(cores=2, gpus=0)))
    refused(
        "security.isolate/not-available",
        lambda: [problem for problem in raised.value.problems if problem.key == "security.isolate"],
    )


# In a namespace


def run_facts(folder: Path, within: list[str]) -> dict:
    command = [*within, sys.executable, "-c", FACTS]
    return json.loads(subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout)


@pytest.mark.skipif(bool(isolation.why_impossible()), reason=isolation.why_impossible())
def test_a_process_in_a_namespace_has_loopback_only_and_everything_else_as_before(tmp_path):
    facts = run_facts(tmp_path, [])
    assert (facts["devices"], facts["same_user"], facts["dies_with_parent"]) == (["lo"], True, True)
    assert facts["opened"] == (os.geteuid() == 0)


@pytest.mark.skipif(not CAN_BE_UNPRIVILEGED, reason="unshare gives no user without capabilities a namespace")
def test_a_user_gets_no_rights_over_files_by_it(tmp_path):
    facts = run_facts(tmp_path, UNPRIVILEGED)
    assert facts == {
        "same_user": True, "devices": ["lo"], "dies_with_parent": True, "opened": False, "capabilities": 0,
    }  # fmt: skip


@pytest.mark.skipif(not CAN_BE_UNPRIVILEGED, reason="unshare gives no user without capabilities a namespace")
def test_a_system_that_refuses_gives_its_reason(snapshot):
    code = "from trainer.launch.processes import isolation; print(isolation.why_impossible())"
    ended = subprocess.run([*REFUSED, sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == snapshot
