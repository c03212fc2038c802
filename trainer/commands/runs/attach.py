"""trainer attach: reads parameters of a running run, all of the same step, without stopping it."""

from pathlib import Path
from typing import Any

import numpy as np
from rich.markup import escape
from rich.table import Table

from trainer.config.output import Output, print_json
from trainer.config.typed import AttachConfig
from trainer.faults import exit_codes
from trainer.launch import progress
from trainer.launch.ending import shown
from trainer.observe.live import attach
from trainer.storage.run_directory import RunDirectory

COLUMNS = ("mean", "std", "min", "max", "norm")


def run(directory: RunDirectory, options: AttachConfig, *, as_json: bool) -> int:
    """Prints a row for each parameter, and writes their values where `options.file` says; returns 0.

    Raises:
        NotRunningError: if the run is not under way.
    """
    with progress.note(f"{shown(directory.path)}: waiting for the next step"):
        step, values = attach(directory.path).parameters(*options.parameters)
    rows = {path: _describe(values[path]) for path in sorted(values)}
    if options.file is not None:
        with Path(options.file).open("wb") as file:
            named: dict[str, Any] = dict(values)
            np.savez(file, **named)
    if as_json:
        print_json({"step": step, "parameters": rows})
    else:
        Output().print(_table(step, rows))
    return exit_codes.OK


def _describe(value: np.ndarray) -> dict[str, Any]:
    numbers = value.astype(np.float64)
    found = (numbers.mean(), numbers.std(), numbers.min(), numbers.max(), np.sqrt((numbers**2).sum()))
    return {"shape": list(value.shape), **{name: float(one) for name, one in zip(COLUMNS, found, strict=True)}}


def _table(step: int, rows: dict[str, dict[str, Any]]) -> Table:
    title = f"step {step}" if rows else f"step {step}: no parameter matches"
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("parameter", "shape", *COLUMNS):
        table.add_column(name, justify="right" if name in COLUMNS else "left", overflow="fold")
    for path, row in rows.items():
        shape = "x".join(map(str, row["shape"])) or "scalar"
        table.add_row(escape(path), shape, *(f"{row[name]:.4g}" for name in COLUMNS))
    return table
