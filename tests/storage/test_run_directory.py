"""The run directory: who may work in it, and what its files say."""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from quick_config import load

from trainer.config.schema import RunConfig
from trainer.faults.exit_codes import RunInUseError
from trainer.plan.description import Description
from trainer.plan.devices import Machine
from trainer.plan.layout import Parameter
from trainer.plan.make import make_plan
from trainer.plan.plan import Plan
from trainer.storage import run_directory
from trainer.storage.atomic import write_atomically
from trainer.storage.lease import Lease
from trainer.storage.resume import describe_finished
from trainer.storage.run_directory import RunDirectory, choose, config_hash

HOLDER = """
import sys, time
from pathlib import Path
from trainer.storage.lease import Lease
from trainer.storage.resume import describe_finished
from trainer.storage.run_directory import RunDirectory

with Lease(RunDirectory(Path(sys.argv[1]))):
    print("holds", flush=True)
    time.sleep(60)
"""
MODEL = Description(
    (Parameter("dense/kernel", (784, 128), True), Parameter("norm/moving_mean", (128,), False)), 10, 8000, 2000
)


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")


@pytest.fixture
def holder(directory: RunDirectory) -> Iterator[subprocess.Popen[str]]:
    """Another process that holds the lease of `directory`."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(directory.path)], stdout=subprocess.PIPE, text=True, bufsize=1
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "holds\n"
    yield process
    process.kill()
    process.wait()
    process.stdout.close()


def planned(config: RunConfig) -> Plan:
    return make_plan(config, MODEL, Machine(cores=2, gpus=0))


def test_a_second_process_is_refused_with_the_first_ones_id(directory, holder):
    with pytest.raises(RunInUseError, match=f"by process {holder.pid};"):
        Lease(directory)


def test_a_directory_is_free_after_its_owner_was_killed(directory, holder):
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    with Lease(directory):
        pass


def test_a_directory_is_free_after_its_owner_left_the_block(directory):
    with Lease(directory):
        pass
    with Lease(directory):
        pass


def test_a_lease_names_its_own_process(directory):
    with Lease(directory), pytest.raises(RunInUseError, match=f"by process {os.getpid()};"):
        Lease(directory)


def test_a_lease_makes_the_directory(directory):
    with Lease(directory):
        assert directory.path.is_dir()


def test_a_lease_of_a_run_that_wrote_nothing_leaves_nothing(directory):
    with Lease(directory):
        pass
    assert not directory.path.exists()
    with Lease(directory):
        directory.config.write_text("")
    assert [path.name for path in directory.path.iterdir()] == ["config.yaml"]


def test_the_error_of_a_directory_that_cannot_be_written_says_what_to_type(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    says = r": the run directory cannot be written \(Not a directory\); choose another with run=PATH"
    with pytest.raises(OSError, match=f"{tmp_path}/file/run{says}"):
        Lease(RunDirectory(tmp_path / "file" / "run"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").write_text("")
    with pytest.raises(OSError, match=f"{tmp_path}/runs/run-local-.*{says}"):
        choose(load([]))


def test_a_lease_taken_while_its_owner_leaves_still_keeps_others_out(directory, monkeypatch):
    """The owner's last act may fall between another process's opening of the lock file and its locking of it."""
    real, owner = fcntl.flock, Lease(directory)

    def leave_first(file, operation):
        monkeypatch.setattr(fcntl, "flock", real)
        owner.__exit__(None, None, None)
        return real(file, operation)

    monkeypatch.setattr(fcntl, "flock", leave_first)
    with Lease(directory), pytest.raises(RunInUseError, match="in use by"):
        Lease(directory)


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param([], id="defaults"),
        pytest.param(["cluster=2ps4w", "placement.pins={dense/*:1}", "optimizer.ema=0.99"], id="cluster"),
        pytest.param(["model=mlp", "model.options.width=7", "device.memory_fraction={worker:0.5}"], id="options"),
    ],
)
def test_a_config_survives_being_written_and_read(directory, overrides):
    config = load(overrides)
    directory.write_inputs(config, planned(config))
    threads = {task.job: task.intra_op_threads for task in planned(config).tasks}
    assert directory.read_config() == replace(config, device=replace(config.device, intra_op_threads=threads))


def test_a_plan_survives_being_written_and_read(directory):
    config = load(["cluster=3ps4w"])  # with warnings: a ps without parameters, more workers than cores
    directory.write_inputs(config, planned(config))
    assert directory.read_plan() == planned(config)


def test_a_file_is_replaced_as_a_whole(tmp_path):
    write_atomically(tmp_path / "status.json", "old")
    with (tmp_path / "status.json").open() as reader:
        write_atomically(tmp_path / "status.json", "new")
        assert reader.read() == "old"
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"status.json": "new"}


@pytest.mark.parametrize("own", ["run=elsewhere", "mode=plan", "plan.write_to=plan.json", "device.gpus={worker:[1]}"])
def test_the_config_hash_ignores_what_tasks_may_differ_in(own):
    assert config_hash(load([own])) == config_hash(load([]))


@pytest.mark.parametrize("told", ["seed=1", "train.steps=7", "optimizer.learning_rate=0.5", "model=mlp", "cluster=2w"])
def test_the_config_hash_sees_what_the_result_depends_on(told):
    assert config_hash(load([told])) != config_hash(load([]))


def test_the_config_hash_is_the_same_after_the_config_was_written_and_read(directory):
    config = load(["cluster=2ps4w"])
    directory.write_inputs(config, planned(config))
    assert config_hash(directory.read_config()) == config_hash(config)


def test_a_named_directory_is_chosen(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert choose(load(["run=mine"])).path == tmp_path / "mine"


def test_a_new_directory_says_name_cluster_and_time(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(run_directory.time, "strftime", lambda form: "20260102-030405")
    monkeypatch.setattr(run_directory.secrets, "token_hex", lambda nbytes: "beef")
    path = choose(load(["name=digits", "cluster=2ps4w"])).path
    assert path == tmp_path / "runs" / "digits-2ps4w-20260102-030405-beef"


def test_two_new_directories_never_share_a_name(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tokens = iter(["beef", "beef", "cafe"])
    monkeypatch.setattr(run_directory.time, "strftime", lambda form: "20260102-030405")
    monkeypatch.setattr(run_directory.secrets, "token_hex", lambda nbytes: next(tokens))
    names = [choose(load([])).path.name for _ in range(2)]
    assert names == ["run-local-20260102-030405-beef", "run-local-20260102-030405-cafe"]


# A finished run


def finish(directory: RunDirectory, *overrides: str, **summary: object) -> RunConfig:
    """Leaves what a run of 300 steps leaves, as far as the command asks for it; returns the run's config."""
    config = load([*overrides, "cluster=1ps2w", f"run={directory.path}"])
    directory.write_inputs(config, make_plan(config, MODEL, Machine(cores=2, gpus=0)))
    directory.export.mkdir()
    (directory.checkpoints / "000000300").mkdir(parents=True)
    tasks = {"ps:0": {"code": 0}, "worker:0": {"code": 0}}
    facts = {"steps": 300, "ended_early": None, "failed": None, "eval_accuracy": 0.9695, "tasks": tasks}
    directory.summary.write_text(json.dumps(facts | summary))
    return config


