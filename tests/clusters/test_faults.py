"""Tasks that are killed, frozen or ended at the worst moment: the run finishes, and with the same bits."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from runs import Run, wait_until

pytestmark = pytest.mark.cluster

STEPS, FAULT_AT = 60, 25
OWN_MODEL = ["seed=4", "train.batch_size=48", f"train.steps={STEPS}", "checkpoint.every=10", "history.every=1"]
EXACT = ["model=mlp", "model.options.width=256", *OWN_MODEL]  # as wide as that, it stays in shared memory
SEVERAL, APART = [*EXACT, "train.steps=130"], 35  # steps, between one fault and the next


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Run]]:
    """unbroken(cluster, *overrides) -> the run without a fault; made once."""
    runs: dict[tuple[str, ...], Run] = {}

    def make(*overrides: str) -> Run:
        if overrides not in runs:
            runs[overrides] = Run([*EXACT, *overrides], tmp_path_factory.mktemp("unbroken"), {})
            assert runs[overrides].wait() == 0, runs[overrides].output
        return runs[overrides]

    yield make
    for run in runs.values():
        run.end()


def signal_tasks(run: Run, number: int, *tasks: str) -> None:
    """Signals the present life of each task; a job stands for all of its tasks."""
    named = [task for task in run.tasks() if task in tasks or task.partition(":")[0] in tasks]
    first, *others = [run.last_pid(task) for task in named]
    os.kill(first, number)
    for pid in others:
        with contextlib.suppress(ProcessLookupError):  # the launcher ends all once it sees that a ps is gone
            os.kill(pid, number)


def assert_same(run: Run, expected: Run) -> None:
    assert run.summary()["params_sha256"] == expected.summary()["params_sha256"]
    assert losses(run) == losses(expected)
    assert run.pids() == []


def wait_for_restart(run: Run) -> None:
    """Returns when the launcher has decided to start something again."""
    wait_until(lambda: "restart" in (run.directory / "journal/launcher.jsonl").read_text())


def losses(run: Run) -> list[tuple[int, float]]:
    return [(line["step"], line["loss"]) for line in run.history()]


def events(run: Run, task: str) -> list[dict]:
    path = run.directory / "journal" / f"{task.replace(':', '-')}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def page(run: Run, task: str) -> dict:
    """What a task's page said last."""
    return json.loads((run.directory / "status.json").read_text())["tasks"][task]


def joins(run: Run, task: str) -> list[list[int]]:
    """The replicas of each place that a task has taken."""
    return [event["replicas"] for event in events(run, task) if event["event"] == "join"]


def reloads(run: Run) -> dict[int, int]:
    """The step of each load of the shards, by its generation."""
    return {event["generation"]: event["step"] for event in events(run, "worker:0") if event["event"] == "reload"}


def newest_checkpoint(run: Run) -> int:
    return max(int(path.name) for path in (run.directory / "checkpoints").glob("0*"))


def test_workers_that_are_killed_or_frozen_come_back_and_not_a_step_is_lost(start, unbroken):
    run = start(*SEVERAL, "cluster=2ps3w", "timeouts.heartbeat_secs=3")
    faults = [("worker:2", signal.SIGKILL), ("worker:0", signal.SIGKILL), ("worker:1", signal.SIGSTOP)]
    for number, (task, kind) in enumerate(faults):
        run.wait_for_step(FAULT_AT + number * APART)
        signal_tasks(run, kind, task)
    assert run.wait() == 0, run.output
    assert "worker:2 died (SIGKILL)" in run.output
    assert "worker:0 died (SIGKILL)" in run.output
    assert re.search(r"worker:1 died \(killed: silent .*timeouts.heartbeat_secs=3\)", run.output)
    assert_same(run, unbroken("cluster=2ps3w", *SEVERAL[len(EXACT) :]))
    loaded = [event["generation"] for event in events(run, "ps:0") if event["event"] == "load"]
    assert loaded == [1]
    assert run.summary()["restarts_of"] == {"worker:0": 1, "worker:1": 1, "worker:2": 1}


