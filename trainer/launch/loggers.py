"""Starts a process for each of `loggers`, and waits for it briefly when the run has ended."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from trainer.config import shell
from trainer.config.command_line import program
from trainer.launch.ending import shown
from trainer.storage.run_directory import RunDirectory

END_SECS = 30.0  # for a logger to log the rest, once the run has ended


class Loggers:
    """The processes of a run's loggers; leaving the block ends the remaining ones."""

    def __init__(self, names: Sequence[str], directory: RunDirectory) -> None:
        self._directory, self._stack = directory, ExitStack()
        self._processes = {name: self._start(name) for name in names}

    def _start(self, name: str) -> subprocess.Popen[bytes]:
        log = self._stack.enter_context(self._log(name).open("wb"))
        command = [sys.executable, "-m", "trainer.observe.loggers.follow", name, str(self._directory.path)]
        # In its own session: Ctrl-C is for the run, whose end is logged too.
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True)

    def _log(self, name: str) -> Path:
        return self._directory.logs / f"logger-{name}.log"

    def __enter__(self) -> Loggers:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            process.kill()
            process.wait()
        self._stack.close()

    def finish(self, timeout_secs: float | None = END_SECS) -> list[str]:
        """Lets the loggers log the rest, within this time; returns a sentence about each that did not."""
        for process in self._processes.values():
            assert process.stdin is not None
            with suppress(OSError):
                process.stdin.close()
        deadline = None if timeout_secs is None else time.monotonic() + timeout_secs
        return [why for name, process in self._processes.items() if (why := self._wait(name, process, deadline))]

    def _wait(self, name: str, process: subprocess.Popen[bytes], deadline: float | None) -> str:
        command = [*program(), "log", shell.override("run", shown(self._directory.path)), f"loggers=[{name}]"]
        again = f"{shell.joined(command)} resumes it"
        try:
            code = process.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return f"logger {name} was killed: it had not finished {END_SECS:.0f} s after the run ended; {again}"
        if code == 0:
            return ""
        said = self._log(name).read_text(errors="replace").strip().splitlines() or [f"exit code {code}"]
        return f"logger {name} failed: {said[-1]}; {again}"
