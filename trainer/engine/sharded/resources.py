"""The variables and queues that a shard host shares with workers.

They have names: every graph, in any process, that makes a resource by that name gets the same one.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from trainer.engine.devices import device_of
from trainer.engine.instruments import GraphClock
from trainer.engine.queues import UNBOUNDED, take
from trainer.engine.sharded.staleness import COLUMNS
from trainer.engine.vectors import packing
from trainer.engine.vectors.wire import FLOAT32, VectorWire
from trainer.plan.layout import Shard
from trainer.plan.spans import Span

v1 = tf.compat.v1

ARRIVAL = 4  # numbers of an arrival: worker, generation, step, what it is
PUSH, STOP_PUSH, HOLD, JOIN = range(4)  # HOLD: the chief asks for a copy of the state, the step is the ticket


def tag_of(vector: tf.Tensor, shard: Shard) -> tf.Tensor:
    """Returns the generation and step of a shard's vector as one number that grows with both."""
    generation, step = tf.unstack(tf.cast(packing.tags_of(vector, shard), tf.int64))
    return generation * packing.GENERATION_STRIDE + step


class Resizable:
    """A variable [n] whose size may change; like the others, the same one by its name in every graph."""

    def __init__(self, name: str, dtype: tf.DType, size: int = 0) -> None:
        self._handle, self._dtype = tf.raw_ops.VarHandleOp(dtype=dtype, shape=[None], shared_name=name), dtype
        self.initializer = self.assign(tf.zeros([size], dtype))

    def assign(self, value: tf.Tensor) -> tf.Operation:
        return tf.raw_ops.AssignVariableOp(resource=self._handle, value=value)

    def read(self) -> tf.Tensor:
        return tf.ensure_shape(tf.raw_ops.ReadVariableOp(resource=self._handle, dtype=self._dtype), [None])


@dataclass(frozen=True)
class ArrivalLog:
    """The order in which gradients arrived at a host of async or backup, and copies of its state on request."""

    arrivals: Any  # queue of [ARRIVAL] int32: what was pushed here
    order: Any  # the same, as the first shard's host decided it for all
    held: Mapping[int, Any]  # by worker, queue of its tickets: a copy was made
    held_flat: Any  # [size] float32 variable
    held_slots: dict[str, Any]  # [slot_size] float32 variables
    contributions: Any  # [workers, COLUMNS] int64 variable, see staleness.py
    joined: Mapping[int, Any]  # by worker, queue of its tickets: the host knows that a new process has its place


@dataclass(frozen=True)
class Shared:
    """The resources of one shard."""

    flat: Any  # [size] float32 variable
    sent: Mapping[int, Any]  # by worker, [numbers] variable: what it pulls, where that is not the vector as it is
    before: Any | None  # [size] float32 variable: the vector of the step before, where all shards move together
    slots: dict[str, Any]  # [slot_size] float32 variables
    seen: Mapping[int, Any]  # by worker, int64 variable: tag of the last token it took
    pushes: Mapping[int, Any]  # by worker, queue of its messages, as vectors/wire.py has them
    tokens: Mapping[int, Any]  # by worker, queue of int64 tags
    loads: Any  # queue of (flat, slots..., the checkpoint that has the rows of tables)
    goodbyes: Any  # queue of worker numbers
    log: ArrivalLog | None
    rows: Mapping[int, Resizable]  # by worker: the rows of tables that it pulls with the vector, where they are sent


