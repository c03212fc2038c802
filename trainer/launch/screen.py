"""Draws a run on a terminal: a live progress line, and below it a table that fits."""

from collections.abc import Sequence
from dataclasses import replace

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from trainer.launch import view
from trainer.launch.view import Course, Standing, TaskView
from trainer.observe.task_page import TaskState

STYLES = {view.BROKEN: "bold red", view.DELAYED: "yellow", view.BUSY: "cyan", view.WORKING: "green", view.ENDED: "dim"}
MIN_BAR, MAX_BAR = 10, 40
NEEDS = {"memory": 64, "wait": 54, "examples/s": 46, "step": 0}  # columns of the terminal, below which one is left out
GAP = "  "


def draw(
    tasks: Sequence[TaskView], course: Course, stands: Standing, console: Console, *, is_over: bool = False
) -> RenderableType:
    """Draws the run within the console's size; a run that has ended shows only its failures."""
    width, height = console.size
    if is_over and stands.phase is TaskState.stopping:
        stands = replace(stands, phase=TaskState.stopped)
    head = header(tasks, course, stands, width, is_ascii=console.options.ascii_only)
    room = height - len(head) - 2  # the headings, and the line of the cursor
    rows = view.rows(tasks, room, is_starting=stands.phase is TaskState.starting)
    if is_over:
        rows = [row for row in rows if row.meaning in (view.BROKEN, view.DELAYED)]
    return Group(*head[: max(height - 1, 1)], *([table(rows, stands.step, width)] if rows else []))


def header(
    tasks: Sequence[TaskView], course: Course, stands: Standing, width: int, *, is_ascii: bool = False
) -> list[Text]:
    """Returns the progress line, or two lines on a narrow terminal."""
    if stands.phase is TaskState.starting:
        parts = ["starting", view.duration(stands.elapsed_secs), view.awaited(tasks)]
        return [_cut(Text(GAP.join(filter(None, parts)), style="bold"), width)]
    times = view.duration(stands.elapsed_secs)
    if stands.left_secs is not None:
        times += f" < {view.duration(stands.left_secs)}"
    share = stands.step / course.steps
    first = [f"{stands.step}/{course.steps}", f"{share:.0%}", times]
    rate = stands.examples_per_second
    rest = [*stands.values(), *([f"{rate:,.0f} examples/s"] if rate else [])]
    if course.epoch_steps:
        rest.append(course.epoch(stands.step) or f"epoch {stands.step / course.epoch_steps:.2f}")
    phase = [] if stands.phase is TaskState.training else [stands.phase.value]
    one, two = GAP.join([*first, *phase, *rest]), GAP.join([*first, *phase])
    fits_one = len(one) + len(GAP) + MIN_BAR <= width
    text = one if fits_one else two
    bar = _bar(share, min(MAX_BAR, width - len(text) - len(GAP)), is_ascii=is_ascii)
    top = Text.assemble(bar, GAP if bar else "", (text, "bold"))
    return [_cut(top, width), *([] if fits_one else [_cut(Text(GAP.join(rest), style="bold"), width)])]


def _bar(share: float, width: int, *, is_ascii: bool) -> Text:
    """Returns a bar whose two parts differ without colours too; empty if there is no room."""
    if width < MIN_BAR:
        return Text()
    full, empty = ("#", ".") if is_ascii else ("━", "─")
    filled = int(min(share, 1.0) * width)
    return Text.assemble((full * filled, "green"), (empty * (width - filled), "dim"))


def _cut(text: Text, width: int) -> Text:
    text.no_wrap = True
    text.truncate(width, overflow="crop")
    return text


def table(rows: Sequence[view.Row], furthest: int, width: int) -> Table:
    """Returns a line for each row; columns that do not fit are left out."""
    headings = [name for name in ("step", "examples/s", "wait", "memory") if width >= NEEDS[name]]
    drawn = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    longest = max((len(row.name) for row in rows), default=0)
    drawn.add_column("task", no_wrap=True, min_width=min(longest, width - 2))
    drawn.add_column("state", no_wrap=True, overflow="ellipsis")
    for name in headings:
        drawn.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        numbers = view.cells(row, furthest)
        state = Text(row.state, style=STYLES[row.meaning])
        style = "bold" if row.meaning == view.BROKEN else ""
        drawn.add_row(row.name, state, *(numbers.get(name, "") for name in headings), style=style)
    return drawn
