"""Limits of single keys, declared as metadata of each key and checked for a whole section."""

import dataclasses
import math
import operator
from collections.abc import Iterator
from typing import Any

from trainer.faults.problems import Problem

IS_BROKEN = {"at_least": operator.lt, "above": operator.le, "at_most": operator.gt, "below": operator.ge}


def limits(**bounds: float) -> dict[str, Any]:
    """Returns metadata for a numeric key: its closed or open bounds, by the names of IS_BROKEN."""
    assert bounds.keys() <= IS_BROKEN.keys(), bounds
    return dict(bounds)


def read_by(*names: str) -> dict[str, Any]:
    """Returns metadata for a key that is used only if the section's `name` is one of these."""
    return {"read_by": names}


def by_task() -> Any:
    """Returns a field for a mapping by job (`worker`) or task (`worker:0`), empty by default."""
    return dataclasses.field(default_factory=dict, metadata={"keys": "task"})


def by_job() -> Any:
    """Returns a field for a mapping by job, empty by default."""
    return dataclasses.field(default_factory=dict, metadata={"keys": "job"})


def check_limits(section: Any, prefix: str = "") -> Iterator[Problem]:
    """Yields a problem for every number in a section (and below it) that is outside its limits, or not finite."""
    for key in dataclasses.fields(section):
        value, path = getattr(section, key.name), f"{prefix}{key.name}"
        if dataclasses.is_dataclass(value):
            yield from check_limits(value, f"{path}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            bounds = {name: bound for name, bound in key.metadata.items() if name in IS_BROKEN}
            yield from _check_number(path, value, bounds, key.default)


def check_read(section: Any, prefix: str) -> Iterator[Problem]:
    """Yields a problem for every key that is set but not used by the choice that the section's `name` makes."""
    for key in dataclasses.fields(section):
        readers, value = key.metadata.get("read_by"), getattr(section, key.name)
        if readers and section.name.value not in readers and value != key.default:
            others = f"{' and '.join(readers)} {'do' if len(readers) > 1 else 'does'}"
            message = f"{section.name.value} does not use it; {others}"
            remedy = f"leave it out, or type {prefix}name={readers[0]}"
            yield Problem(f"{prefix}{key.name}", "no-effect", message, remedy)


def _check_number(path: str, value: float, bounds: dict[str, float], default: Any) -> Iterator[Problem]:
    if not math.isfinite(value):
        remedy = f"give a number, e.g. {path}={default}" if isinstance(default, int | float) else "leave it out"
        yield Problem(path, "out-of-range", f"{value} is not a finite number", remedy)
        return
    if any(IS_BROKEN[name](value, bound) for name, bound in bounds.items()):
        allowed = " and ".join(f"{name.replace('_', ' ')} {limit}" for name, limit in bounds.items())
        nearest = type(value)(_nearest(value, bounds))
        yield Problem(path, "out-of-range", f"{value} is out of range; it must be {allowed}", f"e.g. {path}={nearest}")


def _nearest(value: float, bounds: dict[str, float]) -> float:
    """Returns an allowed value close to the refused one, to paste."""
    if value <= bounds.get("above", -math.inf):
        return min(bounds["above"] + 0.001, bounds.get("at_most", math.inf))
    if value < bounds.get("at_least", -math.inf):
        return bounds["at_least"]
    return bounds.get("at_most", bounds.get("below", 1) * 0.9)
