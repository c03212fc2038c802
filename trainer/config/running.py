"""Finds the line of the user's code that a process is running."""

import os
import sys


def running_line(user: str | None, thread: int) -> str:
    """Returns the innermost line of the user's file, or of a file in its folder, that a thread is running, or ""."""
    folder = os.path.dirname(os.path.abspath(user)) if user is not None else None
    frame = sys._current_frames().get(thread)
    while frame is not None:
        code = frame.f_code
        is_file = not code.co_filename.startswith("<")  # <frozen runpy> is none, in whatever folder this runs
        if is_file and os.path.dirname(os.path.abspath(code.co_filename)) == folder:
            where = "" if code.co_name == "<module>" else f", in {code.co_name}"
            return f"{os.path.basename(code.co_filename)}, line {frame.f_lineno}{where}"
        frame = frame.f_back
    return ""
