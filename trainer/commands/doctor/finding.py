"""What one check of the doctor found."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from trainer.config.words import count
from trainer.faults.problems import Problem

OTHER_LINES = ("TF_CONFIG", "tensorflow", "keras", "ulimit -n")  # keys whose problems have a line of their own


class Level(Enum):
    ok = "ok"
    warning = "warning"  # a run may do without it
    problem = "problem"  # a run will not


@dataclass(frozen=True)
class Finding:
    """One line of the page."""

    level: Level
    what: str  # what was looked at
    message: str
    remedy: str = ""  # what to type


@dataclass(frozen=True)
class Answer:
    """What a command said."""

    code: int | None  # exit code; negative: the signal that ended it; none: it had not ended at its deadline
    out: str = ""
    err: str = ""

    def last_words(self) -> str:
        """The last line it printed, most often the reason."""
        if self.code is None:
            return "no answer"
        return next((line.strip() for line in reversed((self.out + "\n" + self.err).splitlines()) if line.strip()), "")


def ok(what: str, message: str) -> Finding:
    return Finding(Level.ok, what, message)


def warning(what: str, message: str, remedy: str) -> Finding:
    return Finding(Level.warning, what, message, remedy)


def problem(what: str, message: str, remedy: str) -> Finding:
    return Finding(Level.problem, what, message, remedy)


def judged(what: str, message: str, problems: Iterable[Problem]) -> Finding:
    """Returns a fact of this machine, or the problem that the checks of a config have with it."""
    return next((problem(what, one.message, one.remedy) for one in problems if one.key == what), ok(what, message))


def config(problems: Sequence[Problem], cluster: str) -> list[Finding]:
    findings = [problem("config", f"{p.key}: {p.message}", p.remedy) for p in problems if p.key not in OTHER_LINES]
    return findings or [ok("config", f"cluster={cluster} is valid on this machine")]


def summary(findings: Sequence[Finding]) -> str:
    """The last line of the page."""
    counts = Counter(finding.level for finding in findings)
    parts = [count(counts[level], level.value) for level in (Level.problem, Level.warning) if counts[level]]
    if not parts:
        return "all checks passed"
    return ", ".join(parts) + ("" if counts[Level.problem] else "; runs can start")
