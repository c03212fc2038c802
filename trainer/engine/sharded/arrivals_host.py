"""Trains without waiting for all workers: gradients are taken in the order in which they arrive.

    host loop:  next arrival -> apply it, keep it for a quorum, or drop it -> tokens

Each push is an entry in a host's arrivals, and each entry is answered with one token, so no worker waits for a slow
one. Under backup the host of the first shard decides for all: it passes its order of arrivals on, and the others follow
it, so that every shard updates from the same workers and no two shards wait for each other.

A request to copy the state is an entry too: what the chief reads of a shard is never half of an update, and under
backup all shards copy at the same step. So is a request to join: the unannounced pushes of a predecessor are discarded,
and so are its tokens.
"""

import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import tensorflow as tf

from trainer.engine.devices import device_of
from trainer.engine.queues import drain
from trainer.engine.sharded import staleness
from trainer.engine.sharded.host import OnUpdate, ShardHost
from trainer.engine.sharded.resources import HOLD, JOIN, STOP_PUSH, ArrivalLog
from trainer.engine.update import STOP
from trainer.engine.vectors import packing
from trainer.engine.vectors.shared_memory import message_of
from trainer.observe.profile.stamps import Stamps

v1 = tf.compat.v1


class Arrival(NamedTuple):
    """A push, with the state that its gradient was computed on; or a request that must wait its turn."""

    worker: int
    generation: int
    step: int  # of HOLD and JOIN: the ticket
    kind: int