FINISHED = "already finished: 300 of 300 steps, eval_accuracy 0.9695\nto continue: train.steps=600"


@pytest.mark.parametrize("changed", [[], ["launch=docker"], ["cluster=4w"], ["history.every=1"]])
def test_a_finished_run_typed_again_says_so_and_what_to_type(directory, changed):
    finish(directory)
    typed = load(["cluster=1ps2w", f"run={directory.path}", *changed])
    before = {path: path.stat().st_mtime_ns for path in directory.path.rglob("*")}
    assert describe_finished(typed) == FINISHED
    assert {path: path.stat().st_mtime_ns for path in directory.path.rglob("*")} == before


@pytest.mark.parametrize(
    "changed",
    [
        *(["train.steps=600"], ["train.steps=200"], ["resume=never"], ["model=mlp"], ["optimizer=sgd"], ["seed=3"]),
        *(["optimizer.learning_rate=0.5"], ["model.options.dropout=0.5"], ["data=clicks"]),
    ],
)
def test_a_run_that_is_to_go_on_or_is_another_model_s_is_not_finished(directory, changed):
    finish(directory)
    assert describe_finished(load(["cluster=1ps2w", f"run={directory.path}", *changed])) is None


@pytest.mark.parametrize(
    ("changed", "answer"),
    [
        ([], "already finished: 300 of 300 steps, eval_accuracy 0.9695\nto continue: train.epochs=10"),
        (["train.epochs=6"], None),
        (["train.batch_size=128"], None),
    ],
)
def test_a_run_of_epochs_is_finished_until_there_are_more(directory, changed, answer):
    finish(directory, "train.epochs=5")
    assert describe_finished(load(["cluster=1ps2w", f"run={directory.path}", "train.epochs=5", *changed])) == answer


