"""Reports measurements as JSON and as a table."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import median
from typing import Any

from bench import startup
from bench.config import BenchConfig
from bench.contestants import CONTESTANTS, Row
from bench.ratios import Ratio
from bench.running import Running
from bench.startup import ClusterStart
from bench.windows import Window
from trainer.storage.atomic import write_atomically

MIB = 2**20
NONE = "-"
Json = dict[str, Any]


def options_of(options: BenchConfig) -> Json:
    """Returns what makes results comparable."""
    return {name: value for name, value in asdict(options).items() if name != "results"}


class Results:
    """Everything that was measured so far."""

    def __init__(self, machine: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        self._machine, self._options = dict(machine), dict(options)
        self._rows: list[Json] = []
        self._starts: list[ClusterStart] = []
        self._contestants: dict[tuple[str, str], Json] = {}  # by workload and name
        self._windows: dict[tuple[str, str], list[Window]] = {}

    def add_row(self, row: Row, workload: str, pairs: Sequence[float], ratio: Ratio) -> None:
        self._rows.append(_row(row, workload) | {"pairs": [round(pair, 4) for pair in pairs]} | _rounded(asdict(ratio)))

    def add_failure(self, row: Row, workload: str, why: str, log: Sequence[str]) -> None:
        self._rows.append(_row(row, workload) | {"failed": why, "log": list(log)})

    def add_windows(self, running: Running, windows: Sequence[Window]) -> None:
        """Takes in what one contestant did in a row, and its memory so far."""
        key = running.workload, running.contestant.name
        facts = self._contestants.setdefault(key, {"command": running.command, "first_step_secs": {}, "peak_mib": {}})
        facts["first_step_secs"][running.pid] = running.first_step_secs
        for name, mib in running.peak_mib().items():
            facts["peak_mib"][name] = max(mib, facts["peak_mib"].get(name, 0.0))
        self._windows.setdefault(key, []).extend(windows)

    def add_start(self, start: ClusterStart) -> None:
        self._starts.append(start)

    def finish(self, load: float) -> None:
        self._machine["load_after"] = load

    def to_json(self) -> Json:
        contestants = [_contestant(*key, facts, self._windows[key]) for key, facts in sorted(self._contestants.items())]
        return {
            "machine": self._machine,
            "options": self._options,
            "rows": judged(self._rows),
            "contestants": contestants,
            "starts": [_starts(cluster, self._starts) for cluster in dict.fromkeys(s.cluster for s in self._starts)],
        }

    def write(self, folder: Path) -> None:
        """Writes results.json and results.md."""
        results = self.to_json()
        write_atomically(folder / "results.json", json.dumps(results, indent=1))
        write_atomically(folder / "results.md", markdown(results))

    def last_line(self) -> str:
        row = self._rows[-1]
        return f"{row['workload']}: {row['title']}: {_describe(row)}"

    def start_line(self, cluster: str) -> str:
        starts = _starts(cluster, self._starts)
        return f"{cluster}: first step after {_secs(starts['first_step_secs'])} s" + (
            f", {starts['dies']} replaced after {_secs(starts['successor_secs'])} s" if starts["dies"] else ""
        )


def summary(results: Results) -> list[str]:
    """Returns a line for each missed target."""
    page = results.to_json()
    missed = [row for row in page["rows"] if row.get("verdict") == "missed"]
    lines = [
        f"missed: {row['workload']}: {row['title']}: {_describe(row)}, aimed at {row['target']:g}" for row in missed
    ]
    return [*lines, *(f"missed: {s['cluster']}: first step" for s in page["starts"] if s["verdict"] == "missed")]


def judged(rows: Iterable[Mapping[str, Any]]) -> list[Json]:
    """Rows with a verdict where there is a target: met or missed by the lower end of the interval.

    Of the rows of a group only the best, or the worst, has a verdict.
    """
    result = [dict(row) for row in rows]
    for row in result:
        if row.get("target") is None or "low" not in row:
            continue
        others = [r for r in result if r["group"] == row["group"] and r["workload"] == row["workload"] and "low" in r]
        choose = {"best": max, "worst": min}.get(row["judged"])
        if choose is None or choose(others, key=lambda r: r["median"]) is row:
            row["verdict"] = "met" if row["low"] >= row["target"] else "missed"
    return result


def markdown(results: Mapping[str, Any]) -> str:
    """Returns the results as a page."""
    machine, options = results["machine"], results["options"]
    parts = [
        "# Measured beside others\n",
        ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in machine.items() if value is not None) + ".\n",
        f"Windows of {options['window_secs']:g} s in turn, A B B A, {options['rounds']} times; one runs while the "
        "other stands still. A ratio is that of global examples per second: the median over pairs of windows, with its "
        "95 % bootstrap interval. Its lower end must reach the target; of rows that share a target the deciding one is "
        "judged.\n",
        _table(_RATIO_HEADINGS, [_ratio_cells(row) for row in results["rows"]]),
        "CPU time of all its processes; traffic of the loopback interface, whoever's it is; memory as the peak of each "
        "process, in which pages that forked processes share count in each.\n",
        _table(_CONTESTANT_HEADINGS, [_contestant_cells(contestant) for contestant in results["contestants"]]),
    ]
    if results["starts"]:
        parts.append("From the command to the first step, and from the death of a task to its successor's first.\n")
        parts.append(_table(_START_HEADINGS, [_start_cells(start) for start in results["starts"]]))
    parts += [_failure(row) for row in results["rows"] if row.get("log")]
    return "\n".join(parts)


_RATIO_HEADINGS = ("workload", "ours / other", "ratio", "95 %", "target", "")
_CONTESTANT_HEADINGS = (
    "workload",
    "contestant",
    "examples/s",
    "CPU ms/step",
    "by process",
    "MiB/step",
    "packets/step",
    "first step s",
    "peak MiB",
    "largest",
)
_START_HEADINGS = ("cluster", "first step s", "at most", "", "dies", "successor's first step s", "peak MiB by process")


def _row(row: Row, workload: str) -> Json:
    return {
        "workload": workload,
        "row": row.name,
        "title": row.title,
        "target": row.targets.get(workload),
        "group": row.group or row.name,
        "judged": row.judged,
    }


def _contestant(workload: str, name: str, facts: Mapping[str, Any], windows: Sequence[Window]) -> Json:
    processes = dict.fromkeys(process for window in windows for process in window.cpu_ms)
    cpu_ms = {process: median(window.cpu_ms.get(process, 0.0) for window in windows) for process in sorted(processes)}
    return {
        "workload": workload,
        "name": name,
        "title": CONTESTANTS[name].title,
        "examples_per_sec": round(median(window.examples_per_sec for window in windows), 1),
        "cpu_ms_per_step": _rounded(cpu_ms),
        "wire_nbytes_per_step": round(median(window.wire_nbytes for window in windows)),
        "wire_packets_per_step": round(median(window.wire_packets for window in windows), 1),
        "first_step_secs": [round(secs, 2) for secs in facts["first_step_secs"].values()],
        "peak_mib": {process: round(mib) for process, mib in sorted(facts["peak_mib"].items())},
        "command": facts["command"],
    }


def _starts(cluster: str, starts: Iterable[ClusterStart]) -> Json:
    own = [start for start in starts if start.cluster == cluster]
    peaks = [start.peak_mib for start in own if start.peak_mib]
    processes = sorted({process for peak in peaks for process in peak})
    first = [round(start.first_step_secs, 2) for start in own if start.first_step_secs is not None]
    target = startup.TARGETS_SECS.get(cluster)
    return {
        "cluster": cluster,
        "first_step_secs": first,
        "target_secs": target,
        "verdict": None if target is None or not first else "met" if median(first) <= target else "missed",
        "dies": startup.DIES.get(cluster),
        "successor_secs": [round(start.successor_secs, 2) for start in own if start.successor_secs is not None],
        "peak_mib": {process: round(max(peak.get(process, 0.0) for peak in peaks)) for process in processes},
        "failed": [start.failed for start in own if start.failed],
    }


def _describe(row: Mapping[str, Any]) -> str:
    if "failed" in row:
        return str(row["failed"])
    return f"{row['median']:.2f} ({row['low']:.2f} to {row['high']:.2f})"


def _ratio_cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    target = NONE if row.get("target") is None else f"{row['target']:g}"
    if "failed" in row:
        return row["workload"], row["title"], NONE, NONE, target, row["failed"]
    interval = f"{row['low']:.2f} to {row['high']:.2f}"
    return row["workload"], row["title"], f"{row['median']:.2f}", interval, target, row.get("verdict") or ""


def _contestant_cells(contestant: Mapping[str, Any]) -> tuple[str, ...]:
    cpu, peak = contestant["cpu_ms_per_step"], contestant["peak_mib"]
    return (
        contestant["workload"],
        contestant["title"],
        f"{contestant['examples_per_sec']:,.0f}",
        f"{sum(cpu.values()):.1f}",
        ", ".join(f"{process} {ms:.1f}" for process, ms in cpu.items()),
        f"{contestant['wire_nbytes_per_step'] / MIB:.2f}",
        f"{contestant['wire_packets_per_step']:.0f}",
        _secs(contestant["first_step_secs"]),
        f"{sum(peak.values()):,}",
        f"{max(peak.values(), default=0):,}",
    )


def _start_cells(start: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        start["cluster"],
        _secs(start["first_step_secs"]),
        NONE if start["target_secs"] is None else f"{start['target_secs']:g}",
        "; ".join(start["failed"]) or start["verdict"] or "",
        start["dies"] or NONE,
        _secs(start["successor_secs"]),
        ", ".join(f"{process} {mib:,}" for process, mib in start["peak_mib"].items()),
    )


def _secs(values: Sequence[float]) -> str:
    """Returns the median, and the range of several."""
    if not values:
        return NONE
    middle = f"{median(values):.1f}"
    return middle if len(values) == 1 else f"{middle} ({min(values):.1f} to {max(values):.1f})"


def _failure(row: Mapping[str, Any]) -> str:
    lines = "\n".join(row["log"])
    return f"{row['workload']}, {row['title']}: {row['failed']}. The end of its log:\n\n```text\n{lines}\n```\n"


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join(f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |\n" for cells in lines)


def _rounded(values: Mapping[str, float]) -> dict[str, float]:
    return {name: round(value, 4) for name, value in values.items()}
