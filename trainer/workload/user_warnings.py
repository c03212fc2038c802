"""Records warnings that Python and Keras emit for a user's code, to show them with the plan."""

import os
import traceback
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from trainer.workload.error_text import one_paragraph

MOST = 20  # warnings that are shown
NOT_FOR_USERS = (DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning)
KERAS = f"{os.sep}keras{os.sep}"  # part of the paths of its files
# Keras orders mappings by name, so with other names inputs may be swapped.
OTHER_NAMES = r"The structure of `inputs` doesn't match the expected structure\.\nExpected: \{.*\nReceived: inputs=\{"


@contextmanager
def recorded(user_file: str | None) -> Iterator[list[str]]:
    """Records each warning in this context once, with the line of the user's code that caused it.

    The list is complete when the context ends. Filters that the user's code or PYTHONWARNINGS sets are respected.
    """
    folder, texts = Path(user_file).resolve().parent if user_file else None, dict[str, None]()

    def record(message: Warning | str, category: type[Warning], filename: str, *_: Any, **__: Any) -> None:
        place = _place_in(folder)
        is_of_user = (place is not None and category is not FutureWarning) or Path(filename).parent == folder
        if not issubclass(category, NOT_FOR_USERS) and (is_of_user or KERAS in filename):
            text = one_paragraph(message) if isinstance(message, Warning) else f"{category.__name__}: {message}"
            if place or not any(told.endswith(text) for told in texts):  # Keras repeats one when the model is called
                texts[f"{place}: {text}" if place else text] = None

    told: list[str] = []
    with warnings.catch_warnings():
        warnings.simplefilter("always", append=True)
        warnings.filterwarnings("error", OTHER_NAMES)
        warnings.showwarning = record
        try:
            yield told
        finally:
            told += [*texts][:MOST] + ([f"{len(texts) - MOST} more warnings"] if len(texts) > MOST else [])


def _place_in(folder: Path | None) -> str | None:
    """Returns the innermost running line of a file in a folder, e.g. mine.py, line 7."""
    for frame, line in traceback.walk_stack(None):
        if folder is not None and Path(frame.f_code.co_filename).parent == folder:
            return f"{Path(frame.f_code.co_filename).name}, line {line}"
    return None
