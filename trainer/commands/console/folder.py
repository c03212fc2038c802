"""The folder whose runs the console shows, and the files of it that may be downloaded."""

import os
from dataclasses import dataclass
from pathlib import Path

from trainer.commands.console.actions import OUTPUT
from trainer.observe import runs
from trainer.storage import lease
from trainer.storage.run_directory import RunDirectory

FOLDERS = {"export": 1, "logs": 1, "checkpoints": 2, "best": 2}  # whose files may be downloaded: how deep they are
FILES = (  # and these
    *("report.html", "config.yaml", "plan.json", "summary.json", "history.jsonl", "events.jsonl", "evaluations.jsonl"),
    *("placement.json", "profile/trace.json", OUTPUT),
)


class UnknownRunError(Exception):
    """No run below the console's folder has this name."""


@dataclass(frozen=True)
class Folder:
    """The folder whose runs are shown; nothing outside it is read, even through links."""

    path: Path

    def run(self, name: str) -> Path:
        """Returns a run directory by its path from the folder.

        Raises:
            UnknownRunError: if there is none, or a link leads out of the folder.
        """
        root = self.path.resolve()
        try:
            path = (root / name).resolve()
            if path != root and path.is_relative_to(root) and runs.is_run(path) and not _has_links(path):
                return path
        except (OSError, ValueError, RuntimeError) as error:  # a name that no file can have, a loop of links
            raise UnknownRunError(name) from error
        raise UnknownRunError(name)

    def file(self, name: str, path: str) -> Path:
        """Returns a file of a run that may be downloaded.

        Raises:
            UnknownRunError: if it does not exist, or may not be downloaded.
        """
        directory = self.run(name)
        try:
            found = (directory / path).resolve()
            top, *parts = found.relative_to(directory).parts
            if found.is_file() and (FOLDERS.get(top) == len(parts) or str(Path(top, *parts)) in FILES):
                return found
        except (OSError, ValueError, RuntimeError) as error:
            raise UnknownRunError(f"{name}/{path}") from error
        raise UnknownRunError(f"{name}/{path}")

    def name(self, path: Path) -> str:
        """Returns the path of a run from the folder."""
        return str(path.relative_to(self.path))

    def is_running(self, name: str) -> bool:
        """Whether a run exists and is running."""
        try:
            return lease.owner(RunDirectory(self.run(name))) is not None
        except UnknownRunError:
            return False

    def runs(self) -> list[tuple[str, Path]]:
        """Yields (name, directory) of every run that may be shown."""
        found = []
        for path in runs.find(self.path):
            try:
                found.append((self.name(path), self.run(self.name(path))))
            except UnknownRunError:  # a link that leads out
                continue
        return found


def _has_links(path: Path) -> bool:
    """Whether a folder or its logs contain a link: a task may have made one to a file of another user."""
    with os.scandir(path) as entries:
        if any(entry.is_symlink() for entry in entries):
            return True
    logs = path / "logs"
    return logs.is_dir() and any(log.is_symlink() for log in logs.iterdir())
