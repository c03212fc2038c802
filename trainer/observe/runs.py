"""Reads the facts of a run, running or ended, from its directory, for tables and the report.

It asks no process of the run, so any host that shares the directory can read it.
"""

import functools
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, combinations
from pathlib import Path
from typing import Any

from trainer.config import yaml_files
from trainer.config.schema import RunState
from trainer.observe.task_page import TaskPage, TaskState
from trainer.storage import checkpoint, lease
from trainer.storage.checkpoint import CheckpointError
from trainer.storage.damage import DAMAGED, read_json
from trainer.storage.history import NOT_METRICS
from trainer.storage.json_lines import last_measured
from trainer.storage.run_directory import RunDirectory

MOST_STEPS = 2**63
LAST_SECOND = 253_402_300_800  # the year 10000
RUNNING, DONE, STOPPED, FAILED, DIED = STATES = tuple(state.value for state in RunState)
CHIEF = "worker:0"
FILES = ("config", "plan", "history", "evaluation", "summary", "status")  # from which facts are read


@dataclass(frozen=True)
class RunFacts:
    """The facts of one run; None: unknown, or not known yet."""

    path: str
    state: str  # one of STATES
    phase: str  # of a run that is running: what its chief does; else as the state
    cluster: str
    strategy: str
    model: str
    data: str
    step: int
    steps: int
    loss: float | None
    metrics: Mapping[str, float]
    evaluation: Mapping[str, float]  # the last: eval_loss, and eval_accuracy or what else was scored
    examples_per_second: float | None
    started_at: float | None  # Unix time, seconds, of the last launch
    seconds: float | None  # of the last launch, so far
    restarts: int
    failed: str | None  # the task that failed first
    params_sha256: str | None
    checkpoints: tuple[int, ...]  # their steps
    owner: int | None  # the process that uses the directory
    launcher: Mapping[str, Any] | None  # its pid, host, command and folder, where one uses the directory

    @property
    def is_running(self) -> bool:
        return self.state == RUNNING


def is_run(path: Path) -> bool:
    """Whether a folder is a run directory."""
    with suppress(OSError):  # another user's, or a name that no file can have
        return (path / "config.yaml").is_file() and (path / "plan.json").is_file()
    return False


def find(folder: Path) -> list[Path]:
    """Returns the run directories in a folder, and one level below it, as in sweeps; sorted."""
    entries = [entry for entry in _entries(folder) if not is_run(entry)]
    inner = [entry for parent in entries for entry in _entries(parent) if is_run(entry)]
    return sorted([*(entry for entry in _entries(folder) if is_run(entry)), *inner])


