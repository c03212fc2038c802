"""Builds the graph of a worker: one Session.run pulls parameters, computes, and pushes gradients.

    worker step:  wait for my token of every shard -> read -> replica step -> push

Every vector carries (generation, step) in its header. Tokens are growing numbers, so a stale one is skipped.

Under sync all shards are at the same step when a worker reads them. Otherwise they may differ: under backup a gradient
counts as of the oldest, under async every shard judges by its own step.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import tensorflow as tf

from trainer.config.schema import OptimizerConfig
from trainer.engine.combine import mean_over_replicas, sums_over_replicas
from trainer.engine.compute import Packed, Replica, Requests, compute, in_step, in_turn, pack_float32
from trainer.engine.data_wait import BatchCount
from trainer.engine.devices import device_of
from trainer.engine.instruments import GraphClock, failpoint, now
from trainer.engine.sharded.prefetch import PrefetchGraph, build_prefetch
from trainer.engine.sharded.rejoin import Rejoin, build_join
from trainer.engine.sharded.resources import PUSH, STOP_PUSH, Link, share
from trainer.engine.tables.worker import NO_TABLES, RowQuery, Tables
from trainer.engine.update import BAD, DIVISOR, REDUCTIONS, STOP
from trainer.engine.vectors import packing
from trainer.engine.vectors.wire import FLOAT32, VectorWire
from trainer.plan.layout import Shard
from trainer.plan.spans import Span, pushes_of
from trainer.plan.strategy import Strategy

v1 = tf.compat.v1


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """The parts from which a worker's graph is built."""

    task: str  # that computes, e.g. "worker:3"
    worker: int  # whose share of the replicas this is: that of the task, or of a worker that it stands in for
    workers: int  # that push
    averaged: float  # what an update divides this worker's requests by
    shards: Sequence[Shard]
    optimizer: OptimizerConfig
    replicas: Sequence[Replica]  # of this worker
    strategy: Strategy
    parameters: str = "/cpu:0"  # the hosts' device that holds the vectors
    wire: VectorWire = FLOAT32
    profiles: bool = False  # whether steps are stamped: wait, pull, input, compute, push
    tables: Tables = NO_TABLES
    spans: Sequence[Sequence[Span]] | None = None  # by worker, of the sums that it pushes; otherwise it pushes means

    @property
    def scope(self) -> str:
        """Returns the name scope of operations; that of the task's own share is empty."""
        return "" if self.task == f"worker:{self.worker}" else f"for_worker{self.worker}"

    @property
    def here(self) -> str:
        return device_of(self.task)

    @property
    def pushes(self) -> range:
        """Returns the numbers of this worker's vectors among all that an update takes."""
        return pushes_of(self.spans, self.workers)[self.worker]

    @cached_property
    def slots(self) -> dict[str, float]:
        return self.optimizer.slots()


class StepGraph(NamedTuple):
    """The fetches and feeds of a step."""

    messages: list[tf.Tensor]  # pulled from each shard; where they are fed no token is waited for
    fetches: list[Any]  # [tags, metrics, time when pulled, time when computed, [pushes, *stamps]]
    gradients: list[tf.Tensor]  # of this worker, packed for each shard, followed by their divisor


class LoadGraph(NamedTuple):
    """The operations by which the chief loads every shard host."""

    feeds: list[list[tf.Tensor]]  # of each shard: the vector, then its slots, then a checkpoint with rows of tables
    loads: list[tf.Operation]


@dataclass(frozen=True)
class WorkerGraph:
    """All operations that a worker runs."""

    graph: Any
    links: list[Link]
    batches: list[Any]  # by replica
    batch_count: BatchCount
    requests: Requests
    step: StepGraph
    peek: list[tf.Tensor]  # [tags, metrics] when the next token is here
    rejoin: Rejoin
    join: list[tf.Operation]  # under async and backup
    ticket: tf.Tensor  # [] int32, to be fed to `join` and snapshots
    contributions: tf.Tensor | None  # under async and backup
    goodbyes: list[tf.Operation]
    prefetch: PrefetchGraph | None
    query: RowQuery | None  # asks for the rows of the first step, where rows are sent


