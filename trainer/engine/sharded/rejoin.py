"""Takes the place of a worker that died.

Under sync a worker rejoins with one step that needs no tokens, at the lowest step of all shards: its gradient counts
wherever that of its predecessor did not. The shard hosts know whether there was a predecessor: the first token stays
there until a worker takes it.

Under async and backup it asks the hosts for the place: they discard the unannounced pushes of the predecessor, and its
tokens, and hand out one new token.
"""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from trainer.engine.queues import take
from trainer.engine.sharded.resources import JOIN, Link, tag_of
from trainer.engine.step_result import StepResult
from trainer.engine.vectors import packing
from trainer.plan.strategy import Strategy

v1 = tf.compat.v1


class ShardState(NamedTuple):
    """The step and metrics of a shard."""

    now: StepResult  # what a step would pull; its generation is 0 before the shard is loaded
    before: StepResult  # what it would have pulled one step earlier


class Rejoin:
    """Reads the state that a worker finds when it starts, and builds the step with which it rejoins under sync."""

    def __init__(self, links: Sequence[Link], here: str) -> None:
        """Adds what reads the state to the default graph; `here` is the worker's device."""
        self.is_due = False  # the next step needs no tokens
        self._links, self._graph = links, v1.get_default_graph()
        with tf.device(here):
            self._tag_feed = v1.placeholder(tf.int64, [])
        self._states = [_state(link) for link in links]
        self._is_first = [_is_first(link) for link in links]

    def read_states(self, session: Any) -> list[ShardState]:
        """Reads the step and metrics of every shard."""
        return [
            ShardState(*(StepResult.read(tags[None], metrics) for tags, metrics in read))
            for read in session.run(self._states)
        ]

    def start(self, session: Any, states: Sequence[ShardState]) -> tuple[int, list[StepResult]]:
        """Makes this process the worker, under sync.

        Args:
            states: of loaded shards.

        Returns:
            The lowest step, and the last updates up to it, which a predecessor may not have recorded; if some
            shards are ahead, it had recorded all but the last.
        """
        generation, step = min((state.now.generation, state.now.step) for state in states)
        if not all(session.run(self._is_first)):
            self._tag, self.is_due = generation * packing.GENERATION_STRIDE + step, True
            session.run(self._taken, {self._tag_feed: self._tag})
        # Only the first shard has the sums of metrics; if it is one update ahead, those of the update before count.
        first = states[0]
        last = {result.step: result for result in (first.before, first.now) if result.generation == generation}
        return step, [last[missed] for missed in (step - 1, step) if missed in last]

    def pull(self, session: Any) -> list[np.ndarray]:
        """Reads the vectors that the step computes on, without tokens; packed."""
        self.is_due = False
        return session.run(self._pulled, {self._tag_feed: self._tag})

    def prepare(self, session: Any) -> None:
        """Makes what `start` and `pull` need, so that they take less time when they are called."""
        _ = self._taken, self._pulled
        session.run(self._states)
        session.run(self._is_first)

    @cached_property
    def _taken(self) -> list[tf.Operation]:
        with self._graph.as_default():
            return [_take_place(link, self._tag_feed) for link in self._links]

    @cached_property
    def _pulled(self) -> list[tf.Tensor]:
        with self._graph.as_default():
            return [_pull_without_token(link, self._tag_feed) for link in self._links]


def build_join(links: Sequence[Link], strategy: Strategy, ticket: tf.Tensor) -> list[tf.Operation]:
    """Asks the hosts of async or backup for a place; they answer in the order in which pushes and requests arrive.

    Args:
        ticket: [] int32, different for each request.
    """
    joined = []
    for link in links:
        log = link.shared.log
        assert log is not None
        with tf.device(link.device):
            asked = []
            if strategy.waits_for_one or link.shard.index == 0:  # the first shard's host asks the others
                asked.append(log.arrivals.enqueue(tf.stack([link.worker, 0, ticket, JOIN])))
            with tf.control_dependencies(asked):
                joined.append(take(log.joined[link.worker], is_other(ticket)))
    return joined


def is_other(ticket: tf.Tensor) -> Any:
    """Whether an answer is for another ticket."""
    return lambda answer: tf.not_equal(answer, tf.cast(ticket, tf.int64))


def _state(link: Link) -> list[list[tf.Tensor]]:
    """Returns the tags and metrics of a shard's vector, and of the previous one."""
    with tf.device(link.device):
        now = link.shared.flat.read_value()
        with tf.control_dependencies([now]):
            before = now if link.shared.before is None else link.shared.before.read_value()
        return [[packing.tags_of(flat, link.shard), packing.metrics_of(flat, link.shard)] for flat in (now, before)]


def _is_first(link: Link) -> tf.Tensor:
    """Whether this worker's first token of a shard is still there, so that it has no predecessor."""
    with tf.device(link.device):
        return tf.logical_and(link.seen.read_value() < 0, link.tokens.size() > 0)


def _take_place(link: Link, tag: tf.Tensor) -> tf.Operation:
    """Gives this worker a token of the shard's step, even if its predecessor took one, and makes it count."""
    with tf.device(link.device):
        now = tag_of(link.shared.flat.read_value(), link.shard)
        with tf.control_dependencies([link.seen.assign(tag - 1, read_value=False)]):
            return link.tokens.enqueue(now)


def _pull_without_token(link: Link, tag: tf.Tensor) -> tf.Tensor:
    """Reads a shard's vector of the step that all shards have, or had just before; skips that step's token."""
    assert link.shared.before is not None
    with tf.device(link.device):
        seen = link.seen.assign(tag, read_value=False)
        now = link.shared.flat.read_value()
        with tf.control_dependencies([now]):
            before = link.shared.before.read_value()
        step = tf.cast(tag % packing.GENERATION_STRIDE, tf.int32)
        chosen = tf.where(tf.equal(packing.tags_of(now, link.shard)[1], step), now, before)
        with tf.control_dependencies([seen]):
            return link.wire.pack_flat(tf.identity(chosen), link.shard)
