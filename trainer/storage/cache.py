"""The user's cache folder, where a command leaves results for later ones on this machine."""

import os
import socket
from contextlib import suppress
from pathlib import Path


def folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "trainer"


def is_news(what: str) -> bool:
    """Whether something has not been reported on this machine yet; always true if the report cannot be recorded."""
    note = folder() / "told" / f"{what}-{socket.gethostname()}"
    with suppress(OSError):
        if note.exists():
            return False
        note.parent.mkdir(parents=True, exist_ok=True)
        note.touch()
    return True
