"""Runs whose checkpoints do not fit on the disk: earlier ones stay whole, and the config says what follows."""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from runs import LONGEST_SECS, SMALL

from trainer.storage import checkpoint

pytestmark = pytest.mark.cluster

RUN = [*SMALL, "cluster=1ps2w", "model=mlp", "seed=1"]
TOO_LITTLE = 2**20  # bytes of a file: more than logs and events need, less than a checkpoint does


def train(folder: Path, *overrides: str, most_bytes: int = -1) -> subprocess.CompletedProcess[str]:
    """A run whose files cannot be larger than `most_bytes`."""

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes))

    command = [sys.executable, "-m", "trainer", *RUN, "run=run", *overrides]
    return subprocess.run(command, cwd=folder, preexec_fn=limit, capture_output=True, text=True, timeout=LONGEST_SECS)


def saved(folder: Path) -> list[str]:
    """Everything that is in the folder of checkpoints, temporary or not; those that are not are whole."""
    checkpoints = folder / "run/checkpoints"
    for path in checkpoint.finished(checkpoints):
        checkpoint.verify(checkpoint.read_manifest(path))
    return sorted(path.name for path in checkpoints.iterdir())


@pytest.fixture(scope="module")
def six_steps(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run that has ended at step 6."""
    folder = tmp_path_factory.mktemp("six")
    done = train(folder, "train.steps=6")
    assert done.returncode == 0, done.stdout
    return folder


@pytest.fixture
def begun(six_steps: Path, tmp_path: Path) -> Path:
    """A copy of its own."""
    subprocess.run(["cp", "-a", six_steps / "run", tmp_path / "run"], check=True)
    return tmp_path


def test_a_run_whose_save_fails_ends_with_74_and_keeps_what_it_had(begun: Path):
    ended = train(begun, most_bytes=TOO_LITTLE)
    assert ended.returncode == 74, ended.stdout
    assert "step 10 was not saved (File too large)" in ended.stdout
    assert saved(begun) == ["000000005", "000000006"]


@pytest.mark.long
def test_a_run_that_may_fail_to_save_goes_on_until_its_last_save(begun: Path):
    ended = train(begun, "checkpoint.on_error=continue", most_bytes=TOO_LITTLE)
    assert ended.returncode == 74, ended.stdout
    log = (begun / "run/logs/worker-0.log").read_text()
    assert log.count("step 10 was not saved (File") == 1
    assert "step 12 was not saved (File too large)" in ended.stdout
    history = [json.loads(line) for line in (begun / "run/history.jsonl").read_text().splitlines()]
    assert history[-1]["step"] == 12
    assert saved(begun) == ["000000005", "000000006"]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 16 MiB, of which a run's checkpoints take six."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", folder], capture_output=True)
    if mounted.returncode:
        pytest.skip("a disk can be mounted by root only")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def fill(disk: Path) -> Path:
    """A file that leaves room for logs, and for nothing else."""
    path = disk / "other"
    with path.open("wb") as file:
        while True:
            room = shutil.disk_usage(disk).free
            try:
                os.posix_fallocate(file.fileno(), 0, room - 2**18)
                return path
            except OSError:
                continue  # a checkpoint was begun meanwhile


def test_a_run_whose_checkpoints_will_not_fit_is_refused_before_its_first_step(disk: Path):
    fill(disk)
    ended = train(disk)
    assert ended.returncode == 74, ended.stdout
    assert "4 checkpoints of 1.4 MiB" in ended.stdout
    assert "5.4 MiB are needed" in ended.stdout
    assert "checkpoint.keep=1" in ended.stdout


@pytest.mark.long
def test_a_disk_that_is_full_for_a_while_costs_no_more_than_the_checkpoints_of_that_while(start, disk: Path):
    run = start(*RUN, f"run={disk / 'run'}", "train.steps=1500", "checkpoint.on_error=continue")
    run.wait_for_step(1)
    other, log = fill(disk), run.directory / "logs/worker-0.log"
    while "training continues until" not in log.read_text():
        assert run.process.poll() is None, log.read_text()
    other.unlink()
    assert run.wait() == 0, run.output
    assert saved(disk)[-1] == "000001500"
    assert len(saved(disk)) == 3
