"""Formats numbers and lists for people."""

from collections.abc import Sequence


def count(number: int, what: str) -> str:
    """Formats a number with its noun: 1 task, 2 tasks."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def listed(items: Sequence[object]) -> str:
    """Joins items: a, b and c."""
    return " and ".join(filter(None, [", ".join(map(str, items[:-1])), str(items[-1])]))


def some(names: Sequence[object], at_most: int) -> str:
    """Joins the first items and counts the rest: a, b and 3 more."""
    more = f" and {len(names) - at_most:,} more" if len(names) > at_most else ""
    return ", ".join(map(str, names[:at_most])) + more


def size(nbytes: float) -> str:
    """Formats a size: 512 B, 1.5 KiB, 10.6 MiB, 2.00 GiB."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} GiB"
