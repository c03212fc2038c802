"""The search space of a sweep: keys of the config, and the values to try."""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trainer.config import keys
from trainer.config.shell import quoted
from trainer.faults.problems import Problem

RANGE = re.compile(r"(log|linear|integer)\(\s*([^,()]+?)\s*,\s*([^,()]+?)\s*\)")
FORMS = "a list of values, or log(LOW, HIGH), linear(LOW, HIGH) or integer(LOW, HIGH)"

Values = dict[str, Any]  # of a trial, by key


@dataclass(frozen=True)
class Range:
    """A range of numbers from `low` to `high`."""

    low: float
    high: float
    is_log: bool = False  # equally likely in each decade
    is_integer: bool = False

    def ends(self) -> list[float]:
        return [int(one) if self.is_integer else one for one in (self.low, self.high)]


Space = Mapping[str, Sequence[Any] | Range]


def parse(given: Mapping[str, Any]) -> tuple[Space, list[Problem]]:
    """Returns the values of each key, and their problems."""
    space: dict[str, Sequence[Any] | Range] = {}
    problems = []
    for key, value in given.items():
        try:
            space[str(key)] = _choices(value)
        except ValueError as error:
            remedy = "e.g. 'sweep.space={optimizer.learning_rate: log(1e-4, 1e-1), model.options.width: [32, 64]}'"
            problems.append(Problem(f"sweep.space.{key}", "malformed", str(error), remedy))
    return space, problems


def _choices(value: Any) -> Sequence[Any] | Range:
    if isinstance(value, list | tuple):
        if not value or len(set(map(repr, value))) < len(value):
            raise ValueError("needs a list of values without duplicates")
        return list(value)
    found = RANGE.fullmatch(value.strip()) if isinstance(value, str) else None
    if found is None:
        raise ValueError(f"is {value!r}; give {FORMS}")
    kind, low, high = found.groups()
    try:
        limits = float(low), float(high)
    except ValueError:
        raise ValueError(f"{value} has a limit that is not a number") from None
    if not limits[0] < limits[1] or (kind == "log" and limits[0] <= 0):
        raise ValueError(
            f"{value} is not a valid range: LOW must be below HIGH{', and above 0' if kind == 'log' else ''}"
        )
    if kind == "integer" and not all(limit.is_integer() for limit in limits):
        raise ValueError(f"{value} has limits that are not integers")
    return Range(*limits, is_log=kind == "log", is_integer=kind == "integer")


def grid(space: Space) -> Iterator[Values]:
    """Yields every combination if all keys have lists; the last key changes fastest."""
    for values in itertools.product(*(list(one) for one in space.values() if isinstance(one, Sequence))):
        yield dict(zip(space, values, strict=True))


def is_grid(space: Space) -> bool:
    return all(isinstance(one, Sequence) for one in space.values())


def overrides(values: Values) -> list[str]:
    """Returns the values as they are typed."""
    return [f"{key}={quoted(value) if isinstance(value, str) else keys.shown(value)}" for key, value in values.items()]
