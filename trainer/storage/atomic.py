"""Writes files and folders atomically: readers see the old one, the new one or none, never a part."""

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from trainer.faults.failpoints import reach

UNFINISHED = re.compile(r"\.\d{9,}\.tmp-(\d{1,10})")  # the step of a checkpoint, and its writer's process id
UNWRITTEN = re.compile(r"\.[a-z]+\.(?:json|jsonl|yaml|html)\.\d{1,10}")  # a file of `write_atomically`


def write_atomically(path: Path, text: str) -> None:
    """Replaces a file atomically."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_text(text)
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Yields a hidden folder to fill, then renames it to `path`, which ends in a step; an error leaves nothing."""
    temporary = _temporary(path)
    try:
        temporary.mkdir()
        yield temporary
        _sync(temporary)
        temporary.rename(path)
        reach("rename", int(path.name))
        _sync(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)  # after the rename there is none


def remove_folder(path: Path) -> None:
    """Removes a folder, if it exists; a process killed in between leaves a hidden leftover, not half a folder."""
    try:
        path.rename(_temporary(path))
    except FileNotFoundError:
        return
    _delete(_temporary(path))


def remove_leftovers(folder: Path) -> None:
    """Deletes hidden folders of processes that have ended, and of this one, which fills one at a time."""
    for path in folder.iterdir():
        writer = UNFINISHED.fullmatch(path.name)
        if writer and (int(writer[1]) == os.getpid() or not _is_alive(int(writer[1]))):
            _delete(path)


def remove_all_leftovers(run: Path) -> None:
    """Deletes files left behind by killed writers of a run directory; all writers must have ended."""
    for folder in (run, run / "checkpoints", run / "best"):
        with suppress(OSError):  # no directory, or an error that is reported when it is used
            for path in folder.iterdir():
                if UNFINISHED.fullmatch(path.name) or UNWRITTEN.fullmatch(path.name):
                    _delete(path)


def write_synced(file: Path, text: str) -> None:
    """Writes a new file; it is on disk when this returns."""
    with file.open("x") as opened:
        opened.write(text)
        opened.flush()
        os.fsync(opened.fileno())


def link_or_copy(source: Path, target: Path) -> None:
    """Gives a file that is never written again a second name; copies it where the file system has no hard links."""
    try:
        os.link(source, target, follow_symlinks=False)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(source, target, follow_symlinks=False)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp-{os.getpid()}")


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _delete(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _is_alive(process_id: int) -> bool:
    try:
        os.kill(process_id, 0)
    except PermissionError:
        return True
    except (ProcessLookupError, OverflowError):
        return False
    return True
