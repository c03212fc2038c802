"""Checkpoints on a real disk: round trips, every kind of damage, writers that are killed."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import select
import shutil
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from quick_config import load

from trainer.plan.fingerprint import OtherDataError, PartFingerprint
from trainer.plan.layout import Parameter
from trainer.plan.placement import place
from trainer.plan.plan import Plan
from trainer.plan.serialize import to_json
from trainer.storage import checkpoint, checkpoint_writer, resume
from trainer.storage.atomic import remove_folder
from trainer.storage.checkpoint import CheckpointError
from trainer.storage.run_directory import RunDirectory

ROOT = Path(__file__).parents[2]
FACTS = {"optimizer": "adam", "slots": ["momentum", "velocity"], "seed": 7, "replicas": 2}
KILL_SEED = 11


def tensors_of(value: float) -> dict[str, np.ndarray]:
    kernel = np.full((2, 3), value, np.float32)
    return {
        "parameters/dense/kernel": kernel,
        "parameters/dense/bias": np.full(3, value, np.float32),
        "state/norm/mean": np.float32([value]).reshape(()),
        "slots/momentum/dense/kernel": kernel / 2,
        "slots/velocity/dense/kernel": kernel / 4,
    }


def shapes_of(tensors: dict[str, np.ndarray]) -> dict[str, tuple[int, ...]]:
    return {name: value.shape for name, value in tensors.items()}


def save(folder: Path, *steps: int, keep: int = 9) -> Path:
    """Saves checkpoints that hold their step; returns the last one's folder."""
    return [checkpoint_writer.write(folder, step, 1, FACTS, tensors_of(step), keep=keep) for step in steps][-1]


def steps_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def edit_manifest(path: Path, **values: object) -> None:
    manifest = json.loads((path / "manifest.json").read_text())
    (path / "manifest.json").write_text(json.dumps({**manifest, **values}))


def flip_a_bit(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-100])


# ---- what is saved comes back


def test_tensors_come_back_bit_for_bit(tmp_path):
    tensors = {
        "parameters/noise": np.random.default_rng(3).normal(size=(4, 5)).astype(np.float32),
        "parameters/extreme": np.float32([np.finfo(np.float32).max, 1e-45, -0.0, np.inf]),
        "parameters/transposed": np.arange(6, dtype=np.float32).reshape(2, 3).T,
        "state/scalar": np.float32(3.5).reshape(()),
        "slots/momentum/empty": np.zeros((0, 4), np.float32),
    }
    loaded = checkpoint.load(checkpoint.read_manifest(checkpoint_writer.write(tmp_path, 5, 0, {}, tensors, keep=1)))
    assert {name: (v.shape, v.tobytes()) for name, v in loaded.items()} == {
        name: (v.shape, v.tobytes()) for name, v in tensors.items()
    }


def test_the_manifest_describes_the_checkpoint(tmp_path):
    path = checkpoint_writer.write(tmp_path, 1200, 3, FACTS, tensors_of(1.0), keep=1)
    found = checkpoint.read_manifest(path)
    assert (found.step, found.generation, found.path, found.facts) == (1200, 3, tmp_path / "000001200", FACTS)
    assert found.tensors == shapes_of(tensors_of(1.0))


def test_all_checkpoints_have_one_file_of_what_training_never_changes(tmp_path):
    frozen, folder = tmp_path / "frozen.npz", tmp_path / "checkpoints"
    np.savez(frozen, **{"frozen/table": np.ones(1000)})
    writer = checkpoint_writer.Writer(folder, keep=2, shared=[frozen])
    for step in (1, 2, 3):
        writer.save(step, 1, FACTS, tensors_of(step))
    writer.close()
    paths = [folder / "000000002", folder / "000000003"]
    best = checkpoint_writer.copy(paths[0], tmp_path / "best", {})
    assert {(path / "frozen.npz").stat().st_ino for path in [*paths, best]} == {frozen.stat().st_ino}
    assert frozen.stat().st_nlink == 4
    checkpoint.verify(checkpoint.read_manifest(best))
    (best / "frozen.npz").write_bytes(frozen.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="frozen.npz has"):
        checkpoint.read_manifest(best)


