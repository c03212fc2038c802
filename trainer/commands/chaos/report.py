"""Judges each run under faults, and tabulates them by kind. Pure."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from trainer.commands.chaos.injector import Recovery
from trainer.commands.chaos.schedule import Fault, FaultTargets
from trainer.config.schema import RestartConfig, TimeoutsConfig
from trainer.config.words import count
from trainer.faults import exit_codes
from trainer.storage import journal, json_lines

# What a recovery may take; see also `allowed_secs`.
BOOT_SECS = 10.0  # of a task, on a loaded machine
LOAD_SECS = 1.0  # of a checkpoint
SLACK_SECS = 2.0
TOO_SLOW = 2.0  # times what is allowed
OF_MACHINE = ("examples_per_second", "seconds")  # values that depend on the machine, not only on config, seed and data
HARMLESS = ("delay", "throttle")  # faults that a run may end under

HEADINGS = {
    "kind": "kind",
    "runs": "runs",
    "finished": "finished",
    "identical": "identical",
    "recover_p50_secs": "recover p50 s",
    "recover_max_secs": "max s",
    "allowed_secs": "allowed s",
    "steps_lost_max": "steps lost max",
}


@dataclass(frozen=True)
class FaultOutcome:
    """The outcome of a run under faults."""

    kind: str
    name: str  # of its folder, below that of all
    faults: str  # in words
    repeat: str  # overrides that have them again
    has_finished: bool
    is_identical: bool | None  # to the unbroken run; none where that is not promised
    measured: tuple[Recovery, ...]
    problems: tuple[str, ...]


@dataclass(frozen=True)
class RecoveryBudget:
    """The time that a run may take to make steps again after a fault."""

    targets: FaultTargets
    restart: RestartConfig
    timeouts: TimeoutsConfig

    def allowed_secs(self, fault: Fault) -> float:
        """Returns the seconds allowed for a fault."""
        heartbeat = self.timeouts.heartbeat_secs
        is_held = any(task in self.targets.holders for task in fault.tasks) and fault.link is None
        again = BOOT_SECS + self.restart.delay_secs + (LOAD_SECS if is_held else 0.0) + SLACK_SECS
        if fault.action == "term":
            return self.timeouts.stop_grace_secs + again
        if fault.action in ("delay", "throttle") or (fault.action == "stop" and (fault.secs or heartbeat) < heartbeat):
            return (fault.secs or 0.0) + SLACK_SECS
        if fault.action in ("stop", "cut"):
            return max(heartbeat, fault.secs or 0.0 if fault.action == "cut" else 0.0) + again
        return again


def judge(
    code: int,
    wanted: Sequence[Fault],
    measured: Sequence[Recovery],
    budget: RecoveryBudget,
    *,
    finished: int = exit_codes.OK,
) -> list[str]:
    """Returns the problems of a run as sentences; `finished` is the exit code of a run that went well."""
    if code != finished:
        return [f"it ended with exit code {code}; see launcher.log"]
    acted = [m.fault for m in measured]
    problems = [f"'{fault}' did not happen" for fault in wanted if fault not in acted]
    for m in measured:
        allowed = budget.allowed_secs(m.fault)
        if m.recover_secs is None and finished == exit_codes.OK and m.fault.action not in HARMLESS:
            problems.append(f"'{m.fault}' came too late: the run ended before it recovered")
        if m.recover_secs is not None and m.recover_secs > TOO_SLOW * allowed:
            problems.append(f"'{m.fault}' took {m.recover_secs:.1f} s to recover from; {allowed:g} s are allowed")
    return problems


def with_steps_lost(measured: Sequence[Recovery], run: Path) -> list[Recovery]:
    """Adds to each fault the steps that the run lost between it and the next one, by the chief's journal."""
    path = run / "journal" / "worker-0.jsonl"
    entries = [journal.read(json.loads(line)) for line in path.read_text().splitlines()] if path.exists() else []
    reloads = [(entry.at, entry.step) for entry in entries if isinstance(entry, journal.Reload)]
    ends = [m.at for m in measured[1:]] + [math.inf]
    lost = [
        max((m.step - step for at, step in reloads if m.at <= at < end), default=0)
        for m, end in zip(measured, ends, strict=True)
    ]
    return [replace(m, steps_lost=max(m.steps_lost, steps)) for m, steps in zip(measured, lost, strict=True)]