def build_graph(spec: WorkerSpec) -> WorkerGraph:
    """Builds a worker's graph on the resources of the shard hosts."""
    has_prefetch = len({shard.host for shard in spec.shards}) < len(spec.shards)
    assert spec.strategy.waits_for_all or not has_prefetch
    has_log = not spec.strategy.waits_for_all
    clock = GraphClock(is_wanted=spec.profiles)
    # Resources of a task are known by the names of their operations, in all its graphs.
    with tf.Graph().as_default() as graph, tf.name_scope(spec.scope):
        options: dict[str, Any] = {"parameters": spec.parameters, "has_log": has_log, "wire": spec.wire}
        options |= {"sends_rows": spec.tables.announce is not None, "spans": spec.spans}
        mine = [spec.worker]
        shared = [share(shard, list(spec.slots), spec.workers, of=mine, **options) for shard in spec.shards]
        links = [Link(*pair, spec.worker, spec.wire) for pair in zip(spec.shards, shared, strict=True)]
        with tf.device(spec.here):
            batches = [replica.batches() for replica in spec.replicas]
            batch_count = BatchCount("/cpu:0", spec.scope)
            counted = batch_count.count([tensor for one in batches for tensor in one.batch.tensors])
            requests = Requests.placeholders()
            query = spec.tables.query()
        prefetch = build_prefetch(links, spec.here) if has_prefetch else None
        messages = prefetch.messages if prefetch else [link.pull(clock) for link in links]
        ticket = v1.placeholder(tf.int32, [])
        log = links[0].shared.log
        return WorkerGraph(
            graph=graph,
            links=links,
            batches=batches,
            batch_count=batch_count,
            requests=requests,
            step=_build_step(spec, links, messages, batches, counted, requests, clock),
            peek=_build_peek(spec, links, waits=not has_prefetch),
            rejoin=Rejoin(links, spec.here),
            join=build_join(links, spec.strategy, ticket) if has_log else [],
            ticket=ticket,
            contributions=log.contributions.read_value() if log else None,
            goodbyes=[link.shared.goodbyes.enqueue(spec.worker) for link in links],
            prefetch=prefetch,
            query=query,
        )


def build_load(links: Sequence[Link]) -> LoadGraph:
    """Adds the load of every shard to the default graph."""
    vectors = [(link.shared.flat, *link.shared.slots.values()) for link in links]
    feeds = [[*(v1.placeholder(tf.float32, v.shape) for v in one), v1.placeholder(tf.string, [])] for one in vectors]
    return LoadGraph(feeds, [_load(link, fed) for link, fed in zip(links, feeds, strict=True)])


def _load(link: Link, fed: Sequence[tf.Tensor]) -> tf.Operation:
    """Sends a host its state, unless the state of a chief that died is still queued there."""
    loads = link.shared.loads

    def send() -> tf.Tensor:
        with tf.control_dependencies([loads.enqueue(fed)]):
            return tf.constant(True)

    with tf.device(link.device):
        return tf.cond(loads.size() > 0, lambda: tf.constant(False), send).op


def _build_peek(spec: WorkerSpec, links: Sequence[Link], *, waits: bool) -> list[tf.Tensor]:
    tags, metrics = [], []
    for link in links:
        with tf.device(link.device), tf.control_dependencies([link.wait()] if waits else []):
            flat = link.shared.flat.read_value()
            tags.append(packing.tags_of(flat, link.shard))
            metrics.append(packing.metrics_of(flat, link.shard))
    return [_common_tags(spec.strategy, tf.stack(tags)), _common_metrics(spec.strategy, metrics)]


def _common_tags(strategy: Strategy, tags: tf.Tensor) -> tf.Tensor:
    """Returns the tags [shards or 1, 2]: of all shards under sync, which must be equal; otherwise of the oldest."""
    return tags if strategy.waits_for_all else tf.reduce_min(tags, 0, keepdims=True)


def _common_metrics(strategy: Strategy, metrics: Sequence[tf.Tensor]) -> tf.Tensor:
    """Returns the metrics of the first shard, with stops and reductions that other shards may know earlier."""
    if strategy.waits_for_all:
        return metrics[0]
    first, stop = metrics[0], tf.reduce_max([one[STOP] for one in metrics])
    reductions = tf.reduce_min([one[REDUCTIONS] for one in metrics])
    parts = [first[:STOP], [stop], first[STOP + 1 : BAD + 1], [reductions], first[REDUCTIONS + 1 :]]
    return tf.concat(parts, 0)