def test_a_checkpoint_is_a_folder_of_two_plain_files(tmp_path):
    assert steps_in(save(tmp_path, 1)) == ["manifest.json", "tensors.npz"]


def test_the_newest_is_the_one_of_the_highest_step(tmp_path):
    save(tmp_path, 300, 20, 1_000_000_000, 100)
    newest, skipped = checkpoint.newest_valid(tmp_path)
    assert (newest.step, skipped) == (1_000_000_000, [])


def test_a_folder_that_does_not_exist_has_no_checkpoint_and_no_complaint(tmp_path):
    assert checkpoint.newest_valid(tmp_path / "checkpoints") == (None, [])


def test_saving_a_step_again_changes_nothing(tmp_path):
    before = (save(tmp_path, 1) / "manifest.json").stat().st_mtime_ns
    checkpoint_writer.write(tmp_path, 1, 2, FACTS, tensors_of(99.0), keep=9)
    assert (tmp_path / "000000001" / "manifest.json").stat().st_mtime_ns == before


def test_saving_a_damaged_step_again_repairs_it(tmp_path):
    flip_a_bit(save(tmp_path, 1) / "tensors.npz")
    checkpoint.verify(checkpoint.read_manifest(save(tmp_path, 1)))


def test_values_that_are_no_plain_numbers_are_refused(tmp_path, raises):
    with raises(TypeError):
        checkpoint_writer.write(tmp_path, 1, 0, {}, {"parameters/a": np.array([{}])}, keep=1)


def test_a_refused_save_leaves_nothing_behind(tmp_path):
    with pytest.raises(TypeError):
        checkpoint_writer.write(tmp_path, 1, 0, {}, {"parameters/a": np.array([{}])}, keep=1)
    assert steps_in(tmp_path) == []


# ---- damage


def make_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


