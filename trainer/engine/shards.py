"""Parameters on shard hosts, gradients through queues: exact synchronous training over TensorFlow's own runtime.

    each shard host:  one flat vector, flat slots, an intake queue and a token queue per replica
    host loop:        take one message of every replica -> average in replica order -> update -> a token to each
    worker step:      one Session.run: wait for my token of every shard -> read -> replica step -> push

Every vector carries (generation, step) in its header. A host takes only messages of its own generation and step, and
drops others: a duplicate of a restarted worker counts once. Tokens are the same pair as one growing number, so a stale
one is passed over. With this intake no shard can pass step s without every replica's gradient of s, so what a replica
reads between its token and its push is consistent over all shards.

A host is told its state, not built with it: it blocks until the chief loads it, and then lets every replica start.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from trainer import optimizers
from trainer.config import OptimizerConfig
from trainer.engine import packing
from trainer.engine.compute import Replica, compute
from trainer.engine.pulled import Pulled
from trainer.engine.snapshot import Snapshot
from trainer.engine.update import make_update, squares_order
from trainer.placement import Shard

v1 = tf.compat.v1

GENERATION_STRIDE = 2**32  # a tag is generation * stride + step
SPARE_TOKENS = 8  # a returned or stale token never blocks a host


def device_of(task: str, device: str = "cpu:0") -> str:
    """A device of a task, e.g. "ps:0" -> "/job:ps/task:0/cpu:0"."""
    job, index = task.split(":")
    return f"/job:{job}/task:{index}/{device}"


@dataclass(frozen=True)
class _Shared:
    """The resources of one shard; whoever makes them by these names, in whichever process, gets the same ones."""

    flat: Any  # [size] float32 variable
    slots: dict[str, Any]  # [trainable_size] float32 variables
    seen: list[Any]  # per replica, int64 variable: tag of the last token it took
    intake: list[Any]  # per replica, queue of [size] float32
    tokens: list[Any]  # per replica, queue of int64 tags
    loads: Any  # queue of (flat, slots...)
    goodbyes: Any  # queue of replica numbers


def _share(shard: Shard, slots: Sequence[str], replicas: int) -> _Shared:
    """Makes the resources of a shard known to the default graph, on its host."""
    prefix = f"shard{shard.index}"

    def variable(name: str, shape: list[int], dtype: tf.DType = tf.float32) -> Any:
        initializer = v1.zeros_initializer() if dtype == tf.float32 else v1.constant_initializer(-1)
        return v1.get_variable(f"{prefix}/{name}", shape, dtype, initializer, use_resource=True)

    def queue(name: str, capacity: int, dtypes: list[tf.DType], shapes: list[list[int]]) -> Any:
        return v1.FIFOQueue(capacity, dtypes, shapes, shared_name=f"{prefix}/{name}")

    vectors = [[shard.size]] + [[shard.trainable_size]] * len(slots)
    with tf.device(device_of(shard.host)):
        return _Shared(
            flat=variable("flat", [shard.size]),
            slots={name: variable(f"slots/{name}", [shard.trainable_size]) for name in slots},
            seen=[variable(f"seen{r}", [], tf.int64) for r in range(replicas)],
            intake=[queue(f"intake{r}", 1, [tf.float32], [[shard.size]]) for r in range(replicas)],
            tokens=[queue(f"tokens{r}", SPARE_TOKENS, [tf.int64], [[]]) for r in range(replicas)],
            loads=queue("loads", 1, [tf.float32] * len(vectors), vectors),
            goodbyes=queue("goodbyes", replicas, [tf.int32], [[]]),
        )


def _take(queue: Any, stale: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    """Takes from a queue, dropping what is stale."""
    return tf.while_loop(stale, lambda _: (queue.dequeue(),), (queue.dequeue(),), parallel_iterations=1)[0]


def _not_after(seen: Any) -> Callable[[tf.Tensor], tf.Tensor]:
    return lambda tag: tag <= seen.read_value()


class ShardHost:
    """Holds one shard and updates it; runs on a ps, or in a thread of a worker."""

    def __init__(
        self,
        *,
        shards: Sequence[Shard],
        index: int,
        replicas: int,
        optimizer: OptimizerConfig,
    ) -> None:
        """Builds the host's graph.

        Args:
            shards: all shards of the plan; `index` is the one held here.
        """
        self._shards, self._shard, self._optimizer = shards, shards[index], optimizer
        with tf.Graph().as_default() as self._graph, tf.device(device_of(self._shard.host)):
            self._shared = _share(self._shard, list(optimizers.slots(optimizer)), replicas)
            self._tags = self._tag()
            self._load = self._make_load(replicas)
            self._update = self._make_update(replicas)
            self._goodbyes = self._shared.goodbyes.dequeue_many(replicas)
            self._initialize = v1.global_variables_initializer()

    def connect(self, target: str, session_config: Any) -> None:
        """Opens the session on the task's own server and makes the shard's resources, still without a state."""
        self._session = v1.Session(target, graph=self._graph, config=session_config)
        self._session.run(self._initialize)
        self._read_tag = self._session.make_callable(self._tags)

    def load(self) -> int:
        """Blocks until the chief has sent a state, then lets every replica start from it; returns its step."""
        self._session.run(self._load)
        return int(self._read_tag()) % GENERATION_STRIDE

    def serve(self, steps: int, on_update: Callable[[int, float], None]) -> None:
        """Updates until the global step is `steps`; reports the step and the seconds that were spent waiting."""
        update = self._session.make_callable(self._update)
        step = int(self._read_tag()) % GENERATION_STRIDE
        while step < steps:
            began = time.time()
            step, taken_at = update()
            on_update(int(step), max(0.0, taken_at - began))

    def wait_for_goodbyes(self) -> None:
        """Blocks until every replica has said that it needs this shard no more."""
        self._session.run(self._goodbyes)

    def _tag(self) -> tf.Tensor:
        generation, step = tf.unstack(tf.cast(packing.tags_of(self._shared.flat.read_value(), self._shard), tf.int64))
        return generation * GENERATION_STRIDE + step

    def _make_load(self, replicas: int) -> tf.Operation:
        loaded = tf.nest.flatten(self._shared.loads.dequeue())  # a queue of one component returns no list
        targets = [self._shared.flat, *self._shared.slots.values()]
        assigned = [v.assign(value, read_value=False) for v, value in zip(targets, loaded, strict=True)]
        with tf.control_dependencies(assigned):
            return self._hand_out_tokens(replicas)

    def _hand_out_tokens(self, replicas: int) -> tf.Operation:
        tag = self._tag()
        return tf.group(*(self._shared.tokens[r].enqueue(tag) for r in range(replicas)))

    def _make_update(self, replicas: int) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns (global step after the update, the time at which every replica's gradient was here)."""
        flat = self._shared.flat.read_value()
        slots = {name: slot.read_value() for name, slot in self._shared.slots.items()}
        mine = packing.tags_of(flat, self._shard)
        generation, step = tf.unstack(tf.cast(mine, tf.int64))

        def stale(message: tf.Tensor) -> tf.Tensor:
            # Not `!=`, which compares identities in a v1 graph.
            return tf.reduce_any(tf.not_equal(packing.tags_of(message, self._shard), mine))

        packed = [_take(self._shared.intake[r], stale) for r in range(replicas)]
        with tf.control_dependencies(packed):
            taken_at = tf.timestamp()
        exchange = self._make_exchange(mine) if self._optimizer.clip_norm is not None else tf.identity
        new, moved = make_update(self._shard, self._optimizer, exchange)(flat, slots, packed, generation, step)
        assigned = [self._shared.flat.assign(new, read_value=False)]
        assigned += [slot.assign(moved[name], read_value=False) for name, slot in self._shared.slots.items()]
        with tf.control_dependencies(assigned):
            handed = self._hand_out_tokens(replicas)
        with tf.control_dependencies([handed]):
            return step + 1, tf.identity(taken_at)

    def _make_exchange(self, mine: tf.Tensor) -> Callable[[tf.Tensor], tf.Tensor]:
        """Tells every other host the squared norms here and hears theirs; all hosts get the same [K] bits."""
        here, sizes = self._shard.index, [len(shard.trainable) for shard in self._shards]
        order = squares_order(self._shards)

        def queue(sender: int, receiver: int) -> Any:
            with tf.device(device_of(self._shards[receiver].host)):
                name = f"shard{receiver}/squares_of{sender}"
                return v1.FIFOQueue(2, [tf.int32, tf.float32], [[2], [sizes[sender]]], shared_name=name)

        def hear(sender: int) -> tf.Tensor:
            inbox = queue(sender, here)
            return tf.while_loop(
                lambda tags, _: tf.reduce_any(tf.not_equal(tags, mine)), lambda *_: inbox.dequeue(), inbox.dequeue()
            )[1]

        def exchange(squares: tf.Tensor) -> tf.Tensor:
            others = [shard.index for shard in self._shards if shard.index != here]
            told = [queue(here, other).enqueue([mine, squares]) for other in others]
            heard = {other: hear(other) for other in others} | {here: squares}
            with tf.control_dependencies(told):
                return tf.gather(tf.concat([heard[index] for index in sorted(heard)], 0), order)

        return exchange


