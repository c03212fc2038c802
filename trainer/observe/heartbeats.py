"""Heartbeats: TensorFlow notices neither a frozen peer nor a link that is cut, so a task asks its peers itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from trainer.faults import exit_codes
from trainer.observe.peers import read_status
from trainer.plan.plan import Task

# A supervisor ends who is silent after one heartbeat timeout; its peers wait a little longer for that.
PATIENCE = 1.5
BEATS = 4  # within a timeout

Leave = Callable[[int, str], None]  # with an exit code and the reason; ends the process


class Heartbeats:
    """What is known of the peers that a task cannot work without; the clock is passed in, seconds that only rise."""

    def __init__(self, me: str, peers: Iterable[Task], *, timeout_secs: float, now: float) -> None:
        self._me, self._timeout_secs = me, timeout_secs
        self.peers = {peer.name: peer for peer in peers}
        self._heard_at = dict.fromkeys(self.peers, now)
        self._born_at: dict[str, float] = {}

    def hear(
        self, name: str, page: Mapping[str, Any] | None, now: float, *, loses: bool = True
    ) -> tuple[int, str] | None:
        """Takes in a peer's status page, or that none came.

        Args:
            loses: whether something is lost when the peer is started again; not before a state was loaded.

        Returns:
            Why this task cannot go on, if so: an exit code and a sentence.
        """
        peer = self.peers[name]
        if page is None:
            silent = now - self._heard_at[name]
            if silent <= self._timeout_secs * PATIENCE:
                return None
            return exit_codes.UNAVAILABLE, (
                f"{name} at {peer.control} has not answered for {silent:.0f} s: it is gone or frozen, or the link "
                f"{self._me} -> {name} is cut"
            )
        self._heard_at[name] = now
        born_at = self._born_at.get(name)
        self._born_at[name] = page["started_at"]
        if loses and born_at not in (None, page["started_at"]):
            return exit_codes.INCOMPLETE, f"{name} was started again, and what it held is gone"
        return None


def watch(
    heartbeats: Heartbeats,
    *,
    timeout_secs: float,
    is_over: Callable[[], bool],
    loses: Callable[[], bool],
    leave: Leave,
) -> None:
    """Asks every peer again and again, in a thread of its own each, until the task needs them no more."""

    def ask(name: str, peer: Task) -> None:
        while not is_over():
            began = time.monotonic()
            page = _page(peer.control, timeout_secs / BEATS)
            lost = heartbeats.hear(name, page, time.monotonic(), loses=loses())
            if lost and not is_over():
                leave(*lost)
            time.sleep(max(0.0, began + timeout_secs / BEATS - time.monotonic()))

    for name, peer in heartbeats.peers.items():
        threading.Thread(target=ask, args=(name, peer), name=f"heartbeat {name}", daemon=True).start()


def _page(control: str, timeout_secs: float) -> dict[str, Any] | None:
    try:
        return read_status(control, timeout_secs=timeout_secs)
    except (OSError, ValueError):
        return None