DAMAGES = {
    "bit-flip": lambda path: flip_a_bit(path / "tensors.npz"),
    "truncated": lambda path: cut(path / "tensors.npz"),
    "tensors-missing": lambda path: (path / "tensors.npz").unlink(),
    "tensors-linked": lambda path: make_link(path / "tensors.npz"),
    "manifest-missing": lambda path: (path / "manifest.json").unlink(),
    "manifest-linked": lambda path: make_link(path / "manifest.json"),
    "manifest-empty": lambda path: (path / "manifest.json").write_text(""),
    "manifest-garbage": lambda path: (path / "manifest.json").write_bytes(b"\xff\0{"),
    "manifest-cut": lambda path: cut(path / "manifest.json"),
    "manifest-list": lambda path: (path / "manifest.json").write_text("[1]"),
    "manifest-nested": lambda path: (path / "manifest.json").write_text("[" * 99999),
    "manifest-edited": lambda path: edit_manifest(path, generation=9),
    "newer-format": lambda path: edit_manifest(path, format=2),
    "folder-linked": make_link,
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_newest_checkpoint_is_skipped_with_its_reason(tmp_path, kind, snapshot):
    DAMAGES[kind](save(tmp_path, 100, 200))
    newest, skipped = checkpoint.newest_valid(tmp_path)
    assert newest.step == 100
    assert skipped == snapshot


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_checkpoint_that_was_asked_for_is_refused_with_a_remedy(tmp_path, kind, raises):
    DAMAGES[kind](save(tmp_path, 100))
    with raises(CheckpointError):
        checkpoint.verify(checkpoint.read_manifest(tmp_path / "000000100"))


def test_when_all_are_damaged_every_reason_is_given(tmp_path):
    save(tmp_path, 100, 200)
    for path in list(tmp_path.iterdir()):
        flip_a_bit(path / "tensors.npz")
    newest, skipped = checkpoint.newest_valid(tmp_path)
    assert newest is None
    assert [Path(reason.split(":")[0]).name for reason in skipped] == ["000000200", "000000100"]


def test_a_file_in_the_place_of_a_checkpoint_is_refused(tmp_path, raises):
    (tmp_path / "model.ckpt").write_text("")
    with raises(CheckpointError):
        checkpoint.read_manifest(tmp_path / "model.ckpt")


def test_a_checkpoint_that_does_not_exist_is_refused(tmp_path, raises):
    with raises(CheckpointError):
        checkpoint.read_manifest(tmp_path / "000000100")


def test_a_file_in_the_place_of_the_checkpoints_is_refused(tmp_path, raises):
    (tmp_path / "checkpoints").write_text("")
    with raises(CheckpointError):
        checkpoint.newest_valid(tmp_path / "checkpoints")


def test_a_checkpoint_renamed_to_another_step_is_refused(tmp_path):
    save(tmp_path, 100).rename(tmp_path / "000000900")
    with pytest.raises(CheckpointError, match="holds step 100; rename it to 000000100"):
        checkpoint.read_manifest(tmp_path / "000000900")


def test_a_checkpoint_copied_under_a_name_of_your_own_is_read(tmp_path):
    assert checkpoint.read_manifest(save(tmp_path, 100).rename(tmp_path / "best")).step == 100


@pytest.mark.parametrize(
    ("stored", "problem"),
    [
        (np.zeros((3, 2), np.float32), r"parameters/a is float32 \[3, 2\], but manifest.json says float32 \[2, 3\]"),
        (np.zeros((2, 3), np.int32), r"parameters/a is int32 \[2, 3\], but manifest.json says float32 \[2, 3\]"),
    ],
    ids=["shape", "dtype"],
)
def test_tensors_that_differ_from_the_manifest_are_refused(tmp_path, stored, problem):
    path = checkpoint_writer.write(tmp_path, 1, 0, {}, {"parameters/a": np.zeros((2, 3), np.float32)}, keep=1)
    found = checkpoint.read_manifest(path)
    np.savez(path / "tensors.npz", **{"parameters/a": stored})
    with pytest.raises(CheckpointError, match=problem):
        checkpoint.load(found)


def test_tensors_of_other_names_than_the_manifest_are_refused(tmp_path, raises):
    found = checkpoint.read_manifest(save(tmp_path, 1))
    np.savez(found.path / "tensors.npz", **{**tensors_of(1), "parameters/b": np.zeros(1, np.float32)})
    with raises(CheckpointError):
        checkpoint.load(found)


def test_pickled_objects_are_never_loaded(tmp_path):
    found = checkpoint.read_manifest(save(tmp_path, 1))
    np.savez(found.path / "tensors.npz", **{name: np.array([{}], object) for name in found.tensors})
    with pytest.raises(CheckpointError, match=r"tensors\.npz is damaged .*allow_pickle=False"):
        checkpoint.load(found)


@pytest.mark.parametrize("content", [b"", b"PK\3\4", b"not a zip file"])
def test_tensors_that_are_no_archive_are_refused(tmp_path, content):
    found = checkpoint.read_manifest(save(tmp_path, 1))
    (found.path / "tensors.npz").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"tensors\.npz is damaged"):
        checkpoint.load(found)


def test_nan_is_refused_with_the_tensor_that_holds_it(tmp_path, raises):
    path = checkpoint_writer.write(tmp_path, 1, 0, {}, {"parameters/a": np.float32([1, np.nan])}, keep=1)
    with raises(CheckpointError):
        checkpoint.load(checkpoint.read_manifest(path))


# ---- another model, another optimizer


def misfit(tmp_path: Path, **changed: np.ndarray | None) -> str:
    """The error of a run that has other tensors than the checkpoint; None for one it has not."""
    found = checkpoint.read_manifest(save(tmp_path, 1))
    tensors = {name: value for name, value in {**tensors_of(1), **changed}.items() if value is not None}
    with pytest.raises(CheckpointError) as error:
        checkpoint.check_fits(found, shapes_of(tensors))
    return error.value.problem


def test_the_model_and_optimizer_that_were_saved_fit(tmp_path):
    checkpoint.check_fits(checkpoint.read_manifest(save(tmp_path, 1)), shapes_of(tensors_of(2)))


