"""Actions of the console's buttons, which do the same as commands in a terminal."""

import os
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from trainer.config import shell
from trainer.observe import runs
from trainer.storage import requests
from trainer.storage.requests import Request
from trainer.storage.run_directory import RunDirectory

OUTPUT = "launcher.log"  # what a launcher that the console started prints
LOWEST = 19  # priority

_starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="launchers")
_launchers: dict[Path, subprocess.Popen[bytes]] = {}  # that this console started, the last of each run directory


class RefusedError(Exception):
    """Says in a sentence why an action is impossible."""


def stop(path: Path) -> None:
    """Makes a run save and end.

    Raises:
        RefusedError: if it is not running, or has no launcher.
    """
    facts = runs.read(path)
    if not facts.is_running:
        raise RefusedError(f"the run is {facts.state}")
    if facts.launcher is None:
        raise RefusedError("the run has no launcher; a scheduler started it, so stop it there")
    requests.make(RunDirectory(path), Request.stop)


def save(path: Path) -> None:
    """Makes a run save a checkpoint.

    Raises:
        RefusedError: if it is not running.
    """
    facts = runs.read(path)
    if not facts.is_running:
        raise RefusedError(f"the run is {facts.state}")
    requests.make(RunDirectory(path), Request.save)


def continue_run(path: Path) -> None:
    """Starts a launcher for a run that has stopped; it outlives the console.

    Raises:
        RefusedError: if it is running, or done.
    """
    facts = runs.read(path)
    if facts.state in (runs.RUNNING, runs.DONE):
        raise RefusedError(f"the run is {facts.state}")
    start_launcher(["continue", shell.override("run", str(path))], path)


def start_launcher(words: list[str], path: Path) -> None:
    """Starts `python -m trainer WORDS`, without a shell, in a new session; its output goes to launcher.log."""
    path.mkdir(parents=True, exist_ok=True)

    def start() -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW  # a task may have made a link there
        with os.fdopen(os.open(path / OUTPUT, flags, 0o644), "ab") as output:
            _launchers[path] = subprocess.Popen(
                [sys.executable, "-m", "trainer", *words],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    _starter.submit(start).result()


def exit_code(path: Path) -> int | None:
    """Returns the exit code of the launcher that this console started for a run; None if it is alive, or not ours."""
    launcher = _launchers.get(path)
    return None if launcher is None else launcher.poll()


def yield_to_others() -> None:
    """Gives this thread the lowest priority, so that looking at a run does not slow down its training.

    A process inherits the priority of the thread that starts it, so launchers are started by one that keeps its own.
    """
    _starter.submit(int).result()  # its thread is there from now on
    if sys.platform == "linux":  # elsewhere it would be that of the whole process
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), LOWEST)


def ask_of_task(path: Path, task: str, request: Request) -> None:
    """Makes the launcher of a run kill a task, or make it write the stacks of its threads to its log.

    Raises:
        RefusedError: if the run has no launcher, or no such task.
    """
    facts, directory = runs.read(path), RunDirectory(path)
    if not facts.is_running or facts.launcher is None:
        raise RefusedError(f"the run is {facts.state}" if not facts.is_running else "the run has no launcher")
    if task not in runs.read_status(directory).get("attempts", {}):
        raise RefusedError("the run has no such task")
    requests.make(directory, request, task)
