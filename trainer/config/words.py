"""Numbers and lists as a person reads them."""

from collections.abc import Sequence


def count(number: int, what: str) -> str:
    """1 task, 2 tasks."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def listed(items: Sequence[object]) -> str:
    """a, b and c."""
    return " and ".join(filter(None, [", ".join(map(str, items[:-1])), str(items[-1])]))


def some(names: Sequence[object], at_most: int) -> str:
    """a, b and 3 more."""
    more = f" and {len(names) - at_most:,} more" if len(names) > at_most else ""
    return ", ".join(map(str, names[:at_most])) + more


def size(nbytes: float) -> str:
    """512 B, 1.5 KiB, 10.6 MiB, 2.00 GiB."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} GiB"