def test_a_run_that_ended_early_is_finished_until_its_steps_or_its_patience_change(directory):
    config = finish(directory, "train.steps=500", "evaluate.patience=3", "evaluate.every=10", ended_early="no better")
    answer = "already finished: 300 of 500 steps, eval_accuracy 0.9695 (no better)\nto continue: change "
    assert str(describe_finished(config)).startswith(answer)
    # Which state is exported is of no account for the end; older versions have kept another default.
    config = replace(config, evaluate=replace(config.evaluate, export_best=False))
    assert str(describe_finished(config)).startswith(answer)
    assert describe_finished(replace(config, evaluate=replace(config.evaluate, patience=5))) is None


def test_a_batch_makes_as_many_updates_of_an_async_run_as_there_are_workers(directory):
    options = ["train.epochs=5", "strategy=async"]
    finish(directory, *options)
    config = load(["cluster=1ps2w", f"run={directory.path}", *options])
    assert str(describe_finished(config)).startswith("already finished: 300 of 300 steps")
    assert describe_finished(replace(config, cluster=replace(config.cluster, worker=3))) is None


@pytest.mark.parametrize(
    "summary",
    [{"failed": "worker:0"}, {"tasks": {"worker:0": {"code": 143}}}, {"steps": 200}],
    ids=["failed", "stopped", "short"],
)
def test_a_run_that_did_not_come_to_its_end_is_not_finished(directory, summary):
    assert describe_finished(finish(directory, **summary)) is None


def test_a_run_whose_export_checkpoint_or_summary_is_missing_is_not_finished(directory):
    config = finish(directory)
    directory.export.rmdir()
    assert describe_finished(config) is None
    directory.export.mkdir()
    directory.summary.write_text("{")
    assert describe_finished(config) is None


def test_what_killed_writers_left_is_removed_by_the_next_launch(directory: RunDirectory):
    """Whatever process has the number of a writer by now."""
    alive, config = os.getpid(), load([])
    left = [f"checkpoints/.000000050.tmp-{alive}/tensors.npz", "best/.000000010.tmp-99999999/manifest.json"]
    left += [f".summary.json.{alive}", ".config.yaml.7", ".history.jsonl.1234567"]
    kept = ["checkpoints/000000045/manifest.json", "best/000000010/manifest.json", ".gitignore", ".notes.md.1"]
    for name in (*left, *kept):
        (directory.path / name).parent.mkdir(parents=True, exist_ok=True)
        (directory.path / name).touch()
    directory.write_inputs(config, planned(config))
    assert [name for name in (*left, *kept) if (directory.path / name).exists()] == kept
    assert [path.name for path in (directory.path / "checkpoints").iterdir()] == ["000000045"]
