"""Computes packed gradients from pulled vectors, on each replica of a worker: the middle of every engine's step."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from trainer.engine.frozen import Copy
from trainer.engine.vectors import packing
from trainer.engine.vectors.packing import Tensors, TrainableAndRest
from trainer.engine.vectors.wire import FLOAT32
from trainer.plan.layout import METRICS, Shard
from trainer.workload import loss_scale
from trainer.workload.data.examples import Batch

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Replica:
    """One replica: its step, its batches, and its number among all."""

    step: Callable[..., Any]  # from replica.make_step
    batches: Callable[..., Any]  # adds its training batches (data.pipeline.Batches) to the default graph
    seed: int
    index: int = 0  # among all replicas of the run
    count: int = 1
    device: str | None = None  # of the forward and backward pass; None: TensorFlow chooses
    jit: bool = False  # compiled by XLA
    frozen: Copy = field(default_factory=lambda: Copy({}))  # weights that are in no vector
    scopes: Mapping[str, str] = field(default_factory=dict)  # layer path by name scope; known when the step is built


# trainable pieces, the rest, shard -> packed vector
Write = Callable[[Sequence[tf.Tensor], Sequence[tf.Tensor], Shard], tf.Tensor]


def pack_float32(trainable: Sequence[tf.Tensor], rest: Sequence[tf.Tensor], shard: Shard) -> tf.Tensor:
    return FLOAT32.pack(trainable, rest)


class Requests(NamedTuple):
    """The requests of a worker to the shard hosts, sent with its gradients; [] float32, 0 unless fed."""

    stop: tf.Tensor  # 1: all replicas must stop
    reductions: tf.Tensor  # of the learning rate, times the workers whose gradients an update averages

    @classmethod
    def placeholders(cls) -> Requests:
        return cls(*(tf.compat.v1.placeholder_with_default(0.0, []) for _ in cls._fields))


class Computed(NamedTuple):
    """The contribution of a replica step to an update."""

    gradients: dict[str, tf.Tensor]  # by path
    state: dict[str, tf.Tensor]
    metrics: tf.Tensor  # in the order of layout.METRICS, then the sums of the first shard
    rows: Sequence[tf.Tensor] = ()  # gradients of the rows of tables, by lookup


class Packed(NamedTuple):
    """The packed contribution of a replica step."""

    vectors: list[tf.Tensor]  # by shard
    rows: Sequence[tf.Tensor]


def compute(
    vectors: Sequence[TrainableAndRest],
    headers: Sequence[tf.Tensor],
    shards: Sequence[Shard],
    replica: Replica,
    batches: Any,
    requests: Requests,
    write: Write = pack_float32,
    rows: Sequence[tf.Tensor] = (),
) -> Packed:
    """Runs `run_step`, and packs its result for each shard with `write`.

    Args:
        headers: [LANES] the tags of a push to each shard.
    """

    def pack(computed: Computed) -> Packed:
        vectors = [
            write(*packing.pieces_of(shard, computed.gradients, computed.state, computed.metrics, header), shard)
            for shard, header in zip(shards, headers, strict=True)
        ]
        return Packed(vectors, computed.rows)

    return run_step(vectors, shards, replica, batches, requests, pack, rows)


def run_step(
    vectors: Sequence[TrainableAndRest],
    shards: Sequence[Shard],
    replica: Replica,
    batches: Any,
    requests: Requests,
    end: Callable[[Computed], Any] = lambda computed: computed,
    rows: Sequence[tf.Tensor] = (),
) -> Any:
    """Runs the replica step on the next batch, and then `end` in the same function, on the replica's device.

    Every random draw is a function of (seed, step of the batch, replica), so a restarted replica repeats it.

    Args:
        vectors: pulled from each shard.
        rows: of tables, for each lookup.
    """
    checked: list[str] = []  # what each element of `finite` is about

    def step(
        vectors: Sequence[TrainableAndRest],
        frozen: Tensors,
        draw: tf.Tensor,
        batch: Batch,
        requests: Requests,
        rows: Sequence[tf.Tensor],
    ) -> Any:
        with tf.device(replica.device):  # here too: operations of a function do not inherit their caller's device
            parameters, state = packing.unpack(vectors, shards)
            scale = state.get(loss_scale.PARAMETER.path)
            loss_scaled_by = None if scale is None else scale[0]
            given = {"rows": rows} if rows else {}
            output = replica.step(parameters, {**state, **frozen}, draw, batch, loss_scaled_by, **given)
            own = {} if scale is None else {loss_scale.PARAMETER.path: scale}
            metrics = output._asdict() | requests._asdict()
            lanes = tf.concat([tf.stack([metrics[name] for name in METRICS]), output.sums], 0)
            checked[:] = ["the loss", *(f"the gradient of {path}" for path in output.gradients)]
            checked.extend(f"the gradient of lookup {number} of tables" for number, _ in enumerate(rows))
            computed = Computed(output.gradients, {**output.state, **own}, lanes, output.rows)
            return end(computed), output.bad, output.finite

    draw = tf.stack([tf.constant(replica.seed, tf.int64), batches.step * replica.count + replica.index])
    run = tf.function(step, autograph=False, jit_compile=replica.jit or None)
    with tf.name_scope(f"replica{replica.index}"), tf.device(replica.device):  # one copy of each vector goes there
        frozen = replica.frozen.tensors(f"replica{replica.index}_frozen")
        ended, bad, finite = run(list(vectors), frozen, draw, batches.batch, requests, list(rows))
    # Outside the replica, because everything inside is on its device.
    named = _name_bad(replica, bad > 0, finite, checked, step=packing.tags_of(vectors[0], shards[0])[1])
    with tf.device(replica.device), tf.control_dependencies([named]):
        return tf.nest.map_structure(tf.identity, ended)


def _name_bad(
    replica: Replica, is_bad: tf.Tensor, finite: tf.Tensor, checked: Sequence[str], *, step: tf.Tensor
) -> tf.Operation:
    """Logs what is not finite in the task that computed it; the others only learn that something is.

    It is an operation of the graph, to save a fetch, outside the code that XLA compiles, which cannot call Python.
    """

    def report() -> tf.Operation:
        with tf.device("/cpu:0"):  # of the task that an enclosing scope names
            first = tf.gather(tf.constant(checked), tf.argmin(tf.cast(finite, tf.int32)))
            others = tf.reduce_sum(tf.cast(tf.logical_not(finite), tf.int32)) - 1
            numbers = [first, step + 1, others]
            return tf.numpy_function(partial(_log_bad, replica.index), numbers, [])

    with tf.device("/cpu:0"):
        return tf.cond(is_bad, report, tf.no_op)


def _log_bad(replica: int, name: Any, step: int, others: int) -> None:
    first = np.asarray(name).item().decode()  # a scalar array where TensorFlow runs eagerly, else bytes
    more = f" and {others} other gradients are" if others else " is"
    _log.error("replica %d: %s%s NaN or infinite at step %d", replica, first, more, step)


def in_turn(replicas: Sequence[Replica], run: Callable[[int], Packed]) -> list[Packed]:
    """Runs the replicas, by index; those of one device take turns, so that it holds one at a time."""
    computed: list[Packed] = []
    last: dict[str | None, Packed] = {}  # by device
    for index, replica in enumerate(replicas):
        before = last.get(replica.device)
        with tf.control_dependencies([] if before is None else [*before.vectors, *before.rows]):
            last[replica.device] = run(index)
        computed.append(last[replica.device])
    return computed


def in_step(batches: Any, step: tf.Tensor) -> Any:
    """Returns batches that fail unless they and the parameters belong to the same step."""
    same = tf.debugging.assert_equal(batches.step, step, "the batch and the parameters belong to different steps")
    with tf.control_dependencies([same]):
        return dataclasses.replace(batches, batch=batches.batch.map(tf.identity))
