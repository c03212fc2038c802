"""Adds a snapshot to the chief's graph: a copy of all shards, of one step."""

from typing import Any, NamedTuple

import tensorflow as tf

from trainer.engine.queues import take
from trainer.engine.sharded.rejoin import is_other
from trainer.engine.sharded.resources import HOLD
from trainer.engine.sharded.worker_graph import WorkerGraph, WorkerSpec
from trainer.engine.vectors import packing
from trainer.plan.layout import Shard


class SnapshotGraph(NamedTuple):
    """The fetches of a snapshot, by shard."""

    tags: list[tf.Tensor]
    flats: list[tf.Tensor]
    slots: list[dict[str, tf.Tensor]]
    asked: list[tf.Operation]


def build_snapshot(spec: WorkerSpec, graph: WorkerGraph) -> SnapshotGraph:
    """Adds a copy of the state, all of one step, to the default graph."""
    if not spec.strategy.waits_for_all:
        return _build_held_snapshot(spec, graph)
    snapshot = SnapshotGraph([], [], [], [])
    for link in graph.links:  # no shard moves before this worker pushes
        with tf.device(link.device), tf.control_dependencies([] if graph.prefetch else [link.wait()]):
            _read_into(snapshot, link.shard, link.shared.flat, link.shared.slots)
    return snapshot


def _build_held_snapshot(spec: WorkerSpec, graph: WorkerGraph) -> SnapshotGraph:
    """Asks the hosts for a copy and reads it, because the shards themselves continue."""
    snapshot = SnapshotGraph([], [], [], [])
    for link in graph.links:
        log = link.shared.log
        assert log is not None
        with tf.device(link.device):
            if spec.strategy.waits_for_one or link.shard.index == 0:  # the first shard's host asks the others
                with tf.control_dependencies([link.wait()]):  # so that the copy has what this worker pushed
                    snapshot.asked.append(log.arrivals.enqueue(tf.stack([link.worker, 0, graph.ticket, HOLD])))
            with tf.control_dependencies([take(log.held[link.worker], is_other(graph.ticket))]):
                _read_into(snapshot, link.shard, log.held_flat, log.held_slots)
    return snapshot


def _read_into(snapshot: SnapshotGraph, shard: Shard, flat: Any, slots: dict[str, Any]) -> None:
    snapshot.flats.append(flat.read_value())
    snapshot.tags.append(packing.tags_of(snapshot.flats[-1], shard))
    snapshot.slots.append({name: slot.read_value() for name, slot in slots.items()})
