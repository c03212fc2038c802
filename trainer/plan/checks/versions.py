"""Checks that the installed versions of the libraries are supported. Pure."""

import re
from collections.abc import Iterator, Mapping

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from trainer.faults.problems import Problem

# As in pyproject.toml; the metadata of an installed copy may be older than the code.
SUPPORTED = {
    "Python": ">=3.10,<3.14",
    "tensorflow": ">=2.21,<2.22",
    "keras": ">=3.12,<3.16",
    "hydra-core": ">=1.3.8,<1.4",
    "omegaconf": ">=2.3,<2.4",
}
TENSORFLOWS = ("tensorflow", "tensorflow-cpu")  # distributions of the package `tensorflow`
CPU_WHEELS = "python -m pip install --require-hashes -r requirements/cpu.txt"
OTHER_PYTHON = "rm -rf .venv && make PYTHON=python3.12 .venv/run"


def check_versions(installed: Mapping[str, str]) -> Iterator[Problem]:
    """Yields a problem for every library whose version is not supported.

    Args:
        installed: version by distribution; one that is missing is not checked.
    """
    for name, version in installed.items():
        library = "tensorflow" if name in TENSORFLOWS else name
        if not is_in_range(version, SUPPORTED[library]):
            remedy = OTHER_PYTHON if name == "Python" else CPU_WHEELS
            message = f"{name} {version} is installed; supported: {SUPPORTED[library]}"
            yield Problem(library, "not-supported", message, remedy)


def is_in_range(version: str, wanted: str) -> bool:
    """Whether "2.21.0" is in ">=2.21,<2.22"; only the release counts, not what follows it (rc1, +cuda)."""
    number = release(version)
    return number is not None and number in SpecifierSet(wanted)


def release(version: str) -> Version | None:
    """Returns the release of a version: 2.27.0 of "v2.27.0-desktop.2", which is not a valid Python version."""
    match = re.match(r"[v\s]*(\d+(?:\.\d+)*)", version)
    return Version(match[1]) if match else None
