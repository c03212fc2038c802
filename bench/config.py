"""The options of `python -m bench`, read from `key=value` arguments."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from bench.contestants import QUICK_ROWS, ROWS, WORKLOADS
from trainer.config import keys
from trainer.config.limits import check_limits, limits
from trainer.faults.problems import ConfigError, Problem


@dataclass
class BenchConfig:
    """The settings of a benchmark: this trainer and others run in turn, two at a time."""

    workloads: list[str] = field(default_factory=list)  # of noop, cnn, mlp40, resnet20, resnet50, clicks; empty: all
    rows: list[str] = field(default_factory=list)  # patterns of comparisons, e.g. sync/*; empty: all
    rounds: int = field(default=4, metadata=limits(at_least=1))  # of four windows each: A B B A
    window_secs: float = field(default=3.0, metadata=limits(above=0))  # seconds that one runs while the other is frozen
    warm_up_secs: float = field(default=2.0, metadata=limits(at_least=0))  # after the first step
    start_secs: float = field(default=120.0, metadata=limits(above=0))  # deadline of the first step
    starts: int = field(default=3, metadata=limits(at_least=0))  # of each cluster, to time the first step; 0: none
    minutes: float = field(default=0.0, metadata=limits(at_least=0))  # start no row after this; 0: no limit
    quick: bool = False  # one workload, few rows, short windows: within 5 minutes
    results: str = "bench/results"  # folder of results.md, results.json and results.svg


QUICK = BenchConfig(
    workloads=["cnn"], rows=list(QUICK_ROWS), rounds=2, window_secs=1.5, warm_up_secs=1.0, minutes=4.5, starts=1
)


def parse(arguments: Sequence[str]) -> BenchConfig:
    """Reads and checks `key=value` arguments.

    Raises:
        ConfigError: with every problem found.
    """
    typed, problems = OmegaConf.structured(BenchConfig), list[Problem]()
    kinds = get_type_hints(BenchConfig)
    for text in arguments:
        key, equals, _ = text.partition("=")
        try:
            value = OverridesParser.create().parse_overrides([text])[0].value() if equals else None
        except (OverrideParseException, RecursionError):
            equals = ""
        if not equals:
            problems.append(Problem(text, "malformed", "is not key=value", "e.g. quick=true", about="override"))
        elif key not in kinds:
            problems.append(keys.unknown(text, key, value, kinds, program="bench --help"))
        else:
            try:
                typed[key] = value
            except OmegaConfBaseException:
                default = keys.shown(getattr(BenchConfig(), key))
                message = f"{keys.shown(value)!r} is not {keys.describe(kinds[key])}"
                problems.append(Problem(text, "wrong-type", message, f"e.g. {key}={default}", about=key))
    config = OmegaConf.to_object(typed)
    assert isinstance(config, BenchConfig)
    problems += [*check_limits(config), *check(config)]
    if problems:
        raise ConfigError(problems)
    return settled(config)


def check(config: BenchConfig) -> Iterator[Problem]:
    """Yields what keeps the bench from running here, and names that do not exist."""
    if sys.platform != "linux":
        yield Problem("bench", "not-available", f"reads /proc, which {sys.platform} does not have", "run it on Linux")
    for name in config.workloads:
        if name not in WORKLOADS:
            near = (*difflib.get_close_matches(name, WORKLOADS, n=1), "cnn")[0]
            message = f"unknown workload {name!r}; available: {', '.join(WORKLOADS)}"
            yield Problem("workloads", "unknown-choice", message, f"e.g. workloads=[{near}]")
    names = [row.name for row in ROWS]
    for pattern in config.rows:
        if not any(fnmatchcase(name, pattern) for name in names):
            near = (*difflib.get_close_matches(pattern, names, n=1), names[0])[0]
            message = f"no row matches {pattern!r}; available: {', '.join(names)}"
            yield Problem("rows", "no-match", message, f"e.g. rows=[{near}]")


def settled(config: BenchConfig) -> BenchConfig:
    """Shortens what was left at its default if `quick` is set; else names all workloads if none is named."""
    if not config.quick:
        return replace(config, workloads=config.workloads or list(WORKLOADS))
    default = BenchConfig()
    short = {name: getattr(QUICK, name) for name in vars(QUICK) if getattr(config, name) == getattr(default, name)}
    return replace(config, **short | {"quick": True})
