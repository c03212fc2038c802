"""Steps over links with a rate: the table, the messages, and that nothing is left behind."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from runs import LONGEST_SECS, wait_until

from bench import links

TOOLS = ("ip", "tc", "unshare", "nsenter")
ROW = {"link": "1gbit", "cluster": "1ps2w", "variant": "float32", "step_ms": 363.6, "least_ms": 197.4}
MACHINE = {"cpu": "a processor", "cores": 2, "tensorflow": "2.21.0", "date": "2026-01-31"}


def test_without_root_the_requirement_is_named(monkeypatch, capsys, snapshot):
    monkeypatch.setattr(sys, "argv", ["links"])
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    assert links.main() == 2
    assert capsys.readouterr().err == snapshot


def test_missing_tools_are_named(monkeypatch, capsys, snapshot):
    monkeypatch.setattr(sys, "argv", ["links"])
    monkeypatch.setattr(shutil, "which", lambda name: None if name in ("ip", "tc") else f"/usr/bin/{name}")
    assert links.main() == 2
    assert capsys.readouterr().err == snapshot


def test_a_variant_with_an_unknown_key_is_reported():
    assert links.unknown_key([]) is None
    assert links.unknown_key(["placement.max_part_mib=2"]) is None
    assert (links.unknown_key(["strategy.wirez=thin"]) or "").startswith("unknown key strategy.wirez")


def test_the_table_has_a_line_for_every_run_and_every_omission(snapshot):
    other = {**ROW, "variant": "bfloat16", "least_ms": 98.7}
    page = links.page({"machine": MACHINE, "rows": [ROW, other], "left_out": ["fast is left out: it is not there"]})
    assert page.splitlines()[4:] == snapshot


@pytest.mark.long(but=["2"])
@pytest.mark.cluster
@pytest.mark.skipif(os.geteuid() != 0 or not all(map(shutil.which, TOOLS)), reason=f"needs root and {TOOLS}")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_bench_leaves_no_process_and_no_cable(tmp_path: Path, number):
    bench = subprocess.Popen(
        [sys.executable, "-m", "bench.links", "--quick"],
        cwd=Path(__file__).resolve().parents[2],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        wait_until(lambda: len(running(tmp_path)) >= 3 or bench.poll() is not None)  # some fork
        bench.send_signal(number)
        errors = bench.communicate(timeout=LONGEST_SECS)[1]
        assert bench.returncode != 0, errors
        wait_until(lambda: not running(tmp_path))
    finally:
        bench.kill()
    cables = subprocess.run(["ip", "-brief", "link"], capture_output=True, text=True, check=True).stdout
    assert "cable" not in cables
    assert links.BRIDGE not in cables


def running(directory: Path) -> list[int]:
    """Processes of tasks whose run is below a directory."""
    pids = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            command = (process / "cmdline").read_bytes()
        except OSError:  # it has just ended
            continue
        if f"run={directory}".encode() in command:
            pids.append(int(process.name))
    return pids