def test_others_train_on_while_a_worker_is_away(start, unbroken):
    endless = ["train.steps=100000", "checkpoint.every=0", "restart.stand_in_secs=0", "restart.delay_secs=4"]
    run = start(*EXACT, *endless, "cluster=2ps3w")
    run.wait_for_step(1)
    wait_until(lambda: page(run, "worker:1")["can_stand_in_for"] == ["worker:2"], progress=run.progress)
    signal_tasks(run, signal.SIGKILL, "worker:2")
    wait_for_restart(run)
    run.wait_for_step(run.history()[-1]["step"] + FAULT_AT)
    assert [event["task"] for event in events(run, "launcher") if event["event"] == "start"].count("worker:2") == 1
    wait_until(lambda: len(joins(run, "worker:2")) == 2, progress=run.progress)
    run.wait_for_step(run.history()[-1]["step"] + FAULT_AT)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 143, run.output
    assert (joins(run, "worker:1"), joins(run, "worker:2")) == ([[1], [2]], [[2], [2]])
    assert_same(run, unbroken("cluster=local", "train.replicas=3", f"train.steps={run.summary()['steps']}"))


@pytest.mark.long
@pytest.mark.parametrize("task", ["worker:0", "worker:1"])
def test_a_worker_that_is_killed_whenever_it_has_joined_delays_the_run_and_changes_nothing(start, unbroken, task):
    often = ["restart.max=20", "restart.delay_secs=0"]
    run = start(*EXACT, *often, "cluster=1ps2w")
    run.wait_for_step(FAULT_AT)
    for kills in range(1, 13):
        signal_tasks(run, signal.SIGKILL, task)
        if kills < 12:
            wait_until(lambda: sum(event["event"] == "join" for event in events(run, task)) > kills)  # noqa: B023
    assert run.wait() == 0, run.output
    assert_same(run, unbroken("cluster=1ps2w"))
    assert run.summary()["restarts_of"] == {task: 12}


@pytest.mark.long
@pytest.mark.parametrize(
    ("cluster", "faults"),
    [("2ps3w", [["ps:1"], ["ps", "worker"]]), ("2ps3w", [["ps"]]), ("3w", [["worker:1"]]), ("local", [["worker:0"]])],
    ids=["a ps, then everything", "all ps", "a worker with a shard", "one process"],
)
def test_what_was_lost_with_a_shard_is_made_again_from_the_newest_checkpoint(start, unbroken, cluster, faults):
    run, newest = start(*SEVERAL, f"cluster={cluster}"), []
    for number, tasks in enumerate(faults):
        run.wait_for_step(FAULT_AT + number * APART)
        newest.append(newest_checkpoint(run))
        signal_tasks(run, signal.SIGKILL, *tasks)
        wait_until(lambda loads=number + 2: len(reloads(run)) == loads, progress=run.progress)
    assert run.wait() == 0, run.output
    assert run.output.count("restarting all tasks") == len(faults)
    assert_same(run, unbroken(f"cluster={cluster}", *SEVERAL[len(EXACT) :]))
    assert list(reloads(run)) == list(range(1, len(faults) + 2))
    for step, before in zip(list(reloads(run).values())[1:], newest, strict=True):
        assert before <= step <= before + 20


@pytest.mark.long
def test_a_shard_that_is_lost_before_the_first_checkpoint_starts_the_run_anew(start, unbroken):
    run = start(*EXACT, "cluster=2ps3w", "checkpoint.every=0")
    run.wait_for_step(5)
    signal_tasks(run, signal.SIGKILL, "ps:0")
    assert run.wait() == 0, run.output
    assert_same(run, unbroken("cluster=2ps3w"))
    assert not list(run.directory.glob("before-*"))


@pytest.mark.long
def test_where_nobody_waits_a_lost_shard_is_loaded_from_the_newest_checkpoint_too(start):
    run = start(*EXACT, "cluster=2ps3w", "strategy=async", "train.steps=600")
    run.wait_for_step(FAULT_AT)
    signal_tasks(run, signal.SIGKILL, "ps:1")
    assert run.wait() == 0, run.output
    assert [event["generation"] for event in events(run, "worker:0") if event["event"] == "reload"] == [1, 2]
    assert run.summary()["final_loss"] < 2.0  # 2.3 before the first update


@pytest.mark.long(but=["all_reduce"])
@pytest.mark.parametrize("strategy", ["async", "all_reduce"])  # backup: test_table_runs.py
def test_a_killed_worker_of_another_strategy_comes_back(start, unbroken, strategy: str):
    cluster = "2w" if strategy == "all_reduce" else "2ps3w"
    overrides = (f"cluster={cluster}", f"strategy={strategy}")
    run = start(*EXACT, *overrides, *([] if strategy == "all_reduce" else ["train.steps=600"]))
    run.wait_for_step(FAULT_AT)
    signal_tasks(run, signal.SIGKILL, "worker:1")
    assert run.wait() == 0, run.output
    steps = [line["step"] for line in run.history()]
    assert steps == sorted(set(steps))
    if strategy == "all_reduce":
        assert_same(run, unbroken(*overrides))


