"""Renders the console's pages from run directories. Pure except for reading files."""

import functools
import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

from trainer.commands.console.actions import OUTPUT, exit_code
from trainer.commands.console.folder import FILES, Folder
from trainer.commands.runs.table import ORDERS
from trainer.config import shell
from trainer.config.typed import RunOrder
from trainer.launch.view import duration
from trainer.observe import runs
from trainer.observe.html import template
from trainer.observe.report import curves, reported_run, settings
from trainer.observe.report import page as report
from trainer.observe.report.sections import shard_rows
from trainer.observe.runs import RunFacts
from trainer.plan import page as plan_page
from trainer.storage import checkpoint, json_lines
from trainer.storage.run_directory import RunDirectory

PACKAGE = "trainer.commands.console"
SPARK_POINTS = 60  # in a curve of the table of runs
ROWS = 100  # of a table of runs, on a page
TAIL_BYTES = 512 * 1024  # of a log that are read where nothing is searched


def index(folder: Folder, query: Mapping[str, str], *, can_post: bool) -> str:
    """Returns one page of the table of runs, filtered and sorted, the newest first."""
    order = query.get("sort") if query.get("sort") in RunOrder.__members__ else RunOrder.started.value
    order = RunOrder.started.value if order == RunOrder.disk.value or order is None else order
    listed = [(name, runs.read(path)) for name, path in folder.runs()]
    counts = {state: sum(facts.state == state for _, facts in listed) for state in runs.STATES}
    state, text = query.get("state", ""), query.get("name", "").lower()
    chosen = [(n, f) for n, f in listed if state in ("", f.state) and text in f"{n} {f.model} {f.cluster}".lower()]
    chosen.sort(key=lambda pair: ORDERS[RunOrder(order)](pair[1], 0), reverse=order not in ("name", "loss"))
    number = int(query["page"]) if query.get("page", "").isdecimal() else 1
    pages = max(1, -(-len(chosen) // ROWS))
    number = min(max(number, 1), pages)
    return template("index.html.j2", PACKAGE).render(
        folder=folder.path,
        rows=[_row(name, facts) for name, facts in chosen[(number - 1) * ROWS : number * ROWS]],
        all=len(listed),
        chosen=len(chosen),
        counts=counts,
        query={"state": state, "name": query.get("name", ""), "sort": order},
        orders=[one.value for one in RunOrder if one is not RunOrder.disk],
        page=number,
        pages=pages,
        link=lambda number: "?" + urlencode({"state": state, "name": text, "sort": order, "page": number}),
        can_post=can_post,
    )


@dataclass(frozen=True)
class RunRow:
    """A run in the list of runs."""

    name: str
    url: str
    facts: RunFacts
    began: str
    took: str
    share: float  # of its steps that are done
    spark: str  # path of a small loss curve


def _row(name: str, facts: RunFacts) -> RunRow:
    began = "" if facts.started_at is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(facts.started_at))
    return RunRow(
        name=name,
        url=run_url(name),
        facts=facts,
        began=began,
        took="" if facts.seconds is None else duration(facts.seconds),
        share=facts.step / facts.steps if facts.steps else 0.0,
        spark=_spark(Path(facts.path)),
    )


def _spark(run: Path) -> str:
    """Returns the path of a small loss curve."""
    history = RunDirectory(run).history
    try:
        stat = history.stat()
    except OSError:
        return ""
    return _spark_of(history, stat.st_ino, stat.st_size)


@functools.lru_cache(maxsize=1024)
def _spark_of(history: Path, inode: int, size: int) -> str:
    lines = json_lines.sampled(history, SPARK_POINTS)
    points = sorted((line["step"], line["loss"]) for line in lines if _is_number(line.get("loss")) and "step" in line)
    try:
        return curves.spark(points)
    except OverflowError:  # values near the limits of float64
        return ""


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and math.isfinite(value)


def run_url(name: str) -> str:
    """Returns the address of a run's page."""
    return f"/runs/{quote(name)}"


def run(folder: Folder, name: str, *, can_post: bool, can_kill: bool, notice: str = "") -> str:
    """Returns the page of a run: its report, live, with its buttons and logs.

    Args:
        can_post: whether the run may be stopped, saved and continued.
        can_kill: whether its tasks may be killed.
        notice: the result of the button that was pressed.
    """
    if (output := _starting(folder, name)) is not None:
        code = exit_code(folder.path / name)
        return template("starting.html.j2", PACKAGE).render(name=name, output=output, code=code, can_post=can_post)
    path, before = folder.run(name), version(folder, name)
    record, url = reported_run.read(path, name), run_url(name)
    exported = [f"export/{one.name}" for one in sorted((path / "export").glob("*")) if one.is_file()]
    shown = report.context([record], _changed(path, (path / "config.yaml").stat().st_mtime_ns))
    own = {
        "url": url,
        "version": before,
        "log_url": lambda task: f"{url}/log/{task.name}",
        "file_url": lambda file: f"{url}/files/{quote(file)}",
        "downloads": [*(one for one in FILES if (path / one).is_file()), *exported],
        "checkpoints": _checkpoints(path),
        "can_post": can_post,
        "can_kill": can_kill,
        "notice": notice,
    }
    return template("run.html.j2", PACKAGE).render(shown | own)


@dataclass(frozen=True)
class CheckpointRow:
    """A checkpoint on the page of a run."""

    step: int
    what: str  # "best", or empty
    saved: str  # when
    files: Sequence[tuple[str, int]]  # name, bytes
    path: Path  # in the run directory


def _checkpoints(path: Path) -> list[CheckpointRow]:
    """Returns the checkpoints of a run, the last one first, and its best."""
    directory = RunDirectory(path)
    found = [("", one) for one in reversed(checkpoint.finished(directory.checkpoints))]
    found += [("best", one) for one in checkpoint.finished(directory.best)]
    rows = []
    for what, one in found:
        with suppress(OSError):  # a newer one has taken its place meanwhile
            files = [(file.name, file.stat().st_size) for file in sorted(one.iterdir())]
            saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime((one / checkpoint.MANIFEST).stat().st_mtime))
            rows.append(CheckpointRow(int(one.name), what, saved, files, one.relative_to(path)))
    return rows


