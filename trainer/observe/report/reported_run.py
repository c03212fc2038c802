"""Reads everything that the report shows of a run."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.config.schema import RunConfig
from trainer.observe import runs
from trainer.observe.runs import RunFacts
from trainer.plan.plan import Plan
from trainer.storage.damage import read_json
from trainer.storage.event_log import EventLog, RunEvent
from trainer.storage.json_lines import measured_lines
from trainer.storage.run_directory import RunDirectory


@dataclass(frozen=True)
class ReportedRun:
    """The data that the report shows of one run."""

    name: str
    facts: RunFacts
    config: RunConfig
    plan: Plan
    status: Mapping[str, Any]
    summary: Mapping[str, Any]
    history: Sequence[Mapping[str, Any]]
    evaluations: Sequence[Mapping[str, Any]]
    events: Sequence[RunEvent]
    placement: Mapping[str, Any]  # where everything ran; empty: that was not recorded

    @property
    def folder(self) -> Path:
        return Path(self.facts.path)


def read(path: Path, name: str, *, is_over: bool = False) -> ReportedRun:
    """Reads a run directory.

    Args:
        name: of the run on the page.
        is_over: whether the run has ended, although its launcher still uses the directory.
    """
    directory = RunDirectory(path)
    return ReportedRun(
        name=name,
        facts=runs.read(path, is_over=is_over),
        config=_read_config(path, directory.config.stat().st_mtime_ns),
        plan=directory.read_plan(),
        status=runs.read_status(directory),
        summary=runs.read_summary(directory),
        history=list(measured_lines(directory.history)),
        evaluations=list(measured_lines(directory.evaluations)),
        events=list(EventLog(directory.event_log).read()),
        placement=read_json(directory.placement),
    )


@functools.lru_cache(maxsize=64)
def _read_config(path: Path, modified_ns: int) -> RunConfig:
    """Returns the config of a run, cached because reading it takes 30 ms, far longer than the rest of a live page."""
    return RunDirectory(path).read_config()
