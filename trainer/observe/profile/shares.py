"""What share of the time each phase is, and who was waited for. Pure."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trainer.config.words import count
from trainer.observe.profile.attempts import AttemptTrace, Profile, Step
from trainer.observe.profile.record import REPLICA, SHARD

PHASES = ("wait", "pull", "input", "compute", "push", "sum", "apply", "tokens")  # in which a step goes through them
OTHER = "other"
TOLD = 3  # of those who came last


def summarize(profile: Profile) -> dict[str, Any]:
    """What summary.json says of a profile; fractions are of each row's time, see `fractions`."""
    steps: Counter[tuple[str, str]] = Counter()  # by task and row, of all its lives
    for life in profile.lives:
        steps.update({(life.task, row): len(_counted(made)) for row, made in life.rows.items()})
    return {
        "steps": max(steps.values(), default=0),
        "fractions": fractions(profile.lives, REPLICA),
        "shard_fractions": fractions(profile.lives, SHARD),
        "came_last": came_last(profile.lives),
        "clocks": {
            name: {"offset_ms": round(1000 * offset.applied_secs, 3), "error_ms": round(1000 * offset.error_secs, 3)}
            for name, offset in profile.offsets.items()
        },
        "missing": list(profile.missing),
        "damaged_lines": profile.damaged,
    }


def fractions(lives: Iterable[AttemptTrace], row: str) -> dict[str, dict[str, float]]:
    """By task, the share of each phase, and of what is in none.

    Of the time from the second step of a life, as the first compiles, to the end of its last one; of several lives
    together. The phases of a step follow each other, so all shares sum to 1.
    """
    spent: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    whole: dict[str, float] = defaultdict(float)
    for life in lives:
        steps = _counted(life.rows.get(row, ()))
        if not steps:
            continue
        whole[life.task] += steps[-1].ended - steps[0].began
        for step in steps:
            for span in step.spans:
                spent[life.task][span.name] += span.ended - span.began
    return {
        task: _rounded({name: secs / whole[task] for name, secs in by_phase.items()})
        for task, by_phase in spent.items()
        if whole[task] > 0
    }


def _rounded(shares: Mapping[str, float]) -> dict[str, float]:
    rounded = {name: round(shares[name], 4) for name in PHASES if name in shares}
    return rounded | {OTHER: round(max(0.0, 1 - sum(rounded.values())), 4)}


def came_last(lives: Iterable[AttemptTrace]) -> dict[str, dict[str, float]]:
    """By worker, in how many updates its gradient came last, and how long after the next to last, on average.

    As the first shard saw it; only updates that several gradients are in count.
    """
    host = _first_host(lives)
    late: dict[str, list[float]] = defaultdict(list)
    updates = 0
    for step in (step for life in host for step in _counted(life.rows.get(SHARD, ())) if len(step.arrived) > 1):
        updates += 1
        (before, _), (at, worker) = sorted((at, worker) for worker, at in step.arrived.items())[-2:]
        late[worker].append(at - before)
    return {
        worker: {"updates": len(secs), "of": updates, "late_ms": round(1000 * sum(secs) / len(secs), 3)}
        for worker, secs in sorted(late.items(), key=lambda item: -len(item[1]))
    }


def _first_host(lives: Iterable[AttemptTrace]) -> list[AttemptTrace]:
    """The lives of the task that hosts the first shard: shards are dealt out in the order of their hosts."""
    hosts = [life for life in lives if SHARD in life.rows]
    return [life for life in hosts if life.task == hosts[0].task]


def _counted(steps: Sequence[Step]) -> Sequence[Step]:
    """All but the first of a life."""
    return steps[1:]


def describe(summary: Mapping[str, Any]) -> str:
    """The shares as a table, and who was waited for."""
    rows = dict(summary["fractions"]) | {f"{t} shard": shares for t, shares in summary["shard_fractions"].items()}
    if not rows:
        return "no task came to a second step, so there is no profile"
    names = [name for name in (*PHASES, OTHER) if any(name in shares for shares in rows.values())]
    width = max(map(len, rows))
    lines = [f"where the time of {count(summary['steps'], 'step')} went", " " * width + _cells(names)]
    for row, shares in rows.items():
        lines.append(row.ljust(width) + _cells(f"{shares[name]:.1%}" if name in shares else "" for name in names))
    if summary["came_last"]:
        lines.append(_late(summary["came_last"]))
    lines += [_moved(name, **told) for name, told in summary["clocks"].items() if told["offset_ms"]]
    if summary["missing"]:
        lines.append(f"nothing is known of {', '.join(summary['missing'])}")
    return "\n".join(lines)


def _cells(texts: Iterable[str]) -> str:
    return "".join(f"{text:>9}" for text in texts).rstrip()


def _moved(task: str, *, offset_ms: float, error_ms: float) -> str:
    side = "behind" if offset_ms > 0 else "ahead of"
    return (
        f"{task}'s clock is {abs(offset_ms):,.1f} ms {side} the chief's (within {error_ms:.1f} ms); this allows for it"
    )


def _late(came_last: Mapping[str, Mapping[str, float]]) -> str:
    (first, told), *others = came_last.items()
    share = f"{told['updates']} of {told['of']} updates"
    said = [f"{first} came last in {share}, {told['late_ms']:.1f} ms after the next to last on average"]
    said += [f"{worker} in {other['updates']}, {other['late_ms']:.1f} ms" for worker, other in others[: TOLD - 1]]
    return "; ".join(said) + ("; ..." if len(others) >= TOLD else "")
