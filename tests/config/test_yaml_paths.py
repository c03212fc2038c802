"""The path of a YAML file chooses an experiment: `python -m trainer mine/first.yaml`."""

from __future__ import annotations

from pathlib import Path

import pytest
from snapshots import cases

from trainer.config import arguments
from trainer.config.compose import load

pytestmark = pytest.mark.slow

CODE = "def tiny(spec, *, width=32): ...\ndef blobs(): ...\n"
YAML = """
defaults:
  - override /cluster: 1ps2w
  - override /model: tiny
  - override /data: blobs
user: my.py
model: { options: { width: 64 } }
train: { steps: 7 }
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    """A folder with an experiment and its Python file, below the working directory."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "my.py").write_text(CODE)
    (tmp_path / "mine" / "first.yaml").write_text(YAML)
    return tmp_path / "mine"


def typed(*words: str, config_dir=None):
    """The config of what is typed behind `python -m trainer`."""
    line = arguments.sort(words)
    assert line.faults == ()
    return load(line.overrides, config_dir=config_dir).config


def test_a_path_alone_brings_the_experiment_and_the_functions_of_its_user_file(folder):
    config = typed("mine/first.yaml")
    assert (config.user, config.model.name, config.data.name) == ("mine/my.py", "tiny", "blobs")
    assert (config.cluster.name, config.train.steps, config.model.options) == ("1ps2w", 7, {"width": 64})


def test_settings_beside_a_path_win_wherever_they_stand(folder):
    config = typed("train.steps=9", "mine/first.yaml", "model.options.width=8")
    assert (config.train.steps, config.model.options["width"]) == (9, 8)


@pytest.mark.parametrize("cwd", ["mine", "/"])
def test_the_user_file_lies_beside_the_yaml_wherever_the_command_is_typed(folder, monkeypatch, cwd):
    monkeypatch.chdir(folder if cwd == "mine" else cwd)
    assert Path(typed(str(folder / "first.yaml")).user).resolve() == folder / "my.py"


def test_a_user_file_that_is_not_beside_the_yaml_is_taken_from_the_working_directory(folder):
    (folder / "my.py").rename("my.py")
    assert typed("mine/first.yaml").user == "my.py"


def test_the_user_file_may_lie_beside_an_experiment_of_a_config_folder(folder):
    (folder / "conf" / "experiment").mkdir(parents=True)
    (folder / "first.yaml").rename(folder / "conf" / "experiment" / "first.yaml")
    (folder / "my.py").rename(folder / "conf" / "experiment" / "my.py")
    text = (folder / "conf" / "experiment" / "first.yaml").read_text()
    (folder / "conf" / "experiment" / "first.yaml").write_text("# @package _global_" + text)
    assert typed("experiment=first", config_dir="mine/conf").user == "mine/conf/experiment/my.py"


@pytest.mark.parametrize("name", ["a name with spaces.yaml", "it's (1) [x], y.yaml", "é.yaml", "../mine/x.yaml"])
def test_any_path_can_be_given(folder, monkeypatch, refused, name):
    monkeypatch.chdir(folder)
    (folder / "first.yaml").rename(folder / name)
    assert typed(name).train.steps == 7
    refused("train/unknown-key", typed, name, "train.stepz=3")


def test_a_path_wins_over_a_shipped_experiment_of_that_name(folder, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "first.yaml").rename(folder / "digits.yaml")
    assert typed("digits.yaml").train.steps == 7
    assert typed("experiment=digits").train.steps == 300


BAD_PATHS = {
    "experiment/not-found": ["mine/frist.yaml", "none/first.yaml"],
    "override/malformed": ["mine/first.yml"],
    "train.steps/out-of-range": ["mine/first.yaml train.steps=0"],
}


@pytest.mark.parametrize(("codes", "words"), cases(BAD_PATHS))
def test_a_path_that_is_wrong_is_refused(folder, refused, codes, words):
    refused(codes, typed, *words.split())


def test_a_second_path_is_refused(snapshot):
    assert arguments.sort(["a.yaml", "seed=1", "b.yaml"]).faults == snapshot


BAD_FILES = {
    "train/unknown-key": {"a wrong key": YAML.replace("steps", "stepz")},
    "train.steps/out-of-range": {"a value out of range": YAML.replace("steps: 7", "steps: 0")},
    "file/unsafe": {"code": YAML + "_target_: os.system\n"},
}


@pytest.mark.parametrize(("codes", "content"), cases(BAD_FILES))
def test_a_fault_in_the_file_is_named_with_its_line(folder, refused, codes, content):
    (folder / "first.yaml").write_text(content)
    refused(codes, typed, "mine/first.yaml")