def test_a_parameter_the_checkpoint_lacks_is_named(tmp_path, snapshot):
    problem = misfit(tmp_path, **{"parameters/new": np.zeros(2)})
    assert problem == snapshot


def test_a_parameter_the_model_lacks_is_named(tmp_path, snapshot):
    problem = misfit(tmp_path, **{"state/norm/mean": None})
    assert problem == snapshot


def test_another_shape_is_named_on_both_sides(tmp_path, snapshot):
    problem = misfit(tmp_path, **{"parameters/dense/kernel": np.zeros((3, 2))})
    assert problem == snapshot


def test_at_most_five_tensors_are_named(tmp_path):
    problem = misfit(tmp_path, **{f"parameters/new{i}": np.zeros(2) for i in range(7)})
    assert problem.endswith("parameters/new3, parameters/new4 and 2 more")


def test_another_optimizer_is_said_in_words_and_its_tensors_are_not_listed(tmp_path, snapshot):
    gone = {"slots/momentum/dense/kernel": None, "slots/velocity/dense/kernel": None}
    problem = misfit(tmp_path, **gone, **{"slots/accumulator/dense/kernel": np.zeros((2, 3))})
    assert problem == snapshot


def test_an_optimizer_without_slots_is_said_in_words(tmp_path, snapshot):
    problem = misfit(tmp_path, **{"slots/momentum/dense/kernel": None, "slots/velocity/dense/kernel": None})
    assert problem == snapshot


# ---- which one a run starts from


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")


@pytest.mark.parametrize(
    "content", ["", "\0\xff", "000000900", "/etc", "../../elsewhere", 'model_checkpoint_path: "/x"']
)
@pytest.mark.parametrize("name", ["checkpoint", "latest", "LATEST"])
def test_no_file_points_at_the_newest_so_none_can_mislead(directory, name, content):
    save(directory.checkpoints, 100, 200)
    (directory.checkpoints / name).write_text(content)
    assert resume.find("auto", directory, steps=300).step == 200


def test_a_checkpoint_beyond_the_last_step_is_refused(directory, raises):
    save(directory.checkpoints, 200)
    assert resume.find("auto", directory, steps=200).step == 200
    with raises(CheckpointError):
        resume.find("auto", directory, steps=150)


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_anew_by_itself(directory, caplog, raises):
    flip_a_bit(save(directory.checkpoints, 100) / "tensors.npz")
    with raises(CheckpointError):
        resume.find("auto", directory, steps=300)
    assert "skipping a damaged" in caplog.text
    assert resume.find("never", directory, steps=300) is None


@pytest.mark.parametrize(
    "make",
    [
        lambda path: None,
        lambda path: path.write_text(""),
        lambda path: path.mkdir(),
        lambda path: (path / "checkpoints").mkdir(parents=True),
    ],
    ids=["nothing", "a file", "an empty folder", "a run without any"],
)
def test_a_path_without_a_checkpoint_is_refused(tmp_path, directory, make, raises):
    make(tmp_path / "other")
    with raises(CheckpointError):
        resume.find(str(tmp_path / "other"), directory, steps=300)


@pytest.mark.parametrize("override", ["model=mlp", "optimizer=sgd"])
def test_a_checkpoint_of_another_model_or_optimizer_is_refused_before_it_is_read(tmp_path, override, raises):
    found = checkpoint.read_manifest(checkpoint_writer.write(tmp_path, 1, 1, {"model": "cnn", **FACTS}, {}, keep=1))
    empty = Plan("test", "sync", 1, 1, (), (), 1, ())
    resume.check_model(found, load([]), empty)
    with raises(CheckpointError):
        resume.check_model(found, load([override]), empty)


