"""Which versions of the libraries are supported, and whether those that are installed are among them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from trainer.faults.problems import Problem

# As in pyproject.toml: that of an installed copy may be older than the code, so it is not asked.
SUPPORTED = {
    "Python": ">=3.10,<3.14",
    "tensorflow": ">=2.21,<2.22",
    "keras": ">=3.12,<3.16",
    "hydra-core": ">=1.3.8,<1.4",
    "omegaconf": ">=2.3,<2.4",
}
TENSORFLOWS = ("tensorflow", "tensorflow-cpu")  # distributions that bring the package `tensorflow`
CPU_WHEELS = "python -m pip install --require-hashes -r requirements/cpu.txt"


def check(installed: Mapping[str, str]) -> Iterator[Problem]:
    """Yields a problem for every library of another version than the supported ones; one that is not listed is unknown.

    Args:
        installed: version by distribution.
    """
    for name, version in installed.items():
        library = "tensorflow" if name in TENSORFLOWS else name
        if not is_in_range(version, SUPPORTED[library]):
            yield Problem(library, f"{name} {version} is installed; supported is {SUPPORTED[library]}", CPU_WHEELS)


def is_in_range(version: str, wanted: str) -> bool:
    """Whether "2.21.0" is in ">=2.21,<2.22"; what follows the numbers (rc1, +cuda) does not count."""
    have = numbers(version)
    for bound in wanted.split(","):
        limit = numbers(bound.lstrip("<>="))
        if (bound.startswith(">=") and have < limit) or (bound.startswith("<") and have >= limit):
            return False
    return True


def numbers(version: str) -> tuple[int, ...]:
    """(2, 21, 0) of "2.21.0+cu12"; empty where no number comes first."""
    found = re.match(r"[v\s]*(\d+(?:\.\d+)*)", version)
    return tuple(map(int, found[1].split("."))) if found else ()
