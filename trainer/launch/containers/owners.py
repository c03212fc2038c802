"""Decides which user containers run as, and who owns what they write."""

import contextlib
import os
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path

from trainer.config import shell
from trainer.faults.problems import ConfigError, Problem
from trainer.launch.containers.spec import NOBODY
from trainer.plan.checks.containers import check_paths


def user_of_tasks() -> tuple[int, int]:
    """Returns user and group of the tasks: the caller's, and never root."""
    return (os.getuid(), os.getgid()) if os.getuid() else (NOBODY, NOBODY)


def check_readable(inputs: Sequence[str]) -> None:
    """Fails early if tasks cannot read their inputs: tasks of root run as a user who may read less.

    Raises:
        ConfigError: with the command that opens the paths.
    """
    problems = list(check_paths("launch", inputs))
    if problems:
        raise ConfigError(problems)
    if os.getuid():
        return
    closed = [path for path in inputs if not _is_open(Path(path))]
    if closed:
        message = f"{', '.join(closed)} cannot be read by user {NOBODY}, which runs the tasks of root"
        remedy = f"type chmod -R o+rX {shell.joined(closed)}, or use another user"
        raise ConfigError([Problem("launch", "unreadable", message, remedy)])


def _is_open(path: Path) -> bool:
    """Whether everybody may read a path; a missing path is reported elsewhere."""
    if not path.exists():
        return True
    needed = stat.S_IROTH | (stat.S_IXOTH if path.is_dir() else 0)
    return path.stat().st_mode & needed == needed


def lend(run: str) -> None:
    """If the caller is root, gives the run directory to the tasks' user; `given_back` takes it back."""
    if os.getuid() == 0:
        _change_owner(run, NOBODY, NOBODY)


@contextlib.contextmanager
def given_back(run: str) -> Iterator[None]:
    """If the caller is root, gives the run directory, and what tasks wrote, to its owner when the block ends."""
    owner = os.stat(run)
    try:
        yield
    finally:
        if os.getuid() == 0:
            _change_owner(run, owner.st_uid, owner.st_gid)


def _change_owner(run: str, user: int, group: int) -> None:
    for path in [Path(run), *Path(run).rglob("*")]:
        with contextlib.suppress(FileNotFoundError):
            os.chown(path, user, group, follow_symlinks=False)
