"""Prints what the doctor found."""

import textwrap
from collections.abc import Sequence

from rich.text import Text

from trainer.commands.doctor.finding import Finding, Level, summary
from trainer.config.output import Output

STYLES = {Level.ok: "green", Level.warning: "yellow", Level.problem: "bold red"}


def show(findings: Sequence[Finding]) -> None:
    """Prints the page: level, what was looked at, what was found, and below it what to type."""
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
    """Lines that leave paths and options whole, however narrow the terminal is."""
    lines = textwrap.wrap(text, max(width, 20), break_long_words=False, break_on_hyphens=False)
    return [indent + line for line in lines]
