"""Computes the share of each phase in the time of a step, and which worker came last. Pure."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import TypedDict

from trainer.config.words import count
from trainer.observe.profile.attempts import AttemptTrace, Profile, Step
from trainer.observe.profile.record import REPLICA, SHARD

PHASES = ("wait", "pull", "input", "compute", "push", "sum", "apply", "tokens")  # in the order of a step
OTHER = "other"
WORKERS_NAMED = 3  # of those that came last


class ProfileSummary(TypedDict):
    """The profile's part of summary.json."""

    steps: int
    fractions: dict[str, dict[str, float]]  # by task and phase
    shard_fractions: dict[str, dict[str, float]]
    came_last: dict[str, dict[str, float]]
    clocks: dict[str, dict[str, float]]  # offset_ms and error_ms by task, against the chief's clock
    missing: list[str]  # tasks
    damaged_lines: int


def summarize(profile: Profile) -> ProfileSummary:
    """Returns the profile's part of summary.json; fractions are of each row's time, see `fractions`."""
    numbers: Counter[tuple[str, str]] = Counter()  # by task and row, of all its attempts
    for attempt in profile.attempts:
        numbers.update({(attempt.task, row): len(_counted(steps)) for row, steps in attempt.rows.items()})
    return {
        "steps": max(numbers.values(), default=0),
        "fractions": fractions(profile.attempts, REPLICA),
        "shard_fractions": fractions(profile.attempts, SHARD),
        "came_last": came_last(profile.attempts),
        "clocks": {
            name: {"offset_ms": round(1000 * offset.applied_secs, 3), "error_ms": round(1000 * offset.error_secs, 3)}
            for name, offset in profile.offsets.items()
        },
        "missing": list(profile.missing),
        "damaged_lines": profile.damaged,
    }


def fractions(attempts: Iterable[AttemptTrace], row: str) -> dict[str, dict[str, float]]:
    """Returns by task the share of each phase, and of time outside all phases.

    The time runs from the second step of an attempt, as the first compiles, to the end of its last one, summed over
    attempts. The phases of a step do not overlap, so all shares sum to 1.
    """
    spent: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    whole: dict[str, float] = defaultdict(float)
    for attempt in attempts:
        steps = _counted(attempt.rows.get(row, ()))
        if not steps:
            continue
        whole[attempt.task] += steps[-1].ended - steps[0].began
        for step in steps:
            for span in step.spans:
                spent[attempt.task][span.name] += span.ended - span.began
    return {
        task: _rounded({name: secs / whole[task] for name, secs in by_phase.items()})
        for task, by_phase in spent.items()
        if whole[task] > 0
    }


def _rounded(shares: Mapping[str, float]) -> dict[str, float]:
    rounded = {name: round(shares[name], 4) for name in PHASES if name in shares}
    return rounded | {OTHER: round(max(0.0, 1 - sum(rounded.values())), 4)}


def came_last(attempts: Iterable[AttemptTrace]) -> dict[str, dict[str, float]]:
    """Returns by worker in how many updates its gradient came last, and how long after the next to last on average.

    As measured by the first shard; only updates of several gradients count.
    """
    host = _first_host(attempts)
    late: dict[str, list[float]] = defaultdict(list)
    updates = 0
    for step in (step for attempt in host for step in _counted(attempt.rows.get(SHARD, ())) if len(step.arrived) > 1):
        updates += 1
        (before, _), (at, worker) = sorted((at, worker) for worker, at in step.arrived.items())[-2:]
        late[worker].append(at - before)
    return {
        worker: {"updates": len(secs), "of": updates, "late_ms": round(1000 * sum(secs) / len(secs), 3)}
        for worker, secs in sorted(late.items(), key=lambda item: -len(item[1]))
    }


def _first_host(attempts: Iterable[AttemptTrace]) -> list[AttemptTrace]:
    """Returns the attempts of the task that hosts the first shard: shards are assigned in the order of their hosts."""
    hosts = [attempt for attempt in attempts if SHARD in attempt.rows]
    return [attempt for attempt in hosts if attempt.task == hosts[0].task]


def _counted(steps: Sequence[Step]) -> Sequence[Step]:
    """Returns all steps of an attempt but the first."""
    return steps[1:]


def describe(summary: ProfileSummary) -> str:
    """Returns the shares as a table, and which workers came last."""
    rows = dict(summary["fractions"]) | {f"{t} shard": shares for t, shares in summary["shard_fractions"].items()}
    if not rows:
        return "no task reached a second step, so there is no profile"
    names = [name for name in (*PHASES, OTHER) if any(name in shares for shares in rows.values())]
    width = max(map(len, rows))
    lines = [f"where the time of {count(summary['steps'], 'step')} went", " " * width + _cells(names)]
    for row, shares in rows.items():
        lines.append(row.ljust(width) + _cells(f"{shares[name]:.1%}" if name in shares else "" for name in names))
    if summary["came_last"]:
        lines.append(_late(summary["came_last"]))
    lines += [_moved(name, **clock) for name, clock in summary["clocks"].items() if clock["offset_ms"]]
    if summary["missing"]:
        lines.append(f"no steps recorded by {', '.join(summary['missing'])}")
    return "\n".join(lines)


def _cells(texts: Iterable[str]) -> str:
    return "".join(f"{text:>9}" for text in texts).rstrip()


def _moved(task: str, *, offset_ms: float, error_ms: float) -> str:
    side = "behind" if offset_ms > 0 else "ahead of"
    return (
        f"{task}'s clock is {abs(offset_ms):,.1f} ms {side} the chief's (within {error_ms:.1f} ms); times are corrected"
    )


def _late(came_last: Mapping[str, Mapping[str, float]]) -> str:
    (worker, most), *others = came_last.items()
    share = f"{most['updates']} of {most['of']} updates"
    parts = [f"{worker} came last in {share}, {most['late_ms']:.1f} ms after the next to last on average"]
    parts += [f"{name} in {late['updates']}, {late['late_ms']:.1f} ms" for name, late in others[: WORKERS_NAMED - 1]]
    return "; ".join(parts) + ("; ..." if len(others) >= WORKERS_NAMED else "")
