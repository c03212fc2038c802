"""Rows that travel behind the vectors of messages: the same bits, under every strategy and wire."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf
import test_tables
from small_clusters import STEPS, Cluster, to_the_end
from test_rejoin import AT_STEPS, dying, looping
from test_tables import OPTIMIZERS, clicks, rows_of, trained, workload

from trainer.config.schema import OptimizerConfig, OptimizerName
from trainer.engine.tables import messages
from trainer.engine.tables.host import TableHost
from trainer.engine.tables.mapping import private
from trainer.engine.tables.payloads import Payloads
from trainer.plan.table_layout import TableLayout
from trainer.plan.tables import FirstValues, Table, blocks_of
from trainer.task import table_files
from trainer.task.export import params_sha256
from trainer.workload import step
from trainer.workload.data.errors import DataError

pytestmark = pytest.mark.cluster

ADAGRAD = OPTIMIZERS["adagrad"]
ROUNDED = 2.0**-8  # the largest relative error of a bfloat16


def sent(ps: int, *, wire: str = "float32", workers: int = 2, **options: Any) -> str:
    cluster = Cluster(workload("*"), ps=ps, workers=workers, optimizer=ADAGRAD, wire=wire, **options)
    _, snapshot = cluster.train([to_the_end] * workers)[0]
    return params_sha256(snapshot, rows_of(cluster))


@pytest.mark.long(but=["2"])
@pytest.mark.parametrize("ps", [1, 2, 0])
def test_rows_that_are_sent_have_the_bits_of_those_in_memory(ps):
    assert sent(ps) == trained(ADAGRAD, "*")


@pytest.mark.long
def test_replicas_of_one_worker_get_their_own_rows():
    devices = ("/cpu:0", "/cpu:1")
    assert sent(2, devices=devices) == trained(ADAGRAD, "*", devices=devices)


@pytest.mark.long
def test_rounded_rows_have_the_same_bits_wherever_they_are_and_whoever_dies():
    one = sent(1, wire="bfloat16")
    assert [sent(ps, wire="bfloat16") for ps in (2, 0)] == [one] * 2
    cluster = Cluster(workload("*"), ps=2, workers=2, optimizer=ADAGRAD, wire="bfloat16")
    moment = AT_STEPS["after its push to the first shard"]
    _, (_, snapshot) = cluster.train([dying(cluster, 0, moment, {}), to_the_end])
    assert params_sha256(snapshot, rows_of(cluster)) == one != sent(1)


@pytest.mark.long
def test_hosts_answer_the_questions_of_any_number_of_workers_that_died():
    def die(engine: Any) -> None:
        (link,) = engine._built.links
        with engine.graph.as_default():
            engine.session.run(messages._asks(link.shard).enqueue([link.worker, messages.RELEASE, 0, 1, ""]))

    cluster = Cluster(workload("*"), ps=1, workers=2, optimizer=ADAGRAD)
    _, (_, snapshot) = cluster.train([to_the_end, looping(die)])
    assert params_sha256(snapshot, rows_of(cluster)) == trained(ADAGRAD, "*")


@pytest.mark.long
@pytest.mark.parametrize("wire", ["memory", "float32"])
def test_a_quorum_of_all_has_the_bits_of_sync(wire):
    assert sent(2, wire=wire, strategy="backup", quorum=2) == trained(ADAGRAD, "*")


@pytest.mark.long
@pytest.mark.parametrize("wire", ["memory", "float32"])
def test_one_worker_that_waits_for_nobody_has_the_bits_of_sync(wire):
    assert sent(2, wire=wire, workers=1, strategy="async") == sent(1, workers=1)


@pytest.mark.long
def test_an_update_that_is_left_out_changes_no_row(monkeypatch: pytest.MonkeyPatch):
    """One example of the data is NaN, in two of eight batches."""
    data = clicks()
    data.train.arrays[[array.dtype.kind for array in data.train.arrays].index("f")][5] = np.nan
    monkeypatch.setattr(test_tables, "clicks", lambda: data)
    hashes = []
    for ps, wire in ((1, "memory"), (2, "float32")):
        cluster = Cluster(workload("*"), ps=ps, workers=2, optimizer=ADAGRAD, wire=wire)
        _, snapshot = cluster.train([to_the_end] * 2)[0]
        rows = rows_of(cluster)
        hashes.append(params_sha256(snapshot, rows))
        assert all(np.isfinite(block.rows).all() for block in rows)
        assert any(np.ptp(block.rows) > 0.01 for block in rows)  # other updates were made
    assert hashes[0] == hashes[1]


def test_rows_are_given_as_they_were_when_the_state_was_held():
    random, adagrad = np.random.default_rng(7), OptimizerConfig(name=OptimizerName.adagrad)
    layout = TableLayout(blocks_of([Table("t/embeddings", 40, 3, FirstValues(-1, 1), 4)], 2), ("accumulator",), 1, 9)
    (memory,) = blocks = private(layout)
    with tf.Graph().as_default():
        host, number = TableHost(blocks, 1, adagrad, seed=7), tf.compat.v1.placeholder(tf.int64, [])
        collected = host.collect(number, tf.constant(False), [], pushes=[0])
        update, load = host.finish(collected, number, tf.constant(0.0)), host.load(tf.constant(""))
        with tf.compat.v1.Session() as session:

            def train(steps: range) -> None:
                for at in steps:
                    places = np.unique(random.integers(20, 40, 9))
                    memory.write_push(0, places, random.random((len(places), 3), np.float32))
                    session.run(update, {number: at})

            session.run(load)
            train(range(3))
            ((places, values, slots),) = host.changed(1)
            host.hold()
            train(range(3, 9))
            ((later, held, held_slots),) = host.changed(1)
            order = np.argsort(later)
            at = order[np.searchsorted(later[order], places)]
            assert np.array_equal(held[at], values)
            assert np.array_equal(held_slots["accumulator"][at], slots["accumulator"])
            host.release()
            ((now_places, now, _),) = host.changed(1)
            assert np.array_equal(now_places, later[order])
            assert not np.array_equal(now, held[order])
            assert np.array_equal(now, memory.rows[now_places])


@pytest.mark.long
def test_a_worker_that_waits_for_nobody_clips_the_gradients_of_rows_too():
    """One step of sgd, which moves everything by the learning rate times the limit."""
    sgd = OptimizerConfig(name=OptimizerName.sgd, learning_rate=1.0, clip_norm=0.01)
    options = {"wire": "memory", "strategy": "async", "steps": 1, "devices": ("/cpu:0", "/cpu:1")}
    cluster = Cluster(workload("*"), ps=2, workers=1, optimizer=sgd, **options)
    before = step.initial_values(cluster.model)
    _, snapshot = cluster.train([lambda engine: to_the_end(engine, 1)])[0]
    moved = [snapshot.parameters[path] - value for path, value in before.items()]
    memory = rows_of(cluster)
    tables = table_files.tables_in(memory).values()
    moved += [one - np.float32(0.05) for t in tables for one in table_files.rows_of(memory, t)[1]]
    assert np.sqrt(sum(np.square(one, dtype=np.float64).sum() for one in moved)) == pytest.approx(0.01, rel=1e-4)


@pytest.mark.long
@pytest.mark.parametrize(
    ("strategy", "options"), [("async", {"max_staleness": 0}), ("backup", {"quorum": 1})], ids=["async", "backup"]
)
def test_dropped_gradients_change_no_row_and_their_workers_get_the_rows_they_need(strategy, options):
    cluster = Cluster(workload("*"), ps=2, workers=3, optimizer=ADAGRAD, wire="memory", strategy=strategy, **options)
    cluster.train([_until_the_end] * 3)
    table = cluster.engines[0].contributions()
    assert table is not None
    assert table[:, :-1].sum() > 0
    for host in cluster.hosts:
        for block in host.tables.memory:
            changed = np.flatnonzero(block.updated)
            assert 0 < block.updated.max() <= STEPS
            assert np.isfinite(block.rows[changed]).all()


def _until_the_end(engine: Any) -> None:
    step = engine.start()
    while step < STEPS:
        step = engine.step().step + 1
    engine.leave()


@pytest.mark.parametrize("numbers", [np.float32, np.int32, np.uint16, np.uint8])
def test_what_is_written_into_a_message_can_be_read(numbers):
    drawn, is_rounded = np.random.default_rng(7), numbers is np.uint16
    shapes = (("a/embeddings", 50, 4), ("b/embeddings", 20, 1))
    blocks = blocks_of([Table(path, rows, width, FirstValues(0, 0), 1) for path, rows, width in shapes], 3)
    payloads = Payloads(blocks, numbers, is_rounded)

    def places(count: int) -> list[np.ndarray]:
        return [np.unique(drawn.integers(0, block.hosts * block.held, count)) for block in blocks]

    pushed = [
        (own, drawn.random((len(own), block.width), np.float32)) for own, block in zip(places(9), blocks, strict=True)
    ]
    asked = [places(7), places(0)]
    rows = [drawn.random((len(own), block.width), np.float32) for own, block in zip(asked[0], blocks, strict=True)]
    sent_rows = [
        payloads.write_rows(
            [[own[own // block.held == host] for own, block in zip(asked[0], blocks, strict=True)]],
            [one[own // block.held == host] for own, one, block in zip(asked[0], rows, blocks, strict=True)],
        )
        for host in range(3)
    ]
    for found, one in zip(payloads.read_rows(sent_rows, asked[:1]), rows, strict=True):
        np.testing.assert_allclose(found, one, rtol=ROUNDED if is_rounded else 0)
    with pytest.raises(DataError, match="different ids"):
        payloads.read_rows(sent_rows, [[own + (own == own[0]) for own in asked[0]]])
    messages = payloads.write_push([pushed, pushed], asked)
    for host, message in enumerate(messages):
        assert message.dtype == numbers
        (*_, gradients), needed = payloads.read_push(message)
        for block, (at, rows), (every, values) in zip(blocks, gradients, pushed, strict=True):
            is_own = every // block.held == host
            assert np.array_equal(at, every[is_own])
            np.testing.assert_allclose(rows, values[is_own], rtol=ROUNDED if is_rounded else 0)
        for of_host, of_all in zip(needed, asked, strict=True):
            for block, at, every in zip(blocks, of_host, of_all, strict=True):
                assert np.array_equal(at, every[every // block.held == host])
