"""Every example runs by the commands in its first lines, and reaches what it promises there."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from quick_config import load, validated_on
from runs import Run

from trainer.config import arguments
from trainer.plan.devices import Machine

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).resolve().parents[2] / "examples"
COMMAND = re.compile(r"^ {4}python -m trainer examples/(.*?) {2,}(.*) on 2 cores; (.*)$", re.MULTILINE)
AT_MOST = ("loss", "mae")  # other scores are promised to be at least as large


class Command(NamedTuple):
    """One command of an example, with the scores that it promises."""

    words: list[str]
    promised: dict[str, float]


def commands(name: str) -> list[Command]:
    """The commands in the first lines of an example, with paths that hold in any folder."""
    text = ast.get_docstring(ast.parse((FOLDER / f"{name}.py").read_text()))
    found = []
    for typed, _, result in COMMAND.findall(text or ""):
        scores = {score: float(value) for score, value in re.findall(r"\b(eval_\w+) (\d+\.\d+)", result)}
        found.append(Command([f"{FOLDER}/{word}" if ".yaml" in word else word for word in shlex.split(typed)], scores))
    return found


EXAMPLES = [name for name in sorted(path.stem for path in FOLDER.glob("*.py")) if name != "matpow"]


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_first_lines_say_what_to_type_how_long_it_takes_and_what_comes_out(name):
    typed = (FOLDER / f"{name}.py").read_text().count("    python -m trainer ")
    assert len(commands(name)) == typed > 0
    for words, promised in commands(name):
        given = arguments.sort(words)
        assert given.faults == ()
        config = load(given.overrides, validated_on(Machine(cores=2, gpus=0)))
        assert config.user is not None
        assert Path(config.user).name == f"{name}.py"
        assert config.seed == 1  # or another run might miss what is promised
        assert promised


def test_every_file_of_yaml_is_a_command_of_an_example():
    typed = {Path(words[0]).name for name in EXAMPLES for words, _ in commands(name)}
    assert typed == {path.name for path in FOLDER.glob("*.yaml")}


def test_the_page_names_every_example():
    assert {f"{name}.py" for name in [*EXAMPLES, "matpow"]} == set(
        re.findall(r"^\| \[[\w.]+\]\((\w+\.py)\)", (FOLDER / "README.md").read_text(), re.MULTILINE)
    )


@pytest.mark.cluster
def test_an_example_trains(run_all: Callable[..., list[Run]]):
    """A few steps of it."""
    for run in run_all("siamese", "train.steps=6", "train.batch_size=32", "evaluate.every=0"):
        assert run.summary()["steps"] == 6


@pytest.mark.cluster
@pytest.mark.long
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_reaches_what_it_promises(run_all: Callable[..., list[Run]], name):
    for run, (_, promised) in zip(run_all(name), commands(name), strict=True):
        for score, value in promised.items():
            reached = run.summary()[score]
            assert reached <= value if score.endswith(AT_MOST) else reached >= value, f"{score} is {reached}"


@pytest.fixture
def run_all(tmp_path: Path) -> Callable[..., list[Run]]:
    """run_all(name, *overrides) -> the runs of an example's commands, each ended with 0."""

    def run(name: str, *overrides: str) -> list[Run]:
        runs = []
        for number, (words, _) in enumerate(commands(name)):
            named = [] if any(word.startswith("run=") for word in words) else [f"run={tmp_path}/run-{number}"]
            runs.append(Run([*words, *named, *overrides], tmp_path, {}))
            assert runs[-1].wait() == 0, runs[-1].output + "\n".join(log.read_text() for log in runs[-1].logs())
        return runs

    return run
