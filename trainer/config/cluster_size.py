"""From a size such as `2ps4w` to the number of tasks of each job. Pure: no TensorFlow."""

from __future__ import annotations

import re
from dataclasses import dataclass

SIZE = re.compile(r"(?:([1-9]\d{0,3})ps)?([1-9]\d{0,3})w(?:([1-9]\d{0,3})e)?", re.ASCII)


@dataclass(frozen=True)
class ClusterSize:
    """How many tasks each job has."""

    ps: int
    worker: int
    evaluator: int

    def __str__(self) -> str:
        """As it is typed: 2ps4w."""
        counts = {"ps": self.ps, "w": self.worker, "e": self.evaluator}
        return "".join(f"{count}{job}" for job, count in counts.items() if count)


def parse_size(text: str) -> ClusterSize:
    """Reads `[<n>ps]<m>w[<k>e]`: 4w, 2ps4w, 8ps32w1e; counts of 1 to 9999, without leading zeros.

    Raises:
        ValueError: says what is wrong with the text and names the nearest size.
    """
    match = SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"'{text}' is not a cluster size: {_reason(text)}; the nearest size is {nearest_size(text)}")
    ps, worker, evaluator = (int(count or 0) for count in match.groups())
    return ClusterSize(ps, worker, evaluator)


def nearest_size(text: str) -> str:
    """A size that parses, made from the counts that can be read in `text`; a missing worker count becomes 1."""
    patterns = {"ps": r"(\d+) *p", "w": r"(\d+) *w|w *(\d+)|(\d+)[a-df-oq-z]?$", "e": r"(\d+) *e"}
    counts = {}
    for job, pattern in patterns.items():
        found = re.search(pattern, text, re.ASCII | re.IGNORECASE)
        counts[job] = min(int(found[found.lastindex or 0][:6]), 9999) if found else 0
    counts["w"] = max(counts["w"], 1)
    return "".join(f"{count}{job}" for job, count in counts.items() if count)


def _reason(text: str) -> str:
    """What keeps a text from being a size."""
    loose = re.fullmatch(r"(?:(\d+)ps)?(?:(\d+)w)?(?:(\d+)e)?", text, re.ASCII)
    if loose is None or not text:
        return "it reads [<n>ps]<m>w[<k>e], e.g. 2ps4w, 4w or 8ps32w1e"
    if loose[2] is None:
        return "it has no workers"
    for job, count in zip(("ps", "w", "e"), loose.groups(), strict=True):
        if count is not None and count.startswith("0"):
            advice = f"; leave {job} out for none" if job != "w" else ""
            return f"{count}{job} is no count: counts start at 1, without leading zeros{advice}"
    return "a job has at most 9999 tasks"
