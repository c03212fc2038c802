"""Training that does not wait for all: gradients are taken in the order in which they arrive.

    host loop:  next arrival -> apply it, keep it for a quorum, or drop it -> tokens

Each push is an entry in a host's arrivals; every entry is answered by one token, so nobody waits for a worker that is
slow or gone. With a quorum the host of the first shard decides for all: it hands its order of arrivals on, and the
others follow it, so that every shard updates from the same workers, and no two of them wait for each other's.

A copy of the state is an entry too: what the chief reads of a shard is never half of an update, and with a quorum all
shards copy at the same step.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from trainer.engine import contributions, packing
from trainer.engine.host import OnUpdate, ShardHost
from trainer.engine.shared import GENERATION_STRIDE, HOLD, Log, device_of, log_queue
from trainer.engine.update import STOP

v1 = tf.compat.v1


class Arrival(NamedTuple):
    """A push: whose, the state that its gradient was computed on, and whether its worker asks all to stop."""

    worker: int  # or HOLD, and then the step is the ticket
    generation: int
    step: int
    stop: int


class ArrivalsHost(ShardHost):
    """What both intakes share: the loop, tokens, copies, and the end."""

    inboxes: int  # vectors kept until they are applied

    def __init__(self, **options: Any) -> None:
        """Builds the host's graph from the options of `ShardHost`."""
        super().__init__(**options, has_log=True)
        assert self.shared.log is not None
        self.log: Log = self.shared.log
        self.counts = contributions.empty(self.workers)
        with self.graph.as_default(), tf.device(device_of(self.shard.host)):
            self._inbox = [
                v1.get_variable(f"inbox{i}", [self.shard.size], initializer=v1.zeros_initializer(), use_resource=True)
                for i in range(self.inboxes)
            ]
            self._next = self._make_next()
            self._accept = [
                self._inbox[w % self.inboxes].assign(intake.dequeue(), read_value=False)
                for w, intake in enumerate(self.shared.intake)
            ]
            self._drop = [intake.dequeue().op for intake in self.shared.intake]
            self._tag_feed = v1.placeholder(tf.int64, [])
            self._give = [tokens.enqueue(self._tag_feed) for tokens in self.shared.tokens]
            self._counts_feed = v1.placeholder(tf.int64, self.counts.shape)
            self._tell_counts = self.log.contributions.assign(self._counts_feed, read_value=False)
            self._ticket_feed = v1.placeholder(tf.int64, [])
            self._hold = self._make_hold()
            self._raise_stop = self._make_raise_stop()
            self._update = self._make_update()

    def serve(self, steps: int, on_update: OnUpdate) -> None:
        """Serves on when the run is over: workers still push, and are answered, until they and the hosts leave."""
        self._prepare()
        is_over = self.step >= steps
        while True:
            began = time.monotonic()
            try:
                arrival = Arrival(*self._run_next().tolist())
            except (tf.errors.UnavailableError, tf.errors.CancelledError):
                if is_over:  # another host has heard all goodbyes and left, so nobody needs this one either
                    return
                raise
            waited = time.monotonic() - began
            if arrival.worker == HOLD:
                self._run_hold(arrival.step)
            elif arrival.generation != self._generation:
                self._run_drop[arrival.worker]()  # of a state that is gone, and so is who waits for a token
            elif is_over:
                self._answer_by_dropping(arrival.worker)
            elif arrival.stop:
                is_over = True
                self._run_raise_stop()
                self._answer_by_dropping(arrival.worker)
                self.let_go()
            else:
                if self.take(arrival):
                    self.step += 1
                    is_over = self.step >= steps
                    on_update(self.step, waited)
                self._run_tell_counts(self.counts)

    @abstractmethod
    def take(self, arrival: Arrival) -> bool:
        """Acts on a gradient; returns whether it led to an update."""

    def let_go(self) -> None:
        """Answers those who still wait for an update that will not come."""

    def accept(self, worker: int) -> None:
        self._run_accept[worker]()

    def drop(self, worker: int) -> None:
        """Drops a gradient, counts that, and lets its worker start afresh."""
        contributions.add_dropped(self.counts, worker)
        self._answer_by_dropping(worker)

    def give_token(self, worker: int) -> None:
        self._handed += 1
        self._run_give[worker](self._generation * GENERATION_STRIDE + self._handed)

    def _answer_by_dropping(self, worker: int) -> None:
        self._run_drop[worker]()
        self.give_token(worker)

    def _prepare(self) -> None:
        callable_of = self.session.make_callable
        self._run_next = callable_of(self._next)
        self._run_accept = [callable_of(op) for op in self._accept]
        self._run_drop = [callable_of(op) for op in self._drop]
        self._run_give = [callable_of(op, [self._tag_feed]) for op in self._give]
        self._run_tell_counts = callable_of(self._tell_counts, [self._counts_feed])
        self._run_hold = callable_of(self._hold, [self._ticket_feed])
        self._run_raise_stop = callable_of(self._raise_stop)
        self._generation, self.step = self.read_tag()
        self._handed = self.step  # tokens of this generation grow from the one that said that the state is loaded

    def _make_next(self) -> tf.Tensor:
        return self.log.arrivals.dequeue()

    def _make_hold(self) -> tf.Operation:
        targets = [self.log.held_flat, *self.log.held_slots.values()]
        sources = [self.shared.flat, *self.shared.slots.values()]
        with tf.device(self.parameters):
            copied = [t.assign(s.read_value(), read_value=False) for t, s in zip(targets, sources, strict=True)]
        with tf.control_dependencies(copied):
            return self.log.held.enqueue(self._ticket_feed)

    def _make_raise_stop(self) -> tf.Operation:
        at = self.shard.metrics_offset + STOP
        flat = self.shared.flat.read_value()
        raised = tf.concat([flat[:at], [1.0], flat[at + 1 :]], 0)
        return self.shared.flat.assign(raised, read_value=False)

    @abstractmethod
    def _make_update(self) -> tf.Operation:
        """Adds the update to the graph."""


