"""The path of a YAML file chooses an experiment: `python -m trainer mine/first.yaml`."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.config import arguments
from trainer.config.compose import load
from trainer.faults.problems import ConfigError

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
    return load(line.overrides, config_dir=config_dir)


def refusal(*words: str) -> str:
    with pytest.raises(ConfigError) as caught:
        typed(*words)
    return " ".join(str(caught.value).split())


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
def test_any_path_can_be_given(folder, monkeypatch, name):
    monkeypatch.chdir(folder)
    (folder / "first.yaml").rename(folder / name)
    assert typed(name).train.steps == 7
    assert "unknown key train.stepz" in refusal(name, "train.stepz=3")


def test_a_path_wins_over_a_shipped_experiment_of_that_name(folder, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "first.yaml").rename(folder / "digits.yaml")
    assert typed("digits.yaml").train.steps == 7
    assert typed("experiment=digits").train.steps == 300


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["mine/frist.yaml"], "mine/frist.yaml: there is no such file did you mean mine/first.yaml?"),
        (["none/first.yaml"], "none/first.yaml: there is no such file, nor any other .yaml file in"),
        (["mine/first.yml"], "mine/first.yml: is not key=value rename it to mine/first.yaml"),
        (["mine/first.yaml", "train.steps=0"], "train.steps: 0 is out of range"),
    ],
)
def test_a_path_that_is_wrong_is_refused(folder, words, answer):
    assert answer in refusal(*words)


def test_a_second_path_is_refused():
    (fault,) = arguments.sort(["a.yaml", "seed=1", "b.yaml"]).faults
    assert str(fault).startswith("b.yaml: is a second experiment beside a.yaml")


def test_a_wrong_key_in_the_file_is_named_with_its_line(folder):
    (folder / "first.yaml").write_text(YAML.replace("steps", "stepz"))
    assert "mine/first.yaml:8 train.stepz: unknown key train.stepz" in refusal("mine/first.yaml")


def test_a_value_out_of_range_in_the_file_is_named_with_its_line(folder):
    (folder / "first.yaml").write_text(YAML.replace("steps: 7", "steps: 0"))
    assert "mine/first.yaml:8 train.steps: 0 is out of range" in refusal("mine/first.yaml")


def test_a_file_that_names_code_is_refused(folder):
    (folder / "first.yaml").write_text(YAML + "_target_: os.system\n")
    assert "names code to import" in refusal("mine/first.yaml")
