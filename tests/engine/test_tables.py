"""Tables: rows that stay on the hosts give the same bits as dense parameters, wherever they lie."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from small_clusters import SEED, Cluster, make_local, spans_of, to_the_end, values_of
from test_rejoin import AT_STEPS, dying, stood_in_for

from trainer.config.schema import OptimizerConfig, OptimizerName, RowRule, SparseConfig
from trainer.engine import optimizers
from trainer.engine.tables import exact_sum
from trainer.engine.tables.first_values import first_values
from trainer.engine.tables.host import TableHost
from trainer.engine.tables.mapping import private
from trainer.engine.tables.memory import BlockMemory, sum_pushed
from trainer.engine.tables.touches import check_ids
from trainer.plan.spans import Span
from trainer.plan.table_layout import TableLayout
from trainer.plan.tables import FirstValues, SparsePattern, Table, blocks_of
from trainer.task import table_files
from trainer.task.export import params_sha256
from trainer.workload import lookups, step, tracing
from trainer.workload.compiling import Wanted, make_objective
from trainer.workload.data.arrays import from_arrays
from trainer.workload.data.errors import DataError
from trainer.workload.workload import Workload

pytestmark = pytest.mark.cluster

ROWS = 50


def clicks(count: int = 96) -> Any:
    random = np.random.default_rng(SEED)
    features = {
        "user": random.integers(0, ROWS, count),
        "words": random.integers(0, 20, (count, 5)),
        "x": random.random((count, 3), np.float32),
    }
    labels = random.integers(0, 4, count)
    return from_arrays((features, labels), (features, labels), source="test")


def model() -> keras.Model:
    """Two tables of one width, one of which is looked up twice, and one of another."""
    start = keras.initializers.Constant(0.05)
    user = keras.Input((), dtype="int64", name="user")
    words, x = keras.Input((5,), dtype="int64", name="words"), keras.Input((3,), name="x")
    word = keras.layers.Embedding(20, 4, embeddings_initializer=start, name="word")
    deep = [
        keras.layers.Embedding(ROWS, 4, embeddings_initializer=start, name="user_table")(user),
        keras.layers.Flatten()(word(words)),
        word(user % 20),
        keras.layers.Embedding(ROWS, 1, embeddings_initializer=start, name="wide")(user),
        x,
    ]
    hidden = keras.layers.Dense(8, activation="relu", name="hidden")(keras.layers.Concatenate()(deep))
    return keras.Model({"user": user, "words": words, "x": x}, keras.layers.Dense(4, name="logits")(hidden))


def reduced() -> keras.Model:
    """Layers of keras-rs, which combine the rows of an example."""
    from keras_rs.layers import EmbedReduce

    user = keras.Input((), dtype="int64", name="user")
    words, x = keras.Input((5,), dtype="int64", name="words"), keras.Input((3,), name="x")
    weights = keras.layers.Dense(5, activation="sigmoid", name="weigh")(x)
    deep = [x]
    for combiner in ("sum", "mean", "sqrtn"):
        for given in ((), (weights,)):
            layer = EmbedReduce(20, 4, combiner=combiner, embeddings_initializer="ones", name=f"{combiner}{len(given)}")
            deep.append(layer(words, *given))
    deep.append(EmbedReduce(ROWS, 4, embeddings_initializer="ones", name="user_table")(user))
    hidden = keras.layers.Dense(8, activation="relu", name="hidden")(keras.layers.Concatenate()(deep))
    return keras.Model({"user": user, "words": words, "x": x}, keras.layers.Dense(4, name="logits")(hidden))


def workload(*patterns: str | SparsePattern, make: Callable[[], keras.Model] = model) -> Workload:
    keras.utils.set_random_seed(SEED)
    with lookups.building([SparsePattern(one) if isinstance(one, str) else one for one in patterns]):
        built = make()
    data = clicks()
    objective = make_objective(built, data.spec, Wanted("sparse_categorical_crossentropy"))
    tracing.trace(objective, data.spec)
    return Workload(built, data, objective, {})


def trained(
    optimizer: OptimizerConfig, *patterns: str, ps: int = 1, make: Callable[[], keras.Model] = model, **options: Any
) -> str:
    """The hash of what two workers train; several tests compare with the same."""
    key = repr((optimizer, patterns, ps, make.__name__, options))
    if key not in _trained:
        cluster = Cluster(
            workload(*patterns, make=make), ps=ps, workers=2, optimizer=optimizer, wire="memory", **options
        )
        _, snapshot = cluster.train([to_the_end] * 2)[0]
        _trained[key] = params_sha256(snapshot, cluster.tables)
    return _trained[key]


_trained: dict[str, str] = {}


OPTIMIZERS = {
    "sgd": OptimizerConfig(name=OptimizerName.sgd, learning_rate=0.1),
    "adagrad": OptimizerConfig(name=OptimizerName.adagrad, learning_rate=0.1),
}


@pytest.mark.long(but=["adagrad"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_sparse_rows_have_the_bits_of_dense_ones(name):
    dense = trained(OPTIMIZERS[name])
    assert trained(OPTIMIZERS[name], "*") == dense


@pytest.mark.long
def test_layers_that_combine_rows_have_the_bits_of_dense_ones():
    pytest.importorskip("keras_rs", reason="NO LAYER OF keras-rs WAS TESTED")  # now: its import draws random numbers
    adagrad = OPTIMIZERS["adagrad"]
    dense = trained(adagrad, make=reduced)
    assert trained(adagrad, "*", ps=2, make=reduced) == dense
    assert workload("*", make=reduced).model.count_params() < workload(make=reduced).model.count_params()


def test_the_bits_do_not_depend_on_where_rows_are():
    adagrad = OPTIMIZERS["adagrad"]
    one = trained(adagrad, "*", ps=1)
    assert [trained(adagrad, "*", ps=ps) for ps in (2, 0)] == [one] * 2
    assert local(adagrad) == one


@pytest.mark.long
def test_the_norm_of_clipped_gradients_does_not_depend_on_where_rows_are():
    clipped = dataclasses.replace(OPTIMIZERS["adagrad"], clip_norm=0.01)
    one = local(clipped)
    assert trained(clipped, "*", ps=2) == one
    sent = Cluster(workload("*"), ps=3, workers=2, optimizer=clipped, wire="float32")
    _, snapshot = sent.train([to_the_end] * 2)[0]
    assert params_sha256(snapshot, rows_of(sent)) == one != trained(OPTIMIZERS["adagrad"], "*")


def local(optimizer: OptimizerConfig) -> str:
    """In one process, with two replicas."""
    engine = make_local(workload("*"), optimizer, count=2)
    _, snapshot = to_the_end(engine)
    return params_sha256(snapshot, engine.table_memory)


@pytest.mark.long
def test_a_norm_is_that_of_dense_gradients():
    """A step of sgd whose gradients are clipped moves by the learning rate times the limit."""
    sgd = OptimizerConfig(name=OptimizerName.sgd, learning_rate=1.0, clip_norm=0.01)
    cluster = Cluster(workload("*"), ps=2, workers=2, optimizer=sgd, wire="memory", steps=1)
    before = step.initial_values(cluster.model)
    _, snapshot = cluster.train([lambda engine: to_the_end(engine, 1)] * 2)[0]
    tables = table_files.tables_in(cluster.tables).values()
    moved = [snapshot.parameters[path] - value for path, value in before.items()]
    moved += [one - np.float32(0.05) for t in tables for one in table_files.rows_of(cluster.tables, t)[1]]
    assert np.sqrt(sum(np.square(one, dtype=np.float64).sum() for one in moved)) == pytest.approx(0.01, rel=1e-4)


def test_sums_of_squares_are_exact():
    drawn = np.random.default_rng(SEED)
    rows = (drawn.standard_normal((3000, 3)) * 10.0 ** drawn.integers(-30, 15, (3000, 1))).astype(np.float32)
    rows[:10] = 0
    whole = exact_sum.total(exact_sum.square_sums(rows)[None])
    for parts in (2, 3, 7):
        sums = np.stack([exact_sum.square_sums(rows[part::parts]) for part in range(parts)])
        assert exact_sum.total(sums) == whole
    assert whole == pytest.approx(float(np.square(rows, dtype=np.float64).sum()), rel=1e-6)
    assert exact_sum.total(exact_sum.square_sums(rows[:10])[None]) == 0
    assert exact_sum.total(exact_sum.square_sums(np.zeros((0, 3), np.float32))[None]) == 0


@pytest.mark.long(but=["after its push to the first shard-float32"])
@pytest.mark.parametrize(
    ("moment", "wire"),
    [
        ("before its tokens", "memory"),
        ("after its push to the first shard", "memory"),
        ("after its push to the first shard", "float32"),
        ("after both pushes", "float32"),
    ],
)
def test_a_successor_leaves_the_same_bits_whenever_a_worker_dies(moment, wire):
    adagrad = OPTIMIZERS["adagrad"]
    cluster = Cluster(workload("*"), ps=2, workers=2, optimizer=adagrad, wire=wire)
    _, (_, snapshot) = cluster.train([dying(cluster, 0, AT_STEPS[moment], {}), to_the_end])
    assert params_sha256(snapshot, rows_of(cluster)) == trained(adagrad, "*")


@pytest.mark.long(but=["memory"])
@pytest.mark.parametrize("wire", ["memory", "float32"])
def test_another_worker_stands_in_until_a_successor_comes(wire):
    cluster = Cluster(workload("*"), ps=2, workers=2, optimizer=OPTIMIZERS["adagrad"], wire=wire)
    (_, snapshot), _ = cluster.train([to_the_end, stood_in_for(cluster, 1, task=0)])
    assert params_sha256(snapshot, rows_of(cluster)) == trained(OPTIMIZERS["adagrad"], "*")


def rows_of(cluster: Cluster) -> list[BlockMemory]:
    """The rows of all hosts, each of which may have its own for itself."""
    if cluster.tables:
        return cluster.tables
    whole = private(cluster.layout)
    for host in cluster.hosts:
        for block, own in zip(whole, host.tables.memory, strict=True):
            first = host.shard.index * block.block.held
            block.rows[first : first + block.block.held] = own.rows[first : first + block.block.held]
    return whole


@pytest.mark.long
def test_replicas_of_one_worker_are_averaged_as_dense_ones():
    sgd, devices = OPTIMIZERS["sgd"], ("/cpu:0", "/cpu:1")
    assert trained(sgd, "*", devices=devices) == trained(sgd, devices=devices)


def test_a_batch_in_parts_has_the_gradients_of_the_whole():
    sgd, found = OPTIMIZERS["sgd"], []
    for accumulate in (1, 3):
        cluster = Cluster(workload("*"), ps=1, workers=1, optimizer=sgd, wire="memory", accumulate=accumulate)
        cluster.train([to_the_end])
        tables = table_files.tables_in(cluster.tables).values()
        found.append(np.concatenate([one.ravel() for t in tables for one in table_files.rows_of(cluster.tables, t)[1]]))
    np.testing.assert_allclose(found[1], found[0], atol=1e-6)
    assert np.ptp(found[0]) > 0.01


RULES = [
    *(OptimizerConfig(name=name) for name in (OptimizerName.adam, OptimizerName.rmsprop, OptimizerName.ftrl)),
    OptimizerConfig(name=OptimizerName.sgd, momentum=0.9, nesterov=True),
    OptimizerConfig(name=OptimizerName.adamw, weight_decay=0.1),
]


@pytest.mark.parametrize("config", RULES, ids=lambda config: config.describe())
def test_a_row_is_updated_only_when_it_is_touched_and_then_as_a_dense_one(config):
    """Against the rule of dense parameters, given the touched rows alone."""
    table = Table("t/embeddings", 40, 3, FirstValues(-1.0, 1.0), 4)
    layout = TableLayout(blocks_of([table], 2), tuple(config.slots()), 2, 4)
    memory, random = private(layout), np.random.default_rng(SEED)
    block = memory[0].block
    with tf.Graph().as_default():
        hosts = [TableHost(memory, host, config, seed=SEED) for host in range(2)]
        step = tf.compat.v1.placeholder(tf.int64, [])
        collected = [host.collect(step, tf.constant(False), [], pushes=[0, 1]) for host in hosts]
        updates = [host.finish(one, step, tf.constant(0.0)) for host, one in zip(hosts, collected, strict=True)]
        loads = [host.load(tf.constant("")) for host in hosts]
        fed = [tf.compat.v1.placeholder(tf.float32, [None, 3]) for _ in range(2 + len(config.slots()))]
        rule = optimizers.apply(config, fed[0], dict(zip(config.slots(), fed[2:], strict=True)), fed[1], step)
        with tf.compat.v1.Session() as session:
            session.run(loads)
            expected = values_of(memory, table)
            slots = {name: np.full_like(expected, fill) for name, fill in config.slots().items()}
            for number in range(100):
                total, touched = np.zeros_like(expected), set()
                for worker in range(2):
                    rows = np.unique(random.integers(0, 40, 6))
                    places = np.sort(block.place_of(rows))
                    gradients = random.normal(size=(len(rows), 3)).astype(np.float32)
                    memory[0].write_push(worker, places, gradients)
                    total[block.row_at(places)] += gradients
                    touched |= set(rows.tolist())
                own = sorted(touched)
                values = [expected[own], total[own] / 2, *(one[own] for one in slots.values())]
                expected[own], slots_of = session.run(rule, {step: number, **dict(zip(fed, values, strict=True))})
                for name, values in slots_of.items():
                    slots[name][own] = values
                session.run(updates, {step: number})
                found = values_of(memory, table)
                np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.long
def test_rowwise_adagrad_keeps_the_mean_of_the_squares_of_a_row():
    """Against numpy, over 100 steps; and its bits do not depend on where rows are."""
    sparse = SparseConfig(name=RowRule.rowwise_adagrad, learning_rate=0.1)
    config = OptimizerConfig(name=OptimizerName.adam, sparse=sparse)
    layout = TableLayout(blocks_of([Table("t/embeddings", 9, 3, FirstValues(-1, 1), 4)], 2), ("row_accumulator",), 1, 4)
    memory, drawn = private(layout), np.random.default_rng(SEED)
    (table,) = layout.blocks[0].tables
    with tf.Graph().as_default():
        hosts = [TableHost(memory, host, config, seed=SEED) for host in range(2)]
        at = tf.compat.v1.placeholder(tf.int64, [])
        collected = [host.collect(at, tf.constant(False), [], pushes=[0]) for host in hosts]
        updates = [host.finish(one, at, tf.constant(0.0)) for host, one in zip(hosts, collected, strict=True)]
        loads = [host.load(tf.constant("")) for host in hosts]
        with tf.compat.v1.Session() as session:
            session.run(loads)
            expected = values_of(memory, table).astype(np.float64)
            accumulator = np.full(9, 0.1)
            for number in range(100):
                rows = np.unique(drawn.integers(0, 9, 4))
                places = layout.blocks[0].place_of(rows)
                order = np.argsort(places)
                gradients = drawn.normal(size=(len(rows), 3)).astype(np.float32)
                memory[0].write_push(0, places[order], gradients[order])
                session.run(updates, {at: number})
                accumulator[rows] += np.square(gradients).mean(axis=1)
                expected[rows] -= 0.1 * gradients / np.sqrt(accumulator[rows] + 1e-7)[:, None]
            found = values_of(memory, table)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    one = trained(config, "*")
    assert [trained(config, "*", ps=2), local(config)] == [one] * 2


def test_first_values_are_a_function_of_seed_table_and_row():
    table = Table("t/embeddings", 10**9, 4, FirstValues(-0.05, 0.05), 1)
    rows = np.array([0, 5, 999_999_999], np.int64)
    values = first_values(table, rows, seed=3)
    assert values.dtype == np.float32
    assert np.array_equal(values[1:2], first_values(table, rows[1:2], seed=3))
    assert np.array_equal(values, first_values(table._replace(rows=2 * 10**9), rows, seed=3))
    assert not np.array_equal(values, first_values(table, rows, seed=4))
    assert not np.array_equal(values, first_values(table._replace(path="u/embeddings"), rows, seed=3))
    many = first_values(table, np.arange(100_000), seed=3)
    assert (many >= -0.05).all()
    assert (many < 0.05).all()
    assert abs(many.mean()) < 2e-4
    assert abs(many.std() - 0.1 / 12**0.5) < 2e-4


@pytest.mark.parametrize("rows", [1, 7, 12])
def test_every_row_has_a_place_of_its_own(rows):
    for hosts in (1, 2, 3, 5):
        (block,) = blocks_of([Table("t/embeddings", rows, 2, FirstValues(0.0, 0.0), 1)], hosts)
        numbers = np.arange(rows)
        places = block.place_of(numbers)
        assert len(set(places.tolist())) == rows
        assert np.array_equal(block.row_at(places), numbers)
        assert np.array_equal(places // block.held, numbers % hosts)


def test_rows_are_summed_in_the_order_of_the_replicas():
    pushed = [(np.array([1, 4]), np.float32([[1e8], [1]])), (np.array([1, 3]), np.float32([[-1e8], [2]]))]
    pushed.append((np.array([1]), np.float32([[1]])))
    places, rows = sum_pushed(pushed)
    assert (places.tolist(), rows.tolist()) == ([1, 3, 4], [[1.0], [2.0], [1.0]])
    _, other_order = sum_pushed([pushed[2], *pushed[:2]])
    assert other_order.tolist() == [[0.0], [2.0], [1.0]]


@pytest.mark.parametrize("shares", [[7], [3, 4], [4, 3], [2, 2, 3], [1, 5, 1]], ids=str)
def test_no_bit_of_a_sum_of_rows_depends_on_who_summed_what(shares):
    random = np.random.default_rng(5)
    places = [np.flatnonzero(random.random(40) < 0.4) for _ in range(7)]
    pushed = [(own, random.standard_normal((len(own), 3), np.float32)) for own in places]
    spans = [span for of_worker in spans_of(shares) for span in of_worker]
    replicas = [range(span.first, span.first + span.size) for span in spans]
    sums = [sum_pushed([pushed[number] for number in own], [Span(number, 1) for number in own]) for own in replicas]
    found = sum_pushed(sums, spans)
    for own, expected in zip(found, sum_pushed(pushed), strict=True):
        assert own.tobytes() == expected.tobytes()


REFUSED = {
    "embeddings_regularizer": {"embeddings_regularizer": "l2"},
    "embeddings_constraint": {"embeddings_constraint": "non_neg"},
    "trainable=False": {"trainable": False},
    "the initializer GlorotNormal": {"embeddings_initializer": "glorot_normal"},
}


def test_a_subclass_that_looks_rows_up_by_itself_cannot_be_sparse():
    class Own(keras.layers.Embedding):
        def call(self, inputs):
            return keras.ops.take(self.embeddings, inputs, axis=0)

    says = r"a call that does not use super\(\).*layer table"
    with lookups.building([SparsePattern("table")]), pytest.raises(ValueError, match=says):
        Own(10, 2, name="table")(keras.Input((), dtype="int64"))


@pytest.mark.parametrize("what", REFUSED)
def test_a_layer_that_cannot_be_sparse_says_why(what):
    with lookups.building([SparsePattern("table")]), pytest.raises(ValueError, match=what):
        keras.layers.Embedding(10, 2, name="table", **REFUSED[what])(keras.Input((), dtype="int64"))


@pytest.mark.parametrize("ids", [[3, -1], [10, 0]])
def test_an_id_without_a_row_is_named(ids):
    with pytest.raises(DataError, match=r"t/embeddings: example \d of a batch has the id (-1|10)\b.*0\.\.9"):
        check_ids(np.array(ids), 10, "t/embeddings")
