"""Checks the formats and files of an export."""

from collections.abc import Iterator, Sequence
from importlib.util import find_spec

from trainer.faults.problems import Problem

FORMATS = ("keras", "weights", "saved_model", "onnx", "litert")
NAMED = ("last", "best")
FILES = (".npz", ".csv", ".jsonl")  # formats of predictions


def check_formats(formats: Sequence[str]) -> Iterator[Problem]:
    """Yields a problem for every format that does not exist, or cannot be written here."""
    for name in formats:
        if name not in FORMATS:
            message = f"unknown format {name!r}"
            yield Problem("export.formats", "unknown-choice", message, f"choose from {', '.join(FORMATS)}")
    if "onnx" in formats and find_spec("tf2onnx") is None:
        message = "onnx needs the package tf2onnx"
        yield Problem("export.formats", "not-available", message, "pip install 'trainer[onnx]'")


def check_checkpoint(name: str) -> Iterator[Problem]:
    """Checks the name of a checkpoint: last, best or a step."""
    if name not in NAMED and not name.isdecimal():
        message = f"{name!r} must be last, best or a step"
        yield Problem("export.checkpoint", "malformed", message, "e.g. export.checkpoint=best")


def check_file(to: str | None, *, writes: bool) -> Iterator[Problem]:
    """Checks the file that trainer predict writes; trainer evaluate writes none."""
    if writes and (to is None or not to.endswith(FILES)):
        message = "trainer predict needs a file" if to is None else f"{to} ends in none of {', '.join(FILES)}"
        yield Problem("export.to", "malformed", message, "e.g. to=predictions.npz")
    elif to is not None and not writes:
        yield Problem("export.to", "no-effect", "trainer evaluate writes no file", "leave it out; --json prints scores")
