"""What one check of the doctor found."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from trainer.faults.problems import Problem

TOLD_APART = ("TF_CONFIG", "tensorflow", "keras")  # problems of a config that other checks tell


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


# The config and TF_CONFIG


def config(problems: Sequence[Problem], cluster: str) -> list[Finding]:
    findings = [problem("config", f"{p.key}: {p.message}", p.remedy) for p in problems if p.key not in TOLD_APART]
    return findings or [ok("config", f"cluster={cluster} is valid on this machine")]


# Words


def summary(findings: Sequence[Finding]) -> str:
    """The last line of the page."""
    counts = {level: sum(finding.level is level for finding in findings) for level in Level}
    problems, warnings = counts[Level.problem], counts[Level.warning]
    if not problems and not warnings:
        return "nothing is missing"
    parts = [f"{n} {word}{'' if n == 1 else 's'}" for n, word in ((problems, "problem"), (warnings, "warning")) if n]
    return ", ".join(parts) + ("" if problems else "; runs can start")


def listed(items: Sequence[object]) -> str:
    words = list(map(str, items))
    return words[0] if len(words) == 1 else ", ".join(words[:-1]) + " and " + words[-1]