def test_a_checkpoint_of_a_model_of_other_sizes_is_refused_before_tasks_start(tmp_path):
    parameters = [Parameter("dense/kernel", (2, 3), True), Parameter("norm/mean", (3,), False)]
    config = load(["optimizer=adam"])
    tensors = {
        name: np.zeros(shape, np.float32)
        for name, shape in checkpoint.shapes_of(parameters, list(config.optimizer.slots())).items()
    }
    found = checkpoint.read_manifest(checkpoint_writer.write(tmp_path, 1, 1, {"model": "cnn"}, tensors, keep=1))

    def plan(*parameters: Parameter) -> Plan:
        return Plan("test", "sync", 1, 1, (), tuple(place(parameters, ["ps:0"], pins={})), 1, ())

    resume.check_model(found, config, plan(*parameters))
    with pytest.raises(CheckpointError, match=r"kernel \(there \(2, 3\), here \(2, 4\)\).*run=PATH"):
        resume.check_model(found, config, plan(Parameter("dense/kernel", (2, 4), True), parameters[1]))


def test_a_run_continues_with_the_data_that_it_had(tmp_path):
    """Unless it is told to start from the checkpoint all the same; runs of versions that took no fingerprint go on."""
    first, other = (Plan("test", "sync", 1, 1, (), (), 1, (), fingerprint=fingerprint(sample)) for sample in "ab")
    saved = checkpoint.read_manifest(
        checkpoint_writer.write(tmp_path, 1, 1, {"data": to_json(first.fingerprint)}, {}, keep=1)
    )
    resume.check_data(saved, load([]), first)
    with pytest.raises(OtherDataError) as raised:
        resume.check_data(saved, load([]), other)
    assert raised.value.exit_code == 65
    assert f"resume={saved.path}" in str(raised.value)
    resume.check_data(saved, load([f"resume={saved.path}"]), other)
    resume.check_data(replace(saved, facts={}), load([]), other)
    with pytest.raises(CheckpointError, match="facts/data"):
        resume.check_data(replace(saved, facts={"data": {"train": 7}}), load([]), first)


def fingerprint(sample: str) -> dict[str, PartFingerprint]:
    return {"train": PartFingerprint(10, "features float32 [2]", sample)}


