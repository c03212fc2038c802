"""The ratios as a picture: a column for each workload, a row for each comparison, with interval and target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.observe.machine import version_of

LIBRARY = "matplotlib"
LABEL_INCHES, PANEL_INCHES, ROW_INCHES, AROUND_INCHES = 3.6, 2.5, 0.42, 1.7
TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100)
MARGIN = 1.35  # of the ratios, left and right
COLOURS = {"met": "#1b7837", "missed": "#b2182b", "": "#4d4d4d"}  # by verdict
TARGET_COLOUR = "#e08a00"


def write(results: Mapping[str, Any], path: Path) -> str | None:
    """Draws results.json into a file of the suffix's format; returns why not, if nothing was drawn."""
    rows = [row for row in results["rows"] if "median" in row]
    if not rows:
        return f"{path} is not drawn: there is no ratio to show"
    if version_of(LIBRARY) is None:
        return f"{path} is not drawn: {LIBRARY} is not installed; make bench installs it"
    _draw(results["rows"], results["machine"], path)
    return None


def _draw(rows: Sequence[Mapping[str, Any]], machine: Mapping[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    matplotlib.rcParams.update({"svg.hashsalt": "bench", "font.size": 9})
    workloads, titles = (list(dict.fromkeys(row[key] for row in rows)) for key in ("workload", "title"))
    figure, grid = pyplot.subplots(
        1,
        len(workloads),
        figsize=(LABEL_INCHES + PANEL_INCHES * len(workloads), AROUND_INCHES + ROW_INCHES * len(titles)),
        squeeze=False,
        sharex=True,
        sharey=True,
        layout="constrained",
    )
    for axes, workload in zip(grid[0], workloads, strict=True):
        _draw_panel(axes, workload, titles, [row for row in rows if row["workload"] == workload])
    grid[0, 0].set_yticks(range(len(titles)), [title.replace(" / ", "\n/ ") for title in titles])
    grid[0, 0].set_ylim(len(titles) - 0.5, -0.5)
    _scale(grid[0, 0], [row for row in rows if "median" in row])
    title = "Global examples per second, ours / other, with 95 % intervals"
    figure.suptitle(f"{title}\n{machine['cores']} cores, {machine['cpu']}, {machine['date']}", fontsize=10)
    _add_legend(figure)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None, dpi=130)
    pyplot.close(figure)


def _draw_panel(axes: Any, workload: str, titles: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    """Draws one workload, with its rows at the positions of their titles."""
    axes.set_title(workload, fontweight="bold")
    for place in range(0, len(titles), 2):
        axes.axhspan(place - 0.5, place + 0.5, color="#f3f3f3", linewidth=0, zorder=0)
    axes.axvline(1.0, color="black", linewidth=1)
    for row in rows:
        _draw_row(axes, titles.index(row["title"]), row)
    axes.grid(axis="x", color="#dcdcdc", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.tick_params(axis="y", length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _draw_row(axes: Any, place: int, row: Mapping[str, Any]) -> None:
    if "median" not in row:
        axes.annotate("did not run", (1.0, place), (4, 0), textcoords="offset points", va="center", fontsize=7)
        return
    colour = COLOURS[row.get("verdict") or ""]
    middle, low, high = row["median"], row["low"], row["high"]
    if row.get("target") is not None:
        axes.plot(row["target"], place, marker="|", color=TARGET_COLOUR, markersize=15, markeredgewidth=2.5)
    axes.errorbar(middle, place, xerr=[[middle - low], [high - middle]], fmt="o", color=colour, capsize=3, markersize=4)
    from matplotlib.patheffects import withStroke

    text = axes.annotate(
        f"{middle:.2f}", (middle, place), (0, 5), textcoords="offset points", ha="center", color=colour, fontsize=7.5
    )
    text.set_path_effects([withStroke(linewidth=2.5, foreground="white")])  # it may stand on a line


def _scale(axes: Any, rows: Sequence[Mapping[str, Any]]) -> None:
    """Sets a logarithmic axis with every interval and target, and 1, with ticks that read as ratios."""
    shown = [0.5, 2.0, *(row[end] for row in rows for end in ("low", "high"))]
    shown += [row["target"] for row in rows if row.get("target") is not None]
    low, high = min(shown) / MARGIN, max(shown) * MARGIN
    ticks = [tick for tick in TICKS if low <= tick <= high]
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()


def _add_legend(figure: Any) -> None:
    from matplotlib.lines import Line2D

    def mark(colour: str, label: str, **how: Any) -> Any:
        return Line2D([], [], color=colour, label=label, **how)

    point = {"marker": "o", "markersize": 4}
    target = {"marker": "|", "markersize": 13, "markeredgewidth": 2.5, "linewidth": 0}
    handles = [
        mark(COLOURS["met"], "target met", **point),
        mark(COLOURS["missed"], "target missed", **point),
        mark(COLOURS[""], "not judged", **point),
        mark(TARGET_COLOUR, "target, of the interval's lower end", **target),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
