"""Asks a running run for its parameters, by a file that its chief answers with another file.

The chief answers between two steps, so all values are of the same step.
"""

import json
import os
import secrets
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np

from trainer.storage.atomic import write_atomically
from trainer.storage.run_directory import RunDirectory

QUESTION, ANSWER = "parameters-", "answer-"  # begin the names of files, both with the same end
SLOTS = "slots/"  # begins the paths of slots: slots/momentum/dense/kernel
STEP = "step"  # of an answer: the global step


def ask(directory: RunDirectory, patterns: Sequence[str]) -> Path:
    """Asks for the parameters whose paths match a pattern (fnmatch).

    Returns:
        The path of the answer.
    """
    directory.requests.mkdir(exist_ok=True)
    number = secrets.token_hex(8)
    write_atomically(directory.requests / f"{QUESTION}{number}", json.dumps(list(patterns)))
    return directory.requests / f"{ANSWER}{number}.npz"


def withdraw(answer: Path) -> None:
    """Removes a question and its answer."""
    question = answer.with_name(answer.stem.replace(ANSWER, QUESTION))
    for path in (question, answer):
        path.unlink(missing_ok=True)


def answer(directory: RunDirectory, name: str, step: int, values: Mapping[str, np.ndarray]) -> None:
    """Answers the question in the file with this name from the values of a step, and removes it.

    Raises:
        OSError, ValueError, TypeError: if its asker has exited, it is damaged, or the directory cannot be written.
    """
    question = directory.requests / name
    patterns = [str(one) for one in json.loads(question.read_text())]
    question.unlink()
    chosen = {path: value for path, value in values.items() if any(_matches(path, one) for one in patterns)}
    target = question.with_name(name.replace(QUESTION, ANSWER) + ".npz")
    temporary = target.with_name(f".{target.name}")
    named: dict[str, Any] = {STEP: np.int64(step), **{f"/{path}": value for path, value in chosen.items()}}
    with temporary.open("wb") as file:
        np.savez(file, **named)
    os.replace(temporary, target)


def _matches(path: str, pattern: str) -> bool:
    """Whether a pattern matches a path; slots of an optimizer match only patterns that name them."""
    return fnmatchcase(path, pattern) and path.startswith(SLOTS) == pattern.startswith(SLOTS)


def read(answer: Path) -> tuple[int, dict[str, np.ndarray]]:
    """Returns the step of an answer, and its values by path; removes it."""
    with np.load(answer) as file:
        step = int(file[STEP])
        values = {name[1:]: file[name] for name in file.files if name != STEP}
    answer.unlink()
    return step, values
