"""Vectors in shared memory: their places, that no bit depends on them, and what a rejoining worker reads."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import keras
import numpy as np
import pytest
import tensorflow as tf
from small_clusters import STEPS, Cluster, digest, plain, to_the_end, unbroken, with_everything

from trainer.engine.sharded.worker import ShardedEngine
from trainer.engine.vectors import packing
from trainer.engine.vectors.shared_memory import MemoryWire
from trainer.plan.layout import Parameter
from trainer.plan.placement import place
from trainer.plan.shared_memory import PAGE, lay_out, nbytes, places, tables_offset
from trainer.plan.strategy import STRATEGIES

PARAMETERS = [Parameter("a", (5, 700), True), Parameter("b", (40,), True), Parameter("mean", (3,), False)]
SYNC = STRATEGIES["sync"]
SHARDS = place(PARAMETERS, ["ps:0", "ps:1"], pins={})


@pytest.fixture
def memory() -> Iterator[MemoryWire]:
    file = os.memfd_create("test")
    with lay_out(file, SHARDS, SYNC, 2) as path:
        yield MemoryWire(path, SHARDS, SYNC, 2)
    os.close(file)


def test_places_begin_at_pages_and_do_not_overlap():
    ends = 0
    for shard, offset in places(SHARDS, SYNC, pushes=2):
        assert offset % PAGE == 0
        assert offset >= ends
        ends = offset + shard.nbytes
    assert nbytes(SHARDS, SYNC, pushes=2) == ends
    assert len(list(places(SHARDS, SYNC, pushes=2))) == 6


def test_the_file_is_empty_after_a_run_and_all_zeros_in_the_next():
    file = os.memfd_create("test")
    for _ in range(2):
        with lay_out(file, SHARDS, STRATEGIES["async"], 2) as path:
            assert os.stat(path).st_size == tables_offset(SHARDS, STRATEGIES["async"], 2)
            with open(path, "r+b") as opened:
                assert opened.read(8) == bytes(8)
                opened.seek(0)
                opened.write(b"leftover")
        assert os.stat(path).st_size == 0
    os.close(file)


def run(*fetches: tf.Tensor, graph: tf.Graph) -> list[np.ndarray]:
    with tf.compat.v1.Session(graph=graph) as session:
        return [session.run(fetch) for fetch in fetches]


def test_pieces_are_read_back_as_one_vector(memory):
    vectors = {(s, w): np.full(SHARDS[s].size, 10 * s + w, np.float32) for s in (0, 1) for w in (0, 1)}
    with tf.Graph().as_default() as graph:
        put = [memory.put([v[:3], v[3:]], SHARDS[s], memory.place_of(w)) for (s, w), v in vectors.items()]
        read = [vector for s in (0, 1) for vector in memory.read_gradients(tf.constant([1, 2, 0]), SHARDS[s], [0, 1])]
    vectors_read = run(*put, *read, graph=graph)
    for found, expected in zip(vectors_read, [*vectors.values()] * 2, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_no_operation_writes_over_the_inputs_of_a_vector(memory):
    """Otherwise the product would reuse the read-only memory of the slice, and end this process."""
    shard = SHARDS[0]
    with tf.Graph().as_default() as graph:
        twos = tf.compat.v1.placeholder_with_default(np.full(shard.size, 2, np.float32), [shard.size])
        ones = memory.put([tf.ones([shard.size])], shard, 0)
        vector = memory.get_vector(tf.constant([1, 2, 0]), shard)
        product = tf.slice(vector, [0], [shard.trainable_size]) * twos[: shard.trainable_size]
        rest = tf.zeros([shard.size - shard.trainable_size])
        put = memory.put([product, rest], shard, 1, computed_on=[vector])
        again = memory.get_vector(tf.constant([1, 2, 0]), shard)
    _, computed, unchanged = run(ones, put, again, graph=graph)
    assert (unchanged == 1).all()
    assert (computed[: shard.trainable_size] == 2).all()


def test_a_fed_vector_is_read_once(memory):
    other = np.full(SHARDS[0].size, 5, np.float32)
    with tf.Graph().as_default() as graph:
        read = memory.get_vector(tf.constant([1, 2, 0]), SHARDS[0])
    memory.feed([other], SHARDS[:1])
    first, second = run(read, read, graph=graph)
    np.testing.assert_array_equal(first, other)
    assert not second.any()


def trained(ps: int, wire: str, build=with_everything, **options) -> tuple[list[float], str]:
    losses, last = Cluster(build, ps=ps, workers=2, wire=wire, **options).train([to_the_end] * 2)[0]
    assert len(losses) >= STEPS - 1
    return losses, digest(last)


@pytest.mark.long(but=["0.5-1"])
@pytest.mark.cluster
@pytest.mark.parametrize(("clip_norm", "ps"), [(0.5, 0), (0.5, 1), (None, 2)])
def test_no_bit_depends_on_whether_vectors_travel(ps, clip_norm):
    losses, last = unbroken(with_everything, clip_norm=clip_norm)
    assert trained(ps, "memory", clip_norm=clip_norm) == (losses, digest(last))


def in_bfloat16() -> keras.Model:
    """Layers that TensorFlow would make one operation of, which rounds less often."""
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    try:
        inputs = keras.Input((8, 8, 1))
        hidden = keras.layers.Dense(16, activation="relu", name="hidden")(keras.layers.Flatten(name="flatten")(inputs))
        return keras.Model(inputs, keras.layers.Dense(10, name="logits", dtype="float32")(hidden))
    finally:
        keras.config.set_dtype_policy(policy)


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.parametrize(
    "options",
    [
        {"build": in_bfloat16},
        {"jit": True, "build": plain},
        {"devices": ("/cpu:0", "/cpu:1")},
        {"parameters_on": "/cpu:1"},
        {"buckets": 2},
    ],
    ids=["bfloat16", "compiled replicas", "two replicas a worker", "parameters on another device", "buckets"],
)
def test_nor_under_other_options(options):
    assert trained(1, "memory", **options) == trained(1, "float32", **options)


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.parametrize(("strategy", "ps"), [("async", 0), ("backup", 1)])
def test_a_worker_alone_trains_the_same_under_async_and_backup(ps, strategy):
    def train(wire: str) -> tuple[list[float], str]:
        cluster = Cluster(with_everything, ps=ps, workers=1, strategy=strategy, quorum=1, wire=wire)
        losses, last = cluster.train([to_the_end])[0]
        return losses, digest(last)

    assert train("memory") == train("float32")


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.parametrize("strategy", ["async", "backup"])
def test_the_vector_of_a_worker_stays_while_others_continue(strategy):
    cluster = Cluster(plain, ps=1, workers=3, strategy=strategy, quorum=2, wire="memory")
    has_token = threading.Event()

    def others(engine: ShardedEngine) -> None:
        assert has_token.wait(30)
        to_the_end(engine)

    def slow(engine: ShardedEngine) -> tuple[np.ndarray, np.ndarray]:
        engine.start()
        (message,) = engine.session.run(engine._built.step.messages)  # takes the token
        has_token.set()
        assert message[1] == 0
        vector = cluster.wire._read[0][message[2]]
        before = vector.copy()
        assert packing.tags_in(before, cluster.shards[0]).tolist() == message[:2].tolist()
        while engine._rejoin.read_states(engine.session)[0].now.step < STEPS:
            pass
        after = vector.copy()
        engine.leave()
        return before, after

    _, _, (before, after) = cluster.train([others, others, slow])
    np.testing.assert_array_equal(before, after)


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.parametrize("wire", ["float32", "memory"])
@pytest.mark.parametrize("strategy", ["async", "backup"])
def test_after_a_snapshot_a_worker_computes_on_the_newest_vector(strategy, wire):
    cluster = Cluster(plain, ps=2, workers=2, strategy=strategy, quorum=1, wire=wire)
    saved, others_stepped = threading.Event(), threading.Event()

    def chief(engine: ShardedEngine) -> tuple[int, int]:
        engine.start()
        before = engine.snapshot().step
        saved.set()
        assert others_stepped.wait(30)
        computed_on = engine.step().step
        engine.leave()
        return before, computed_on

    def other(engine: ShardedEngine) -> None:
        engine.start()
        assert saved.wait(30)
        for _ in range(3):
            engine.step()
        engine.peek()
        others_stepped.set()
        engine.leave()

    (before, computed_on), _ = cluster.train([chief, other])
    assert computed_on == before + 3


@pytest.mark.long
@pytest.mark.cluster
def test_gradients_can_be_fetched(memory):
    cluster = Cluster(plain, ps=1, workers=1, wire="memory")
    other = Cluster(plain, ps=1, workers=1)

    def fetch(engine):
        engine.start()
        gradients = engine.step(fetch_gradients=True).gradients
        for _ in range(STEPS - 1):
            engine.step()
        engine.peek()
        engine.leave()
        return gradients

    (found,), (expected,) = cluster.train([fetch]), other.train([fetch])
    assert found.keys() == expected.keys()
    for path, gradient in found.items():
        np.testing.assert_array_equal(gradient, expected[path])


def test_tags_of_a_vector_that_was_fetched():
    flat = packing.to_flat(SHARDS[0], {p.path: np.zeros(p.shape, np.float32) for p in PARAMETERS}, generation=3, step=9)
    assert packing.tags_in(flat, SHARDS[0]).tolist() == [3, 9]
