"""trainer stop: makes a run save a checkpoint and end, and waits until it has."""

import time

from trainer.commands.runs import status
from trainer.faults import exit_codes
from trainer.launch import progress
from trainer.launch.ending import shown
from trainer.observe import runs
from trainer.observe.live import NotRunningError
from trainer.storage import lease, requests
from trainer.storage.requests import Request
from trainer.storage.run_directory import RunDirectory

POLL_SECS = 0.1
START_SECS = 15.0  # from the lease of a launcher to its first status


def run(directory: RunDirectory, *, as_json: bool) -> int:
    """Stops the run and shows how it ended; returns 0.

    Raises:
        NotRunningError: if it is not under way, or no launcher started it.
    """
    facts = runs.read(directory.path)
    where = shown(directory.path)
    if not facts.is_running:
        raise NotRunningError(f"{where} is not running: it is {facts.state}")
    deadline = time.monotonic() + START_SECS
    while facts.is_running and facts.launcher is None and time.monotonic() < deadline:
        time.sleep(POLL_SECS)
        facts = runs.read(directory.path)
    if facts.is_running and facts.launcher is None:
        raise NotRunningError(f"{where} has no launcher; a scheduler started it, so stop it there")
    requests.make(directory, Request.stop)
    with progress.note(f"stopping {where}: it finishes its step and saves a checkpoint"):
        while lease.owner(directory) is not None:
            time.sleep(POLL_SECS)
    status.show(directory, as_json=as_json)
    return exit_codes.OK
