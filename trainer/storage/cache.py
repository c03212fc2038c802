"""The folder of a user's cache: what a command leaves for the next ones on this machine."""

import os
import socket
from contextlib import suppress
from pathlib import Path


def folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainer"


def is_news(what: str) -> bool:
    """Whether nobody was told of something on this machine yet; where that cannot be noted, it always is."""
    note = folder() / "told" / f"{what}-{socket.gethostname()}"
    with suppress(OSError):
        if note.exists():
            return False
        note.parent.mkdir(parents=True, exist_ok=True)
        note.touch()
    return True