def differences(unbroken: Path, other: Path) -> list[str]:
    """Lists the differences between two run directories: final parameters, and values reported during the runs."""
    found = []
    before, after = (json.loads((path / "summary.json").read_text()).get("params_sha256") for path in (unbroken, other))
    if before != after:
        found.append(f"params_sha256 is {str(after)[:12]}..., but the unbroken run has {str(before)[:12]}...")
    for name in ("history.jsonl", "evaluations.jsonl"):
        before, after = _values_by_step(unbroken / name), _values_by_step(other / name)
        if before != after:
            steps = sorted(step for step in {*before, *after} if before.get(step) != after.get(step))
            found.append(f"{name} differs in {count(len(steps), 'line')}, first at step {steps[0]}")
    return found


def _values_by_step(path: Path) -> dict[int, list[dict[str, float]]]:
    """Returns the values that a run reported, a line per step, except those that depend on the machine."""
    values: dict[int, list[dict[str, float]]] = {}
    for line in json_lines.measured_lines(path):
        timeless = {name: value for name, value in line.items() if name not in OF_MACHINE}
        values.setdefault(int(line["step"]), []).append(timeless)
    return values


def rows(outcomes: Sequence[FaultOutcome], budget: RecoveryBudget) -> list[dict[str, Any]]:
    """Returns the table: a row for each kind, by the names of HEADINGS."""
    kinds = dict.fromkeys(outcome.kind for outcome in outcomes)
    return [_row(kind, [outcome for outcome in outcomes if outcome.kind == kind], budget) for kind in kinds]


def _row(kind: str, outcomes: Sequence[FaultOutcome], budget: RecoveryBudget) -> dict[str, Any]:
    measured = [m for outcome in outcomes for m in outcome.measured]
    took = [m.recover_secs for m in measured if m.recover_secs is not None]
    compared = [outcome.is_identical for outcome in outcomes if outcome.is_identical is not None]
    return {
        "kind": kind,
        "runs": len(outcomes),
        "finished": sum(outcome.has_finished for outcome in outcomes),
        "identical": sum(compared) if compared else None,
        "recover_p50_secs": round(median(took), 2) if took else None,
        "recover_max_secs": round(max(took), 2) if took else None,
        "allowed_secs": max((budget.allowed_secs(m.fault) for m in measured), default=None),
        "steps_lost_max": max((m.steps_lost for m in measured), default=None),
    }


def line(outcome: FaultOutcome) -> str:
    """Returns a run on one line."""
    verdict = "finished" if outcome.is_identical is None else "identical"
    parts = [f"recovered in {m.recover_secs:.1f} s" for m in outcome.measured if m.recover_secs is not None]
    if lost := sum(m.steps_lost for m in outcome.measured):
        parts.append(f"{count(lost, 'step')} lost")
    return f"{outcome.name}: {outcome.faults}: {'; '.join(outcome.problems) or ', '.join([verdict, *parts])}"


def fault_line(measured: Recovery) -> str:
    """Returns a fault of a long run, when it is over."""
    lost = f", {count(measured.steps_lost, 'step')} lost" if measured.steps_lost else ""
    return f"{measured.fault}: recovered in {measured.recover_secs:.1f} s{lost}"


def failures(outcomes: Sequence[FaultOutcome], folder: Path) -> list[str]:
    """Returns a line for each run that broke a promise: its folder, and how to repeat it."""
    return [
        f"{folder / outcome.name}: {'; '.join(outcome.problems)}; to repeat it: {outcome.repeat}"
        for outcome in outcomes
        if outcome.problems
    ]


def table(rows: Sequence[Mapping[str, Any]]) -> Any:
    """Returns the rows as a rich table."""
    from rich.table import Table

    shown = Table()
    for name, heading in HEADINGS.items():
        shown.add_column(heading, justify="left" if name == "kind" else "right")
    for row in rows:
        shown.add_row(*_cells(row))
    return shown


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    lines = [tuple(HEADINGS.values()), ("---", *["---:"] * (len(HEADINGS) - 1)), *map(_cells, rows)]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in lines)


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple("-" if row[name] is None else str(row[name]) for name in HEADINGS)


def to_json(outcomes: Sequence[FaultOutcome], rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    runs = [
        {
            "kind": outcome.kind,
            "folder": outcome.name,
            "faults": outcome.faults,
            "finished": outcome.has_finished,
            "identical": outcome.is_identical,
            "problems": list(outcome.problems),
            "measured": [
                {
                    "fault": str(m.fault),
                    "step": m.step,
                    "recover_secs": m.recover_secs and round(m.recover_secs, 3),
                    "steps_lost": m.steps_lost,
                }
                for m in outcome.measured
            ],
        }
        for outcome in outcomes
    ]
    return {"kinds": list(rows), "runs": runs}