COMMANDS = {
    "missing": (lambda path: None, ["resume=elsewhere"]),
    "missing, of a plan": (lambda path: None, ["mode=plan", "resume=elsewhere"]),
    "cut": (lambda path: cut(path / "tensors.npz"), []),
    "flipped": (lambda path: flip_a_bit(path / "tensors.npz"), []),
    "newer format": (lambda path: edit_manifest(path, format=2), []),
    "beyond": (lambda path: None, ["train.steps=50"]),
    "optimizer": (lambda path: None, ["optimizer=sgd"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", COMMANDS)
def test_the_command_ends_with_76_before_any_task_starts_and_leaves_the_checkpoint_alone(
    tmp_path, python, snapshot, kind
):
    damage, overrides = COMMANDS[kind]
    facts = {"model": "mlp", "optimizer": "adam"}
    damage(checkpoint_writer.write(tmp_path, 100, 1, facts, tensors_of(1), keep=1))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    given = ["cluster=1ps2w", "model=mlp", "run=mine", "resume=000000100", *overrides]
    ended = python.run("-m", "trainer", *given, cwd=tmp_path)
    assert ended.returncode == 76, ended.stdout + ended.stderr
    assert ended.stderr == snapshot
    assert "missing" not in kind or ended.stdout == ""
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    assert not (tmp_path / "mine").exists()


# ---- what stays in the folder


def test_only_the_newest_are_kept(tmp_path):
    save(tmp_path, 100, 200, 300, 400, keep=2)
    assert steps_in(tmp_path) == ["000000300", "000000400"]


def test_a_damaged_checkpoint_does_not_count_as_kept(tmp_path):
    cut(save(tmp_path, 100, 200) / "tensors.npz")
    save(tmp_path, 300, keep=2)
    assert steps_in(tmp_path) == ["000000100", "000000200", "000000300"]


def test_the_one_just_saved_stays_even_when_later_ones_exist(tmp_path):
    save(tmp_path, 500, 100, keep=1)
    assert steps_in(tmp_path) == ["000000100", "000000500"]


def test_what_is_not_released_stays(tmp_path):
    asked = []

    def release(due):
        asked.append(due)
        return [step for step in due if step < 200]

    save(tmp_path, 100, 200, 300)
    checkpoint_writer.write(tmp_path, 400, 1, FACTS, tensors_of(400), keep=1, release=release)
    assert asked == [[100, 200, 300]]
    assert steps_in(tmp_path) == ["000000200", "000000300", "000000400"]


def test_a_copy_is_a_valid_checkpoint_with_its_notes_and_outlives_the_original(tmp_path):
    original = save(tmp_path / "all", 100)
    copied = checkpoint_writer.copy(original, tmp_path / "some", {"note.json": "{}"})
    remove_folder(original)
    assert copied == tmp_path / "some/000000100"
    assert steps_in(copied) == ["manifest.json", "note.json", "tensors.npz"]
    loaded = checkpoint.load(checkpoint.read_manifest(copied))
    assert (loaded["parameters/dense/kernel"] == np.full((2, 3), 100, np.float32)).all()


def test_a_copy_is_made_where_files_cannot_have_two_names(tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    checkpoint.verify(checkpoint.read_manifest(checkpoint_writer.copy(save(tmp_path, 100), tmp_path / "some", {})))


def test_a_checkpoint_that_does_not_exist_cannot_be_copied_and_leaves_nothing(tmp_path):
    with pytest.raises(FileNotFoundError):
        checkpoint_writer.copy(tmp_path / "000000100", tmp_path / "some", {})
    assert steps_in(tmp_path / "some") == []


def test_removing_a_checkpoint_twice_is_no_error(tmp_path):
    remove_folder(tmp_path / "000000100")


def test_leftovers_of_dead_writers_are_removed(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (tmp_path / f".000000100.tmp-{dead.pid}").mkdir()
    save(tmp_path, 200)
    assert steps_in(tmp_path) == ["000000200"]


def test_temporary_folders_of_live_writers_stay(tmp_path):
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as alive:
        (tmp_path / f".000000100.tmp-{alive.pid}").mkdir()
        save(tmp_path, 200)
        alive.communicate(b"\n")
    assert steps_in(tmp_path) == [f".000000100.tmp-{alive.pid}", "000000200"]


def test_temporary_folders_are_no_checkpoints(tmp_path):
    save(tmp_path, 100).rename(tmp_path / ".000000100.tmp-1")
    assert checkpoint.newest_valid(tmp_path) == (None, [])


# ---- the writer in the background


def test_a_closed_writer_has_saved_everything(tmp_path):
    writer = checkpoint_writer.Writer(tmp_path, keep=9)
    for step in (1, 2, 3):
        writer.save(step, 0, FACTS, tensors_of(step))
    writer.close()
    assert checkpoint.newest_valid(tmp_path)[0].step == 3
    assert len(steps_in(tmp_path)) == 3


def test_saving_happens_in_another_thread(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(checkpoint_writer, "write", lambda *_, **__: seen.append(threading.current_thread()))
    writer = checkpoint_writer.Writer(tmp_path, keep=1)
    writer.save(1, 0, {}, {})
    writer.close()
    assert seen != [threading.main_thread()]


def test_a_second_save_waits_for_the_first(tmp_path, monkeypatch):
    log, release = [], threading.Event()

    def slow(folder, step, *_, **__):
        release.wait()
        log.append(step)

    monkeypatch.setattr(checkpoint_writer, "write", slow)
    writer = checkpoint_writer.Writer(tmp_path, keep=1)
    writer.save(1, 0, {}, {})
    threading.Timer(0.05, release.set).start()
    writer.save(2, 0, {}, {})
    assert log[:1] == [1]
    writer.close()


@pytest.fixture
def failed_writer(tmp_path):
    """A writer whose first save has failed: there is a file where its folder should be."""
    (tmp_path / "checkpoints").write_text("")
    writer = checkpoint_writer.Writer(tmp_path / "checkpoints", keep=1)
    writer.save(1, 0, FACTS, tensors_of(1))
    return writer


def test_a_failure_is_raised_by_the_next_save(failed_writer):
    with pytest.raises(OSError, match="checkpoint of step 1 was not saved"):
        failed_writer.save(2, 0, FACTS, tensors_of(2))


def test_a_failure_is_raised_by_close(failed_writer):
    with pytest.raises(OSError, match="checkpoint of step 1 was not saved"):
        failed_writer.close()


def test_a_failure_that_was_raised_is_not_raised_again(failed_writer):
    with pytest.raises(OSError, match="not saved"):
        failed_writer.wait()
    failed_writer.close()


def test_a_writer_saves_again_after_a_failure(failed_writer, tmp_path):
    with pytest.raises(OSError, match="not saved"):
        failed_writer.wait()
    (tmp_path / "checkpoints").unlink()
    failed_writer.save(2, 0, FACTS, tensors_of(2))
    failed_writer.close()
    assert steps_in(tmp_path / "checkpoints") == ["000000002"]


def test_a_failure_is_raised_by_looking_once_the_save_has_ended(failed_writer):
    failed_writer._pool.shutdown()
    with pytest.raises(OSError, match="not saved"):
        failed_writer.poll()


def test_looking_does_not_wait_for_a_save(tmp_path, monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(checkpoint_writer, "write", lambda *_, **__: release.wait())
    writer = checkpoint_writer.Writer(tmp_path, keep=1)
    writer.save(1, 0, {}, {})
    writer.poll()
    release.set()
    writer.close()


def test_a_failure_is_reported_to_its_callback_and_nobody_else(tmp_path):
    (tmp_path / "checkpoints").write_text("")
    told = []
    writer = checkpoint_writer.Writer(tmp_path / "checkpoints", keep=1)
    writer.save(1, 0, FACTS, tensors_of(1), on_error=told.append)
    writer.close()
    assert [(error.filename, error.errno) for error in told] == [(str(tmp_path / "checkpoints/000000001"), 17)]


# ---- room


@pytest.fixture
def small_disk(tmp_path):
    """small_disk(options) -> a folder on a disk of 256 KiB; skipped where a test may not mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()

    def mount(options: str = "") -> Path:
        command = ["mount", "-t", "tmpfs", "-o", f"size=256k{options}", "tmpfs", str(disk)]
        if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
            pytest.skip("a disk can be mounted by root only")
        return disk / "checkpoints"

    yield mount
    subprocess.run(["umount", str(disk)], capture_output=True)


def ballast(mib: float) -> dict[str, np.ndarray]:
    return {"parameters/a": np.zeros(int(mib * 2**18), np.float32)}


def test_a_save_that_has_no_room_is_not_begun(small_disk):
    folder = small_disk()
    save(folder, 1)
    with pytest.raises(
        OSError, match=r"step 2 was not saved \(254.0 KiB are needed, [\d.]+ KiB are free\); earlier ones"
    ):
        checkpoint_writer.write(folder, 2, 0, {}, ballast(250 / 1024), keep=1)
    assert steps_in(folder) == ["000000001"]
    checkpoint.verify(checkpoint.read_manifest(folder / "000000001"))


def test_a_disk_that_fills_up_under_a_save_keeps_earlier_checkpoints(small_disk, raises):
    folder = small_disk(",nr_inodes=7")  # room for one checkpoint, and the folder of another with a file in it
    save(folder, 1)
    with raises(OSError):
        save(folder, 2)
    assert steps_in(folder) == ["000000001"]
    checkpoint.verify(checkpoint.read_manifest(folder / "000000001"))


def test_a_save_succeeds_once_there_is_room_again(small_disk):
    folder = small_disk()
    folder.mkdir()
    (folder.parent / "other").write_bytes(bytes(240 * 1024))
    with pytest.raises(OSError, match="not saved"):
        save(folder, 1)
    (folder.parent / "other").unlink()
    save(folder, 2)
    assert steps_in(folder) == ["000000002"]


def test_room_is_needed_for_all_that_are_kept_and_one_more(small_disk):
    folder = small_disk()
    checkpoint_writer.check_space(folder, 60 * 1024, keep=3)
    said = (
        "4 checkpoints of 70.0 KiB will not fit: 280.0 KiB are needed, 256.0 KiB are free; make room, choose another "
        f"disk with run=PATH, or keep fewer with checkpoint.keep=1: '{folder}'"
    )
    with pytest.raises(OSError, match=re.escape(said)):
        checkpoint_writer.check_space(folder, 70 * 1024, keep=3)


def test_existing_checkpoints_need_no_more_room(small_disk):
    folder = small_disk()
    save(folder, 1, 2)
    checkpoint_writer.check_space(folder, 70 * 1024, keep=3)


def test_room_for_one_more_is_needed_in_any_case(small_disk, raises):
    folder = small_disk()
    save(folder, 1, 2)
    with raises(OSError):
        checkpoint_writer.check_space(folder, 250 * 1024, keep=1)


def test_a_disk_that_does_not_tell_its_size_is_trusted(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=0, used=0, free=0))
    checkpoint_writer.check_space(tmp_path, 2**40, keep=3)
    save(tmp_path, 1)


# ---- real processes

SAVE_FOR_EVER = """
import itertools, sys
from pathlib import Path
import numpy as np
from trainer.storage import checkpoint, checkpoint_writer

writer = checkpoint_writer.Writer(Path(sys.argv[1]), keep=2)
for step in itertools.count(int(sys.argv[2])):
    writer.save(step, 0, {}, {"parameters/a": np.full(1_000_000, step, np.float32)})
    writer.wait()
    print(step, flush=True)
"""

FILL_THE_DISK = """
import resource, sys
from pathlib import Path
import numpy as np
from trainer.storage import checkpoint, checkpoint_writer

folder = Path(sys.argv[1])
checkpoint_writer.write(folder, 1, 0, {}, {"parameters/a": np.zeros(10, np.float32)}, keep=1)
tensors = {f"parameters/{i}": np.zeros(30_000, np.float32) for i in range(4)}
resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))
try:
    checkpoint_writer.write(folder, 2, 0, {}, tensors, keep=1)
except OSError as error:
    print(error)
"""


def last_line_within(process: subprocess.Popen[str], secs: float) -> str:
    """Reads what a process prints for some time after its first line, then kills it."""
    line = process.stdout.readline()
    select.select([], [], [], secs)
    process.kill()
    rest = process.communicate()[0].split()
    return rest[-1] if rest else line


@pytest.mark.slow
def test_a_writer_killed_at_any_moment_leaves_the_previous_checkpoint_valid(tmp_path):
    print(f"seed {KILL_SEED}")
    delays = random.Random(KILL_SEED)
    saved = 0
    for _ in range(6):
        command = [sys.executable, "-c", SAVE_FOR_EVER, str(tmp_path), str(saved + 1)]
        with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
            said = int(last_line_within(process, delays.uniform(0, 0.08)))
        newest, skipped = checkpoint.newest_valid(tmp_path)
        saved = newest.step
        assert skipped == []
        assert said <= saved <= said + 1
        assert (checkpoint.load(newest)["parameters/a"] == saved).all()


def test_leftovers_of_killed_writers_are_removed_by_the_next_save(tmp_path):
    command = [sys.executable, "-c", SAVE_FOR_EVER, str(tmp_path), "1"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        process.stdout.readline()
        while process.poll() is None and not list(tmp_path.glob(".*.tmp-*/tensors.npz")):
            pass
        process.kill()
    save(tmp_path, 100_000, keep=1)
    assert steps_in(tmp_path) == ["000100000"]


@pytest.mark.parametrize("room_bytes", [0, 100, 50_000, 300_000, 480_500])
def test_a_full_disk_leaves_the_previous_checkpoint_valid_and_nothing_temporary(tmp_path, room_bytes):
    command = [sys.executable, "-c", FILL_THE_DISK, str(tmp_path), str(room_bytes)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "was not saved (File too large)" in done.stdout
    assert steps_in(tmp_path) == ["000000001"]
    checkpoint.verify(checkpoint.read_manifest(tmp_path / "000000001"))
