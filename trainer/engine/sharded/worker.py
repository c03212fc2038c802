"""A worker's side of training with shard hosts: one Session.run pulls parameters, computes, pushes gradients.

    worker step:  wait for my token of every shard -> read -> replica step -> push

Every vector carries (generation, step) in its header. Tokens are growing numbers, so a stale one is passed over.

Whoever takes the place of a worker that was ended joins: under sync with a step that needs no tokens, at the lowest
step of all shards; its gradient counts wherever that of its predecessor did not. Whether there was a predecessor the
shard hosts know: its first token lies there until somebody takes it.

Under sync all shards are of the same step when a worker reads them. Otherwise they may differ: under backup a
gradient counts as of the oldest, and where each is an update every shard judges by its own. The batches of a worker
then follow its own steps, for nobody knows which global step a push will make.

Where hosts hold several shards each (buckets, under sync only) a worker pulls ahead: a second Session.run waits for
the next step's tokens while this step computes and pushes, one bucket of a host after the other. So the new parameters
of a bucket come while the gradients of the next one go. The tokens are the same, and so is all that follows from them.
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import time
from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from trainer.config.schema import OptimizerConfig
from trainer.engine.compute import Join, Replica, compute, in_step, is_final, mean_over_replicas
from trainer.engine.instruments import GraphClock, failpoint, run_traced
from trainer.engine.session_engine import SessionEngine
from trainer.engine.sharded.prefetch import Prefetch
from trainer.engine.sharded.resources import (
    GENERATION_STRIDE,
    HOLD,
    JOIN,
    PUSH,
    STOP_PUSH,
    Shared,
    device_of,
    not_after,
    share,
    take,
)
from trainer.engine.sharded.staleness import Table
from trainer.engine.step_result import StepResult
from trainer.engine.update import STOP
from trainer.engine.vectors import packing, wire
from trainer.engine.vectors.shared_memory import Memory
from trainer.engine.vectors.snapshot import Snapshot
from trainer.faults.exit_codes import IncompleteError
from trainer.plan.layout import Shard
from trainer.plan.strategy import Strategy

_log = logging.getLogger(__name__)

v1 = tf.compat.v1

LOADED_POLL_SECS = 0.02
REPORT_EVERY_SECS = 10.0


class _Graph(NamedTuple):
    """A step of a worker, in a graph."""

    vectors: list[tf.Tensor]  # messages pulled from each shard; where they are fed no token is waited for
    fetches: list[Any]  # [tags, metrics, time when pulled, time when computed, [pushes, *stamps]]
    gradients: list[tf.Tensor]  # packed


class _PullNext(NamedTuple):
    """A worker that pulls ahead."""

    brought: list[tf.Operation]  # the next step's messages are here
    taken: list[tf.Tensor]  # those messages
    closed: list[tf.Operation]  # none will come any more


class ShardsEngine(SessionEngine):
    """Pulls parameters from the shard hosts, pushes packed gradients."""

    def __init__(
        self,
        *,
        task: str,
        workers: int,
        shards: Sequence[Shard],
        optimizer: OptimizerConfig,
        replicas: Sequence[Replica],
        strategy: Strategy,
        parameters: str = "/cpu:0",
        as_wire: str = wire.FLOAT32,
        memory: Memory | None = None,
        profiles: bool = False,
    ) -> None:
        """Builds the worker's graph.

        Args:
            task: this task, e.g. "worker:3".
            workers: how many push.
            replicas: those of this worker.
            strategy: of the hosts.
            parameters: the hosts' device that holds the vectors.
            as_wire: how vectors travel.
            memory: where they lie instead, as a wire of `memory` has it.
            profiles: whether steps are stamped: wait, pull, input, compute, push.
        """
        self._wire, self._memory = as_wire, memory
        self._packs = wire.FLOAT32 if memory else as_wire
        self._shards, self._fills = shards, optimizer.slots()
        self._strategy, self._workers = strategy, workers
        self._profiles = profiles
        self._worker, here = int(task.split(":")[1]), device_of(task)
        self._pulls_ahead = len({shard.host for shard in shards}) < len(shards)
        assert strategy.waits_for_all or not self._pulls_ahead
        with tf.Graph().as_default() as self.graph:
            options: dict[str, Any] = {
                "parameters": parameters,
                "has_log": not strategy.waits_for_all,
                "as_wire": as_wire,
            }
            shared = [share(shard, list(self._fills), workers, **options) for shard in shards]
            with tf.device(here):
                self._batches = [replica.batches() for replica in replicas]
                self._stop = v1.placeholder_with_default(0.0, [])
                self._join_tag = v1.placeholder(tf.int64, [])
            if self._pulls_ahead:
                self._pull_next = self._make_pull_next(shared, here)
                self._settle = [self._wait(s) for s in shared]
            clip = optimizer if strategy.waits_for_one and optimizer.clip_norm is not None else None
            self._vectors, self._step, self._gradients = self._make_step(shared, here, replicas, clip)
            self._state = [self._make_state(s, shard) for s, shard in zip(shared, shards, strict=True)]
            self._first = [self._make_first(s, shard) for s, shard in zip(shared, shards, strict=True)]
            self._peek = self._make_peek(shared)
            self._ticket_feed = v1.placeholder(tf.int32, [])
            self._join = [] if strategy.waits_for_all else self._make_join(shared)
            self._contributions = shared[0].log.contributions.read_value() if shared[0].log else None
            self._goodbye = [s.goodbyes.enqueue(self._worker) for s in shared]
        self.scopes = replicas[0].scopes
        self._shared = shared
        if self._worker == 0:  # the chief, who needs them; now, because to add to a graph that runs takes longer
            self._feeds, self._load = self._make_load()
            self._snapshot  # noqa: B018
        self._ticket = secrets.randbelow(2**30)  # a predecessor's are others
        self._is_first = self._is_joining = self._is_behind = False
        self._ahead = Prefetch(self._bring_next, fail=self._tell_nothing_comes)
        self.missed: Sequence[StepResult] = ()  # updates that nobody may have written down; set by `start`

    def load(self, snapshot: Snapshot, *, generation: int) -> None:
        """Sends a state to every shard host; the chief's duty."""
        feeds = {}
        for shard, (flat, *slots) in zip(self._shards, self._feeds, strict=True):
            feeds[flat] = snapshot.flat(shard, generation=generation)
            feeds |= {
                feed: snapshot.slot(shard, name, fill)
                for feed, (name, fill) in zip(slots, self._fills.items(), strict=True)
            }
        self.session.run(self._load, feeds)

    def held(self) -> int:
        """The generation of the state that the shard hosts hold; 0: none yet.

        Raises:
            IncompleteError: if some of them hold one and others do not, or another.
        """
        generations = {generation for generation, *_ in self._read_state()}
        if len(generations) > 1:
            raise IncompleteError(f"the shard hosts hold states of other generations: {sorted(generations)}")
        return generations.pop()

    def start(self) -> int:
        """Blocks until the shards are loaded, and takes this worker's place; sets the input to the step it returns."""
        state = self._read_state()
        began = told_at = time.monotonic()
        while any(generation == 0 for generation, *_ in state):
            if time.monotonic() - told_at >= REPORT_EVERY_SECS:
                told_at = time.monotonic()
                _log.info("has waited %.0f s for worker:0 to load the state", told_at - began)
            time.sleep(LOADED_POLL_SECS)
            state = self._read_state()
        self.generation = self.held()
        if self._strategy.waits_for_all:
            step = self._start_waiting_for_all(state)
        else:
            self._take_place()
            step = self.peek().step
        first = step // self._workers if self._strategy.waits_for_one else step  # of this worker's own steps
        for batches in self._batches:
            self.session.run(batches.initializer, batches.feed_from(first))
        return step

    def step(self, *, stop: bool = False, fetch_gradients: bool = False) -> StepResult:
        if self._is_behind:
            self._is_behind = False
            self._take_place()
        if not self._is_joining and not self._pulls_ahead:
            return super().step(stop=stop, fetch_gradients=fetch_gradients)
        if not self._is_joining:
            return self._step_ahead(stop=stop, fetch_gradients=fetch_gradients)
        self._is_joining = False
        began = time.time()
        with self.graph.as_default():
            pulls = [self._pull_joining(s, shard) for s, shard in zip(self._shared, self._shards, strict=True)]
        vectors = self.session.run(pulls, {self._join_tag: self._joined_at})
        if self._memory is not None:
            self._memory.instead = {shard.index: one for shard, one in zip(self._shards, vectors, strict=True)}
            tags = [packing.tags_in(one, shard) for shard, one in zip(self._shards, vectors, strict=True)]
            vectors = [np.append(one, np.int32(0)) for one in tags]  # messages; under sync there is no other place
        *others, (pushes, *stamps) = self._step
        if stamps:
            ends, arrived = stamps
            stamps = [{phase: at for phase, at in ends.items() if phase != "wait"}, arrived]  # there is no token
        fetches = [*others, [pushes, *stamps], *([self._gradients] if fetch_gradients else [])]
        feeds = {self._stop: float(stop), **dict(zip(self._vectors, vectors, strict=True))}
        if self.is_tracing:
            fetched, self.executed = run_traced(self.session, fetches, feeds)
            self.is_tracing = False
        else:
            fetched = self.session.run(fetches, feeds)
        return self._pulled(fetched, began, fetch_gradients=fetch_gradients)

    def _step_ahead(self, *, stop: bool, fetch_gradients: bool) -> StepResult:
        """A step on what was pulled ahead."""
        if not self._ahead.is_started:
            self._ahead.start()
        try:
            pulled = super().step(stop=stop, fetch_gradients=fetch_gradients)
        except tf.errors.OutOfRangeError:
            self._ahead.check()
            raise
        self._ahead.use()
        return pulled

    def _bring_next(self) -> None:
        self.session.run(self._pull_next.brought)

    def _tell_nothing_comes(self) -> None:
        with contextlib.suppress(tf.errors.OpError, RuntimeError):  # the session may be closed, and so all is told
            self.session.run(self._pull_next.closed)

    def _start_waiting_for_all(self, state: Sequence[tuple[int, int, Any, Any]]) -> int:
        """Finds the lowest step, what was missed there, and makes tokens of this place mean what they say."""
        generation, step = min((generation, step) for generation, step, *_ in state)
        if not self._is_first:
            self._joined_at, self._is_joining = generation * GENERATION_STRIDE + step, True
            with self.graph.as_default():
                take_place = self._make_take_place(self._shared)
            self.session.run(take_place, {self._join_tag: self._joined_at})
        now = next(flat for _, at, flat, _ in state if at == step)
        earlier = [before for *_, before in state if (before.generation, before.step) == (generation, step - 1)]
        self.missed = [*earlier[:1], now]
        return step

    def _read_state(self) -> list[tuple[int, int, StepResult, StepResult]]:
        """Of each shard: generation, step, what a step would pull, and what one would have pulled before."""
        read, first = self.session.run([self._state, self._first])
        self._is_first = all(first)
        states = [[StepResult.read(tags[None], metrics) for tags, metrics in shard] for shard in read]
        return [(now.generation, now.step, now, before) for now, before in states]

    def peek(self) -> StepResult:
        """Blocks until all that this worker pushed is applied, or dropped; reads where the run stands."""
        self._wait_ahead()
        return StepResult.read(*self.session.run(self._peek))

    def snapshot(self) -> Snapshot:
        """Everything a checkpoint holds, of one step; where shards do not move together, of the oldest one's."""
        self._wait_ahead()
        self._ticket += 1
        tags, flats, slots, *_ = self.session.run(self._snapshot, {self._ticket_feed: self._ticket})
        # It takes time, and what is done with it too: others go on, and in shared memory a token is of its own vector.
        self._is_behind = self._memory is not None and not self._strategy.waits_for_all
        return Snapshot.from_flats(min(int(step) for _, step in tags), self._shards, flats, slots)

    def _take_place(self) -> None:
        """Where nobody waits: lets what this place pushed be forgotten, if it was not told of, and gets a new token."""
        self._ticket += 1
        self.session.run(self._join, {self._ticket_feed: self._ticket})

    def _wait_ahead(self) -> None:
        """Waits until the next step's vectors are here, where they are pulled ahead: then no shard moves before it."""
        if self._ahead.is_started:
            self._ahead.wait()
        elif self._pulls_ahead:
            self.session.run(self._settle)

    def contributions(self) -> Table | None:
        """What each worker contributed so far, as the first shard counts it; none under sync, where all do equally."""
        return None if self._contributions is None else np.asarray(self.session.run(self._contributions))

    def leave(self) -> None:
        """Tells every shard host that this worker needs it no more.

        A host that has heard it from all leaves at once, maybe before it has answered; so each is told on its own.
        """
        for goodbye in self._goodbye:
            with contextlib.suppress(tf.errors.UnavailableError):
                self.session.run(goodbye)

    def _name(self, packed: list[np.ndarray]) -> dict[str, np.ndarray]:
        gradients = (wire.trainable_of(one, shard) for one, shard in zip(packed, self._shards, strict=True))
        return packing.join(zip((shard.trainable for shard in self._shards), gradients, strict=True))

    def _make_step(
        self,
        shared: Sequence[Shared],
        here: str,
        replicas: Sequence[Replica],
        clip: OptimizerConfig | None,
    ) -> _Graph:
        """A step; everything but the two vectors stays where it is: one tensor each way per shard and step."""
        shards, clock = self._shards, GraphClock(is_wanted=self._profiles)
        if self._pulls_ahead:
            pulled = self._pull_next.taken
        else:
            pulled = [self._pull(s, shard, clock) for s, shard in zip(shared, shards, strict=True)]
        with tf.device(here):
            pulled = [tf.identity(message) for message in pulled]
            vectors = [self._receive(message, s) for message, s in zip(pulled, shards, strict=True)]
            put = partial(self._put, computed_on=[vector.trainable for vector in vectors])
            tags = tf.stack([packing.tags_of(one, shard) for one, shard in zip(vectors, shards, strict=True)])
            # Not after the messages themselves: where they are fed, that would still wait for a token.
            with tf.control_dependencies([tags]):
                pulled_at = tf.timestamp()
            clock.end_at("pull", pulled_at)
            clock.end("input", [batches.features for batches in self._batches])
            headers, batches = [packing.header_of(v, s) for v, s in zip(vectors, shards, strict=True)], self._batches
            if self._strategy.waits_for_all:
                same = tf.debugging.assert_equal(tags, tags[:1], "the shards are at other steps")
                with tf.control_dependencies([same]):  # before anything is pushed
                    step = tf.cast(tags[0][1], tf.int64)
                batches = [in_step(one, step) for one in batches]
            else:
                tags = tf.reduce_min(tags, 0, keepdims=True)
            if self._strategy.waits_for_quorum:  # one host decides for all, so the oldest shard counts
                headers = [packing.header(tags[0][0], tags[0][1])] * len(shards)
            join = self._join_pieces(replicas[0], put) if is_final(len(replicas), clip) else None
            computed = [
                compute(vectors, headers, shards, replica, one, self._stop, join)
                for replica, one in zip(replicas, batches, strict=True)
            ]
            packed = mean_over_replicas(computed, headers, shards, clip=clip, as_wire=self._packs)
            if self._memory is not None and join is None:
                packed = [put([vector], [], shard) for vector, shard in zip(packed, shards, strict=True)]
            with tf.control_dependencies(packed):
                computed_at = tf.timestamp()
            clock.end_at("compute", computed_at)
            metrics = self._metrics([packing.metrics_of(v, s) for v, s in zip(vectors, shards, strict=True)])
        pushed = self._push(shared, packed, here, clock, tags=tags[0])
        return _Graph(pulled, [tags, metrics, pulled_at, computed_at, [pushed, *clock.fetches]], packed)

    def _put(
        self,
        trainable: Sequence[tf.Tensor],
        rest: Sequence[tf.Tensor],
        shard: Shard,
        *,
        computed_on: Sequence[tf.Tensor],
    ) -> tf.Tensor:
        """Writes gradients into shared memory."""
        assert self._memory is not None
        place = self._memory.place_of(self._worker)
        return self._memory.put([*trainable, *rest], shard, place, computed_on=computed_on)

    def _join_pieces(self, replica: Replica, put: Join) -> Join | None:
        """How a replica whose gradients are what is pushed makes that of their pieces; none if only its vector can be.

        Straight into shared memory a replica can write on a CPU, and where XLA does not compile it.
        """
        if self._memory is None:
            return lambda trainable, rest, _: wire.join(trainable, rest, self._wire)
        if replica.jit or replica.device is None or "cpu" not in replica.device.lower():
            return None
        return put

    def _make_pull_next(self, shared: Sequence[Shared], here: str) -> _PullNext:
        """Between the Session.run that pulls and the one that computes: a place for one message of each shard."""
        places, brought = [], []
        for s, shard in zip(shared, self._shards, strict=True):
            message = self._pull(s, shard, GraphClock(is_wanted=False))
            with tf.device(here):
                name = f"ahead{secrets.token_hex(8)}"
                places.append(v1.FIFOQueue(1, [message.dtype], [message.shape], shared_name=name))
                brought.append(places[-1].enqueue(tf.identity(message)))
        with tf.device(here):
            closed = [place.close(cancel_pending_enqueues=True) for place in places]
            return _PullNext(brought, [place.dequeue() for place in places], closed)

    def _pull(self, s: Shared, shard: Shard, clock: GraphClock) -> tf.Tensor:
        """Waits for this worker's token of a shard and reads it."""
        me = self._worker
        with tf.device(device_of(shard.host)):
            token = take(s.tokens[me], not_after(s.seen[me]))
            clock.end("wait", [token], on=shard.host)
            with tf.control_dependencies([s.seen[me].assign(token, read_value=False)]):
                return (s.sent[me] if s.sent else s.flat).read_value()

    def _pull_joining(self, s: Shared, shard: Shard) -> tf.Tensor:
        """Reads a shard's vector of the step that all have, or had just before; passes over that step's token."""
        assert s.before is not None
        with tf.device(device_of(shard.host)):
            seen = s.seen[self._worker].assign(self._join_tag, read_value=False)
            now = s.flat.read_value()
            with tf.control_dependencies([now]):
                before = s.before.read_value()
            step = tf.cast(self._join_tag % GENERATION_STRIDE, tf.int32)
            chosen = tf.where(tf.equal(packing.tags_of(now, shard)[1], step), now, before)
            with tf.control_dependencies([seen]):
                return wire.send(tf.identity(chosen), shard, self._packs)

    def _receive(self, message: tf.Tensor, shard: Shard) -> packing.TrainableAndRest:
        """What was pulled of a shard."""
        if self._memory is None:
            return wire.receive(message, shard, self._wire)
        trainable, rest = packing.halves(self._memory.get_vector(message, shard), shard)
        # What a step fetches it hands out when it has pushed, and then the next vector may lie there.
        rest = tf.raw_ops.DeepCopy(x=rest)
        with tf.control_dependencies([rest]):
            return packing.TrainableAndRest(tf.identity(trainable), rest)

    def _send(self, vector: tf.Tensor, shard: Shard, here: str) -> tf.Tensor:
        """The message of what is pushed to a shard."""
        if self._memory is None:
            return vector
        with tf.device(here):
            return wire.tell(packing.tags_of(vector, shard), wire.asks_to_stop(vector, shard, wire.FLOAT32))

    def _make_first(self, s: Shared, shard: Shard) -> tf.Tensor:
        """Whether this worker's first token of a shard is there and was there for nobody before it."""
        with tf.device(device_of(shard.host)):
            return tf.logical_and(s.seen[self._worker].read_value() < 0, s.tokens[self._worker].size() > 0)

    def _make_take_place(self, shared: Sequence[Shared]) -> list[tf.Operation]:
        """Gives this worker a token of every shard's step, whoever took the one before it, and makes it count."""
        done = []
        for s, shard in zip(shared, self._shards, strict=True):
            with tf.device(device_of(shard.host)):
                generation, step = tf.unstack(tf.cast(packing.tags_of(s.flat.read_value(), shard), tf.int64))
                seen = s.seen[self._worker].assign(self._join_tag - 1, read_value=False)
                with tf.control_dependencies([seen]):
                    done.append(s.tokens[self._worker].enqueue(generation * GENERATION_STRIDE + step))
        return done

    def _make_load(self) -> tuple[list[list[tf.Tensor]], list[tf.Operation]]:
        """Returns what is fed to each shard's load, and the loads."""
        with self.graph.as_default():
            feeds = [[v1.placeholder(tf.float32, v.shape) for v in (s.flat, *s.slots.values())] for s in self._shared]
            return feeds, [s.loads.enqueue(fed) for s, fed in zip(self._shared, feeds, strict=True)]

    def _make_state(self, s: Shared, shard: Shard) -> list[list[tf.Tensor]]:
        """The tags and metrics of a shard's vector, and of the one before it."""
        with tf.device(device_of(shard.host)):
            now = s.flat.read_value()
            with tf.control_dependencies([now]):
                before = now if s.before is None else s.before.read_value()
            return [[packing.tags_of(flat, shard), packing.metrics_of(flat, shard)] for flat in (now, before)]

    def _make_join(self, shared: Sequence[Shared]) -> list[tf.Operation]:
        """Asks the hosts for a place; they answer in the order in which they take what arrives."""
        done = []
        for s, shard in zip(shared, self._shards, strict=True):
            assert s.log is not None
            with tf.device(device_of(shard.host)):
                asked = []
                if self._strategy.waits_for_one or shard.index == 0:  # the first shard's host tells the others
                    asked.append(s.log.arrivals.enqueue(tf.stack([self._worker, 0, self._ticket_feed, JOIN])))
                with tf.control_dependencies(asked):
                    done.append(take(s.log.joined[self._worker], self._is_other_ticket))
        return done

    def _push(
        self,
        shared: Sequence[Shared],
        packed: Sequence[tf.Tensor],
        here: str,
        clock: GraphClock,
        *,
        tags: tf.Tensor,
    ) -> list[tf.Operation]:
        """Sends each host its vector; then, where they are taken as they come, tells that they are there."""
        arrived: list[tf.Tensor] = []
        pushed: list[tf.Operation] = []
        reached = None
        last: dict[str, tf.Operation] = {}  # by host
        for s, shard, vector in zip(shared, self._shards, packed, strict=True):
            message = self._send(vector, shard, here)
            if shard.host in last:  # one bucket after the other: side by side all would come late
                with tf.device(here), tf.control_dependencies([last[shard.host]]):
                    message = tf.identity(message)
            if len(pushed) == 1:
                with tf.control_dependencies(pushed):
                    reached = failpoint("push", tags[1])
            with tf.control_dependencies([reached] if reached is not None else []), tf.device(device_of(shard.host)):
                arrived.append(tf.identity(message))  # here, so that what is read of it below is not sent on its own
                with tf.control_dependencies(clock.end("push", [arrived[-1]], on=shard.host)):
                    pushed.append(s.pushes[self._worker].enqueue(arrived[-1]))
                last[shard.host] = pushed[-1]
        told = []
        for number, (s, shard) in enumerate(zip(shared, self._shards, strict=True)):
            # The first shard's host tells the others of a quorum, and no sooner than all have the vector.
            if s.log is None or (self._strategy.waits_for_quorum and number > 0):
                continue
            with tf.device(device_of(shard.host)):
                kind = tf.where(wire.asks_to_stop(arrived[number], shard, self._wire), STOP_PUSH, PUSH)
                arrival = tf.concat([[self._worker], wire.tags_of(arrived[number], shard, self._wire), [kind]], 0)
                with tf.control_dependencies(pushed if self._strategy.waits_for_quorum else [pushed[number]]):
                    told.append(s.log.arrivals.enqueue(arrival))
        return told or pushed

    def _metrics(self, metrics: Sequence[tf.Tensor]) -> tf.Tensor:
        """The first shard's; but shards that do not move together may hear of a stop one after the other."""
        if self._strategy.waits_for_all:
            return metrics[0]
        stop = tf.reduce_max([one[STOP] for one in metrics])
        return tf.concat([metrics[0][:STOP], [stop], metrics[0][STOP + 1 :]], 0)

    def _make_peek(self, shared: Sequence[Shared]) -> list[tf.Tensor]:
        tags, metrics = [], []
        for s, shard in zip(shared, self._shards, strict=True):
            with tf.device(device_of(shard.host)), tf.control_dependencies(self._waited(s)):
                flat = s.flat.read_value()
                tags.append(packing.tags_of(flat, shard))
                metrics.append(packing.metrics_of(flat, shard))
        stacked = tf.stack(tags)
        return [
            stacked if self._strategy.waits_for_all else tf.reduce_min(stacked, 0, keepdims=True),
            self._metrics(metrics),
        ]

    @cached_property
    def _snapshot(self) -> tuple[Any, ...]:
        with self.graph.as_default():
            make = self._make_snapshot if self._strategy.waits_for_all else self._make_held_snapshot
            return make(self._shared)

    def _make_snapshot(self, shared: Sequence[Shared]) -> tuple[Any, Any, Any]:
        """Reads between two steps: no shard moves before this worker pushes."""
        tags, flats, slots = [], [], []
        for s, shard in zip(shared, self._shards, strict=True):
            with tf.device(device_of(shard.host)), tf.control_dependencies(self._waited(s)):
                flats.append(s.flat.read_value())
                tags.append(packing.tags_of(flats[-1], shard))
                slots.append({name: slot.read_value() for name, slot in s.slots.items()})
        return tags, flats, slots

    def _make_held_snapshot(self, shared: Sequence[Shared]) -> tuple[Any, Any, Any, Any]:
        """Asks the hosts for a copy and reads that: the shards themselves move on."""
        tags, flats, slots, asked = [], [], [], []
        for s, shard in zip(shared, self._shards, strict=True):
            assert s.log is not None
            with tf.device(device_of(shard.host)):
                if self._strategy.waits_for_one or shard.index == 0:  # the first shard's host tells the others
                    with tf.control_dependencies([self._wait(s)]):  # so that the copy has what this worker pushed
                        asked.append(s.log.arrivals.enqueue(tf.stack([self._worker, 0, self._ticket_feed, HOLD])))
                with tf.control_dependencies([take(s.log.held[self._worker], self._is_other_ticket)]):
                    flats.append(s.log.held_flat.read_value())
                    tags.append(packing.tags_of(flats[-1], shard))
                    slots.append({name: slot.read_value() for name, slot in s.log.held_slots.items()})
        return tags, flats, slots, asked

    def _is_other_ticket(self, ticket: tf.Tensor) -> tf.Tensor:
        return tf.not_equal(ticket, tf.cast(self._ticket_feed, tf.int64))

    def _waited(self, s: Shared) -> list[tf.Operation]:
        """What a read between two steps comes after; nothing where `_wait_ahead` waits."""
        return [] if self._pulls_ahead else [self._wait(s)]

    def _wait(self, s: Shared) -> tf.Operation:
        """Waits for the token of the next step, and gives it back."""
        token = take(s.tokens[self._worker], not_after(s.seen[self._worker]))
        return s.tokens[self._worker].enqueue(token)
