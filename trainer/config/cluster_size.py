"""Parses a cluster size such as `2ps4w` into the number of tasks of each job. Pure."""

import re
from dataclasses import dataclass

EXAMPLES = "2ps4w, 4w or 8ps32w1e"
SIZE = re.compile(r"(?:([1-9]\d{0,3})ps)?([1-9]\d{0,3})w(?:([1-9]\d{0,3})e)?", re.ASCII)


@dataclass(frozen=True)
class ClusterSize:
    """The number of tasks of each job."""

    ps: int
    worker: int
    evaluator: int

    def __str__(self) -> str:
        """Returns the size as typed: 2ps4w."""
        counts = {"ps": self.ps, "w": self.worker, "e": self.evaluator}
        return "".join(f"{count}{job}" for job, count in counts.items() if count)


def parse_size(text: str) -> ClusterSize:
    """Reads `[<n>ps]<m>w[<k>e]`: 4w, 2ps4w, 8ps32w1e; counts of 1 to 9999, without leading zeros.

    Raises:
        ValueError: says what is wrong with the text.
    """
    match = SIZE.fullmatch(text)
    if match is None:
        raise ValueError(f"'{text}' is not a cluster size{_reason(text)}")
    ps, worker, evaluator = (int(count or 0) for count in match.groups())
    return ClusterSize(ps, worker, evaluator)


def nearest_size(text: str) -> str:
    """Returns a valid size with the counts that `text` contains; a missing worker count becomes 1."""
    patterns = {"ps": r"(\d+) *p", "w": r"(\d+) *w|w *(\d+)|(\d+)[a-df-oq-z]?$", "e": r"(\d+) *e"}
    counts = {}
    for job, pattern in patterns.items():
        found = re.search(pattern, text, re.ASCII | re.IGNORECASE)
        counts[job] = min(int(found[found.lastindex or 0][:6]), 9999) if found else 0
    counts["w"] = max(counts["w"], 1)
    return "".join(f"{count}{job}" for job, count in counts.items() if count)


def _reason(text: str) -> str:
    """Returns why a text is not a size, as the rest of the sentence."""
    loose = re.fullmatch(r"(?:(\d+)ps)?(?:(\d+)w)?(?:(\d+)e)?", text, re.ASCII)
    if loose is None or not text:
        return f" such as {EXAMPLES}"
    if loose[2] is None:
        return ": it has no workers"
    for job, count in zip(("ps", "w", "e"), loose.groups(), strict=True):
        if count is not None and count.startswith("0"):
            advice = f"; leave {job} out for none" if job != "w" else ""
            return f": {count}{job} is wrong, counts start at 1 and have no leading zeros{advice}"
    return ": a job has at most 9999 tasks"
