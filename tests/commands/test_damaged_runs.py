"""Each file of a run directory, damaged in each way: every command reads around it, or ends with one sentence."""

from __future__ import annotations

import copy
import functools
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pages import page
from quick_config import load

from trainer.commands.check import claims
from trainer.commands.runs import attach, checkpoints, continue_run, log, report, save, status, stop, table
from trainer.commands.start import Start
from trainer.config.schema import RunConfig
from trainer.config.typed import AttachConfig, ReportCommandConfig, RunsConfig
from trainer.faults import exit_codes
from trainer.launch.ending import stopped
from trainer.launch.progress import HistoryLines
from trainer.observe import runs
from trainer.observe.loggers.follow import Follower
from trainer.plan.description import Description
from trainer.plan.devices import Machine
from trainer.plan.layout import Parameter
from trainer.plan.make import make_plan
from trainer.plan.plan import Plan
from trainer.storage import changes, checkpoint_writer, evaluations, foreign, resume
from trainer.storage.history import History
from trainer.storage.lease import Lease
from trainer.storage.rollbacks import count_rollbacks
from trainer.storage.run_directory import RunDirectory

DENSE = Description((Parameter("dense/kernel", (4, 2), True),), 10, 8000, 2000)
STEP = 10
START = Start(0.0)
USER_FILE = "import keras\n\n\ndef model(input_shape, classes):\n    return None\n"

# The files, and what makes each of them other than it was


def wrong_types(value: Any) -> Any:
    """The same keys with values of other kinds."""
    if isinstance(value, Mapping):
        return {key: wrong_types(item) for key, item in value.items()}
    if isinstance(value, list):
        return {"0": [wrong_types(item) for item in value]}
    return 1.5 if isinstance(value, str) else "text"


def shallow(value: Any) -> Any:
    """The keys alone."""
    return dict.fromkeys(value, 3) if isinstance(value, Mapping) else 3


