"""Whom the tasks of containers are, and whom what they write belongs to."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from trainer.render.container import NOBODY


def user_of_tasks() -> tuple[int, int]:
    """User and group of the tasks: the caller's, and never root."""
    return (os.getuid(), os.getgid()) if os.getuid() else (NOBODY, NOBODY)


def lend(run: str) -> None:
    """Gives a run directory of root's to the tasks' user."""
    if os.getuid() == 0:
        _change_owner(run, NOBODY, NOBODY)


def give_back(run: str, owner: tuple[int, int]) -> None:
    """Gives it, and what the tasks wrote, back to whom it was of."""
    if os.getuid() == 0:
        _change_owner(run, *owner)


def _change_owner(run: str, user: int, group: int) -> None:
    for path in [Path(run), *Path(run).rglob("*")]:
        with contextlib.suppress(FileNotFoundError):
            os.chown(path, user, group, follow_symlinks=False)
