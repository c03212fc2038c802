"""Holds a shard: waits for its state, updates it, hands out tokens, and waits for the workers' goodbyes.

A host is built without a state: it blocks until the chief loads it, and then lets every worker start. How gradients
become updates depends on the strategy.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import tensorflow as tf

from trainer.config.schema import OptimizerConfig
from trainer.engine.devices import device_of
from trainer.engine.instruments import failpoint, run_traced
from trainer.engine.sharded.resources import share, tag_of
from trainer.engine.tables.host import TableHost
from trainer.engine.tables.messages import RowServer, cut_message
from trainer.engine.tables.payloads import Payloads
from trainer.engine.update import Exchange, is_scaled, judge, make_update, squares_order
from trainer.engine.vectors import packing
from trainer.engine.vectors.wire import FLOAT32, VectorWire
from trainer.observe.placement.executed import Executed
from trainer.observe.profile.stamps import Stamps
from trainer.plan.layout import Shard
from trainer.plan.spans import Span, pushes_of

v1 = tf.compat.v1

OnUpdate = Callable[[int, float], None]  # global step, seconds spent waiting for gradients
Record = Callable[[int, Stamps], None]  # global step


class ShardHost(ABC):
    """Holds one shard and updates it; runs on a ps, or in a thread of a worker."""

    is_tracing = False  # the next update also writes what ran where to `executed`
    executed: Executed | None = None
    record: Record | None = None  # called after each update, where a profile is wanted
    place: Any = 0  # of the newest vector, in shared memory

    def __init__(
        self,
        *,
        shards: Sequence[Shard],
        index: int,
        workers: int,
        spans: Sequence[Sequence[Span]] | None = None,
        optimizer: OptimizerConfig,
        parameters: str = "/cpu:0",
        tables: TableHost,
        has_log: bool = False,
        wire: VectorWire = FLOAT32,
        profiles: bool = False,
        payloads: Payloads | None = None,
    ) -> None:
        """Begins the host's graph.

        Args:
            shards: all shards of the plan; this host holds the one at `index`.
            workers: that push.
            spans: by worker, of the sums that it pushes, where an update waits for all; otherwise it pushes one vector.
            parameters: the device that holds the vectors.
            tables: updates the rows of this host.
            has_log: whether updates follow a log of arrivals, as under async and backup.
            profiles: whether updates are stamped, for `record`.
            payloads: carry these rows behind the vectors of messages, if rows are sent.
        """
        self.shards, self.shard, self.optimizer, self.workers = shards, shards[index], optimizer, workers
        self.wire, self.profiles, self.tables = wire, profiles, tables
        self.spans = None if spans is None else [span for of_worker in spans for span in of_worker]
        self.pushes = pushes_of(spans, workers)
        self.parameters = device_of(self.shard.host, parameters)
        # Made once, because each would be compiled again.
        self._update_shard = make_update(
            self.shard, optimizer, self._exchanged, scaled=is_scaled(shards), wire=wire, spans=self.spans
        )
        self._exchange: Exchange | None = None  # of the update that is being added
        self.graph = tf.Graph()
        with self.graph.as_default(), tf.device(device_of(self.shard.host)):
            names = list(optimizer.slots())
            options: dict[str, Any] = {
                "has_log": has_log,
                "wire": wire,
                "sends_rows": payloads is not None,
                "spans": spans,
            }
            self.shared = share(self.shard, names, workers, parameters=parameters, **options)
            self.rows = RowServer(tables, self.shard, self.pushes, payloads) if payloads else None
            self.resizable = list(self.shared.rows.values())
            self._tag = self.tag()
            self._load = self._make_load()
            self._goodbye = self.shared.goodbyes.dequeue()

    def connect(self, target: str, session_config: Any) -> None:
        """Opens the session on the task's own server and makes the shard's resources, without a state."""
        with self.graph.as_default():
            initialize = [v1.global_variables_initializer(), *(one.initializer for one in self.resizable)]
        self.session = v1.Session(target, graph=self.graph, config=session_config)
        self.session.run(initialize)
        self._read_tag = self.session.make_callable(self._tag)

    def load(self) -> int:
        """Blocks until the chief has sent a state, then lets every worker start from it; returns its step."""
        self.session.run(self._load)
        return self.read_tag()[1]

    def read_tag(self) -> tuple[int, int]:
        """Returns (generation, step) of the shard."""
        return divmod(int(self._read_tag()), packing.GENERATION_STRIDE)

    @abstractmethod
    def serve(self, steps: int, on_update: OnUpdate) -> None:
        """Updates until the global step is `steps`; under async and backup it then answers late pushes forever."""

    def wait_for_goodbyes(self) -> None:
        """Blocks until every worker has said that it no longer needs this shard; a restarted one may say so twice."""
        finished: set[int] = set()
        while len(finished) < self.workers:
            finished.add(int(self.session.run(self._goodbye)))

    def missing(self) -> list[int]:
        """Returns the workers that the next update waits for; can be called from any thread."""
        return []

    def run_update(self, run: Callable[..., Any], fetches: Any, feeds: Mapping[Any, Any] | None = None) -> Any:
        """Runs an update through its callable, or through the session if it is to be traced.

        Args:
            run: made of `fetches` and the keys of `feeds`.
        """
        feeds = dict(feeds or {})
        if not self.is_tracing:
            return run(*feeds.values())
        self.is_tracing = False
        fetched, self.executed = run_traced(self.session, fetches, feeds)
        return fetched

    def tag(self) -> tf.Tensor:
        return tag_of(self.shared.flat.read_value(), self.shard)

    def hand_out_tokens(self) -> tf.Operation:
        """Returns a token of the shard's step for every worker."""
        tag = self.tag()
        with tf.control_dependencies([op for worker in self.shared.tokens for op in self.give_rows(worker)]):
            tag = tf.identity(tag)
        first, *others = self.shared.tokens.values()
        handed = [first.enqueue(tag)]
        with tf.control_dependencies(failpoint("token", tag % packing.GENERATION_STRIDE, handed)):
            return tf.group(*handed, *(tokens.enqueue(tag) for tokens in others))

    def give_rows(self, worker: int) -> list[tf.Operation]:
        """Copies the rows that a worker has asked for, where rows are sent, for its next token."""
        return [] if self.rows is None else [self.shared.rows[worker].assign(self.rows.rows_for(worker))]

    def read_push(self, message: tf.Tensor, worker: int, *, counts: tf.Tensor | bool = True) -> list[tf.Tensor]:
        """Returns the packed vectors that a worker pushed, and takes the rows behind them, if any.

        Args:
            counts: [] bool, whether the update has it.
        """
        pushes = self.pushes[worker]
        if self.rows is None:
            return self.wire.read_gradients(message, self.shard, pushes)
        vectors, payload = cut_message(message, *self.wire.push_shape(self.shard, len(pushes)))
        with tf.control_dependencies([self.rows.take(worker, payload, counts=counts)]):
            return self.wire.read_gradients(tf.identity(vectors), self.shard, pushes)

    def update(
        self,
        packed: Sequence[tf.Tensor],
        *,
        pushes: Any,
        chosen: tf.Tensor | None = None,
        exchange: Exchange | None = None,
    ) -> tuple[tf.Tensor, list[tf.Operation]]:
        """Adds one update from pushed vectors; returns (global step after it, the assignments that it ends with).

        Args:
            packed: vectors.
            pushes: [n] the numbers of those that are averaged.
            chosen: [len(packed)] bool, which vectors these are; all by default.
        """
        flat = self.shared.flat.read_value()
        slots = {name: slot.read_value() for name, slot in self.shared.slots.items()}
        generation, step = tf.unstack(tf.cast(packing.tags_of(flat, self.shard), tf.int64))
        scaled = is_scaled(self.shards)
        decide = partial(judge, flat, packed, self.shard, self.wire, scaled=scaled, chosen=chosen, spans=self.spans)
        take = self.rows.pushed if self.rows else None
        tag = generation * packing.GENERATION_STRIDE + step
        rows = self.tables.begin(tag, decide, packed, pushes=pushes, spans=self.spans, take=take)
        self._exchange = exchange
        if exchange is not None:
            self._exchange = rows.extend(exchange, partial(self._square_sum, packing.tags_of(flat, self.shard)))
        with tf.device(self.parameters):
            new, moved = self._update_shard(flat, slots, packed, generation, step, chosen)
            previous = []
            if self.shared.before is not None:
                with tf.control_dependencies([new]):  # while the host waits, a rejoining worker may need it
                    previous = [self.shared.before.assign(flat, read_value=False)]  # by reference
            with tf.control_dependencies(
                [*previous, *rows.finish(step)]
            ):  # so that all can be read once the new vector can
                assigned = self.assign_flat(new, packed)
            assigned += [slot.assign(moved[name], read_value=False) for name, slot in self.shared.slots.items()]
        return step + 1, assigned

    def _square_sum(self, tags: tf.Tensor) -> tf.Tensor:
        """Returns the square sum [] of the rows' gradients of all hosts, in the update with these tags [2]."""
        if self.rows is None:
            return self.tables.square_sum()
        own = self.tables.own_square_sums()
        shapes = [own.shape.as_list()] * len(self.shards)
        return self.tables.square_sum(self._from_all(tags, own, "row_squares", shapes))

    def assign_flat(self, new: tf.Tensor, packed: Sequence[tf.Tensor] = ()) -> list[tf.Operation]:
        """Writes the workers' part of a new vector, then the vector: once that can be read, both can.

        Args:
            packed: the gradients that it was computed on.
        """
        with tf.device(device_of(self.shard.host)):
            message = self.wire.write_parameters(new, self.shard, self.place, computed_on=packed)
            if message is None:
                written = []
            elif self.wire.is_per_worker:  # workers get it with their tokens
                written = [message.op]
            else:
                written = [self.shared.sent[0].assign(message, read_value=False)]
        with tf.control_dependencies(written):
            return [*written, self.shared.flat.assign(new, read_value=False)]

    def exchange(self, tags: tf.Tensor) -> Exchange | None:
        """Exchanges squared norms with all other hosts; every host gets the same [K] bits.

        Args:
            tags: [2] the generation and step of the update; norms of others are dropped.
        """
        if self.optimizer.clip_norm is None:
            return None
        shapes, order = [[len(shard.trainable)] for shard in self.shards], squares_order(self.shards)

        def exchange(squares: tf.Tensor) -> tf.Tensor:
            return tf.gather(tf.concat(self._from_all(tags, squares, "squares", shapes), 0), order)

        return exchange

    def _from_all(self, tags: tf.Tensor, own: tf.Tensor, name: str, shapes: Sequence[list[int]]) -> list[tf.Tensor]:
        """Returns the values of all hosts for the update with these tags [2]; those of other updates are dropped."""
        here, others = self.shard.index, [shard.index for shard in self.shards if shard.index != self.shard.index]

        def queue(sender: int, receiver: int) -> Any:
            with tf.device(device_of(self.shards[receiver].host)):
                shared_name = f"shard{receiver}/{name}_of{sender}"
                return v1.FIFOQueue(2, [tf.int32, own.dtype], [[2], shapes[sender]], shared_name=shared_name)

        def receive(sender: int) -> tf.Tensor:
            inbox = queue(sender, here)
            return tf.while_loop(
                lambda theirs, _: tf.reduce_any(tf.not_equal(theirs, tags)), lambda *_: inbox.dequeue(), inbox.dequeue()
            )[1]

        sent = [queue(here, other).enqueue([tags, own]) for other in others]
        received = {other: receive(other) for other in others} | {here: own}
        with tf.control_dependencies(sent):
            return [tf.identity(received[index]) for index in sorted(received)]

    def _exchanged(self, squares: tf.Tensor) -> tf.Tensor:
        assert self._exchange is not None
        return self._exchange(squares)

    def _make_load(self) -> tf.Operation:
        flat, *slots, checkpoint = self.shared.loads.dequeue()
        assigned = self.tables.load(checkpoint)
        for variable, value in zip(self.shared.slots.values(), slots, strict=True):
            with tf.control_dependencies(assigned):
                assigned.append(variable.assign(value, read_value=False))
        with tf.control_dependencies(assigned):  # the vector last, because its tags say that the state is complete
            assigned += self.assign_flat(flat)
        with tf.control_dependencies(assigned):
            return self.hand_out_tokens()