class EachHost(ArrivalsHost):
    """Every gradient is an update: asynchronous training. Shards do not wait for each other either."""

    inboxes = 1

    def __init__(self, *, max_staleness: int | None = None, **options: Any) -> None:
        """Builds the host's graph.

        Args:
            max_staleness: steps; gradients that are older are dropped and counted.
            options: of `ShardHost`. Gradients are clipped by their worker, which has all of one.
        """
        self._max_staleness = max_staleness
        super().__init__(**options)

    def take(self, arrival: Arrival) -> bool:
        staleness = self.step - arrival.step
        if self._max_staleness is not None and staleness > self._max_staleness:
            self.drop(arrival.worker)
            return False
        self.accept(arrival.worker)
        self.run_update(self._run_update, self._update)
        contributions.add_applied(self.counts, arrival.worker, staleness)
        self.give_token(arrival.worker)
        return True

    def _prepare(self) -> None:
        super()._prepare()
        self._run_update = self.session.make_callable(self._update)

    def _make_update(self) -> tf.Operation:
        return tf.group(self.update([self._inbox[0].read_value()])[1])


class QuorumHost(ArrivalsHost):
    """Updates when so many gradients of the shard's step are there; what comes later is dropped and counted."""

    def __init__(self, *, quorum: int, **options: Any) -> None:
        """Builds the host's graph.

        Args:
            quorum: workers that an update waits for.
            options: of `ShardHost`.
        """
        self._quorum, self.inboxes = quorum, options["workers"]
        self._chosen: list[int] = []
        super().__init__(**options)

    def take(self, arrival: Arrival) -> bool:
        if arrival.step != self.step:
            self.drop(arrival.worker)
            return False
        self.accept(arrival.worker)
        contributions.add_applied(self.counts, arrival.worker, 0)
        self._chosen.append(arrival.worker)
        if len(self._chosen) < self._quorum:
            return False
        self.run_update(
            self._run_update, self._update, {self._chosen_feed: np.isin(np.arange(self.workers), self._chosen)}
        )
        self.let_go()
        return True

    def let_go(self) -> None:
        for worker in self._chosen:
            self.give_token(worker)
        self._chosen.clear()

    def _prepare(self) -> None:
        super()._prepare()
        self._run_update = self.session.make_callable(self._update, [self._chosen_feed])

    def _make_next(self) -> tf.Tensor:
        """The first shard's host takes what arrives and tells the others; they take it in the same order."""
        if self.shard.index > 0:
            return self.log.order.dequeue()
        arrival = self.log.arrivals.dequeue()
        told = [log_queue(shard, "order", self.workers).enqueue(arrival) for shard in self.shards[1:]]
        with tf.control_dependencies(told):
            return tf.identity(arrival)

    def _make_update(self) -> tf.Operation:
        self._chosen_feed = v1.placeholder(tf.bool, [self.workers])
        mine = packing.tags_of(self.shared.flat.read_value(), self.shard)
        packed = [inbox.read_value() for inbox in self._inbox]
        return tf.group(self.update(packed, chosen=self._chosen_feed, exchange=self.exchange(mine))[1])