class ShardsEngine:
    """A replica's side: pulls parameters from the shard hosts, pushes packed gradients."""

    def __init__(
        self,
        *,
        task: str,
        shards: Sequence[Shard],
        optimizer: OptimizerConfig,
        replica: Replica,
    ) -> None:
        """Builds the replica's graph.

        Args:
            task: this task, e.g. "worker:3".
        """
        self._shards, self._fills = shards, optimizers.slots(optimizer)
        with tf.Graph().as_default() as self.graph:
            shared = [_share(shard, list(self._fills), replica.count) for shard in shards]
            with tf.device(device_of(task)):
                self._batches = replica.batches()
                self._stop = v1.placeholder(tf.float32, [])
            self._step, self._gradients = self._make_step(shared, device_of(task), replica)
            self._peek = self._make_peek(shared, replica.index)
            self._snapshot = self._make_snapshot(shared, replica.index)
            self._feeds = [[v1.placeholder(tf.float32, v.shape) for v in (s.flat, *s.slots.values())] for s in shared]
            self._load = [s.loads.enqueue(feeds) for s, feeds in zip(shared, self._feeds, strict=True)]
            self._goodbye = [s.goodbyes.enqueue(replica.index) for s in shared]

    def connect(self, target: str, session_config: Any) -> None:
        """Opens the session on the task's own server; the shard hosts must be up."""
        self.session = v1.Session(target, graph=self.graph, config=session_config)
        self._run_step = self.session.make_callable(self._step, feed_list=[self._stop])
        self._run_step_and_fetch = self.session.make_callable([*self._step, self._gradients], feed_list=[self._stop])

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

    def start(self) -> int:
        """Blocks until the shards are loaded; sets the input to their global step and returns it."""
        step = self.peek().step
        self.session.run(self._batches.initializer, self._batches.feed_from(step))
        return step

    def step(self, *, stop: bool = False, fetch_gradients: bool = False) -> Pulled:
        """Pulls, computes on the next batch, pushes.

        Args:
            stop: asks all replicas to stop after the next step.
            fetch_gradients: also returns what this replica pushed.
        """
        began = time.time()
        run = self._run_step_and_fetch if fetch_gradients else self._run_step
        tags, metrics, pulled_at, computed_at, _, *gradients = run(float(stop))
        pulled = Pulled.read(tags, metrics, wait_secs=pulled_at - began, compute_secs=computed_at - pulled_at)
        return pulled._replace(gradients=self._name(gradients[0])) if gradients else pulled

    def peek(self) -> Pulled:
        """Blocks until all that this replica pushed is applied; reads where the run stands and pushes nothing."""
        return Pulled.read(*self.session.run(self._peek))

    def snapshot(self) -> Snapshot:
        """Like `peek`, with everything a checkpoint holds."""
        tags, flats, slots = self.session.run(self._snapshot)
        return Snapshot.from_flats(int(tags[0][1]), self._shards, flats, slots)

    def leave(self) -> None:
        """Tells every shard host that this replica needs it no more.

        A host that has heard it from all leaves at once, maybe before it has answered; so each is told on its own.
        """
        for goodbye in self._goodbye:
            with contextlib.suppress(tf.errors.UnavailableError):
                self.session.run(goodbye)

    def _name(self, packed: list[np.ndarray]) -> dict[str, np.ndarray]:
        named: dict[str, np.ndarray] = {}
        for shard, flat in zip(self._shards, packed, strict=True):
            named |= packing.from_flat(shard.trainable, flat)
        return named

    def _make_step(self, shared: list[_Shared], here: str, replica: Replica) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        """Returns ([tags, metrics, time when pulled, time when computed, pushes], packed gradients).

        Everything but the two vectors stays where it is: one tensor each way per shard and step.
        """
        pulled = []
        for s, shard in zip(shared, self._shards, strict=True):
            with tf.device(device_of(shard.host)):
                token = _take(s.tokens[replica.index], _not_after(s.seen[replica.index]))
                with tf.control_dependencies([s.seen[replica.index].assign(token, read_value=False)]):
                    pulled.append(s.flat.read_value())
        with tf.device(here):
            pulled = [tf.identity(flat) for flat in pulled]
            with tf.control_dependencies(pulled):
                pulled_at = tf.timestamp()
            tags = tf.stack([packing.tags_of(flat, shard) for flat, shard in zip(pulled, self._shards, strict=True)])
            packed, computed_at = compute(pulled, self._shards, replica, self._batches, self._stop)
            metrics = packing.metrics_of(pulled[0], self._shards[0])
        pushes = []
        for s, shard, vector in zip(shared, self._shards, packed, strict=True):
            with tf.device(device_of(shard.host)):
                pushes.append(s.intake[replica.index].enqueue(vector))
        return [tags, metrics, pulled_at, computed_at, pushes], packed

    def _make_peek(self, shared: list[_Shared], replica: int) -> list[tf.Tensor]:
        tags, metrics = [], []
        for s, shard in zip(shared, self._shards, strict=True):
            with tf.device(device_of(shard.host)), tf.control_dependencies([self._wait(s, replica)]):
                flat = s.flat.read_value()
                tags.append(packing.tags_of(flat, shard))
                metrics.append(packing.metrics_of(flat, shard))
        return [tf.stack(tags), metrics[0]]

    def _make_snapshot(self, shared: list[_Shared], replica: int) -> tuple[Any, Any, Any]:
        tags, flats, slots = [], [], []
        for s, shard in zip(shared, self._shards, strict=True):
            with tf.device(device_of(shard.host)), tf.control_dependencies([self._wait(s, replica)]):
                flats.append(s.flat.read_value())
                tags.append(packing.tags_of(flats[-1], shard))
                slots.append({name: slot.read_value() for name, slot in s.slots.items()})
        return tags, flats, slots

    def _wait(self, s: _Shared, replica: int) -> tf.Operation:
        """Waits for the token of the next step, and gives it back."""
        token = _take(s.tokens[replica], _not_after(s.seen[replica]))
        return s.tokens[replica].enqueue(token)
