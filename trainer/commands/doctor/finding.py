"""The findings of the doctor's checks, and their page."""

import textwrap
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import Enum

from rich.text import Text

from trainer.config.output import Output
from trainer.config.words import count
from trainer.faults.problems import Problem

OTHER_LINES = ("TF_CONFIG", "tensorflow", "keras", "ulimit -n")  # keys whose problems have their own line


class Level(Enum):
    ok = "ok"
    warning = "warning"  # a run may do without it
    problem = "problem"  # a run will not


STYLES = {Level.ok: "green", Level.warning: "yellow", Level.problem: "bold red"}


@dataclass(frozen=True)
class Finding:
    """One line of the page."""

    level: Level
    what: str  # what was looked at
    message: str
    remedy: str = ""  # what to type


@dataclass(frozen=True)
class Answer:
    """The output of a command."""

    code: int | None  # exit code; negative: the signal that ended it; none: it had not ended at its deadline
    out: str = ""
    err: str = ""

    def last_words(self) -> str:
        """Returns the last line that the command printed, which is usually the reason."""
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
    """Returns the finding for a fact of this machine, or for the problem that a config has with it."""
    return next((problem(what, one.message, one.remedy) for one in problems if one.key == what), ok(what, message))


def config(problems: Sequence[Problem], cluster: str) -> list[Finding]:
    findings = [problem("config", f"{p.key}: {p.message}", p.remedy) for p in problems if p.key not in OTHER_LINES]
    return findings or [ok("config", f"cluster={cluster} is valid on this machine")]


def summary(findings: Sequence[Finding]) -> str:
    """Returns the last line of the page."""
    counts = Counter(finding.level for finding in findings)
    parts = [count(counts[level], level.value) for level in (Level.problem, Level.warning) if counts[level]]
    if not parts:
        return "all checks passed"
    return ", ".join(parts) + ("" if counts[Level.problem] else "; runs can start")


def show(findings: Sequence[Finding]) -> None:
    """Prints the page: level, what was checked, the result, and below it what to type."""
    console = Output()
    width = console.width
    first = max(len(level.value) for level in Level) + 2
    indent = first + max(len(finding.what) for finding in findings) + 2
    for finding in findings:
        lines = [*_wrapped(finding.message, width - indent), *_wrapped(finding.remedy, width - indent - 2, "  ")]
        head = Text(f"{finding.level.value:<{first}}", STYLES[finding.level])
        head.append(f"{finding.what:<{indent - first}}", "bold")
        head.append(lines[0] if lines else "", "default")
        for line in lines[1:]:
            head.append("\n" + " " * indent + line, "default")
        console.print(head, soft_wrap=True)
    console.print(Text("\n" + summary(findings)), soft_wrap=True)


def _wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """Wraps a text without splitting paths and options, however narrow the terminal is."""
    lines = textwrap.wrap(text, max(width, 20), break_long_words=False, break_on_hyphens=False)
    return [indent + line for line in lines]