def _starting(folder: Folder, name: str) -> str | None:
    """Returns the output of a launcher that the console started, before its run exists; else None."""
    root = folder.path.resolve()
    try:
        path = (root / name).resolve()
        if path != root and path.is_relative_to(root) and not runs.is_run(path):
            output = path / OUTPUT
            return None if output.is_symlink() else output.read_text(errors="replace")[-TAIL_BYTES:]
    except (OSError, ValueError, RuntimeError):
        pass
    return None


def new(draft: Any, fields: Sequence[Any]) -> str:
    """Returns the form that starts a run, with the problems of its values, and its plan."""
    command = shell.joined(["python", "-m", "trainer", *draft.overrides])
    values = {"plan": None, "draft": draft, "fields": fields, "command": command}
    if draft.plan is not None:
        values |= {"plan": plan_page.tables(draft.plan), "shards": shard_rows(draft.plan)}
    return template("new.html.j2", PACKAGE).render(values)


@functools.lru_cache(maxsize=64)
def _changed(path: Path, modified_ns: int) -> list[tuple[str, str, str]]:
    """Returns the settings of a config that are not defaults; composing those takes a tenth of a second."""
    return settings.changed(RunDirectory(path).read_config())


def version(folder: Folder, name: str) -> str:
    """Returns a value that changes whenever the page of a run does."""
    directory = RunDirectory(folder.run(name))
    seen = (directory.status, directory.history, directory.summary, directory.lock, directory.event_log)
    return " ".join(map(_modified, seen))


def _modified(file: Path) -> str:
    try:
        return str(file.stat().st_mtime_ns)
    except OSError:
        return "0"
