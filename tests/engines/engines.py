"""Engines that start tasks on several hosts, for tests: scripts make hosts of network namespaces and run them there.

$TRAINER_ENGINES is the folder of the scripts: `NAME/NAME.sh up [N]`, `env` and `down`, and `hosts/hosts.sh`. All share
the same hosts, so one test at a time has them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import LONGEST_SECS

FOLDER = os.environ.get("TRAINER_ENGINES")


class Engine:
    """An engine that is up."""

    def __init__(self, name: str) -> None:
        self.script = f"{FOLDER}/{name}/{name}.sh"

    def call(self, *words: str) -> str:
        ended = subprocess.run(
            ["bash", self.script, *words], capture_output=True, text=True, timeout=LONGEST_SECS, check=False
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    def hosts(self, *words: str) -> str:
        ended = subprocess.run(
            ["bash", f"{FOLDER}/hosts/hosts.sh", *words], capture_output=True, text=True, timeout=60, check=False
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    def environment(self) -> dict[str, str]:
        """The variables by which its commands find it."""
        settings = self.call("env").removeprefix("export ")
        return dict(word.split("=", 1) for word in shlex.split(settings))


def _start(engine: Engine, nodes: int) -> None:
    """Brings it up; once more from nothing if a part of it does not come up."""
    try:
        engine.call("up", str(nodes))
    except AssertionError:
        engine.call("down")
        engine.call("up", str(nodes))


@contextlib.contextmanager
def engine(name: str, nodes: int = 3) -> Iterator[Engine]:
    """An engine, for as long as the block runs; the test is skipped where it cannot be started."""
    if FOLDER is None or not Path(FOLDER, name, f"{name}.sh").exists():
        pytest.skip(f"{name.upper()} WAS NOT TESTED: $TRAINER_ENGINES names no folder with {name}/{name}.sh")
    if os.geteuid() != 0:
        pytest.skip(f"{name.upper()} WAS NOT TESTED: hosts in network namespaces need root")
    with open(Path(tempfile.gettempdir(), "trainer-engines.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        started = Engine(name)
        try:
            _start(started, nodes)
            yield started
        finally:
            started.call("down")
