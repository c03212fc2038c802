"""trainer init: what it makes works as it is, installed anywhere; and it never touches what is there."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import json_schemas
import pytest
import yaml
from forks import Forks
from quick_config import load
from runs import LONGEST_SECS, Run

from trainer.commands.start import start_early
from trainer.config import json_schema

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
FILES = [".gitignore", "README.md", "experiment.yaml", "model.py", "schema.json", "test_smoke.py"]


@pytest.fixture
def project(tmp_path: Path, python: Forks) -> Path:
    """A new project below the working directory."""
    ended = python.run("-m", "trainer", "init", "my project", cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
    return tmp_path / "my project"


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_project_is_made_and_the_next_command_is_printed(tmp_path: Path, python: Forks):
    ended = python.run("-m", "trainer", "init", "deep/mine", cwd=tmp_path)
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.splitlines() == [
        f"deep/mine: {', '.join(FILES)}",
        "next:  cd deep/mine",
        "       python -m trainer experiment.yaml",
    ]
    assert names(tmp_path / "deep" / "mine") == FILES


def test_the_long_form_does_the_same(tmp_path: Path, python: Forks):
    assert python.run("-m", "trainer", "mode=init", "project=mine", cwd=tmp_path).returncode == 0
    assert names(tmp_path / "mine") == FILES


def test_an_empty_folder_is_filled(tmp_path: Path, python: Forks):
    assert python.run("-m", "trainer", "init", ".", cwd=tmp_path).returncode == 0
    assert names(tmp_path) == FILES


@pytest.mark.parametrize(
    "words",
    [["init"], ["init", "full"], ["init", "full/README.md"], ["init", "full/README.md/mine"], ["init", "a", "b"]],
)
def test_what_cannot_be_made_is_refused_and_nothing_changes(tmp_path: Path, python: Forks, snapshot, words):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "README.md").write_text("mine")
    ended = python.run("-m", "trainer", *words, cwd=tmp_path)
    assert ended.returncode == 2
    assert ended.stderr == snapshot
    assert (names(tmp_path), names(tmp_path / "full")) == (["full"], ["README.md"])
    assert (tmp_path / "full" / "README.md").read_text() == "mine"


def test_no_process_imports_tensorflow_for_it(tmp_path: Path, python: Forks):
    assert start_early(["init", "mine"]) is None
    program = (
        "import sys; sys.argv = ['trainer', 'init', 'mine']\n"
        "from trainer.__main__ import console\n"
        "try: console()\n"
        "finally: print({'tensorflow', 'keras'} & set(sys.modules))"
    )
    assert python.run("-c", program, cwd=tmp_path).stdout.splitlines()[-1] == "set()"


def test_the_experiment_composes_from_any_working_directory(project: Path, monkeypatch):
    monkeypatch.chdir("/")
    config = load([f"experiment='{project / 'experiment.yaml'}'"])
    assert (config.name, config.model.name, config.data.name) == ("my-project", "classifier", "spirals")
    assert config.user is not None
    assert Path(config.user).resolve() == project / "model.py"


def test_the_experiment_follows_the_schema_that_it_names(project: Path):
    text = (project / "experiment.yaml").read_text()
    assert text.startswith("# yaml-language-server: $schema=schema.json\n")
    assert (project / "schema.json").read_text() == json_schema.text()
    schema = json_schema.config_schema()
    assert list(json_schemas.errors(yaml.safe_load(text), schema, schema)) == []


@pytest.mark.skipif(shutil.which("ruff", path=Path(sys.executable).parent) is None, reason="there is no ruff")
def test_its_code_is_formatted(project: Path):
    ruff = Path(sys.executable).parent / "ruff"
    for command in (["format", "--check"], ["check"]):
        config = ["--config", str(ROOT / "pyproject.toml")]
        ended = subprocess.run([ruff, *command, *config, project], capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stdout


def test_its_page_names_every_file_and_its_commands_compose(project: Path, monkeypatch):
    page = (project / "README.md").read_text()
    assert page.startswith("# my project\n")
    assert re.findall(r"^\| `([^`]+)`", page, re.MULTILINE) == ["model.py", "experiment.yaml", "test_smoke.py"]
    monkeypatch.chdir(project)
    for words in trainer_commands(page):
        assert load(["experiment=experiment.yaml", *words[1:]]).name == "my-project"


def trainer_commands(page: str) -> list[list[str]]:
    """The arguments of each `python -m trainer experiment.yaml` of a page."""
    lines = re.findall(r"^python -m trainer (?:plan )?(experiment\.yaml[^#\n]*)", page, re.MULTILINE)
    assert len(lines) > 3
    return [shlex.split(line) for line in lines]


@pytest.fixture(scope="module")
def installed(tmp_path_factory) -> Path:
    """The files of the wheel, in a folder far from the checkout."""
    pytest.importorskip("setuptools")
    source = tmp_path_factory.mktemp("source")
    for name in ("trainer", "conf"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    wheels = tmp_path_factory.mktemp("wheels")
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", wheels, source]
    subprocess.run(build, check=True, capture_output=True, timeout=LONGEST_SECS)
    folder = tmp_path_factory.mktemp("installed")
    (wheel,) = wheels.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(folder)
    return folder


@pytest.mark.long
@pytest.mark.cluster
def test_a_project_of_the_installed_trainer_passes_its_own_test(installed: Path, tmp_path: Path):
    environment = os.environ | {"PYTHONPATH": str(installed), "PYTEST_ADDOPTS": ""}

    def run(*words: str, cwd: Path = tmp_path) -> str:
        ended = subprocess.run(
            [sys.executable, "-m", *words],
            cwd=cwd,
            env=environment,
            capture_output=True,
            text=True,
            timeout=LONGEST_SECS,
            check=False,
        )
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return ended.stdout

    run("trainer", "init", "mine")
    assert "1 passed" in run("pytest", "mine", "-p", "no:cacheprovider")
    assert run("trainer", "mode=schema") == (tmp_path / "mine" / "schema.json").read_text()
    shipped = (installed / "trainer" / "conf" / "schema.json").read_text()
    assert shipped == run("trainer", "mode=schema", cwd=tmp_path / "mine")
    assert set(names(tmp_path / "mine")) - {"__pycache__"} == set(FILES)


@pytest.mark.long
@pytest.mark.cluster
def test_the_commands_of_its_page_run_and_the_experiment_reaches_what_it_promises(project: Path, monkeypatch):
    monkeypatch.chdir(project)
    promised = re.search(r"eval_accuracy (\d\.\d+)", (project / "experiment.yaml").read_text())
    assert promised is not None
    for words in trainer_commands((project / "README.md").read_text()):
        run = Run(words, project, {})
        assert run.wait() == 0, run.output
        if words == ["experiment.yaml"]:
            assert run.summary()["eval_accuracy"] >= float(promised[1])