@pytest.mark.long
def test_the_chief_of_an_asynchronous_run_adopts_what_the_others_did_without_it(start):
    run = start(*EXACT, "cluster=2ps3w", "strategy=async", "train.steps=1500")
    run.wait_for_step(FAULT_AT)
    signal_tasks(run, signal.SIGKILL, "worker:0")
    assert run.wait() == 0, run.output
    (adopted,) = [event["step"] for event in events(run, "worker:0") if event["event"] == "adopt"]
    assert adopted > FAULT_AT
    assert run.summary()["steps"] >= 1500


@pytest.mark.long
def test_a_ps_that_is_frozen_is_ended_and_replaced(start, unbroken):
    run = start(*EXACT, "cluster=2ps3w", "timeouts.heartbeat_secs=3")
    run.wait_for_step(FAULT_AT)
    signal_tasks(run, signal.SIGSTOP, "ps:0")
    assert run.wait() == 0, run.output
    assert re.search(r"ps:0 died \(killed: silent .*timeouts.heartbeat_secs=3\)", run.output)
    assert_same(run, unbroken("cluster=2ps3w"))


@pytest.mark.long
def test_a_task_that_is_frozen_for_a_moment_is_waited_for(start, unbroken):
    run = start(*EXACT, "cluster=2ps3w")
    run.wait_for_step(FAULT_AT)
    signal_tasks(run, signal.SIGSTOP, "worker:1")
    time.sleep(2)  # the fault itself: shorter than the heartbeat's timeout
    signal_tasks(run, signal.SIGCONT, "worker:1")
    assert run.wait() == 0, run.output
    assert run.summary()["restarts"] == 0
    assert_same(run, unbroken("cluster=2ps3w"))


def test_a_task_that_fails_again_and_again_ends_the_run_with_its_first_failure(start):
    environment = {"TRAINER_FAILPOINT": f"save-data:kill@{FAULT_AT}"}
    run = start(*EXACT, "cluster=1ps2w", "restart.max=2", "restart.delay_secs=0.1", environment=environment)
    assert run.wait() == 137, run.output
    assert "worker:0 died (SIGKILL)" in run.output
    assert "restarted 2 times within 3600 s" in run.output
    assert "worker:0 failed first, exit code -9" in run.output
    assert run.pids() == []


@pytest.mark.long
def test_a_run_that_is_stopped_while_a_task_is_on_its_way_back_saves_all_the_same(start, unbroken):
    run = start(*EXACT, "cluster=2ps3w", "train.steps=100000")
    run.wait_for_step(FAULT_AT)
    signal_tasks(run, signal.SIGKILL, "worker:1")
    wait_for_restart(run)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 143, run.output
    saved = run.summary()["steps"]
    assert losses(run)[:STEPS] == losses(unbroken("cluster=2ps3w"))[:saved]


def test_sigterm_to_a_ps_stops_all_and_saves(start):
    run = start(*EXACT, "cluster=1ps2w", "train.steps=100000", "checkpoint.every=0")
    run.wait_for_step(FAULT_AT)
    signal_tasks(run, signal.SIGTERM, "ps:0")
    assert run.wait() == 143, run.output
    saved = run.summary()["steps"]
    assert f"Stopped at step {saved}, checkpoint saved" in run.output
    assert (run.directory / f"checkpoints/{saved:09d}/manifest.json").exists()


@pytest.mark.long
def test_a_run_that_is_stopped_right_after_its_first_step_saves_it(start):
    run = start(*EXACT, "cluster=1ps2w", "train.steps=100000", "checkpoint.every=0")
    run.wait_for_step(1)
    run.process.send_signal(signal.SIGTERM)
    assert run.wait() == 143, run.output
    assert f"Stopped at step {run.summary()['steps']}, checkpoint saved" in run.output


