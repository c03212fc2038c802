"""trainer save: makes a run save a checkpoint before its next step, and waits for it."""

import time
from pathlib import Path

from trainer.config.output import print_json
from trainer.faults import exit_codes
from trainer.launch import progress
from trainer.launch.ending import shown
from trainer.observe import runs
from trainer.observe.live import NotRunningError
from trainer.storage import checkpoint, lease, requests
from trainer.storage.requests import Request
from trainer.storage.run_directory import RunDirectory

POLL_SECS = 0.05
WRITE_SECS = 600.0  # after the chief has begun to save


def run(directory: RunDirectory, *, as_json: bool) -> int:
    """Prints the new checkpoint; returns 0.

    Raises:
        NotRunningError: if the run is not under way, or ends or fails to save before it has one.
    """
    where = shown(directory.path)
    facts = runs.read(directory.path)
    if not facts.is_running:
        raise NotRunningError(f"{where} is not running: it is {facts.state}; its checkpoints are in checkpoints/")
    before = set(checkpoint.finished(directory.checkpoints))
    requests.make(directory, Request.save)
    with progress.note(f"{where}: waiting for the next step and its checkpoint"):
        saved = _wait(directory, before, where)
    step = int(saved.name)
    if as_json:
        print_json({"step": step, "path": str(saved)})
    else:
        print(f"saved step {step}: {shown(saved)}")
    return exit_codes.OK


def _wait(directory: RunDirectory, before: set[Path], where: str) -> Path:
    """Returns the first new checkpoint once the request has been taken."""
    taken_at: float | None = None
    while True:
        is_running = lease.owner(directory) is not None  # before the folder is read
        if taken_at is None and not requests.is_pending(directory, Request.save):
            taken_at = time.monotonic()
        new = [path for path in checkpoint.finished(directory.checkpoints) if path not in before]
        if new and (taken_at is not None or not is_running):
            return new[-1]
        if not is_running:
            raise NotRunningError(f"{where} ended before it saved; its log is {shown(directory.logs)}/worker-0.log")
        if taken_at is not None and time.monotonic() - taken_at > WRITE_SECS:
            raise NotRunningError(f"{where} saved no checkpoint; see {shown(directory.logs)}/worker-0.log")
        time.sleep(POLL_SECS)
