"""How clusters of processes end when something breaks, or somebody stops them."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import Run, has_ended, wait_until

pytestmark = pytest.mark.cluster

Finish = Callable[..., Run]
FAST = ["model=mlp", "cluster=1ps2w", "train.batch_size=64", "seed=1", "history.every=1", "checkpoint.every=40"]
LONG = [*FAST, "train.steps=100000"]


def _wait_until_gone(pids: list[int]) -> None:
    wait_until(lambda: all(map(has_ended, pids)))


@pytest.mark.long
def test_a_run_that_is_stopped_and_then_killed_ends_as_if_nothing_happened(start, finish: Finish):
    fast = [*FAST, "cluster=2ps2w"]
    run = start(*fast, "train.steps=100000", "run=broken")
    run.wait_for_step(20)
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130, run.output
    assert "Stopping: finishing this" in run.output
    reached = run.summary()["steps"]
    assert (run.directory / f"checkpoints/{reached:09d}/manifest.json").exists()
    assert run.pids() == []
    last = reached + 150
    killed = start(*fast, f"train.steps={last}", "run=broken")
    killed.wait_for_step(reached + 60)
    pids = killed.pids()
    assert len(pids) == 4
    os.killpg(killed.process.pid, signal.SIGKILL)
    _wait_until_gone(pids)
    newest = max(int(path.name) for path in (killed.directory / "checkpoints").glob("0*"))
    assert reached <= newest < last
    resumed = finish(*fast, f"train.steps={last}", "run=broken")
    assert f"done: {last} steps ({last - newest} of them now) in " in resumed.output
    assert resumed.summary()["resumed_from"] is not None
    unbroken = finish(*fast, f"train.steps={last}", "run=unbroken")
    assert [line["step"] for line in resumed.history()] == list(range(1, last + 1))
    assert [line["loss"] for line in resumed.history()] == [line["loss"] for line in unbroken.history()]
    assert resumed.summary()["params_sha256"] == unbroken.summary()["params_sha256"]


def test_nothing_survives_a_launcher_that_is_killed(start):
    run = start(*LONG)
    run.wait_for_step(5)
    pids = run.pids()
    assert len(pids) == 3
    os.kill(run.process.pid, signal.SIGKILL)
    _wait_until_gone(pids)


def test_a_run_whose_terminal_is_gone_saves_and_says_no_more(start):
    run = start(*LONG)
    run.wait_for_step(20)
    run.process.send_signal(signal.SIGHUP)
    assert run.wait() == 128 + signal.SIGHUP
    assert (run.directory / f"checkpoints/{run.summary()['steps']:09d}/manifest.json").exists()
    assert "Stopping" not in run.output
    assert run.pids() == []


def test_a_run_stopped_before_its_first_step_ends_at_once(start):
    run = start(*LONG)
    wait_until(run.pids)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 143
    assert run.pids() == []


def test_ctrl_c_before_any_task_has_started_ends_the_run(start):
    run = start(*LONG)
    wait_until((run.directory / "plan.json").exists, poll_secs=0.005)
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130
    assert "Stopped before the" in run.output
    assert "ended (-9)" not in run.output
    assert not list((run.directory / "checkpoints").glob("0*"))


def test_sigterm_to_one_worker_stops_all_and_saves(start):
    run = start(*LONG)
    run.wait_for_step(10)
    os.kill(_pid(run, "worker-1"), signal.SIGTERM)
    assert run.wait() == 143, run.output
    saved = run.summary()["steps"]
    assert f"Stopped at step {saved}, checkpoint saved" in run.output
    assert (run.directory / f"checkpoints/{saved:09d}/manifest.json").exists()


def test_a_save_that_fails_while_stopping_is_reported(start):
    run = start(*[o for o in LONG if not o.startswith("checkpoint")], "cluster=1ps1w", "checkpoint.every=0")
    run.wait_for_step(10)
    (run.directory / "checkpoints").write_text("not a directory")
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 74, run.output
    assert "worker:0 failed first, exit code 74" in run.output


def _pid(run: Run, log: str) -> int:
    """The process of a task, as its log names it."""
    return int((run.directory / f"logs/{log}.log").read_text().partition("pid ")[2].partition(":")[0])


def test_a_killed_worker_is_named_and_ends_the_run(start):
    run = start(*LONG, "restart.max=0")
    run.wait_for_step(5)
    os.kill(_pid(run, "worker-1"), signal.SIGKILL)
    assert run.wait() == 137
    assert "worker:1 failed first, exit code -9" in run.output
    assert run.pids() == []


def test_a_killed_ps_is_named_although_the_workers_fail_too(start):
    run = start(*LONG, "restart.max=0")
    run.wait_for_step(5)
    os.kill(_pid(run, "ps-0"), signal.SIGKILL)
    assert run.wait() == 137
    assert "ps:0 failed first" in run.output


def test_a_task_that_raises_is_named_with_the_end_of_its_log(start, tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        "import keras, os\n"
        "def bad(input_shape, classes):\n"
        "    return keras.Sequential([keras.Input(input_shape), Explodes(), keras.layers.Flatten(), "
        "keras.layers.Dense(classes)])\n"
        "class Explodes(keras.layers.Layer):\n"
        "    def call(self, inputs, training=False):\n"
        "        if training and 'TRAINER_SUPERVISED' in os.environ: raise RuntimeError('this layer explodes')\n"
        "        return inputs\n"
    )
    run = start("cluster=1ps2w", "user=mine.py", "model=bad", "train.steps=5")
    assert run.wait() == 65
    assert "exit code 65: bad data" in run.output
    assert re.search(r"mine\.py, line 6: RuntimeError: .*this layer explodes", run.output)


def test_a_loss_that_is_not_finite_ends_the_run_and_saves_nothing(start):
    run = start("cluster=1ps2w", "model=mlp", "optimizer=sgd", "optimizer.learning_rate=1e30", "train.steps=50")
    assert run.wait() == 65, run.output
    assert "gradient of step" in run.output
    assert not list((run.directory / "checkpoints").glob("0*"))


def test_a_second_run_on_the_same_directory_is_refused(start):
    first = start(*LONG, "cluster=local", "run=shared")
    first.wait_for_step(3)
    second = start(*LONG, "cluster=local", "run=shared")
    assert second.wait() == 73
    assert f"by process {first.process.pid}" in second.output
    assert first.process.poll() is None


@pytest.mark.long
def test_a_damaged_newest_checkpoint_is_skipped_and_reported(finish: Finish):
    run = finish(*FAST, "train.steps=80", "run=torn")
    expected = run.summary()["params_sha256"]
    newest = run.directory / "checkpoints/000000080/tensors.npz"
    damaged = bytearray(newest.read_bytes())
    damaged[len(damaged) // 2] ^= 1
    newest.write_bytes(damaged)
    (run.directory / "summary.json").unlink()  # as after a crash; what has finished is left as it is
    again = finish(*FAST, "train.steps=80", "run=torn")
    assert "skipping a damaged" in again.output
    assert "resumes at step 40" in again.output
    assert again.summary()["params_sha256"] == expected
