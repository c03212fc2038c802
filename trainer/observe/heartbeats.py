"""Polls the status pages of peers, because TensorFlow notices neither a frozen peer nor a cut link."""

import threading
import time
from collections.abc import Callable, Iterable

from trainer.faults import exit_codes
from trainer.observe.peers import try_status
from trainer.observe.task_page import TaskPage
from trainer.plan.plan import Task

# A supervisor kills a silent task after one heartbeat timeout; its peers give it time for that.
PATIENCE = 1.5
BEATS = 4  # within a timeout

Leave = Callable[[int, str], None]  # ends the process, with an exit code and the reason


class Heartbeats:
    """Records when each peer that a task needs last answered, with monotonic times that are passed in."""

    def __init__(self, me: str, peers: Iterable[Task], *, timeout_secs: float, now: float) -> None:
        self._me, self._timeout_secs = me, timeout_secs
        self.peers = {peer.name: peer for peer in peers}
        self._heard_at = dict.fromkeys(self.peers, now)
        self._started_at: dict[str, float] = {}

    def hear(self, name: str, page: TaskPage | None, now: float, *, loses: bool = True) -> tuple[int, str] | None:
        """Records a peer's status page, or None if it did not answer.

        Args:
            loses: whether a restarted peer loses state; not before one was loaded.

        Returns:
            Why this task cannot continue, if so: an exit code and a sentence.
        """
        peer = self.peers[name]
        if page is None:
            silent = now - self._heard_at[name]
            if silent <= self._timeout_secs * PATIENCE:
                return None
            return exit_codes.UNAVAILABLE, (
                f"{name} at {peer.control} has not answered for {silent:.0f} s: it has died or is frozen, or the link "
                f"{self._me} -> {name} is cut"
            )
        self._heard_at[name] = now
        started_at = self._started_at.get(name)
        self._started_at[name] = page.started_at
        if loses and started_at not in (None, page.started_at):
            return exit_codes.INCOMPLETE, f"{name} was restarted and has lost its state"
        return None


def watch(
    heartbeats: Heartbeats, *, timeout_secs: float, is_over: Callable[[], bool], loses: Callable[[], bool], leave: Leave
) -> None:
    """Polls every peer, each in its own thread, until the task no longer needs them."""

    def poll(name: str, peer: Task) -> None:
        while not is_over():
            began = time.monotonic()
            page = try_status(peer.control, timeout_secs=timeout_secs / BEATS)
            failure = heartbeats.hear(name, page, time.monotonic(), loses=loses())
            if failure and not is_over():
                leave(*failure)
            time.sleep(max(0.0, began + timeout_secs / BEATS - time.monotonic()))

    for name, peer in heartbeats.peers.items():
        threading.Thread(target=poll, args=(name, peer), name=f"heartbeat {name}", daemon=True).start()