class ArrivalsHost(ShardHost):
    """The base of the hosts of async and backup: the loop, tokens, copies, and the end.

    On a busy machine every Session.run waits for its turn on a core, so an update and its tokens are one.
    """

    def __init__(self, **options: Any) -> None:
        """Builds the host's graph from the options of `ShardHost`."""
        super().__init__(**options, has_log=True)
        assert self.shared.log is not None
        self.log: ArrivalLog = self.shared.log
        self.counts = staleness.empty(self.workers)
        self._arrived_at: dict[str, float] = {}  # by worker whose gradient is in the next update, Unix time
        self._newest = 0  # the vector's place in shared memory
        self._places = [0] * self.workers  # the place in the newest message to each worker
        with self.graph.as_default(), tf.device(device_of(self.shard.host)):
            self.tag_feed = v1.placeholder(tf.int64, [])
            self.counts_feed = v1.placeholder(tf.int64, self.counts.shape)
            self._ticket_feed = v1.placeholder(tf.int64, [])
            self._next = self.next_arrival()
            self._drop = [self._drop_push(worker) for worker in range(self.workers)]
            self._give = [self.give(worker) for worker in range(self.workers)]
            queues = zip(self.shared.pushes.values(), self.shared.tokens.values(), strict=True)
            self._forget = [tf.group(drain(pushes), drain(tokens)) for pushes, tokens in queues]
            self._admit = [queue.enqueue(self._ticket_feed) for queue in self.log.joined.values()]
            self._hold = [self._make_hold(worker) for worker in range(self.workers)]
            self._raise_stop = self._make_raise_stop()
            self._apply = [self._make_apply(worker) for worker in range(self.workers)]

    def serve(self, steps: int, on_update: OnUpdate) -> None:
        """Continues after the last update: workers still push, and are answered, until they and the hosts leave."""
        self._prepare()
        updated_at = time.time()
        is_over, is_stopped = self.step >= steps, False
        while True:
            began = time.monotonic()
            try:
                arrival = Arrival(*self._run_next().tolist())
            except (tf.errors.UnavailableError, tf.errors.CancelledError):
                if is_over:  # another host has received all goodbyes and left, so no worker needs this one either
                    return
                raise
            waited, arrived_at = time.monotonic() - began, time.time()
            if arrival.kind == HOLD:
                self.tables.hold()
                self._run_hold[arrival.worker](arrival.step, self.counts)
            elif arrival.kind == JOIN:
                self._join(arrival)
            elif arrival.generation != self._generation:
                self._run_drop[arrival.worker]()  # of an earlier state; the worker that pushed it has ended too
            elif arrival.kind == STOP_PUSH and not is_stopped:
                # After the last update too: another shard may have stopped before.
                is_over = is_stopped = True
                self._newest = self._free_place()
                self._run_raise_stop(*self._at(self._newest).values())
                self._answer_by_dropping(arrival.worker)
                self.let_go()
            elif is_over:
                self._answer_by_dropping(arrival.worker)
            else:
                self._arrived_at[f"worker:{arrival.worker}"] = arrived_at
                if not self.take(arrival):
                    continue
                self.step += 1
                is_over = self.step >= steps
                if self.record:
                    now = time.time()
                    ends = {"wait": arrived_at, "apply": now}
                    self.record(self.step, Stamps(updated_at, now, ends, dict(self._arrived_at)))
                    updated_at = now
                self._arrived_at.clear()
                on_update(self.step, waited)

    def owes(self, worker: int) -> bool:
        """Whether a push of a worker will still be answered with a token."""
        return False

    @abstractmethod
    def take(self, arrival: Arrival) -> bool:
        """Acts on a gradient; returns whether it led to an update."""

    def let_go(self) -> None:
        """Answers the workers that wait for an update that will not happen."""

    def drop(self, worker: int) -> None:
        """Drops and counts a gradient, and gives its worker a token."""
        staleness.add_dropped(self.counts, worker)
        self._arrived_at.pop(f"worker:{worker}", None)
        self._answer_by_dropping(worker)

    def apply(self, worker: int, answered: Sequence[int], feeds: Mapping[Any, Any] | None = None) -> None:
        """Updates with the gradient that a worker pushed.

        Args:
            answered: the workers that get a token for it.
        """
        place = self._free_place()
        feeds = {self.tag_feed: self._next_tag(), self.counts_feed: self.counts, **self._at(place), **(feeds or {})}
        self.run_update(self._run_apply[worker], self._apply[worker], feeds)
        self._newest = place
        for other in answered:
            self._places[other] = place

    def give_token(self, worker: int) -> None:
        self._run_give[worker](self._next_tag(), *self._at(self._newest).values())
        self._places[worker] = self._newest

    def give(self, worker: int) -> tf.Operation:
        """Writes a worker's own message, if it has one, and hands out a token."""
        with tf.control_dependencies([*self._write_message(worker), *self.give_rows(worker)]):
            return self.shared.tokens[worker].enqueue(self.tag_feed)

    def hand_out_tokens(self) -> tf.Operation:
        written = [op for worker in range(self.workers) for op in self._write_message(worker)]
        with tf.control_dependencies(written):
            return super().hand_out_tokens()

    def _drop_push(self, worker: int) -> tf.Operation:
        """Drops a gradient; the rows that it requested with the next token are still sent."""
        message = self.shared.pushes[worker].dequeue()
        return message.op if self.rows is None else tf.group(*self.read_push(message, worker))

    def _write_message(self, worker: int) -> list[tf.Operation]:
        if not self.wire.is_per_worker:
            return []
        with tf.device(self.parameters):
            tags = packing.tags_of(self.shared.flat.read_value(), self.shard)
        return [self.shared.sent[worker].assign(message_of(tags, self.place), read_value=False)]

    @cached_property
    def place(self) -> tf.Tensor:
        """Returns the place of the newest vector in shared memory; by default the first, as when a state is loaded."""
        with tf.control_dependencies(None):
            return v1.placeholder_with_default(0, [])

    def _at(self, place: int) -> dict[tf.Tensor, int]:
        """Returns the feed for a place; nothing if vectors are sent in messages."""
        return {self.place: place} if self.wire.is_per_worker else {}

    def _free_place(self) -> int:
        """Returns a place that no worker reads; there is one place more than there are workers."""
        return next(place for place in range(self.workers + 1) if place not in self._places)

    def write_counts(self) -> tf.Operation:
        return self.log.contributions.assign(self.counts_feed, read_value=False)

    def _join(self, arrival: Arrival) -> None:
        """Gives a worker's place to a new process, which waits for one token."""
        self._run_forget[arrival.worker]()
        if not self.owes(arrival.worker):
            self.give_token(arrival.worker)
        self._run_admit[arrival.worker](arrival.step)

    def _next_tag(self) -> int:
        self._handed += 1
        return self._generation * packing.GENERATION_STRIDE + self._handed

    def _answer_by_dropping(self, worker: int) -> None:
        self._run_drop[worker]()
        self.give_token(worker)

    def _prepare(self) -> None:
        callable_of = self.session.make_callable
        self._run_next = callable_of(self._next)
        self._run_drop = [callable_of(op) for op in self._drop]
        self._run_give = [callable_of(op, [self.tag_feed, *self._at(0)]) for op in self._give]
        self._run_forget = [callable_of(op) for op in self._forget]
        self._run_admit = [callable_of(op, [self._ticket_feed]) for op in self._admit]
        self._run_apply = [
            callable_of(op, [self.tag_feed, self.counts_feed, *self._at(0), *self.apply_feeds()]) for op in self._apply
        ]
        self._run_hold = [callable_of(op, [self._ticket_feed, self.counts_feed]) for op in self._hold]
        self._run_raise_stop = callable_of(self._raise_stop, list(self._at(0)))
        self._generation, self.step = self.read_tag()
        self._handed = self.step  # tokens of this generation grow from the first one, which said: the state is loaded

    def apply_feeds(self) -> list[tf.Tensor]:
        """Returns the feeds of `apply` besides the tag, the counts and the place."""
        return []

    def next_arrival(self) -> tf.Tensor:
        return self.log.arrivals.dequeue()

    def _make_hold(self, worker: int) -> tf.Operation:
        targets = [self.log.held_flat, *self.log.held_slots.values()]
        sources = [self.shared.flat, *self.shared.slots.values()]
        with tf.device(self.parameters):
            copied = [t.assign(s.read_value(), read_value=False) for t, s in zip(targets, sources, strict=True)]
        with tf.control_dependencies([*copied, self.write_counts()]):
            return self.log.held[worker].enqueue(self._ticket_feed)

    def _make_raise_stop(self) -> tf.Operation:
        at = self.shard.metrics_offset + STOP
        flat = self.shared.flat.read_value()
        return tf.group(*self.assign_flat(tf.concat([flat[:at], [1.0], flat[at + 1 :]], 0)))

    @abstractmethod
    def _make_apply(self, worker: int) -> tf.Operation:
        """Adds the update that a worker's gradient makes, and the tokens that follow it."""
