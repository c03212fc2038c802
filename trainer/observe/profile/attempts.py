"""Reads the steps that the tasks of a run recorded, on the chief's clock. Pure."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

from trainer.observe.profile.clock import Offset, best


class Interval(NamedTuple):
    """A phase of a step."""

    name: str
    began: float  # Unix time of the chief's clock, seconds
    ended: float


@dataclass(frozen=True)
class Step:
    """One step of a replica, or one update of a shard."""

    number: int  # the update that it makes, or that its gradient is for
    began: float  # Unix time of the chief's clock, seconds
    ended: float
    spans: tuple[Interval, ...]  # one after the other, within it
    arrived: Mapping[str, float]  # of an update: when the gradient of each worker arrived


@dataclass
class AttemptTrace:
    """The steps of one attempt of a task."""

    task: str
    number: int  # 0 for the first, 1 after the first restart
    pid: int
    rows: dict[str, list[Step]] = field(default_factory=dict)  # by row: replica, shard


@dataclass
class _Task:
    """The lines of a task's file."""

    attempts: list[tuple[int, list[dict[str, Any]]]] = field(default_factory=list)  # pid, and its steps
    offsets: list[Offset] = field(default_factory=list)
    damaged: int = 0  # lines that cannot be read: the process was killed as it wrote


@dataclass(frozen=True)
class Profile:
    """All attempts of all tasks, on one clock."""

    attempts: Sequence[AttemptTrace]
    offsets: Mapping[str, Offset]  # by task that asked the chief for its clock
    missing: Sequence[str]  # tasks that recorded nothing
    damaged: int  # lines that could not be read


def read(files: Mapping[str, str], expected: Iterable[str]) -> Profile:
    """Reads the files of all tasks and converts their times to the chief's clock.

    Args:
        files: text by task.
        expected: the tasks that should have written one.
    """
    tasks = {name: _read_task(text) for name, text in files.items()}
    offsets = {name: offset for name, task in tasks.items() if (offset := best(task.offsets)) is not None}
    ahead = {name: offset.applied_secs for name, offset in offsets.items()}
    attempts: list[AttemptTrace] = []
    damaged = 0
    for name, task in tasks.items():
        damaged += task.damaged
        for number, (pid, lines) in enumerate(task.attempts):
            attempt = AttemptTrace(name, number, pid)
            for line in lines:
                try:
                    row, step = str(line["row"]), _step(line, name, ahead)
                except (KeyError, TypeError, ValueError, AttributeError):
                    damaged += 1
                else:
                    attempt.rows.setdefault(row, []).append(step)
            attempts.append(attempt)
    missing = [name for name in expected if not any(attempt.rows for attempt in attempts if attempt.task == name)]
    return Profile([attempt for attempt in attempts if attempt.rows], offsets, missing, damaged)


def _read_task(text: str) -> _Task:
    task = _Task()
    for line in filter(None, text.splitlines()):
        try:
            entry = dict(json.loads(line))
        except (ValueError, TypeError):
            task.damaged += 1
            continue
        if "pid" in entry:
            task.attempts.append((entry["pid"], []))
        elif "offset_secs" in entry:
            task.offsets.append(Offset(entry["offset_secs"], entry["error_secs"]))
        elif task.attempts:
            task.attempts[-1][1].append(entry)
        else:
            task.damaged += 1
    return task


def _step(line: Mapping[str, Any], task: str, ahead: Mapping[str, float]) -> Step:
    """Converts a line to the chief's clock; moves times on which the clocks disagree, so that no phase is negative."""

    def on_chief(at: Any) -> float:
        if isinstance(at, dict):
            return max(float(value) + ahead.get(name.partition("/")[0], 0.0) for name, value in at.items())
        return float(at) + ahead.get(task, 0.0)

    began = on_chief(line["began"])
    ended = max(began, on_chief(line["ended"]))
    ends = [min(max(on_chief(at), began), ended) for at in line["ends"].values()]
    moments = list(accumulate([began, *ends], max))
    spans = [Interval(name, a, b) for name, a, b in zip(line["ends"], moments, moments[1:], strict=False)]
    arrived = {name: on_chief(at) for name, at in line["arrived"].items()}
    return Step(int(line["step"]), began, ended, tuple(spans), arrived)
