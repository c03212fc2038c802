"""Renders the report of one run, or of several side by side, with the template page.html.j2."""

import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, combinations
from pathlib import Path
from typing import Any

from jinja2 import UndefinedError

from trainer.config import shell
from trainer.config.shell import printable
from trainer.config.words import count
from trainer.observe.html import template
from trainer.observe.report import curves, sections, settings
from trainer.observe.report.curves import Axes, Curve
from trainer.observe.report.reported_run import ReportedRun, read
from trainer.observe.waits import UPDATE
from trainer.storage.atomic import write_atomically
from trainer.storage.damage import DAMAGED

REPORT = "report.html"
NOT_DRAWN = ("step", "seconds")  # of a line of history.jsonl or evaluations.jsonl
TITLES = {"loss": "loss", "examples_per_second": "examples per second", "learning_rate": "learning rate"}
LEFT_OUT: dict[str, Any] = {"status": {}, "summary": {}, "events": (), "placement": {}}  # for damaged files
FILES = ("plan.json", "placement.json", "profile/trace.json")  # that the page links to, where the run has them


def write(path: Path, others: Sequence[Path] = (), file: Path | None = None, *, is_over: bool = False) -> Path:
    """Writes the report of the run in a directory, with the curves and configs of others beside it.

    Args:
        file: its path; None: report.html in the directory.
        is_over: whether the run has ended, although its launcher still uses the directory.

    Returns:
        The path of the report.
    """
    records = [read(one, _name(one, [path, *others]), is_over=is_over) for one in (path, *others)]
    file = file or path / REPORT
    write_atomically(file, render(records))
    return file


def _name(path: Path, paths: Sequence[Path]) -> str:
    """Returns the name of a run on the page; directories with equal names are told apart by their folders."""
    is_alone = [other.name for other in paths].count(path.name) == 1
    return path.name if is_alone else f"{path.parent.name}/{path.name}"


def render(records: Sequence[ReportedRun]) -> str:
    """Renders the page; the first run is shown in full, except its damaged files."""
    first, *others = records
    changed = settings.changed(first.config)
    for damaged in chain.from_iterable(combinations(LEFT_OUT, size) for size in range(len(LEFT_OUT))):
        shown = replace(first, **{name: LEFT_OUT[name] for name in damaged})
        with suppress(*DAMAGED, UndefinedError):
            return _render([shown, *others], changed)
    return _render([replace(first, **LEFT_OUT), *others], changed)


def _render(records: Sequence[ReportedRun], changed: Sequence[tuple[str, str, str]]) -> str:
    return printable(template("report/page.html.j2").render(context(records, changed)))


def context(records: Sequence[ReportedRun], changed: Sequence[tuple[str, str, str]]) -> dict[str, Any]:
    """Returns the variables of the template.

    Args:
        changed: settings of the first run that differ from the defaults.
    """
    first = records[0]
    return {
        "runs": records,
        "run": first,
        "tiles": list(_tiles(first)),
        "charts": list(_charts(records)),
        "width": curves.WIDTH,
        "height": curves.HEIGHT,
        "left": curves.LEFT,
        "bottom": curves.BOTTOM,
        "tasks": sections.task_rows(first),
        "waits": sections.waits_table(first),
        "update": UPDATE,
        "contributions": first.summary.get("contributions") or {},
        "events": sections.event_rows(first),
        "placement": sections.placement_table(first),
        "more_events": max(0, len(first.events) - sections.MAX_EVENTS),
        "shards": sections.shard_rows(first.plan),
        "files": [name for name in FILES if (first.folder / name).exists()],
        "changed": changed,
        "differences": settings.differences([record.config for record in records]) if len(records) > 1 else [],
        "versions": first.status.get("versions"),
        "commands": list(dict.fromkeys(shell.joined(event.command) for event in first.events if event.command)),
        "written": time.strftime("%Y-%m-%d %H:%M:%S"),
        "log_url": lambda task: task.log,
        "file_url": str,
    }


def _tiles(run: ReportedRun) -> Iterator[tuple[str, str, str]]:
    """Yields (label, value, a word below it)."""
    facts, summary = run.facts, run.summary
    yield "state", facts.state, facts.failed or ("" if facts.phase == facts.state else facts.phase)
    yield "steps", f"{facts.step:,}", f"of {facts.steps:,}"
    if facts.loss is not None:
        yield "loss", f"{facts.loss:.4g}", "of the last step"
    for name, value in facts.evaluation.items():
        yield name.removeprefix("eval_"), f"{value:.4g}", "evaluation"
    if facts.examples_per_second:
        yield "examples per second", f"{facts.examples_per_second:,.0f}", count(len(run.plan.workers), "worker")
    if facts.seconds is not None:
        first = summary.get("time_to_first_step_secs")
        yield "time", _duration(facts.seconds), f"first step after {first:.1f} s" if first else ""
    if (wait := summary.get("wait_fraction")) is not None:
        yield "waiting", f"{wait:.0%}", "of the chief's step"
    yield "restarts", f"{facts.restarts}", ", ".join(summary.get("restarts_of") or {})


def _duration(secs: float) -> str:
    hours, minutes = int(secs) // 3600, int(secs) // 60 % 60
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {int(secs) % 60:02} s" if minutes else f"{secs:.1f} s"


@dataclass(frozen=True)
class Chart:
    """The curves of one value, over all runs."""

    title: str
    linear: Axes
    logarithmic: Axes | None


def _charts(records: Sequence[ReportedRun]) -> Iterator[Chart]:
    names = dict.fromkeys(name for record in records for line in record.history for name in line)
    names |= dict.fromkeys(name for record in records for line in record.evaluations for name in line)
    order = ["loss", *(name for name in names if name not in TITLES), "examples_per_second", "learning_rate"]
    for name in order:
        drawn = [curve for hue, record in enumerate(records) for curve in _curves(record, name, hue, len(records) > 1)]
        if name in names and name not in NOT_DRAWN and (linear := curves.draw(drawn, logarithmic=False)):
            yield Chart(TITLES.get(name, name), linear, curves.draw(drawn, logarithmic=True))


def _curves(record: ReportedRun, name: str, hue: int, is_one_of_several: bool) -> Iterator[Curve]:
    of = f"{record.name}, " if is_one_of_several else ""
    for lines_, kind in ((record.history, "training"), (record.evaluations, "evaluation")):
        points = [(line["step"], line[name]) for line in lines_ if line.get(name) is not None]
        if points:
            own = hue if is_one_of_several else int(kind == "evaluation")
            yield Curve(f"{of}{kind}", points, own, is_dashed=is_one_of_several and kind == "evaluation")