def rewritten(change: Callable[[Any], Any]) -> Callable[[bytes], bytes]:
    def rewrite(content: bytes) -> bytes:
        try:
            return "\n".join(json.dumps(change(json.loads(line))) for line in content.decode().splitlines()).encode()
        except ValueError:
            pass
        try:
            return json.dumps(change(json.loads(content))).encode()
        except ValueError:
            return b"0"  # no JSON

    return rewrite


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "cut off": lambda content: content[: len(content) // 2],
    "no UTF-8": lambda content: content.replace(b'"', b'"\xff\xfe', 3) + b"\x80\n",
    "a list": lambda content: b"[1, 2]\n",
    "a text": lambda content: b'"text"\n',
    "null": lambda content: b"null\n",
    "a huge number": lambda content: b"1" + 400 * b"0" + b"\n",
    "infinite": lambda content: b'{"step": 1e999, "steps": 1e999, "loaded": 1e999, "time": 1e999, "seconds": 1e999}\n',
    "wrong types": rewritten(wrong_types),
    "keys alone": rewritten(shallow),
    "nested": lambda content: 100_000 * b"[",
    "garbage": lambda content: bytes(range(256)) * 4,
    "lines of others": lambda content: content + b'{"step": -1}\n{"a": 1}\n' + content[: len(content) // 2] + b"\n{}\n",
}
FILES = (
    *("config.yaml", "plan.json", "code.json", "summary.json", "status.json", "history.jsonl", "evaluations.jsonl"),
    *("events.jsonl", "generation.json", "rollbacks.jsonl", "journal/worker-0.jsonl", "journal/launcher.jsonl"),
    *("checkpoints/000000010/manifest.json", "checkpoints/000000010/tensors.npz", "best/000000010/evaluation.json"),
    *("loggers/csv.json", "lock"),
)
KINDS: dict[str, Callable[[Path], object]] = {
    "a folder": lambda path: path.mkdir(),
    "a link to itself": lambda path: path.symlink_to(path),
    "a link to nothing": lambda path: path.symlink_to(path.with_name("nowhere")),
    "a pipe": os.mkfifo,
}


# What reads them


def train(directory: RunDirectory, config: RunConfig) -> None:
    """What a launch and its chief do before the first step."""
    foreign.check(directory.path)
    resume.describe_finished(config)
    made = _plan("1ps1w")
    lines = HistoryLines(directory.history, start=0, steps=300, batch=8)
    with Lease(directory):
        source = resume.find("auto", directory, steps=300)
        if source is not None:
            changes.check(source, config, directory, steps=300)
        directory.write_inputs(config, made)
        assert not directory.has_loaded()
        assert 1 <= directory.next_generation() < 2**31
        count_rollbacks(directory.rollbacks)
        for path in (directory.history, directory.evaluations):
            History(path, start=STEP).close()
            assert all(json.loads(line)["step"] <= STEP for line in path.read_text().splitlines())
        evaluations.read(directory.evaluations)
        evaluations.best(directory.best)
    lines.new()
    stopped(directory, runs.read_summary(directory) | {"time_to_first_step_secs": None})


def follow(directory: RunDirectory, config: RunConfig) -> None:
    Follower("csv", directory.path).finish()


Read = Callable[[RunDirectory, RunConfig], object]
READERS: dict[str, Read] = {
    "attach": lambda directory, config: attach.run(directory, AttachConfig(), as_json=False),
    "log": lambda directory, config: log.run(directory, config.loggers),
    "report": lambda directory, config: report.run(directory, ReportCommandConfig()),
    "save": lambda directory, config: save.run(directory, as_json=False),
    "status": lambda directory, config: status.show(directory, as_json=False),
    "stop": lambda directory, config: stop.run(directory, as_json=False),
    "table": lambda directory, config: table.run(RunsConfig(folder=str(directory.path.parent)), as_json=False),
    "status as JSON": lambda directory, config: status.show(directory, as_json=True),
    "check": lambda directory, config: claims.run(directory.path),
    "continue": lambda directory, config: continue_run.run(config, START),
    "export": lambda directory, config: [checkpoints.named(directory, name) for name in ("last", "best", "10")],
    "follow": follow,
    "train": train,  # last: it writes
}


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    """What a run leaves that has been stopped."""
    folder = tmp_path_factory.mktemp("intact")
    (folder / "mine.py").write_text(USER_FILE)
    directory = RunDirectory(folder / "run")
    config = load([f"user={folder}/mine.py", f"run={directory.path}", "cluster=1ps1w"])
    directory.write_inputs(config, _plan("1ps1w"))
    directory.next_generation()
    line = {"step": STEP, "loss": 0.5, "accuracy": 0.5, "learning_rate": 0.001, "examples_per_second": 10.0}
    shown = page(
        state="training", step=STEP, loss=0.5, examples_per_second=1.0, wait_fraction=0.1, memory_bytes=1
    ).to_json()
    attempt = {"restarts": 0, "code": None, "host": "here", "pid": 1, "metrics": "", "log": ""}
    files: dict[str, list[Any]] = {
        "history.jsonl": [line | {"step": 5}, line],
        "evaluations.jsonl": [{"step": STEP, "loss": 0.5, "accuracy": 0.5, "seconds": 0.1}],
        "events.jsonl": [{"time": time.time(), "event": "launch", "cluster": "1ps1w", "command": ["trainer"]}],
        "rollbacks.jsonl": [{"step": 3, "checkpoint": None}],
        "journal/worker-0.jsonl": [{"event": "reload", "at": 1.0, "generation": 1, "step": 0, "checkpoint": None}],
        "journal/launcher.jsonl": [{"event": "start", "at": 1.0, "task": "worker:0", "attempt": 0, "pid": 1}],
        "summary.json": [{"steps": STEP, "ended_early": None, "failed": None, "tasks": {"worker:0": {"code": 143}}}],
        "status.json": [
            {
                "launcher": {"pid": 1, "host": "here", "command": ["trainer"], "folder": str(folder)},
                **{"started_at": 1.0, "time": 2.0, "steps": 300, "versions": "1", "waits": {"worker:0": {"ps:0": 1.0}}},
                **{"tasks": {"worker:0": shown}, "states": {"worker:0": "x"}, "attempts": {"worker:0": attempt}},
            }
        ],
        "loggers/csv.json": [{"steps": {"history.jsonl": 5}, "state": {}}],
    }
    for name, values in files.items():
        (directory.path / name).parent.mkdir(exist_ok=True)
        (directory.path / name).write_text("".join(f"{json.dumps(value)}\n" for value in values))
    (directory.path / "lock").write_text("1\n")
    tensors = {"parameters/dense/kernel": np.zeros((4, 2), np.float32)}
    checkpoint_writer.write(directory.checkpoints, STEP, 1, {}, tensors, keep=3)
    scored = evaluations.Evaluation(STEP, {"loss": 0.5}, 0.1)
    evaluations.keep_as_best(directory.best, directory.checkpoints / f"{STEP:09d}", scored)
    return directory


@pytest.fixture
def copied(intact: RunDirectory, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], RunDirectory]:
    """Makes a copy of the run, in which nothing trains and no process is started."""
    monkeypatch.setattr(continue_run.train, "run", lambda config, start, **_: exit_codes.OK)
    monkeypatch.setattr(continue_run.validate, "validate", lambda config, machine: [])
    monkeypatch.setattr(log, "Loggers", _NoLoggers)
    monkeypatch.setattr(RunDirectory, "read_config", _read_config_once)
    monkeypatch.setattr(sys, "argv", ["trainer"])
    monkeypatch.chdir(tmp_path)

    def make_copy() -> RunDirectory:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        shutil.copytree(intact.path, tmp_path / "run")
        return RunDirectory(tmp_path / "run")

    return make_copy


