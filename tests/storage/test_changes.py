"""A run that continues says what decides its result and is not as before; another model is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from quick_config import load

from trainer.config import user_file
from trainer.config.schema import RunConfig
from trainer.plan.description import Description
from trainer.plan.devices import Machine
from trainer.plan.layout import Parameter
from trainer.plan.make import make_plan
from trainer.storage import changes
from trainer.storage.checkpoint import Checkpoint, CheckpointError
from trainer.storage.run_directory import RunDirectory

DENSE = Description((Parameter("dense/kernel", (784, 10), True),), 10, 8000, 2000)
MODEL = """
import keras
import layers  # beside


def model(input_shape, classes, *, width=8):
    return keras.Sequential([keras.Input(input_shape), layers.hidden(width), keras.layers.Dense(classes)])
"""
LAYERS = "import keras\n\n\ndef hidden(width):\n    return keras.layers.Dense(width, 'relu')\n"
SAID = [
    (["seed=8"], ["seed=8 instead of 7"]),
    (["train.batch_size=128"], ["train.batch_size=128 instead of 256"]),
    (["train.precision=mixed_bfloat16"], ["train.precision=mixed_bfloat16 instead of float32"]),
    (["train.accumulate=2", "train.jit=true"], ["train.accumulate=2 instead of 1", "train.jit=true instead of false"]),
    (["optimizer.learning_rate=0.5"], ["optimizer.learning_rate=0.5 instead of 0.001"]),
    (["optimizer.schedule.name=cosine"], ["optimizer.schedule.name=cosine instead of constant"]),
    (["optimizer.clip_norm=1"], ["optimizer.clip_norm=1.0 instead of null"]),
]
REFUSED = [
    (["model.options.dropout=0.5"], "model.options.dropout=0.5"),
    (["model.loss=mse"], "model.loss=mse"),
    (["model=mlp"], "model.name=mlp"),
]
UNCHANGED = [
    ["train.steps=900"],
    ["cluster=4w"],
    ["launch=docker"],
    ["evaluate.every=5"],
    ["history.every=1", "checkpoint.every=7"],
    ["device.log_placement=true"],
]


@pytest.fixture
def directory(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")


def launched(directory: RunDirectory, *typed: str) -> RunConfig:
    config = load([*typed, f"run={directory.path}", "seed=7"])
    directory.write_inputs(config, make_plan(config, DENSE, Machine(cores=2, gpus=0)))
    return config


def check(directory: RunDirectory, typed: Sequence[str], *, step: int = 100) -> str:
    source = Checkpoint(step, 1, directory.checkpoints / f"{step:09d}", {}, {}, {}, {})
    return changes.check(source, load([f"run={directory.path}", "seed=7", *typed]), directory, steps=300)


@pytest.mark.parametrize(("typed", "said"), SAID)
def test_what_has_changed_is_said_with_both_values(directory: RunDirectory, typed, said):
    launched(directory)
    assert check(directory, typed).partition(": ")[2].partition(": ")[2].split("; ") == said


@pytest.mark.parametrize("typed", UNCHANGED)
def test_what_does_not_decide_the_result_is_not_said(directory: RunDirectory, typed):
    launched(directory)
    assert check(directory, typed) == ""


@pytest.mark.parametrize(("typed", "named"), REFUSED)
def test_another_model_is_refused_unless_the_checkpoint_is_named(directory: RunDirectory, typed, named: str):
    launched(directory)
    with pytest.raises(CheckpointError) as refused:
        check(directory, typed)
    assert named in refused.value.problem
    assert f"resume={directory.checkpoints}/000000100" in refused.value.remedy
    assert check(directory, [*typed, f"resume={directory.checkpoints}/000000100"]) == ""


@pytest.mark.parametrize(("typed", "said"), SAID[:1])
def test_a_run_without_a_step_left_is_not_another_one(directory: RunDirectory, typed, said):
    launched(directory)
    with pytest.raises(CheckpointError) as refused:
        check(directory, typed, step=300)
    assert all(one in refused.value.problem for one in said)
    assert check(directory, [], step=300) == ""


def test_a_run_of_an_older_version_and_a_damaged_config_do_not_stop_it(directory: RunDirectory):
    launched(directory)
    directory.config.write_text("cluster: {name: local}\nmodel: {name: cnn}\ndata: {name: mnist_10k}\nseed: 7\n")
    assert "seed" not in check(directory, [])
    directory.config.write_text("")
    assert str(directory.config) in check(directory, ["seed=8"])
    directory.config.unlink()
    assert check(directory, ["seed=8"]) == ""


Edit = Callable[[Path], object]
EDITS: dict[str, tuple[Edit, str]] = {
    "another activation": (lambda folder: replace(folder / "layers.py", "relu", "tanh"), "layers.py"),
    "another layer": (lambda folder: replace(folder / "mine.py", "layers.hidden(width), ", ""), "mine.py"),
    "a file that is gone": (lambda folder: (folder / "layers.py").unlink(), "layers.py"),
    "a comment": (lambda folder: replace(folder / "mine.py", "# beside", "# by its side"), ""),
    "empty lines": (lambda folder: replace(folder / "layers.py", "\n\n\n", "\n"), ""),
    "a file that is not imported": (lambda folder: (folder / "other.py").write_text("x = 1"), ""),
}


def replace(file: Path, old: str, new: str) -> None:
    assert old in file.read_text()
    file.write_text(file.read_text().replace(old, new))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, text in {"mine.py": MODEL, "layers.py": LAYERS}.items():
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize("edit", EDITS)
def test_code_of_the_user_that_has_changed_is_named(directory: RunDirectory, folder: Path, edit: str):
    launched(directory, f"user={folder}/mine.py")
    change, named = EDITS[edit]
    change(folder)
    said = check(directory, [f"user={folder}/mine.py"])
    assert named in said if named else said == ""


@pytest.mark.parametrize(("text", "is_refused"), [(MODEL, False), (MODEL.replace("width=8", "width=9"), True)])
def test_another_file_is_refused_unless_it_has_the_same_code(
    directory, folder: Path, text: str, is_refused: bool, raises
):
    launched(directory, f"user={folder}/mine.py", "model.options.width=8")
    (folder / "other.py").write_text(text)
    typed = [f"user={folder}/other.py", "model.options.width=8"]
    if is_refused:
        with raises(CheckpointError):
            check(directory, typed)
    else:
        assert check(directory, typed) == ""


def test_a_run_that_has_not_kept_its_code_continues(directory: RunDirectory, folder: Path):
    launched(directory, f"user={folder}/mine.py")
    replace(folder / "layers.py", "relu", "tanh")
    for damage in ("", "[]", '{"file": 3}', "\0"):
        directory.code.write_text(damage)
        assert check(directory, [f"user={folder}/mine.py"]) == ""
    directory.code.unlink()
    assert check(directory, [f"user={folder}/mine.py"]) == ""


def test_digests_are_of_the_files_that_are_imported_wherever_that_is_written(tmp_path: Path):
    files = {
        "mine.py": "import a\nfrom b import c\nfrom . import d\nfrom .e import f\ndef g():\n    import numpy, h\n",
        "package/__init__.py": "from . import inner\nfrom .. import a",
        **{"a.py": "import package.inner", "b.py": "import mine", "d.py": "", "e.py": "", "h.py": "", "z.py": ""},
        "package/inner.py": "",
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    named = {"", "a.py", "b.py", "d.py", "e.py", "h.py", "package/inner.py"}
    assert user_file.digests(tmp_path / "mine.py").keys() == named
