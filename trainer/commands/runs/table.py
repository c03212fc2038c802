"""trainer runs: lists the runs of a folder."""

import fnmatch
import math
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from trainer.config.output import Output, print_json
from trainer.config.typed import RunOrder, RunsConfig
from trainer.config.words import size
from trainer.faults import exit_codes
from trainer.launch.ending import shown
from trainer.launch.view import duration
from trainer.observe import runs
from trainer.observe.runs import RunFacts

STYLES = {runs.RUNNING: "green", runs.FAILED: "red", runs.DIED: "red", runs.STOPPED: "yellow"}
ORDERS: dict[RunOrder, Callable[[RunFacts, int], Any]] = {
    RunOrder.started: lambda facts, _: facts.started_at or 0.0,
    RunOrder.name: lambda facts, _: Path(facts.path).name,
    RunOrder.step: lambda facts, _: facts.step,
    RunOrder.loss: lambda facts, _: _sortable(facts.loss),
    RunOrder.rate: lambda facts, _: facts.examples_per_second or 0.0,
    RunOrder.disk: lambda _, nbytes: nbytes,
}


def run(options: RunsConfig, *, as_json: bool) -> int:
    """Prints a row for each run; returns 0."""
    listed = select(options)
    if as_json:
        print_json([asdict(facts) | {"disk_bytes": nbytes} for facts, nbytes in listed])
    elif listed:
        Output().print(_table(listed))
    else:
        print(f"no runs in {options.folder}" + (" match" if runs.find(Path(options.folder)) else ""))
    return exit_codes.OK


def select(config: RunsConfig) -> list[tuple[RunFacts, int]]:
    """Returns the runs that the config asks for, in its order, each with the bytes that it takes on disk."""
    paths = [path for path in runs.find(Path(config.folder)) if fnmatch.fnmatchcase(path.name, config.name)]
    facts = [runs.read(path) for path in paths]
    if config.state is not None:
        facts = [one for one in facts if one.state == config.state.value]
    chosen = [(one, runs.disk_nbytes(Path(one.path))) for one in facts]
    chosen.sort(key=lambda pair: ORDERS[config.sort](*pair))
    return chosen if config.last is None else chosen[-config.last :]


def _sortable(loss: float | None) -> float:
    if loss is None:
        return -math.inf
    return math.inf if math.isnan(loss) else loss


def _table(listed: list[tuple[RunFacts, int]]) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("run", overflow="fold")
    for name in ("state", "started", "cluster", "model"):
        table.add_column(name, no_wrap=True)
    for name in ("step", "loss", "evaluation", "examples/s", "took", "disk"):
        table.add_column(name, justify="right", no_wrap=True)
    for facts, nbytes in listed:
        style = STYLES.get(facts.state, "")
        table.add_row(
            escape(shown(Path(facts.path))),
            f"[{style}]{facts.state}[/{style}]" if style else facts.state,
            "" if facts.started_at is None else time.strftime("%m-%d %H:%M", time.localtime(facts.started_at)),
            escape(facts.cluster),
            escape(facts.model),
            f"{facts.step}/{facts.steps}",
            "" if facts.loss is None else f"{facts.loss:.4f}",
            next((f"{value:.4f}" for name, value in facts.evaluation.items() if name != "eval_loss"), ""),
            "" if facts.examples_per_second is None else f"{facts.examples_per_second:,.0f}",
            "" if facts.seconds is None else duration(facts.seconds),
            size(nbytes),
        )
    return table
