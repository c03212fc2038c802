"""Points at which a process can be made to fail, to prove that a run survives it; unset failpoints cost nothing.

    TRAINER_FAILPOINT="push:kill@40"                    NAME:ACTION@STEP
    TRAINER_FAILPOINT="push:sleep=5@40;save-data:stop@60"

The action happens once per process: the first time that the point is reached at this step or later. It is
`kill` (SIGKILL to itself), `stop` (SIGSTOP to itself), `raise` (a RuntimeError) or `sleep=SECONDS`. The points, each
between two events that are visible from outside:

    who         name           what is done, and what is not
    worker      step           a step is complete; nothing of the next one was pulled
                push           the first shard host has this worker's gradient; the others have not
    shard host  take           the gradients are taken out of their queues; nothing is updated
                apply          the shard is updated; no worker has the token for it
                token          the first worker has its token; the others have not
    chief       generation     the new generation is recorded; no shard host has heard of it
                load           the first shard host has its state; the others have not
    checkpoint  save-data      the tensors are in the temporary folder; the manifest is not
                save-manifest  the manifest is there too; the folder does not have its name yet
                rename         the folder has its name; its parent was not synced, so a power cut may undo it
"""

import functools
import logging
import os
import re
import signal
import threading
import time
from dataclasses import dataclass

_log = logging.getLogger(__name__)

VARIABLE = "TRAINER_FAILPOINT"
NAMES = ("step", "push", "take", "apply", "token", "generation", "load", "save-data", "save-manifest", "rename")
WRITTEN = re.compile(r"(?P<name>[a-z-]+):(?P<action>kill|stop|raise|sleep=(?P<secs>\d+(\.\d+)?))@(?P<step>\d+)")

_lock = threading.Lock()


@dataclass(frozen=True)
class Failpoint:
    """An action of a process on itself, with its point and step."""

    name: str  # one of NAMES
    action: str  # kill, stop, raise or sleep=SECONDS
    step: int  # the first one at which it acts
    secs: float = 0.0  # of a sleep

    def __str__(self) -> str:
        return f"{self.name}:{self.action}@{self.step}"

    def act(self, step: int) -> None:
        _log.warning("failpoint %s reached at step %d", self, step)
        if self.action == "raise":
            raise RuntimeError(f"failpoint {self} reached at step {step}")
        if self.secs:
            time.sleep(self.secs)
        elif self.action in ("kill", "stop"):
            os.kill(os.getpid(), signal.SIGKILL if self.action == "kill" else signal.SIGSTOP)


def parse(text: str) -> list[Failpoint]:
    """Reads NAME:ACTION@STEP, several separated by `;`; an empty text has none.

    Raises:
        ValueError: says what cannot be read and what is allowed.
    """
    return [_parse_one(part.strip()) for part in text.split(";")] if text.strip() else []


def reach(name: str, step: int) -> None:
    """Reports that this process is at a point of NAMES, at a global step; acts if a failpoint is set there."""
    for failpoint in _take_due(name, step):
        failpoint.act(step)


def is_set(name: str) -> bool:
    """Whether a failpoint at a point of NAMES has yet to act in this process."""
    assert name in NAMES, name
    return any(failpoint.name == name for failpoint in _set_in_this_process())


@functools.cache
def _set_in_this_process() -> list[Failpoint]:
    """Returns those that have not acted yet; read late, because a task is forked before it has its environment."""
    return parse(os.environ.get(VARIABLE, ""))


def _take_due(name: str, step: int) -> list[Failpoint]:
    assert name in NAMES, name
    waiting = _set_in_this_process()
    if not waiting:
        return []
    with _lock:
        due = [failpoint for failpoint in waiting if failpoint.name == name and step >= failpoint.step]
        for failpoint in due:
            waiting.remove(failpoint)
    return due


def _parse_one(text: str) -> Failpoint:
    found = WRITTEN.fullmatch(text)
    if found is None or found["name"] not in NAMES:
        raise ValueError(
            f"{VARIABLE}: {text!r} is not NAME:ACTION@STEP, e.g. push:kill@40; names are {', '.join(NAMES)}; actions "
            "are kill, stop, raise and sleep=SECONDS; separate several with ;"
        )
    return Failpoint(found["name"], found["action"], int(found["step"]), float(found["secs"] or 0))
