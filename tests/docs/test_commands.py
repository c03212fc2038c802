"""What README.md and docs/ show: every command is run, or checked where it needs another machine."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from forks import Forks
from quick_config import load, validated_on
from runs import LONGEST_SECS

from bench import config as bench
from trainer.config import arguments
from trainer.launch.describe import describe
from trainer.plan import make
from trainer.plan.description import Description, ModelProbe
from trainer.plan.devices import Machine

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "examples" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)
SHORT = {"train.steps": 6, "train.batch_size": 32, "checkpoint.every": 3}
# What needs GPUs, other machines or files that are not here, or has a test of its own: it is planned, not run.
ELSEWHERE = re.compile(
    r"device=gpu|device\.gpus|cluster\.addresses|launch=(?:ssh|slurm|docker 'cluster)|data=(?:npz|tfrecord|csv|images)|"
    r"/mnt/|experiment="
)
# Programs of the system, and of other pages' subjects: their lines are only parsed.
# Experiments that are run elsewhere: tests/clusters/test_examples.py.
EXAMPLE = re.compile(r"\bexamples/\w+\.yaml")
PROJECT = "my_project"  # commands that name it use the folder that the first of them makes
PARSED = (
    "source ",
    "eval ",
    "ls ",
    "kill ",
    "curl ",
    "docker run ",
    "docker compose ",
    "docker stack ",
    "kubectl ",
    "srun ",
    "python -m bench",
)


def blocks(path: Path, kind: str) -> list[str]:
    return [text for language, text in BLOCK.findall(path.read_text()) if language == kind]


def commands(path: Path) -> list[str]:
    lines = [line for block in blocks(path, "bash") for line in block.splitlines()]
    return [line.partition("  #")[0].strip() for line in lines if line.strip()]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def is_of_trainer(command: str) -> bool:
    return f"{command} ".startswith("trainer ")


def is_called(command: str, *names: str) -> bool:
    """Whether the first word behind `trainer` is one of these commands."""
    return is_of_trainer(command) and command.split()[1:2] in [[name] for name in names]


def is_planned(command: str) -> bool:
    """Whether a command is only planned: in this process, which costs a fraction of a second."""
    if not is_of_trainer(command) or is_called(command, "doctor", "help") or PROJECT in command:
        return False
    return is_called(command, "plan") or is_elsewhere(command)


def is_elsewhere(command: str) -> bool:
    return bool(ELSEWHERE.search(command) or EXAMPLE.search(command)) or is_called(command, "chaos")


ALL = list(dict.fromkeys(command for path in PAGES for command in commands(path)))


def test_every_command_is_of_a_known_kind():
    known = ("make ", "trainer", "python -m trainer.observe", "python -m pytest", "python examples/", *PARSED)
    assert [c for c in ALL if not c.startswith(known)] == []


@pytest.mark.parametrize("command", ALL)
def test_every_command_can_be_parsed(command):
    subprocess.run(["bash", "-n", "-c", command], check=True, capture_output=True)


@pytest.mark.skipif(shutil.which("make") is None, reason="there is no make, as in an image")
@pytest.mark.parametrize("command", [c for c in ALL if c.startswith("make ")])
def test_every_make_target_exists(command):
    subprocess.run(["make", "--dry-run", *shlex.split(command)[1:]], cwd=ROOT, check=True, capture_output=True)


@pytest.mark.parametrize("command", [c for c in ALL if c.startswith(("make bench ", "python -m bench"))])
def test_every_option_of_the_bench_exists(command):
    words = shlex.split(shlex.split(command)[-1].removeprefix("ARGS="))
    assert bench.parse(words) != bench.BenchConfig()


@pytest.mark.slow
@pytest.mark.parametrize("path", [p for p in PAGES if any(map(is_planned, commands(p)))], ids=name_of)
def test_every_command_for_another_machine_can_be_planned(path, tmp_path: Path, monkeypatch):
    """With as many GPUs as it likes, and any file that it names."""
    monkeypatch.chdir(tmp_path)
    write_files(path)
    machine = Machine(cores=2, gpus=8)
    descriptions: dict[str, Description] = {}
    for command in filter(is_planned, commands(path)):
        words = shlex.split(EXAMPLE.sub(lambda named: f"{ROOT}/{named[0]}", command))[1:]
        words = words[1:] if words[0] in ("plan", "render", "chaos") else words
        typed = [w for w in words if not w.startswith(("mode=", "launch=", "plan.write_to=", "--"))]
        overrides = arguments.sort(typed).overrides
        folder = next((w.partition("=")[2] for w in words if w.startswith("--config-dir=")), None)
        config = load(overrides, validated_on(machine), config_dir=folder)
        if not config.data.name.startswith(("npz", "tfrecord", "csv", "criteo", "images")) and not EXAMPLE.search(
            command
        ):
            question = ModelProbe.about(config.model, config.data, user=config.user, seed=config.seed)
            if repr(question) not in descriptions:
                descriptions[repr(question)] = describe(question)
            make.make_plan(config, descriptions[repr(question)], machine)


def write_files(path: Path) -> None:
    """The files that a page shows: their first line is a comment with their name."""
    for kind in ("python", "yaml"):
        for block in blocks(path, kind):
            file = Path(block.partition("\n")[0].removeprefix("# "))
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.partition("\n")[2])


def shortened(command: str) -> list[str]:
    """The arguments of python; a run that is continued for more steps still is."""
    words = ["-m", *shlex.split(command)] if is_of_trainer(command) else shlex.split(command)[1:]
    if words[0].startswith("examples/"):
        return [str(ROOT / words[0]), *words[1:]]
    given = dict(word.partition("=")[::2] for word in words)
    if words[2:] and words[2].isalpha():
        given["mode"] = words[2]
    if given.get("mode") == "sweep":
        return [word for word in words if not word.startswith("sweep.trials=")] + ["sweep.trials=4", "train.steps=6"]
    if words[1] != "trainer" or any(word.startswith("--") for word in words) or given.get("mode", "train") != "train":
        return words
    steps = max(SHORT["train.steps"], int(given.get("train.steps", 0)) // 50)
    short = SHORT | {"train.steps": steps, "train.batch_size": given.get("train.batch_size", 32)}
    return [w for w in words if w.partition("=")[0] not in SHORT] + [f"{key}={value}" for key, value in short.items()]


MAIN_JOB = "trainer cluster=2ps4w"


def runs() -> Iterator[object]:
    """Each command to run, with those of its page that use the same run; what an earlier page runs is left out."""
    seen: set[tuple[str, ...]] = set()
    for path in PAGES:
        groups: dict[str, list[str]] = {}
        for command in filter(is_run, commands(path)):
            groups.setdefault(run_of(command) or command, []).append(command)
        for group in groups.values():
            keys = {key_of(command, alone=len(group) == 1) for command in group}
            if not keys <= seen:
                in_containers = "launch=docker" in group[0]  # tests/containers runs the same
                marks = [pytest.mark.docker] if in_containers else []
                is_the_main_job = group == [MAIN_JOB]  # tests/clusters runs it
                is_long = in_containers or is_the_main_job or path.name != "README.md"
                marks += [pytest.mark.long] if is_long else []
                yield pytest.param(path, group, marks=marks, id=f"{name_of(path)}: {group[0]}")
            seen |= keys


def run_of(command: str) -> str | None:
    """The run directory, or the project, that a command writes or reads."""
    named = re.search(rf"runs/\w+|{PROJECT}", command)
    return named[0] if named else None


def key_of(command: str, *, alone: bool) -> tuple[str, ...]:
    """What makes a command another one: its short form, and its run where other commands of the page use that."""
    return tuple(word for word in shortened(command) if not (alone and word.startswith("run=")))


def is_run(command: str) -> bool:
    if command.startswith("python examples/") or "trainer.observe.profile" in command or PROJECT in command:
        return True
    # `trainer clean` would clean up after other tests too; those of containers run it.
    return is_of_trainer(command) and not is_elsewhere(command) and not is_called(command, "plan", "clean")


@pytest.mark.cluster
@pytest.mark.parametrize(("path", "group"), list(runs()))
def test_every_command_runs(path, group, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch):
    """At reduced length: the page's own overrides, then fewer steps."""
    monkeypatch.chdir(tmp_path)
    write_files(path)
    if "launch=docker" in group[0]:
        subprocess.run([str(ROOT / "compose/cluster.sh"), "image", "cpu"], check=True, capture_output=True)
    cache = tmp_path_factory.getbasetemp() / "cache"  # of one user, who types one command after the other
    for command in group:
        ended = subprocess.run(
            [sys.executable, *shortened(command)],
            env=os.environ | {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
            timeout=LONGEST_SECS,
            check=False,
        )
        assert ended.returncode == 0, f"{command}\n{ended.stdout}{ended.stderr}"


def shown_after(command: str, path: Path) -> str:
    """What a page shows as the output of a command."""
    block = next(block for block in blocks(path, "text") if block.startswith(f"$ {command}\n"))
    return block.partition("\n")[2]


REFUSED = "trainer cluster=2ps4w train.stepz=3 train.batch_size=255"


@pytest.mark.slow
@pytest.mark.parametrize("path", [p for p in PAGES if REFUSED in p.read_text()], ids=name_of)
def test_the_refused_command_is_answered_as_shown(path, tmp_path: Path, python: Forks):
    ended = python.run("-m", *shlex.split(REFUSED), cwd=tmp_path)
    assert (ended.returncode, ended.stderr.strip()) == (2, shown_after(REFUSED, path).strip())
    assert list(tmp_path.iterdir()) == []


def test_the_readme_fits_on_200_lines():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 200


@pytest.mark.parametrize("page", ["README.md", "docs/explanation/architecture.md"])
def test_the_tree_has_the_folders_that_there_are(page):
    text = (ROOT / page).read_text()
    shown = re.findall(r"^ *(trainer/[\w/]+/) ", text, re.MULTILINE)
    depth = "*" if page == "README.md" else "**"
    real = {f"{p.parent.relative_to(ROOT)}/" for p in (ROOT / "trainer").glob(f"{depth}/__init__.py")} - {"trainer/"}
    assert sorted(shown) == sorted(real)


def test_every_name_of_the_readme_s_tree_exists():
    tree = next(block for block in blocks(ROOT / "README.md", "text") if block.startswith("conf/  "))
    for line in tree.splitlines():
        assert (ROOT / line.split()[0]).exists(), line


def test_every_path_that_a_page_names_exists():
    for path in PAGES:
        for named in re.findall(r"`((?:conf|trainer|bench|compose|docs|examples|tests)/[\w/.-]+)`", path.read_text()):
            assert (ROOT / named).exists(), f"{name_of(path)}: {named}"


def test_every_link_leads_to_a_file():
    for path in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", path.read_text()):
            assert target.startswith("http") or (path.parent / target).exists(), f"{name_of(path)}: {target}"


def test_what_is_generated_is_current():
    subprocess.run([sys.executable, "docs/generate.py", "--check"], cwd=ROOT, check=True, timeout=LONGEST_SECS)


@pytest.mark.long  # as `make docs` does in CI
@pytest.mark.slow
def test_sphinx_builds_the_pages_without_a_warning(tmp_path: Path):
    pytest.importorskip("myst_parser")
    pytest.importorskip("furo")
    build = [sys.executable, "-m", "sphinx", "-q", "-W", "-n", "docs", str(tmp_path)]
    ended = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    for file in tmp_path.rglob("*.html"):
        loaded = r'<(?:script|img|iframe)[^>]*src="(?:https?:)?//|<link[^>]*href="(?:https?:)?//'
        assert not re.search(loaded, file.read_text()), file


def test_make_check_is_as_good_after_make_train(tmp_path: Path):
    """The folder of runs has the name of a module of the tests."""
    for folder in ("runs", "trainer", "tests"):
        (tmp_path / folder).mkdir()
    for name in ("pyproject.toml", "trainer/__init__.py", "tests/runs.py"):
        shutil.copyfile(ROOT / name, tmp_path / name)
    (tmp_path / "tests/test_it.py").write_text("import pytest\nfrom runs import Run\n\nimport trainer\n")
    checked = subprocess.run(
        [sys.executable, "-m", "ruff", "check", "--no-cache", "--select", "I", "."],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked.stdout
