"""Shows the trials of a sweep on a terminal while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from trainer.commands.sweep.space import overrides
from trainer.commands.sweep.trials import DONE, WAITING, Sweep, Trial
from trainer.config.keys import shown as typed
from trainer.launch.progress import is_interactive
from trainer.observe.runs import read_status
from trainer.storage.json_lines import last_measured
from trainer.storage.run_directory import RunDirectory

if TYPE_CHECKING:
    from rich.table import Table

MOST_ROWS = 12
PER_SECOND = 2


@contextmanager
def shown(sweep: Sweep, running: Callable[[], Sequence[tuple[Trial, int]]]) -> Iterator[None]:
    """Shows the best trials and the running ones (each with the steps of its round), on a terminal."""
    if not is_interactive():
        yield
        return
    from rich.live import Live

    with Live(get_renderable=lambda: _table(sweep, running()), refresh_per_second=PER_SECOND, transient=True):
        yield


def line(sweep: Sweep, trial: Trial, steps: int) -> str:
    """Describes the result of a trial."""
    metric = sweep.settings.metric
    reached = f"{metric} {trial.scores[steps]:.6g}" if steps in trial.scores else trial.state
    return f"{trial.name}  {' '.join(overrides(trial.values))}  step {trial.trained or steps}  {reached}"


def _table(sweep: Sweep, running: Sequence[tuple[Trial, int]]) -> Table:
    from rich.table import Table

    settings = sweep.settings
    ended = sum(one.state != WAITING for one in sweep.trials)
    drawn = Table(title=f"{ended} of {settings.trials} trials", title_justify="left")
    for name in ("trial", *settings.space, "step", settings.metric):
        drawn.add_column(name, overflow="fold")
    ranked = [one for one in sweep.ranked() if one not in (trial for trial, _ in running)]
    for one in ranked[:MOST_ROWS]:
        reached = f"{one.score:.6g}" if one.state == DONE and one.scores else one.state
        drawn.add_row(one.name, *map(typed, one.values.values()), str(one.trained), reached)
    if len(ranked) > MOST_ROWS:
        drawn.add_row("...", *[""] * len(settings.space), "", f"{len(ranked) - MOST_ROWS} more")
    for trial, steps in running:
        directory = RunDirectory(sweep.run_of(trial))
        now, total = last_measured(directory.history), read_status(directory).get("steps", steps)  # epochs -> steps
        step, loss = now.get("step", 0), now.get("loss")
        training = "starts" if loss is None else f"loss {loss:.4f}"
        drawn.add_row(trial.name, *map(typed, trial.values.values()), f"{step}/{total}", training, style="bold")
    return drawn
