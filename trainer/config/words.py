"""Numbers as a person reads them."""


def count(number: int, what: str) -> str:
    """1 task, 2 tasks."""
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def size(nbytes: float) -> str:
    """512 B, 1.5 KiB, 10.6 MiB, 2.00 GiB."""
    for unit in ("B", "KiB", "MiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.2f} GiB"
