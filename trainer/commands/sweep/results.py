"""Writes results.csv, results.md and results.svg of a sweep, and the trials for the HPARAMS page of TensorBoard."""

import csv
import io
import math
import shutil
import time
from collections.abc import Sequence
from typing import Any

from trainer.commands.sweep.space import Range
from trainer.commands.sweep.trials import Sweep, Trial
from trainer.config.keys import shown
from trainer.storage.atomic import write_atomically

LINEAR = Range(0.0, 1.0)
TABLE, PAGE, PLOT, HPARAMS = "results.csv", "results.md", "results.svg", "hparams"


def write(sweep: Sweep) -> None:
    """Rewrites the tables; the plot is drawn by `plot`."""
    head = ["trial", *sweep.settings.space, "steps", sweep.settings.metric, "state", "params_sha256"]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(head)
    writer.writerows(_row(one) for one in sweep.trials)
    write_atomically(sweep.path / TABLE, text.getvalue())
    rows = [head, ["---"] * len(head), *(_row(one) for one in sweep.ranked())]
    lines = [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
    write_atomically(
        sweep.path / PAGE, "\n".join([f"# Trials by {sweep.settings.metric}, the best first", "", *lines, ""])
    )


def _row(trial: Trial) -> list[str]:
    score = "" if math.isnan(trial.score) else f"{trial.score:.9g}"
    values = map(shown, trial.values.values())
    return [trial.name, *values, str(trial.trained), score, trial.state, trial.params_sha256[:12]]


def write_hparams(sweep: Sweep) -> None:
    """Rewrites hparams/NNNN of the sweep.

    Raises:
        ImportError: if tensorboard is not installed.
    """
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams.summary_v2 import hparams_pb
    from tensorboard.summary.writer.event_file_writer import EventFileWriter

    shutil.rmtree(sweep.path / HPARAMS, ignore_errors=True)
    for trial in sweep.trials:
        values = {key: one if isinstance(one, int | float) else shown(one) for key, one in trial.values.items()}
        scores = [Summary.Value(tag=sweep.settings.metric, simple_value=trial.score)] if trial.scores else []
        writer = EventFileWriter(str(sweep.path / HPARAMS / trial.name))
        for step, summary in ((0, hparams_pb(values, trial_id=trial.name)), (trial.steps, Summary(value=scores))):
            writer.add_event(Event(wall_time=time.time(), step=step, summary=summary))
        writer.close()


def plot(sweep: Sweep) -> None:
    """Draws the score against each key, and below it all keys side by side, with a line for each trial.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    from matplotlib.figure import Figure

    trials = [one for one in sweep.trials if not math.isnan(one.score)]
    if not trials:
        return
    keys, scores = list(sweep.settings.space), [one.score for one in trials]
    figure = Figure(figsize=(max(6.0, 3.0 * len(keys)), 7.0), layout="constrained")
    parts: Any = figure.subfigures(2, 1)
    top, bottom = parts
    columns = [_Axis(sweep.space[key], [one.values[key] for one in trials]) for key in keys]
    for axes, key, axis in zip(top.subplots(1, len(keys), squeeze=False, sharey=True)[0], keys, columns, strict=True):
        axes.scatter(axis.places, scores, alpha=0.7)
        axes.set_xticks(*axis.ticks)
        axes.set_xlabel(key)
    top.axes[0].set_ylabel(sweep.settings.metric)
    _draw_parallel(bottom.subplots(), [*keys, sweep.settings.metric], [*columns, _Axis(LINEAR, scores)], scores)
    figure.savefig(sweep.path / PLOT)


class _Axis:
    """Maps values to positions on an axis from 0 to 1."""

    def __init__(self, space: Sequence[Any] | Range, values: Sequence[Any]) -> None:
        if isinstance(space, Range):
            numbers = [math.log10(one) if space.is_log else float(one) for one in values]
            low, high = min(numbers), max(numbers)
            self.places = [(one - low) / ((high - low) or 1.0) for one in numbers]
            self.ticks = [0.0, 1.0], [f"{min(values):.4g}", f"{max(values):.4g}"]
        else:
            last = max(1, len(space) - 1)
            self.places = [space.index(one) / last for one in values]
            self.ticks = [place / last for place in range(len(space))], [shown(one) for one in space]


def _draw_parallel(axes: Any, names: Sequence[str], columns: Sequence[_Axis], scores: Sequence[float]) -> None:
    from matplotlib import colormaps

    low, high = min(scores), max(scores)
    for number, score in enumerate(scores):
        colour = colormaps["viridis"]((score - low) / ((high - low) or 1.0))
        axes.plot(range(len(columns)), [one.places[number] for one in columns], color=colour, alpha=0.7)
    for place, column in enumerate(columns):
        axes.axvline(place, color="grey", linewidth=0.5)
        for height, text in zip(*column.ticks, strict=True):
            axes.annotate(text, (place, height), textcoords="offset points", xytext=(3, 3), fontsize="small")
    axes.set_xticks(range(len(names)), names)
    axes.set_yticks([])