@pytest.mark.long
def test_sigterm_to_every_process_at_once_saves(start):
    run = start(*EXACT, "cluster=1ps2w", "train.steps=100000", "checkpoint.every=0")
    run.wait_for_step(FAULT_AT)
    nursery = int(Path(f"/proc/{run.last_pid('ps:0')}/stat").read_text().split()[3])
    for pid in (nursery, *run.pids(), run.process.pid):
        os.kill(pid, signal.SIGTERM)
    assert run.wait() == 143, run.output
    assert f"Stopped at step {run.summary()['steps']}, checkpoint saved" in run.output


@pytest.mark.long
def test_a_run_that_is_stopped_while_all_tasks_start_again_saves(start):
    run = start(*EXACT, "cluster=2ps2w", "train.steps=100000", "restart.delay_secs=2")
    run.wait_for_step(FAULT_AT)
    signal_tasks(run, signal.SIGKILL, "ps:0")
    wait_for_restart(run)
    run.process.send_signal(signal.SIGINT)
    assert run.wait() == 130, run.output
    assert f"Stopped at step {run.summary()['steps']}, checkpoint saved" in run.output


@pytest.mark.long
def test_a_task_that_freezes_before_it_trains_is_ended_too(start, unbroken):
    run = start(*EXACT, "cluster=2ps3w", "timeouts.heartbeat_secs=2", "timeouts.roll_call_secs=8")
    run.wait_for_step(FAULT_AT)
    dead = run.last_pid("worker:1")
    signal_tasks(run, signal.SIGKILL, "worker:1")
    wait_until(lambda: run.last_pid("worker:1") != dead, poll_secs=0.005)
    signal_tasks(run, signal.SIGSTOP, "worker:1")
    assert run.wait() == 0, run.output
    assert re.search(r"worker:1 died \(killed: silent for longer .*=[28]\)", run.output), run.output
    assert_same(run, unbroken("cluster=2ps3w"))


@pytest.mark.long
def test_the_whole_run_killed_goes_on_where_it_was_saved(start, unbroken):
    run = start(*EXACT, "cluster=2ps3w", "run=whole")
    run.wait_for_step(FAULT_AT)
    run.end()
    again = start(*EXACT, "cluster=2ps3w", "run=whole")
    assert again.wait() == 0, again.output
    assert "resumes at step" in again.output
    assert_same(again, unbroken("cluster=2ps3w"))


SKEWED = """
import os, time

now, skews = time.time, {"worker-0.log": 3600.0, "ps-0.log": -3600.0}


def skewed():
    return now() + skews.get(os.path.basename(os.readlink("/proc/self/fd/1")), 0.0)


time.time = skewed
"""


@pytest.mark.long
def test_clocks_that_are_an_hour_off_have_no_effect(start, unbroken, tmp_path: Path):
    (tmp_path / "sitecustomize.py").write_text(SKEWED)
    run = start(*EXACT, "cluster=2ps3w", environment={"PYTHONPATH": str(tmp_path)})
    run.wait_for_step(FAULT_AT)
    status = json.loads((run.directory / "status.json").read_text())["tasks"]
    started = {task: round((page["started_at"] - status["ps:1"]["started_at"]) / 3600) for task, page in status.items()}
    assert started == {"ps:0": -1, "ps:1": 0, "worker:0": 1, "worker:1": 0, "worker:2": 0}
    signal_tasks(run, signal.SIGKILL, "worker:2")
    assert run.wait() == 0, run.output
    assert run.summary()["restarts_of"] == {"worker:2": 1}
    assert_same(run, unbroken("cluster=2ps3w"))


SLOW_WORKER = """
import os, time
import keras, tensorflow as tf


def slow_down(features):
    if os.readlink("/proc/self/fd/1").endswith("worker-1.log"):
        time.sleep(0.2)
    return features


class Slow(keras.layers.Layer):
    def call(self, inputs):
        return tf.ensure_shape(tf.numpy_function(slow_down, [inputs], inputs.dtype), inputs.shape)


def slow(input_shape, classes):
    return keras.Sequential([
        keras.Input(input_shape), Slow(), keras.layers.Flatten(), keras.layers.Dense(classes, name="logits")
    ])
"""


@pytest.mark.long
def test_a_worker_that_the_others_wait_for_is_named(start, tmp_path: Path):
    (tmp_path / "mine.py").write_text(SLOW_WORKER)
    run = start(*OWN_MODEL, "cluster=1ps3w", "user=mine.py", "model=slow", "train.steps=75")
    assert run.wait() == 0, run.output
    reports = re.findall(r"(worker:\d) is slow: it takes ([\d.]+) times [^;]*; (.*)", run.output)
    ((name, times, follows),) = reports
    assert (name, follows) == ("worker:1", "every step waits for it")
    assert float(times) > 3