def _build_step(
    spec: WorkerSpec,
    links: Sequence[Link],
    messages: Sequence[tf.Tensor],
    batches: Sequence[Any],
    counted: tf.Operation,
    requests: Requests,
    clock: GraphClock,
) -> StepGraph:
    """Builds a step; only two vectors are sent per shard: one tensor each way."""
    shards, replicas, strategy, wire = spec.shards, spec.replicas, spec.strategy, spec.wire
    with tf.device(spec.here):
        messages = [tf.identity(message) for message in messages]
        pulled, payloads = spec.tables.split(messages, [wire.shape(shard)[0] for shard in shards])
        vectors = [wire.read_parameters(message, shard) for message, shard in zip(pulled, shards, strict=True)]
        tags = tf.stack([packing.tags_of(one, shard) for one, shard in zip(vectors, shards, strict=True)])
        # Not after the messages themselves: where they are fed, that would still wait for a token.
        pulled_at = now([tags])
        clock.end_at("pull", pulled_at)
        clock.end("input", [tensor for one in batches for tensor in one.batch.tensors])
        headers = [packing.header_of(one, shard) for one, shard in zip(vectors, shards, strict=True)]
        if strategy.waits_for_all:
            same = tf.debugging.assert_equal(tags, tags[:1], "the shards are at different steps")
            with tf.control_dependencies([same]):  # before anything is pushed
                step = tf.cast(tags[0][1], tf.int64)
            batches = [in_step(one, step) for one in batches]
        tags = _common_tags(strategy, tags)
        if strategy.waits_for_quorum:  # one host decides for all, so the oldest shard counts
            headers = [packing.header(tags[0][0], tags[0][1])] * len(shards)
        tag = tf.cast(tags[0][0], tf.int64) * packing.GENERATION_STRIDE + tf.cast(tags[0][1], tf.int64)
        rows = spec.tables.rows_of_step([one.derived for one in batches], tag, payloads)
        clip = spec.optimizer if strategy.waits_for_one and spec.optimizer.clip_norm is not None else None
        is_alone = len(replicas) == 1 and clip is None
        writes_in_step = is_alone and wire.writes_on(replicas[0].device, jit=replicas[0].jit)
        computed_on = [vector.trainable for vector in vectors]

        def write(trainable: Sequence[tf.Tensor], rest: Sequence[tf.Tensor], shard: Shard, push: int = 0) -> tf.Tensor:
            return wire.write_gradients(trainable, rest, shard, push=spec.pushes[push], computed_on=computed_on)

        def run(index: int) -> Packed:
            written = write if writes_in_step else pack_float32
            return compute(vectors, headers, shards, replicas[index], batches[index], requests, written, rows[index])

        computed = in_turn(replicas, run)
        vectors_of = [one.vectors for one in computed]
        spans = None if spec.spans is None else spec.spans[spec.worker]
        sums = spec.tables.sum_gradients([one.derived for one in batches], [one.rows for one in computed], spans)
        scale = None
        if writes_in_step:
            packed = vectors_of
        elif spans is None:
            means, scale = mean_over_replicas(vectors_of, headers, shards, clip=clip, write=write, rows=sums[1::2])
            packed = [means]
        else:
            packed = sums_over_replicas(vectors_of, headers, shards, spans, write)
        left = spec.tables.leave(sums, [one.upcoming for one in batches], scale)
        computed_at = now([*(vector for of_span in packed for vector in of_span), *left, counted])
        clock.end_at("compute", computed_at)
        metrics = [packing.metrics_of(one, shard) for one, shard in zip(vectors, shards, strict=True)]
        metrics = _common_metrics(strategy, metrics)
        with tf.control_dependencies(left):
            pushes = [[of_span[number] for of_span in packed] for number, _ in enumerate(shards)]
            announced = [wire.announce(vectors, shard) for vectors, shard in zip(pushes, shards, strict=True)]
            announced = spec.tables.join(announced, left)
        vectors = [vector for of_span in packed for vector in of_span]
        divisor = tf.constant(1.0 if spans is None else float(len(replicas)))
        if shards[0].is_counted:
            divisor = tf.add_n([wire.metrics_of(of_span[0], shards[0])[DIVISOR] for of_span in packed])
    pushed = push(spec, links, announced, clock, tags=tags[0])
    return StepGraph(messages, [tags, metrics, pulled_at, computed_at, [pushed, *clock.fetches]], [*vectors, divisor])


def push(
    spec: WorkerSpec, links: Sequence[Link], messages: Sequence[tf.Tensor], clock: GraphClock, *, tags: tf.Tensor
) -> list[tf.Operation]:
    """Sends each host its message; then, under async and backup, announces the pushes to the hosts."""
    arrived: list[tf.Tensor] = []
    pushed: list[tf.Operation] = []
    reached: list[tf.Operation] = []
    last: dict[str, tf.Tensor] = {}  # by host; not the push itself, which may wait for space until another push
    for link, message in zip(links, messages, strict=True):
        host = link.shard.host
        if host in last:  # buckets arrive one after the other; sent concurrently, all would arrive late
            with tf.device(spec.here), tf.control_dependencies([last[host]]):
                message = tf.identity(message)
        if len(pushed) == 1:
            reached = failpoint("push", tags[1], pushed)
        with tf.control_dependencies(reached), tf.device(link.device):
            arrived.append(tf.identity(message))  # here, so that what is read of it below is not sent on its own
            with tf.control_dependencies(clock.end("push", [arrived[-1]], on=host)):
                pushed.append(link.shared.pushes[spec.worker].enqueue(arrived[-1]))
            last[host] = arrived[-1]
    announced = []
    for number, (link, message) in enumerate(zip(links, arrived, strict=True)):
        # Under backup the first shard's host informs the others, and no sooner than all have the vector.
        if link.shared.log is None or (spec.strategy.waits_for_quorum and number > 0):
            continue
        with tf.device(link.device):
            kind = tf.where(spec.wire.asks_to_stop(message, link.shard), STOP_PUSH, PUSH)
            arrival = tf.concat([[spec.worker], spec.wire.tags_of(message, link.shard), [kind]], 0)
            with tf.control_dependencies(pushed if spec.strategy.waits_for_quorum else [pushed[number]]):
                announced.append(link.shared.log.arrivals.enqueue(arrival))
    return announced or pushed
