"""Checks what a run is to be exported to."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from trainer.config.schema import ExportConfig
from trainer.faults.problems import Problem

FORMATS = ("keras", "weights", "saved_model", "onnx", "litert")
NAMED = ("last", "best")
FILES = (".npz", ".csv", ".jsonl")  # formats of predictions


def check_export(export: ExportConfig) -> Iterator[Problem]:
    """Formats that do not exist, or cannot be written here, and a checkpoint that cannot be one."""
    for name in export.formats:
        if name not in FORMATS:
            yield Problem(
                "export.formats", "unknown-choice", f"unknown format {name!r}", f"choose from {', '.join(FORMATS)}"
            )
    if "onnx" in export.formats and find_spec("tf2onnx") is None:
        yield Problem(
            "export.formats", "not-available", "onnx needs the package tf2onnx", "pip install 'trainer[onnx]'"
        )
    if export.checkpoint not in NAMED and not export.checkpoint.isdecimal():
        message = f"{export.checkpoint!r} must be last, best or a step"
        yield Problem("export.checkpoint", "malformed", message, "e.g. export.checkpoint=best")


def check_file(to: str | None, *, writes: bool) -> Iterator[Problem]:
    """Checks the file that trainer predict writes; trainer evaluate writes none."""
    if writes and (to is None or not to.endswith(FILES)):
        message = "trainer predict needs a file" if to is None else f"{to} ends in none of {', '.join(FILES)}"
        yield Problem("export.to", "malformed", message, "e.g. to=predictions.npz")
    elif to is not None and not writes:
        yield Problem("export.to", "no-effect", "trainer evaluate writes no file", "leave it out; --json prints scores")
