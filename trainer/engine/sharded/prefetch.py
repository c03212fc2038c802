"""Pulls the next step's parameters while this step computes and pushes.

For hosts with several shards each (buckets, under sync only). A second Session.run waits for the next step's tokens
and puts what it pulls into queues of this worker, where the step takes it. The tokens are the same as without it, and
so is everything that follows from them.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from trainer.engine.instruments import GraphClock
from trainer.engine.sharded.resources import Link


class PrefetchGraph(NamedTuple):
    """The operations of a worker that prefetches."""

    pulled: list[tf.Operation]  # the next step's messages are here
    messages: list[tf.Tensor]  # those messages, by shard, taken once
    closed: list[tf.Operation]  # no more will come
    settled: list[tf.Operation]  # the next step's tokens are here; they stay where they are


def build_prefetch(links: Sequence[Link], here: str) -> PrefetchGraph:
    """Adds a queue for one message of each shard, on the worker's device `here`, from which the step takes it."""
    queues, pulled = [], []
    for link in links:
        message = link.pull(GraphClock(is_wanted=False))
        with tf.device(here):
            name = f"ahead{secrets.token_hex(8)}"
            queues.append(tf.compat.v1.FIFOQueue(1, [message.dtype], [message.shape], shared_name=name))
            pulled.append(queues[-1].enqueue(tf.identity(message)))
    with tf.device(here):
        closed = [queue.close(cancel_pending_enqueues=True) for queue in queues]
        messages = [queue.dequeue() for queue in queues]
    return PrefetchGraph(pulled, messages, closed, [link.wait() for link in links])


class Prefetch:
    """Calls `pull` repeatedly in a thread; a call ends when its result is queued, so it is one ahead of its use."""

    def __init__(self, pull: Callable[[], object], *, fail: Callable[[], object]) -> None:
        """Prepares the thread; `fail` is called when `pull` has raised, so that no thread waits for a result."""
        self._pull, self._fail = pull, fail
        self._changed = threading.Condition()
        self._pulled = self._used = 0
        self._error: Exception | None = None
        self.is_started = False

    @classmethod
    def of(cls, graph: PrefetchGraph, session: Any) -> Prefetch:
        """Prefetches with the operations of a worker's graph."""

        def fail() -> None:
            with contextlib.suppress(tf.errors.OpError, RuntimeError):  # a closed session has ended every wait already
                session.run(graph.closed)

        return cls(lambda: session.run(graph.pulled), fail=fail)

    def start(self) -> None:
        if not self.is_started:
            self.is_started = True
            threading.Thread(target=self._run, name="prefetch", daemon=True).start()

    def use(self) -> None:
        """Counts one result as taken."""
        with self._changed:
            self._used += 1

    def wait(self) -> None:
        """Blocks until there is a result that was not taken; raises the error of `pull`."""
        with self._changed:
            self._changed.wait_for(lambda: self._pulled > self._used or self._error is not None)
        self.check()

    def check(self) -> None:
        """Raises the error of `pull`, if there was one."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        while self._error is None:
            error = None
            try:
                self._pull()
            except Exception as raised:
                error = raised
            with self._changed:
                self._pulled, self._error = self._pulled + (error is None), error
                self._changed.notify_all()
        self._fail()