def share(
    shard: Shard,
    slots: Sequence[str],
    workers: int,
    *,
    of: Sequence[int] | None = None,
    parameters: str = "/cpu:0",
    has_log: bool,
    wire: VectorWire = FLOAT32,
    sends_rows: bool = False,
    spans: Sequence[Sequence[Span]] | None = None,
) -> Shared:
    """Adds the resources of a shard to the default graph, on its host.

    Args:
        workers: that push.
        of: the workers whose resources are made; all by default.
        parameters: the host's device that holds the vectors; queues, and what is sent, are in its memory.
        has_log: whether updates follow a log of arrivals, as under async and backup.
        sends_rows: whether messages have rows of tables behind the vector.
        spans: by worker, of the sums that it pushes; otherwise it pushes one vector.
    """
    prefix = f"shard{shard.index}"
    numbers = range(workers) if of is None else of

    def variable(name: str, shape: list[int], dtype: tf.DType = tf.float32, first: int = 0) -> Any:
        initializer = v1.zeros_initializer() if dtype == tf.float32 else v1.constant_initializer(first)
        return v1.get_variable(f"{prefix}/{name}", shape, dtype, initializer, use_resource=True)

    def queue(name: str, dtypes: list[tf.DType], shapes: list[list[int]] | None, room: int = UNBOUNDED) -> Any:
        return v1.FIFOQueue(room, dtypes, shapes, shared_name=f"{prefix}/{name}")

    def vectors(name: str) -> tuple[Any, dict[str, Any]]:
        with tf.device(device_of(shard.host, parameters)):
            flat = variable(f"{name}flat", [shard.size])
            return flat, {slot: variable(f"{name}slots/{slot}", [shard.slot_size(slot)]) for slot in slots}

    def log() -> ArrivalLog:
        flat, held = vectors("held/")
        counts = variable("contributions", [workers, COLUMNS], tf.int64)
        arrivals, order = (log_queue(shard, name) for name in ("arrivals", "order"))
        joined = {w: queue(f"joined{w}", [tf.int64], [[]]) for w in numbers}
        copied = {w: queue(f"held{w}", [tf.int64], [[]]) for w in numbers}
        return ArrivalLog(arrivals, order, copied, flat, held, counts, joined)

    def sent() -> dict[int, Any]:
        if not wire.has_messages:
            return {}
        if wire.is_per_worker:
            return {w: variable(f"sent{w}", message_shape, wire.dtype) for w in numbers}
        return dict.fromkeys(numbers, variable("sent", message_shape, wire.dtype))

    # Vectors are large, so capacity is limited. Under sync a worker waits for space until the host, which also needs
    # the other workers, has dropped what a predecessor left; with a log the host drops that before a worker may push.
    room = UNBOUNDED if has_log else 1
    shapes = [[shard.size], *([shard.slot_size(slot)] for slot in slots), []]
    loaded = [*[tf.float32] * (1 + len(slots)), tf.string]
    with tf.device(device_of(shard.host)):
        flat, kept = vectors("")
        with tf.device(device_of(shard.host, parameters)):
            before = None if has_log else variable("before", [shard.size])
        message_shape = wire.shape(shard)

        def intake(worker: int) -> Any:
            vectors = 1 if spans is None else len(spans[worker])
            shapes = None if sends_rows else [wire.push_shape(shard, vectors)]
            return queue(f"intake{worker}", [wire.dtype], shapes, room)

        return Shared(
            flat=flat,
            sent=sent(),
            before=before,
            slots=kept,
            seen={w: variable(f"seen{w}", [], tf.int64, -1) for w in numbers},
            pushes={w: intake(w) for w in numbers},
            tokens={w: queue(f"tokens{w}", [tf.int64], [[]]) for w in numbers},
            loads=queue("loads", loaded, shapes, room=1),
            goodbyes=queue("goodbyes", [tf.int32], [[]]),
            log=log() if has_log else None,
            rows={w: Resizable(f"{prefix}/rows{w}", wire.dtype) for w in numbers} if sends_rows else {},
        )


@dataclass(frozen=True)
class Link:
    """One worker's end of a shard."""

    shard: Shard
    shared: Shared
    worker: int
    wire: VectorWire

    @property
    def device(self) -> str:
        return device_of(self.shard.host)

    @property
    def tokens(self) -> Any:
        return self.shared.tokens[self.worker]

    @property
    def seen(self) -> Any:
        return self.shared.seen[self.worker]

    def pull(self, clock: GraphClock) -> tf.Tensor:
        """Waits for this worker's token and reads its message."""
        with tf.device(self.device):
            token = self._take_token()
            clock.end("wait", [token], on=self.shard.host)
            with tf.control_dependencies([self.seen.assign(token, read_value=False)]):
                vector = (self.shared.sent[self.worker] if self.shared.sent else self.shared.flat).read_value()
                return tf.concat([vector, self.shared.rows[self.worker].read()], 0) if self.shared.rows else vector

    def wait(self) -> tf.Operation:
        """Waits for the token of the next step, and puts it back."""
        with tf.device(self.device):
            return self.tokens.enqueue(self._take_token())

    def _take_token(self) -> tf.Tensor:
        """Takes a token, dropping those that are not newer than the last one taken."""
        return take(self.tokens, lambda tag: tag <= self.seen.read_value())


def log_queue(shard: Shard, name: str) -> Any:
    """Returns a queue of arrivals on a shard's host."""
    with tf.device(device_of(shard.host)):
        return v1.FIFOQueue(UNBOUNDED, [tf.int32], [[ARRIVAL]], shared_name=f"shard{shard.index}/{name}")
