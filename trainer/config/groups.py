"""Groups of parameters that have their own learning rate or weight decay, or are frozen: `optimizer.groups`. Pure."""

import difflib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from trainer.config.schema import OptimizerConfig
from trainer.faults.problems import Problem

KEY = "optimizer.groups"
EXAMPLE = "'optimizer.groups=[{match:\"*/bias\",weight_decay:0}]'"


@dataclass(frozen=True)
class PatternGroup:
    """The settings of the parameters that match one of its patterns."""

    match: tuple[str, ...]  # patterns of parameter paths (fnmatch)
    learning_rate: float | None = None  # peak; the schedule scales it
    weight_decay: float | None = None
    frozen: bool | None = None

    def matches(self, path: str) -> bool:
        return any(fnmatchcase(path, pattern) for pattern in self.match)


class ParameterSettings(NamedTuple):
    """The settings of one parameter."""

    learning_rate: float
    weight_decay: float
    is_frozen: bool = False

    def describe(self) -> str:
        return (
            "frozen" if self.is_frozen else f"learning rate {self.learning_rate:g}, weight decay {self.weight_decay:g}"
        )


def groups_of(section: OptimizerConfig) -> list[PatternGroup]:
    """Returns the groups of a section without problems."""
    return [_read(given) for given in section.groups]


def settings_of(section: OptimizerConfig, path: str) -> ParameterSettings:
    """Returns each setting from the last matching group that has it."""
    own = ParameterSettings(section.learning_rate, section.weight_decay)
    for group in groups_of(section):
        if group.matches(path):
            rate, decay, frozen = group.learning_rate, group.weight_decay, group.frozen
            own = ParameterSettings(
                own.learning_rate if rate is None else rate,
                own.weight_decay if decay is None else decay,
                own.is_frozen if frozen is None else frozen,
            )
    return own


def has_rates(section: OptimizerConfig) -> bool:
    """Whether parameters may differ in their learning rate or weight decay."""
    return any(one.learning_rate is not None or one.weight_decay is not None for one in groups_of(section))


def freezing(section: OptimizerConfig) -> list[dict[str, Any]]:
    """Returns the groups that say whether parameters are frozen, without their other settings."""
    groups = groups_of(section)
    return [{"match": list(one.match), "frozen": one.frozen} for one in groups if one.frozen is not None]


def is_frozen(path: str, freezing: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a parameter is frozen by groups that `freezing` returned."""
    return settings_of(OptimizerConfig(groups=list(freezing)), path).is_frozen


def check_groups(section: OptimizerConfig) -> Iterator[Problem]:
    """Yields the problems of groups, except patterns that match nothing; see `match_faults`."""
    for index, given in enumerate(section.groups):
        key = f"{KEY}[{index}]"
        if not isinstance(given, Mapping) or not _patterns(given.get("match")):
            message = f"{given!r} is not a mapping with patterns of parameter paths in match"
            yield Problem(key, "malformed", message, f"e.g. {EXAMPLE}")
            continue
        names = [field.name for field in fields(PatternGroup)]
        for name, value in given.items():
            if name not in names:
                near = (*difflib.get_close_matches(str(name), names, n=1), "weight_decay")[0]
                yield Problem(key, "unknown-key", f"there is no {name}; available: {', '.join(names)}", f"e.g. {near}")
            elif name in CHECKS and value is not None:
                yield from _check(key, name, value)
        if all(given.get(name) is None for name in CHECKS):
            message = f"group {' '.join(_patterns(given['match']))} has no settings; allowed: {', '.join(CHECKS)}"
            yield Problem(key, "not-set", message, f"e.g. {EXAMPLE}")


def match_faults(section: OptimizerConfig, paths: Sequence[str]) -> Iterator[Problem]:
    """Returns the patterns that match none of the parameters."""
    for index, group in enumerate(groups_of(section)):
        for pattern in group.match:
            if not any(fnmatchcase(path, pattern) for path in paths):
                near = difflib.get_close_matches(pattern, paths, n=3, cutoff=0.3) or list(paths[:3])
                message = f"{pattern!r} matches no parameter that is trained; the nearest are {', '.join(near)}"
                yield Problem(f"{KEY}[{index}]", "no-match", message, f"e.g. match:{near[0] if near else '*/bias'}")


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


CHECKS: Mapping[
    str, tuple[Callable[[Any], bool], str, str]
] = {  # whether a value may be there, what it must be, and one
    "learning_rate": (lambda value: _is_number(value) and value > 0, "a number above 0", "0.0001"),
    "weight_decay": (lambda value: _is_number(value) and value >= 0, "a number of at least 0", "0"),
    "frozen": (lambda value: isinstance(value, bool), "true or false", "true"),
}


def _check(key: str, name: str, value: Any) -> Iterator[Problem]:
    is_valid, needed, example = CHECKS[name]
    if not is_valid(value):
        yield Problem(key, "out-of-range", f"{name}={value!r} is not {needed}", f"e.g. {name}:{example}")


def _patterns(match: Any) -> list[str]:
    """Returns a list of one pattern or several; empty if the value is neither."""
    patterns = [match] if isinstance(match, str) else match
    is_valid = isinstance(patterns, list | tuple) and all(isinstance(one, str) and one for one in patterns)
    return list(patterns) if is_valid else []


def _read(given: Mapping[str, Any]) -> PatternGroup:
    return PatternGroup(tuple(_patterns(given["match"])), **{name: given.get(name) for name in CHECKS})
