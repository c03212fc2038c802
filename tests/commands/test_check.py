"""What must hold of a run: each breach in hand-written journals, and runs that were broken for real."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from runs import Run

from trainer.commands.check import claims as check
from trainer.commands.check import invariants
from trainer.storage.journal import Adopt, Entry, Join, Load, Push, Reload, Save, TaskExit, TaskStart, Update
from trainer.storage.run_directory import RunDirectory

WORKERS = ["worker:0", "worker:1"]
UNBROKEN = {1: 0}  # reloads: generation -> step
RELOADED = {1: 0, 2: 4}


def reload(generation: int, step: int, checkpoint: str | None = None) -> Entry:
    return Reload(generation, step, checkpoint)


def save(generation: int, step: int) -> Entry:
    return Save(generation, step)


def load(generation: int, step: int) -> Entry:
    return Load(generation, step)


def updates(generation: int, *steps: int) -> list[Entry]:
    return [Update(generation, step) for step in steps]


def join(step: int, replica: int) -> Entry:
    return Join(step, [replica])


def pushes(generation: int, replica: int, *steps: int) -> list[Entry]:
    return [Push(generation, step, [replica]) for step in steps]


def start(task: str, attempt: int = 0) -> Entry:
    return TaskStart(task, attempt)


def ended(task: str, code: int = 0) -> Entry:
    return TaskExit(task, code)


# ---- history


def test_a_history_has_a_line_for_every_due_step_and_the_last():
    assert invariants.check_history([3, 6, 9, 10], begin=0, end=10, every=3, last=10) == []


def test_a_run_that_was_stopped_has_no_line_for_its_last_step():
    assert invariants.check_history([3, 6], begin=0, end=8, every=3, last=10) == []


def test_a_run_that_continues_another_has_the_lines_of_both():
    assert invariants.check_history([5, 10, 12, 13, 14], begin=11, end=14, every=1, last=14) == []


@pytest.mark.parametrize(
    "steps", [[3, 9, 10], [], [3, 6, 9], [3, 6, 6, 9, 10], [3, 6, 3, 9, 10], [3, 6, 7, 9, 10], [3, 6, 9, 10, 12]]
)
def test_lines_that_are_missing_twice_or_too_many_are_named(steps, snapshot):
    assert invariants.check_history(steps, begin=0, end=10, every=3, last=10) == snapshot


# ---- gradients


@pytest.mark.parametrize(("step", "generation"), [(0, None), (1, 1), (4, 1), (5, 2), (7, 2), (8, 3), (9, 3)], ids=str)
def test_the_last_generation_that_was_loaded_before_a_step_stands(step, generation):
    assert invariants.standing({1: 0, 2: 4, 3: 7}, step) == generation


def test_a_reload_from_an_earlier_step_replaces_all_after_it():
    assert [invariants.standing({1: 0, 2: 40, 3: 20}, step) for step in (20, 21, 41)] == [1, 3, 3]


def test_every_replica_in_every_update_is_right():
    workers = [pushes(1, replica, 0, 1, 2) for replica in (0, 1)]
    assert invariants.check_pushes(workers, UNBROKEN, replicas=2, begin=0, end=3) == []


def test_a_worker_pushes_for_all_its_replicas():
    both = [Push(1, 0, [0, 1])]
    assert invariants.check_pushes([both], UNBROKEN, replicas=2, begin=0, end=1) == []


def test_a_replica_without_a_gradient_is_named_with_its_updates(snapshot):
    workers = [pushes(1, 0, *range(9)), pushes(1, 1, 0, 4, 5, 8)]
    assert invariants.check_pushes(workers, UNBROKEN, replicas=2, begin=0, end=9) == snapshot


def test_a_gradient_of_an_undone_generation_does_not_count(snapshot):
    workers = [pushes(1, 0, *range(6)) + pushes(2, 0, 4, 5, 6), pushes(1, 1, *range(6)) + pushes(2, 1, 5, 6)]
    assert invariants.check_pushes(workers, RELOADED, replicas=2, begin=0, end=7) == snapshot


def test_gradients_of_an_earlier_run_are_not_expected():
    assert invariants.check_pushes([pushes(5, 0, 20, 21)], {5: 20}, replicas=1, begin=0, end=22) == []


def test_a_restarted_worker_may_repeat_a_gradient():
    again = [join(0, 1), *pushes(1, 1, 0, 1), join(1, 1), *pushes(1, 1, 1, 2)]
    assert invariants.check_pushes([pushes(1, 0, 0, 1, 2), again], UNBROKEN, replicas=2, begin=0, end=3) == []


@pytest.mark.parametrize(
    "events",
    [[join(0, 1), *pushes(1, 1, 0), join(2, 1), *pushes(1, 1, 2)], [join(1, 1), join(2, 1), *pushes(1, 1, 0, 2)]],
    ids=["after a push", "at its first"],
)
def test_the_last_push_of_a_killed_worker_need_not_be_recorded(events):
    assert invariants.check_pushes([pushes(1, 0, 0, 1, 2), events], UNBROKEN, replicas=2, begin=0, end=3) == []


def test_a_worker_that_joins_two_steps_further_has_missed_one(snapshot):
    events = [join(0, 1), *pushes(1, 1, 0), join(3, 1), *pushes(1, 1, 3)]
    assert invariants.check_pushes([pushes(1, 0, 0, 1, 2, 3), events], UNBROKEN, replicas=2, begin=0, end=4) == snapshot


def test_an_earlier_launch_without_recorded_steps_is_not_checked(snapshot):
    reloads, workers = {1: 0, 2: 20}, [pushes(2, 0, 20, 21)]
    assert invariants.check_pushes(workers, reloads, replicas=1, begin=20, end=22) == []
    (problem,) = invariants.check_pushes(workers, reloads, replicas=1, begin=0, end=22)
    assert problem == snapshot


def test_without_a_reload_the_pushes_cannot_be_checked(snapshot):
    (problem,) = invariants.check_pushes([pushes(1, 0, 0)], {}, replicas=1, begin=0, end=1)
    assert problem == snapshot


# ---- shards


def test_a_host_may_go_back_with_an_announced_load():
    events = [load(1, 0), *updates(1, 1, 2, 3, 4, 5, 6), load(2, 4), *updates(2, 5, 6)]
    assert invariants.check_host("ps:0", events, RELOADED) == []
    assert invariants.check_host_end("ps:0", events, 6) == []


@pytest.mark.parametrize(
    "events",
    [
        [load(1, 0), *updates(1, 1, 2, 1)],
        [load(1, 0), *updates(1, 1, 1)],
        [load(1, 0), *updates(1, 1, 3)],
        updates(1, 1, 2),
        [load(1, 0), *updates(1, 1), *updates(2, 5, 6)],
        [load(2, 4), load(1, 0)],
        [load(1, 0), load(1, 0)],
        [load(3, 0)],
        [load(1, 0), load(2, 3)],
    ],
)
def test_a_host_with_unannounced_steps_is_named(events, snapshot):
    assert invariants.check_host("ps:0", events, RELOADED) == snapshot


def test_a_host_that_ends_at_another_step_is_named(snapshot):
    assert invariants.check_host_end("ps:1", [load(1, 0), *updates(1, 1, 2)], 3) == snapshot


# ---- the chief


def test_a_chief_may_save_reload_and_be_replaced():
    events = [reload(1, 0), save(1, 4), reload(2, 4, "runs/a/checkpoints/000000004"), save(2, 8)]
    events += [Adopt(2, 9), save(2, 8), save(2, 12)]
    assert invariants.check_chief(events) == []


def test_a_checkpoint_may_have_a_name_of_the_users_own():
    assert invariants.check_chief([reload(1, 7, "mine/the-good-one")]) == []


@pytest.mark.parametrize(
    "events",
    [
        [reload(1, 5)],
        [reload(1, 5, "a/000000004")],
        [reload(2, 0), reload(2, 0)],
        [reload(2, 0), reload(1, 0)],
        [reload(1, 0), reload(2, 0), save(1, 8)],
        [reload(1, 0), save(1, 8), save(1, 4)],
        [reload(1, 0), Adopt(2, 3)],
    ],
)
def test_a_chief_that_breaks_a_promise_is_quoted(events, snapshot):
    assert invariants.check_chief(events) == snapshot


# ---- processes


def attempts(*events: dict, good: tuple[int, ...] = (0,)) -> list[str]:
    return invariants.check_lives(events, WORKERS, good=good)


def test_tasks_may_be_started_again_if_they_end_well():
    begun = [start("worker:0"), start("worker:1"), ended("worker:1", -9), start("worker:1", 1)]
    assert attempts(*begun, ended("worker:0"), ended("worker:1")) == []


def test_a_killed_launcher_leaves_no_task_behind():
    assert (
        attempts(start("worker:0"), start("worker:1"), start("worker:0"), start("worker:1"), *map(ended, WORKERS)) == []
    )


def test_a_run_that_was_stopped_may_end_with_143():
    events = [*map(start, WORKERS), ended("worker:0"), ended("worker:1", 143)]
    assert attempts(*events, good=(0, 143)) == []
    assert attempts(*events) == ["worker:1 exited with code 143"]


def test_two_processes_of_one_task_are_a_problem(snapshot):
    events = [*map(start, WORKERS), start("worker:0", 1), *map(ended, WORKERS)]
    assert attempts(*events) == snapshot


def test_an_end_without_a_start_is_a_problem(snapshot):
    assert attempts(*map(start, WORKERS), *map(ended, WORKERS), ended("worker:1")) == snapshot


def test_a_process_that_never_ended_is_a_problem():
    assert attempts(*map(start, WORKERS), ended("worker:1")) == ["attempt 0 of worker:0 never ended"]


def test_a_task_that_was_never_started_is_a_problem():
    assert attempts(start("worker:0"), ended("worker:0")) == ["worker:1 was never started"]


def test_only_the_last_exit_code_must_be_good():
    events = [
        *map(start, WORKERS),
        ended("worker:0"),
        ended("worker:1", 70),
        start("worker:1", 1),
        ended("worker:1", 70),
    ]
    assert attempts(*events) == ["worker:1 exited with code 70"]


# ---- a run directory

EXACT = ["model=oracle", "data=oracle", "optimizer=sgd", "optimizer.learning_rate=48", "train.batch_size=48"]
RECORDED = ["history.journal=true", "history.every=2", "checkpoint.every=10"]


def breaches(run: Run) -> list[str]:
    return [problem for claim in check.examine(RunDirectory(run.directory)) for problem in claim.problems]


def skipped(run: Run) -> list[str]:
    return [claim.skipped for claim in check.examine(RunDirectory(run.directory)) if claim.skipped]


def ask(*overrides: str) -> subprocess.CompletedProcess[str]:
    code = (
        "import sys; from trainer.__main__ import console\n"
        "try: console()\n"
        "finally: print('imported:', *sorted({'tensorflow', 'keras'} & set(sys.modules)))"
    )
    return subprocess.run(
        [sys.executable, "-c", code, "mode=check", *overrides], capture_output=True, text=True, timeout=60, check=False
    )


def change_lines(path: Path, change: Callable[[list[str]], list[str]]) -> None:
    path.write_text("".join(f"{line}\n" for line in change(path.read_text().splitlines())))


def test_a_missing_directory_is_missing_input(tmp_path, snapshot):
    done = ask(f"run={tmp_path}/none")
    assert done.returncode == 66
    assert done.stderr == snapshot


def test_no_directory_is_a_config_error(snapshot):
    done = ask()
    assert done.returncode == 2
    assert done.stderr == snapshot


@pytest.mark.long
@pytest.mark.cluster
def test_a_complete_run_passes_and_every_damage_is_reported(finish: Callable[..., Run]):
    run = finish("cluster=2ps2w", *EXACT, *RECORDED, "train.steps=25")
    done = ask(f"run={run.directory}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.splitlines()[-2:] == ["all checks passed", "imported:"]
    assert done.stdout.count("ok: ") == 9
    assert "not checked" not in done.stdout

    journal, checkpoints = run.directory / "journal", run.directory / "checkpoints"
    change_lines(run.directory / "history.jsonl", lambda lines: [line for line in lines if '"step": 8,' not in line])
    change_lines(journal / "worker-1.jsonl", lambda lines: [line for line in lines if '"step": 7,' not in line])
    change_lines(journal / "ps-1.jsonl", lambda lines: lines[:-1])
    change_lines(journal / "launcher.jsonl", lambda lines: [line.replace('"code": 0', '"code": 70') for line in lines])
    change_lines(journal / "worker-0.jsonl", lambda lines: [*lines, "{"])
    (checkpoints / ".000000025.tmp-1").mkdir()
    (checkpoints / "000000020" / "tensors.npz").write_bytes(b"")
    done = ask(f"run={run.directory}")
    assert done.returncode == 65
    for problem in (
        "no line for step 8",
        "update 8 of generation 1 had no gradient of replica 1",
        "ps:1 ended at step 24, but the run at 25",
        "worker:1 exited with code 70",
        f"of {journal}/worker-0.jsonl is not a JSON object",
        f"{checkpoints}/.000000025.tmp-1 is not a checkpoint",
        f"{checkpoints}/000000020: tensors.npz has 0 bytes",
    ):
        assert problem in done.stdout
    assert "10 problems" in done.stdout

    (run.directory / "summary.json").unlink()
    assert breaches(run) == [f"{run.directory}/summary.json does not exist"]


@pytest.mark.cluster
def test_examples_that_were_counted_wrong_are_named(finish: Callable[..., Run]):
    run = finish("cluster=local", *EXACT, "train.steps=6", "seed=1")
    assert breaches(run) == []
    config = run.directory / "config.yaml"
    config.write_text(config.read_text().replace("seed: 1\n", "seed: 2\n"))
    assert breaches(run) == []  # whole epochs do not depend on the order
    summary = run.directory / "summary.json"
    summary.write_text(json.dumps(run.summary() | {"steps": 7}))
    (run.directory / "checkpoints/000000006").rename(run.directory / "checkpoints/000000007")
    counted = [problem for problem in breaches(run) if "counted" in problem]
    assert [re.sub("examples.*more counted", "... counted", problem) for problem in counted] == [
        "parameters/counts_0/counts: ... counted once fewer than expected",
        "parameters/counts_1/counts: ... counted once fewer than expected",
    ]


@pytest.mark.long
@pytest.mark.cluster
def test_claims_that_cannot_be_checked_say_why(finish: Callable[..., Run]):
    run = finish("cluster=1ps2w", "strategy=async", *EXACT, "train.steps=20", "history.journal=true")
    assert breaches(run) == []
    assert skipped(run) == [check.NO_WAITING] * 3
    run = finish("cluster=local", *EXACT[:-2], "train.batch_size=48", "train.steps=4", "run=unrecorded")
    assert breaches(run) == []
    assert skipped(run) == [
        check.NOT_RECORDED,
        "no task holds shards for others",
        "the parameters count examples only with optimizer=sgd optimizer.learning_rate=48",
    ]


@pytest.mark.long
@pytest.mark.cluster
def test_a_run_that_was_stopped_and_continued_passes(start: Callable[..., Run]):
    command = ["cluster=2ps2w", *EXACT, *RECORDED, "train.steps=2000"]
    first = start(*command)
    first.wait_for_step(30)
    first.process.send_signal(signal.SIGTERM)
    assert first.wait() == 143
    assert breaches(first) == []
    steps = first.summary()["steps"]
    assert check.examine(RunDirectory(first.directory))[0].text == f"the run was stopped at step {steps} of 2000"
    second = start(*command[:-1], f"train.steps={steps + 31}")
    assert second.wait() == 0, second.output
    assert breaches(second) == []


@pytest.mark.long
@pytest.mark.cluster
def test_a_run_whose_tasks_were_killed_passes(start: Callable[..., Run]):
    run = start("cluster=2ps3w", *EXACT, *RECORDED, "train.steps=600", "restart.delay_secs=0")
    for task, step in (("worker-1", 30), ("worker-0", 60), ("ps-1", 90)):
        run.wait_for_step(step)
        os.kill(last_pid(run, task), signal.SIGKILL)
    assert run.wait() == 0, run.output
    claims = check.examine(RunDirectory(run.directory))
    assert [str(claim) for claim in claims if claim.problems or claim.skipped] == []
    assert "the chief loaded 2 generations, and each checkpoint is of the last one" in [claim.text for claim in claims]


def last_pid(run: Run, task: str) -> int:
    return int(re.findall(r", pid (\d+):", (run.directory / f"logs/{task}.log").read_text())[-1])