@pytest.fixture
def configs(intact: RunDirectory, tmp_path: Path) -> tuple[RunConfig, RunConfig]:
    """Of a command about the copied run, and of one that launches it again."""
    run = f"run={tmp_path / 'run'}"
    of_run = load([run, "cluster=1ps1w", "loggers=[csv]"])
    return of_run, load([f"user={intact.path.parent}/mine.py", run, "cluster=1ps1w"])


_read_config, _configs = RunDirectory.read_config, dict[bytes, RunConfig]()


def _read_config_once(directory: RunDirectory) -> RunConfig:
    """Reads each text once, because that takes longer than the rest."""
    text = directory.config.read_bytes() if directory.config.is_file() else b""
    if text not in _configs:
        _configs[text] = _read_config(directory)
    return copy.deepcopy(_configs[text])


@functools.cache
def _plan(cluster: str) -> Plan:
    return make_plan(load([f"cluster={cluster}"]), DENSE, Machine(cores=2, gpus=0))


class _NoLoggers:
    def __init__(self, names: list[str], directory: RunDirectory) -> None:
        """Starts none."""

    def __enter__(self) -> _NoLoggers:
        return self

    def __exit__(self, *_: object) -> None:
        """There is none."""

    def finish(self, secs: float | None) -> list[str]:
        return []


def outcomes(
    directory: RunDirectory, configs: tuple[RunConfig, RunConfig], names: Iterable[str] = READERS
) -> dict[str, int]:
    """The exit code of each command, or of those of these names, on a run."""
    of_run, launch = configs
    return {
        name: code_of(
            functools.partial(READERS[name], directory, copy.deepcopy(launch if name == "train" else of_run)), directory
        )
        for name in names
    }


def code_of(command: Callable[[], object], directory: RunDirectory) -> int:
    """The exit code of a command, which ends with one sentence about the run if it fails."""
    try:
        command()
    except Exception as error:
        code, text = exit_codes.exit_code_of(error), str(error)
        if code == exit_codes.INTERNAL or directory.path.name not in text or len(text.splitlines()) != 1:
            raise
        return code
    return exit_codes.OK


NOT_RUNNING = {"attach": 69, "save": 69, "stop": 69}  # what must not depend on a damage, but with none


def test_an_intact_run_is_read_by_all(copied: Callable[[], RunDirectory], configs):
    codes = outcomes(copied(), configs)
    assert codes == dict.fromkeys(READERS, exit_codes.OK) | NOT_RUNNING


@pytest.mark.parametrize("file", FILES)
def test_a_file_that_is_damaged_ends_no_command_with_a_traceback(file: str, copied, configs):
    """Each damage is met by one command, and by another one for each file."""
    readers = list(READERS)
    for number, damage in enumerate(DAMAGES, FILES.index(file)):
        check_damaged(copied(), file, damage, configs, [readers[number % len(readers)]])


@pytest.mark.long
@pytest.mark.parametrize("file", FILES)
def test_a_file_that_is_damaged_in_any_way_ends_none_of_the_commands_with_a_traceback(file: str, copied, configs):
    for damage in DAMAGES:
        check_damaged(copied(), file, damage, configs, READERS)


def check_damaged(
    directory: RunDirectory, file: str, damage: str, configs: tuple[RunConfig, RunConfig], names: Iterable[str]
) -> None:
    path = directory.path / file
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    codes = outcomes(directory, configs, names)
    # Whatever only shows, or can be made anew, stops no run and no list of runs.
    always = {"table", "status", "status as JSON", *(() if "manifest" in file or "npz" in file else ("train",))}
    assert {name: code for name, code in codes.items() if name in always and code != exit_codes.OK} == {}


@pytest.mark.long(but=["config.yaml", "status.json"])
@pytest.mark.parametrize("file", [name for name in FILES if "/" not in name and name != "lock"])
def test_something_else_in_the_place_of_a_file_is_named(file: str, copied, configs):
    for make in KINDS.values():
        directory = copied()
        (directory.path / file).unlink()
        make(directory.path / file)
        codes = outcomes(directory, configs)
        assert (codes["table"], codes["train"]) == (exit_codes.OK, exit_codes.BAD_DATA)
