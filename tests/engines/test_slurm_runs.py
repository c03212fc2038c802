"""Runs on a real Slurm of three nodes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from engines import Engine, engine
from runs import ON_HOSTS, Command, Run, has_ended, wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.long]

EXACT, STEPS = [*ON_HOSTS, "checkpoint.every=20"], "train.steps=160"
ARBITRARY = 'for n in 1 1 2 2 3 3; do echo node$n; done >hosts; SLURM_HOSTFILE=hosts exec srun -n6 -m arbitrary "$@"'


@pytest.fixture(scope="module")
def slurm() -> Iterator[Engine]:
    with engine("slurm") as started:
        yield started


@pytest.fixture
def environment(slurm: Engine) -> dict[str, str]:
    return slurm.environment()


@pytest.fixture
def expected(finish: Callable[..., Run]) -> str:
    """params_sha256 of the run on this machine."""
    return finish(*EXACT, STEPS, "run=here").summary()["params_sha256"]


def call(environment: dict[str, str], *words: str) -> str:
    return subprocess.run(words, env=os.environ | environment, capture_output=True, text=True, check=True).stdout


def test_each_process_of_a_step_finds_its_role(start, environment, expected):
    step = start(*EXACT, STEPS, environment=environment, within=["srun", "-n6", "--kill-on-bad-exit=1"])
    assert step.wait() == 0, step.output
    assert step.summary()["params_sha256"] == expected


@pytest.mark.parametrize(
    ("within", "overrides", "message"),
    [
        (["srun", "-n5"], [], "the step has 5 tasks, but cluster=2ps4w has 6"),
        (["srun", "-N2", "-n6", "-m", "plane=2"], [], "the step is distributed by plane"),
        (["sh", "-c", ARBITRARY, "sh"], [], "the step is distributed by arbitrary"),
        ([], ["launch=slurm", 'slurm.args="--partition=nowhere"'], "sbatch refused: "),
    ],
    ids=["five tasks", "plane", "arbitrary", "refused"],
)
def test_what_cannot_work_is_said_in_one_paragraph(start, environment, within, overrides, message):
    run = start(*EXACT, *overrides, "train.steps=10", environment=environment, within=within)
    assert run.wait() != 0
    assert message in run.output
    assert "Traceback" not in run.output


def test_the_nodes_of_a_job_are_the_hosts(slurm, start, environment, expected):
    within = ["salloc", "--quiet", "-N3", "-n6"]
    run = start(*EXACT, "launch=slurm", STEPS, environment=environment, within=within)
    run.wait_for_step(30)
    os.kill(run.last_pid("worker:3"), signal.SIGKILL)
    run.wait_for_step(60)
    os.kill(run.last_pid("ps:1"), signal.SIGKILL)
    run.wait_for_step(90)
    os.kill(run.last_pid("worker:0"), signal.SIGKILL)
    run.wait_for_step(120)
    slurm.hosts("cut", "node3")
    time.sleep(15)  # the fault itself
    slurm.hosts("mend", "node3")
    assert run.wait() == 0, run.output
    assert run.summary()["params_sha256"] == expected
    assert {task["address"].rpartition(":")[0] for task in run.plan()["tasks"]} == {"node1", "node2", "node3"}
    assert run.pids() == []


def job_of(run: Command) -> int:
    return int(wait_until(lambda: _read(run.directory / "slurm/job"), progress=run.progress))


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_a_job_is_submitted_followed_and_requeued_to_the_same_bits(slurm, start, environment, expected):
    run = start(*EXACT, "launch=slurm", "slurm.nodes=3", STEPS, "resume=never", environment=environment)
    job = job_of(run)
    run.wait_for_step(40)
    call(environment, "scontrol", "requeue", str(job))
    run.wait_for_step(90)
    slurm.call("stop", "node2")
    wait_until(
        lambda: "PENDING" in call(environment, "squeue", "-h", "-j", str(job), "-o", "%T"), progress=run.progress
    )
    slurm.call("start", "node2")
    assert run.wait() == 0, run.output
    assert "submitted as job" in run.output
    assert "resumes at step" in run.output
    assert run.summary()["params_sha256"] == expected


def test_a_cancelled_job_saves_and_leaves_nothing(start, environment, tmp_path: Path):
    run = start(*EXACT, "launch=slurm", "slurm.nodes=3", "train.steps=100000", environment=environment)
    job = job_of(run)
    run.wait_for_step(20)
    pids = run.pids()
    run.process.send_signal(signal.SIGINT)  # the command lets it go on
    assert run.wait() == 130, run.output
    assert f"scancel {job}" in run.output
    again = start(*EXACT, "launch=slurm", "slurm.nodes=3", "train.steps=100000", environment=environment)
    wait_until(lambda: "following" in _printed(again), progress=again.progress)
    call(environment, "scancel", str(job))
    assert again.wait() == 143, again.output
    assert re.search(r"Stopped at step \d+, checkpoint saved", _read(run.directory / f"slurm/{job}.out"))
    wait_until(lambda: all(has_ended(pid) for pid in pids))


def _printed(run: Command) -> str:
    return "following" if run._written or run.process.poll() is not None or _has_output(run) else ""


def _has_output(run: Command) -> bool:
    try:
        run.process.communicate(timeout=0.1)
    except subprocess.TimeoutExpired as running:
        return b"following" in (running.output or b"")
    return True