MEMORY = Path("/sys/fs/cgroup/memory")


@pytest.fixture
def little_memory() -> Iterator[Path]:
    """A control group that has hardly any memory."""
    group = MEMORY / f"trainer-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no memory can be taken from a process here: {error}")
    (group / "memory.limit_in_bytes").write_text(str(4 * 2**20))
    yield group
    group.rmdir()


TAKES_MEMORY = """
import keras, numpy as np, tensorflow as tf


class Takes(keras.layers.Layer):
    def call(self, inputs):
        return tf.ensure_shape(tf.numpy_function(take, [inputs], inputs.dtype), inputs.shape)


def take(features):
    return features + np.float32(np.ones(2**23).sum() * 0)


def takes(input_shape, classes):
    return keras.Sequential([
        keras.Input(input_shape), Takes(), keras.layers.Flatten(), keras.layers.Dense(classes, name="logits")
    ])
"""


@pytest.mark.long
def test_a_task_that_runs_out_of_memory_is_distinguished_from_one_that_was_killed(
    start, tmp_path: Path, little_memory: Path
):
    (tmp_path / "mine.py").write_text(TAKES_MEMORY)
    run = start(*OWN_MODEL, "cluster=1ps2w", "user=mine.py", "model=takes")
    run.wait_for_step(FAULT_AT)
    (little_memory / "cgroup.procs").write_text(str(run.last_pid("worker:1")))
    assert run.wait() == 0, run.output
    assert re.search(r"worker:1 died \(out of memory, .* \d+ MiB .*\)", run.output)
    assert run.summary()["restarts_of"] == {"worker:1": 1}


HANGS_ONCE = """
import os, time
import keras, tensorflow as tf

calls = 0


def hang_once(features):
    global calls
    calls += 1
    if calls == 10:
        try:
            os.close(os.open("hung", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return features
        time.sleep(600)
    return features


class Hangs(keras.layers.Layer):
    def call(self, inputs, training=False):
        if not training:
            return inputs
        passed = tf.numpy_function(hang_once, [inputs], inputs.dtype)
        return tf.ensure_shape(passed, inputs.shape)


def hangs(input_shape, classes):
    return keras.Sequential([
        keras.Input(input_shape), Hangs(), keras.layers.Flatten(), keras.layers.Dense(classes, name="logits")
    ])
"""


@pytest.mark.long
def test_a_task_that_hangs_and_holds_the_interpreter_writes_stacks_all_the_same(start, tmp_path: Path):
    holds = HANGS_ONCE.replace("import os, time", "import ctypes, os").replace("time.", "ctypes.PyDLL(None).")
    (tmp_path / "mine.py").write_text(holds)
    run = start(*OWN_MODEL, "cluster=1ps2w", "user=mine.py", "model=hangs", "timeouts.heartbeat_secs=3")
    assert run.wait() == 0, run.output
    (hung,) = re.findall(r"(worker:\d) died \(killed: silent .*timeouts.heartbeat_secs=3\)", run.output)
    assert "in hang_once" in (run.directory / "logs" / f"{hung.replace(':', '-')}.log").read_text()
    assert run.summary()["restarts_of"] == {hung: 1}


@pytest.mark.long(but=["1ps2w"])
@pytest.mark.parametrize("cluster", ["1ps2w", "local"])
def test_a_step_that_hangs_writes_stacks_and_is_done_again(start, tmp_path: Path, cluster: str):
    (tmp_path / "mine.py").write_text(HANGS_ONCE)
    run = start(*OWN_MODEL, f"cluster={cluster}", "user=mine.py", "model=hangs", "timeouts.step_secs=3")
    assert run.wait() == 0, run.output
    assert "longer than timeouts.step_secs" in run.output
    logs = {task: run.directory / "logs" / f"{task.replace(':', '-')}.log" for task in run.tasks()}
    (hung,) = [task for task, log in logs.items() if "in hang_once" in log.read_text()]
    for task, log in logs.items():
        assert f'{task} INFO  state: {{"job": "{task.partition(":")[0]}"' in log.read_text()
    assert run.summary()["restarts_of"] == {hung: 1}
    assert [step for step, _ in losses(run)] == list(range(1, STEPS + 1))