def _entries(folder: Path) -> list[Path]:
    with suppress(OSError):
        return [path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")]
    return []


def read(path: Path, *, is_over: bool = False) -> RunFacts:
    """Reads a run directory; missing files, and those half written by a killed run, are left out.

    Args:
        is_over: whether the run has ended, although its launcher still uses the directory.
    """
    directory = RunDirectory(path)
    owner = None if is_over else lease.owner(directory)
    read = [_yaml(directory.config), read_json(directory.plan), last_measured(directory.history)]
    read += [last_measured(directory.evaluations), read_json(directory.summary), read_json(directory.status)]
    files = dict(zip(FILES, read, strict=True))
    for damaged in chain.from_iterable(combinations(files, size) for size in range(len(files))):
        with suppress(*DAMAGED):
            return _facts(directory, owner, files | {name: {} for name in damaged})
    return _facts(directory, owner, {name: {} for name in files})


def _facts(directory: RunDirectory, owner: int | None, files: Mapping[str, Mapping[str, Any]]) -> RunFacts:
    """Combines the contents of the files; those of a killed run may be empty.

    Raises:
        DAMAGED: if a value does not have the type that a run writes.
    """
    config, plan, status, summary = (files[name] for name in ("config", "plan", "status", "summary"))
    history, evaluation = files["history"], files["evaluation"]
    launcher = status.get("launcher")
    if launcher is not None and launcher["pid"] != owner:
        status, launcher = {} if owner is not None else status, None  # the status is of an earlier launch
    pages = pages_of(status)
    steps = _whole(plan.get("steps"))
    chief = pages.get(CHIEF)
    step = max(_whole(summary.get("steps")), _whole(history.get("step")), _whole(chief.step if chief else None))
    state = _state(summary, step=step, steps=steps, is_owned=owner is not None)
    workers = [page for name, page in pages.items() if name.startswith("worker:")]
    rate = sum(page.examples_per_second for page in workers) if workers else history.get("examples_per_second")
    began, now = _time(status.get("started_at")), _time(status.get("time"))
    metrics = {name: value for name, value in history.items() if name not in NOT_METRICS}
    return RunFacts(
        path=str(directory.path),
        state=state,
        phase=_phase(pages, chief) if state == RUNNING else state,
        cluster=str(plan.get("cluster", "")),
        strategy=str(plan.get("strategy", "")),
        model=str((config.get("model") or {}).get("name", "")),
        data=str((config.get("data") or {}).get("name", "")),
        step=step,
        steps=steps,
        loss=_number(summary.get("final_loss", (chief.loss if chief else None) or history.get("loss"))),
        metrics={name: _known(value) for name, value in ((chief.metrics if chief else None) or metrics).items()},
        evaluation={f"eval_{n}": v for n, v in evaluation.items() if n not in ("step", "seconds")},
        examples_per_second=_number(summary.get("examples_per_second", rate)),
        started_at=began,
        seconds=_time(summary.get("seconds")) or (round(now - began, 3) if now and began else None),
        restarts=_whole(summary.get("restarts") or sum(a["restarts"] for a in status.get("attempts", {}).values())),
        failed=None if (failed := summary.get("failed")) is None else str(failed),
        params_sha256=None if (sha256 := summary.get("params_sha256")) is None else str(sha256),
        checkpoints=_checkpoints(directory),
        owner=owner,
        launcher=launcher,
    )


def _whole(value: Any) -> int:
    """Returns a number of steps or restarts; 0 if there is none."""
    if value is None:
        return 0
    if type(value) is not int or not 0 <= value < MOST_STEPS:
        raise ValueError(f"{value!r} is not a count")
    return value


def _number(value: Any) -> float | None:
    return None if value is None else _known(value)


def _known(value: Any) -> float:
    if type(value) not in (int, float):
        raise TypeError(f"{value!r} is not a number")
    return value


def _time(value: Any) -> float | None:
    """Returns a duration or a Unix time in seconds, before the year 10000."""
    if value is not None and not 0 <= _known(value) < LAST_SECOND:
        raise ValueError(f"{value!r} is not a time")
    return value


def _checkpoints(directory: RunDirectory) -> tuple[int, ...]:
    with suppress(OSError, CheckpointError):
        return tuple(int(one.name) for one in checkpoint.finished(directory.checkpoints))
    return ()


def _state(summary: Mapping[str, Any], *, step: int, steps: int, is_owned: bool) -> str:
    if is_owned:
        return RUNNING
    if not summary:
        return DIED
    if summary.get("failed"):
        return FAILED
    tasks = summary.get("tasks") or {}
    codes = [task["code"] for task in tasks.values()] if isinstance(tasks, dict) else []
    has_ended = summary.get("ended_early") or (summary.get("steps") is not None and step >= steps)
    return DONE if has_ended and not any(codes) else STOPPED


def _phase(pages: Mapping[str, TaskPage], chief: TaskPage | None) -> str:
    if any(page.is_stopping for page in pages.values()):
        return TaskState.stopping.value
    return (chief.state if chief else TaskState.starting).value


def pages_of(status: Mapping[str, Any]) -> dict[str, TaskPage]:
    """Returns the last page of each task, by its name, from the launcher's status file.

    Raises:
        DAMAGED: if one of them is not a page.
    """
    return {name: TaskPage.from_json(page) for name, page in status.get("tasks", {}).items()}


def disk_nbytes(path: Path) -> int:
    """Returns the bytes of a run directory on disk; files with several names, as in checkpoints, count once."""
    seen: dict[tuple[int, int], int] = {}
    for folder, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):  # removed meanwhile
                stat = os.lstat(os.path.join(folder, name))
                seen[stat.st_dev, stat.st_ino] = 512 * stat.st_blocks
    return sum(seen.values())


def read_status(directory: RunDirectory) -> dict[str, Any]:
    """Returns the last status that the launcher wrote; empty if there is none, or it is damaged."""
    status = read_json(directory.status)
    with suppress(*DAMAGED):
        _facts(directory, 0, {name: {} for name in FILES} | {"status": status})
        return status
    return {}


def read_summary(directory: RunDirectory) -> dict[str, Any]:
    """Returns the summary of a run that has ended; empty for others."""
    return read_json(directory.summary)


def _yaml(path: Path) -> dict[str, Any]:
    with suppress(OSError, *DAMAGED):
        if path.is_file():  # reading a pipe would block
            return _parse_yaml(path, path.stat().st_mtime_ns)
    return {}


@functools.lru_cache(maxsize=2000)
def _parse_yaml(path: Path, modified_ns: int) -> dict[str, Any]:
    """Returns the mapping in a file, which is parsed again only when it has changed."""
    text = path.read_bytes()
    if len(text) > yaml_files.MAX_BYTES:
        raise ValueError(f"{path} is not a config")
    value = yaml_files.load(text)
    return value if isinstance(value, dict) else {}
