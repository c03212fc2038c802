"""The README's commands and code do what it says."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from trainer.config.compose import load
from trainer.launch.describe import describe
from trainer.plan import make, page, validate
from trainer.plan.description import Question
from trainer.plan.devices import Machine
from trainer.plan.forecast import step_time

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"```(\w+)\n(.*?)```", README, re.DOTALL)
COMMANDS = [
    line.partition("#")[0].strip() for kind, block in BLOCKS if kind == "bash" for line in block.splitlines() if line
]
TRAINER = [command for command in COMMANDS if command.startswith("python -m trainer")]
SHORT = {"train.steps": 6, "train.batch_size": 32}


def test_every_command_is_make_or_the_trainer():
    assert [c for c in COMMANDS if not c.startswith(("make ", "python -m trainer"))] == []
    assert len(TRAINER) >= 8


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make, as in an image")
@pytest.mark.parametrize("command", [c for c in COMMANDS if c.startswith("make ")])
def test_every_make_target_exists(command):
    subprocess.run(["make", "--dry-run", *shlex.split(command)[1:]], cwd=ROOT, check=True, capture_output=True)


def _marks(command: str) -> list[pytest.MarkDecorator]:
    return [pytest.mark.docker] if "launch=docker" in command else []


@pytest.mark.cluster
@pytest.mark.parametrize(
    "command",
    # mode=clean would clean up after other tests too; those of containers run it.
    [pytest.param(command, marks=_marks(command)) for command in TRAINER if "mode=clean" not in command],
)
def test_every_trainer_command_runs(command, tmp_path: Path):
    """At reduced length: the README's own overrides, then fewer steps."""
    (tmp_path / "my_models.py").write_text(next(block for kind, block in BLOCKS if kind == "python"))
    overrides = shlex.split(command)[3:]
    if "--help" not in overrides:
        overrides = [o for o in overrides if o.partition("=")[0] not in SHORT]
        overrides += [f"{key}={value}" for key, value in SHORT.items()]
    ended = subprocess.run(
        [sys.executable, "-m", "trainer", *overrides],
        cwd=tmp_path,
        env=os.environ | {"XDG_CACHE_HOME": str(tmp_path / "cache")},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_the_refused_command_is_answered_as_shown(tmp_path: Path):
    block = next(block for kind, block in BLOCKS if kind == "text" and block.startswith("$ python -m trainer"))
    command, _, answer = block.partition("\n")
    ended = subprocess.run(
        [sys.executable, *shlex.split(command)[2:]], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stderr.strip()) == (2, answer.strip())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_plan_is_expected_to_take_as_long_as_shown(capsys):
    """On any machine: the sample is of one with 2 cores."""
    block = next(block for kind, block in BLOCKS if kind == "text" and "mode=plan\n" in block)
    command, _, shown = block.partition("\n")
    machine = Machine(cores=2, gpus=0)
    config = load(shlex.split(command)[4:], lambda config: validate.validate(config, machine))
    description = describe(Question.about(config.model, config.data, user=None, seed=config.seed))
    made = make.make_plan(config, description, machine)
    page.show(made, step_time.expect(config, made, description, machine))
    assert capsys.readouterr().out.endswith(shown)


def test_every_file_of_the_tree_exists():
    tree = next(block for kind, block in BLOCKS if kind == "text" and block.startswith("conf/ "))
    for line in tree.splitlines():
        assert (ROOT / re.split(r"[ ,]", line)[0]).exists(), line


def test_every_link_and_path_in_it_exists():
    for path in re.findall(r"`((?:conf|trainer)/[\w/.-]+)`", README):
        assert (ROOT / path).exists(), path
