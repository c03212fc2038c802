"""Tables that grow: any id has a row once it has come, and where and when that is changes no bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from small_clusters import SEED, Cluster, make_local, to_the_end, values_of
from test_rejoin import AT_STEPS, dying
from test_tables import rows_of
from test_tables import workload as sparse_workload

from trainer.config.schema import OptimizerConfig, OptimizerName
from trainer.engine.tables.first_values import first_values
from trainer.engine.tables.growing import GrowingMemory
from trainer.engine.tables.host import TableHost
from trainer.engine.tables.mapping import private
from trainer.engine.vectors.packing import GENERATION_STRIDE
from trainer.plan.table_layout import TableLayout
from trainer.plan.tables import COUNT, UPDATED, FirstValues, Growing, SparsePattern, Table, blocks_of
from trainer.storage import checkpoint, checkpoint_writer, table_rows
from trainer.task import table_files
from trainer.task.export import params_sha256
from trainer.workload import lookups, tracing
from trainer.workload.compiling import Wanted, make_objective
from trainer.workload.data.arrays import from_arrays
from trainer.workload.data.errors import DataError
from trainer.workload.workload import Workload

ADAGRAD = OptimizerConfig(name=OptimizerName.adagrad, learning_rate=0.1)
IDS, STEPS = 200, 30
TINY = Growing(min_count=2, max_age=3)
PATH = "t/embeddings"


def any_ids(numbers: np.ndarray) -> np.ndarray:
    """Numbers as ids from all of int64."""
    return numbers * np.int64(0x5851F42D4C957F2D) - 2**62


def model() -> keras.Model:
    user, words = keras.Input((), dtype="int64", name="user"), keras.Input((3,), dtype="int64", name="words")
    parts = [
        keras.layers.Embedding(1, 4, name="user_table")(user),
        keras.layers.Flatten()(keras.layers.Embedding(7, 4, name="word_table")(words)),
    ]
    hidden = keras.layers.Dense(8, activation="relu", name="hidden")(keras.layers.Concatenate()(parts))
    return keras.Model({"user": user, "words": words}, keras.layers.Dense(2, name="logits")(hidden))


def workload() -> Workload:
    """Users and words from all of int64, some of them seldom."""
    drawn, count = np.random.default_rng(SEED), 24 * STEPS
    numbers = {"user": np.minimum(drawn.geometric(0.01, count), IDS), "words": drawn.integers(0, 60, (count, 3))}
    labels = numbers["user"] % 2
    features = {name: any_ids(one) for name, one in numbers.items()}
    keras.utils.set_random_seed(SEED)
    with lookups.building([SparsePattern("user_table", 120, TINY), SparsePattern("*", 70, Growing(1, None))]):
        built = model()
    data = from_arrays((features, labels), (features, labels), source="test")
    objective = make_objective(built, data.spec, Wanted("sparse_categorical_crossentropy"))
    tracing.trace(objective, data.spec)
    return Workload(built, data, objective, {})


def whole(cluster: Cluster) -> list[Any]:
    """The rows of all hosts in one memory, as a checkpoint brings them there."""
    if cluster.tables:
        return cluster.tables
    memory = private(TableLayout(blocks_of([one for b in cluster.layout.blocks for one in b.tables], 1), (), 1, 0))
    for number, block in enumerate(memory):
        block.begin(0, {}, seed=SEED)
        for host in cluster.hosts:
            own = host.tables.memory[number]
            rows = own.changed_after(0, host.shard.index)
            ids = own.block.row_at(own.places_at(rows))
            block.load(0, ids, own.rows[rows], own.saved_at(rows), STEPS, STEPS)
        block.arrays["steps"][0] = STEPS
    return memory


def trained(**options: Any) -> str:
    cluster = Cluster(workload(), workers=2, optimizer=ADAGRAD, steps=STEPS, **options)
    _, snapshot = cluster.train([lambda engine: to_the_end(engine, STEPS)] * 2)[0]
    return params_sha256(snapshot, whole(cluster))


@pytest.fixture(scope="module")
def expected() -> str:
    """What one process trains."""
    engine = make_local(workload(), ADAGRAD, count=2, steps=STEPS)
    _, snapshot = to_the_end(engine, STEPS)
    (users, words) = engine.table_memory
    assert users.arrays["sweeps"][0] > 0
    assert words.arrays["sweeps"][0] == 0
    assert 0 < len(users.trained()) < len(words.trained()) == 60
    return params_sha256(snapshot, engine.table_memory)


@pytest.mark.long(but=["2-float32"])
@pytest.mark.cluster
@pytest.mark.parametrize(("ps", "wire"), [(2, "memory"), (0, "memory"), (2, "float32")])
def test_the_bits_do_not_depend_on_where_rows_are(expected, ps, wire):
    assert trained(ps=ps, wire=wire) == expected


@pytest.mark.cluster
@pytest.mark.long(but=["after its push to the first shard-memory"])
@pytest.mark.parametrize("wire", ["memory", "float32"])
@pytest.mark.parametrize("moment", ["before its tokens", "after its push to the first shard", "after both pushes"])
def test_a_successor_leaves_the_same_bits_whenever_a_worker_dies(expected, moment, wire):
    cluster = Cluster(workload(), ps=2, workers=2, optimizer=ADAGRAD, steps=STEPS, wire=wire)
    survivor = dying(cluster, 0, AT_STEPS[moment], {})
    _, (_, snapshot) = cluster.train([survivor, lambda engine: to_the_end(engine, STEPS)])
    assert params_sha256(snapshot, whole(cluster)) == expected


@pytest.mark.long
@pytest.mark.cluster
def test_ids_that_a_table_has_rows_for_are_trained_as_there():
    """The same bits as in a table whose ids are 0..rows-1."""
    fixed = Cluster(sparse_workload("user_table"), ps=2, workers=2, optimizer=ADAGRAD, wire="memory")
    fixed.train([to_the_end] * 2)
    growing = Cluster(
        sparse_workload(SparsePattern("user_table", 50, Growing(1, None))),
        ps=2,
        workers=2,
        optimizer=ADAGRAD,
        wire="memory",
    )
    growing.train([to_the_end] * 2)
    (table,) = table_files.tables_in(rows_of(growing)).values()
    ids, parts = table_files.rows_of(growing.tables, table)
    assert len(ids) > 20
    (fixed_table,) = table_files.tables_in(fixed.tables).values()
    values = values_of(fixed.tables, fixed_table)
    assert np.array_equal(values[ids], np.concatenate(list(parts)))


class Reference:
    """The same rules, id by id."""

    def __init__(self, table: Table) -> None:
        self.table, self.rows = table, {}  # id: [count, step after which it was seen last, values]

    def get(self, ids: np.ndarray, at: int) -> np.ndarray:
        first = first_values(self.table, ids, seed=SEED)
        known = [self.rows.get(int(one)) if not self.is_too_old(int(one), at) else None for one in ids]
        return np.stack([own[2] if own else one for own, one in zip(known, first, strict=True)])

    def is_too_old(self, one: int, at: int) -> bool:
        return one in self.rows and at - self.rows[one][1] > self.table.growing.max_age

    def update(self, ids: np.ndarray, gradients: np.ndarray, at: int) -> None:
        for one, values, gradient in zip(ids.tolist(), self.get(ids, at), gradients, strict=True):
            count = 1 + (self.rows[one][0] if one in self.rows and not self.is_too_old(one, at) else 0)
            is_trained = count >= self.table.growing.min_count
            self.rows[one] = [count, at + 1, values - gradient if is_trained else values]


@pytest.mark.parametrize("hosts", [1, 3])
def test_rows_come_and_go_as_the_rules_say(hosts: int, tmp_path: Path):
    """Against a dictionary, over 60 updates of sgd, with sweeps; what is read, held and saved, too."""
    table = Table(PATH, 90, 3, FirstValues(-1.0, 1.0), 1, Growing(min_count=2, max_age=4))
    sgd, drawn, reference = OptimizerConfig(name=OptimizerName.sgd), np.random.default_rng(SEED), Reference(table)
    layout = TableLayout(blocks_of([table], hosts), (), 1, 12)
    (memory,) = blocks = private(layout)
    all_ids = any_ids(np.arange(150))
    with tf.Graph().as_default():
        owners = [TableHost(blocks, host, sgd, seed=SEED) for host in range(hosts)]
        tag = tf.compat.v1.placeholder(tf.int64, [])
        collected = [owner.collect(tag, tf.constant(False), [], pushes=[0]) for owner in owners]
        at, rate = tag % GENERATION_STRIDE, tf.constant(0.0)
        updates = [owner.finish(one, at, rate) for owner, one in zip(owners, collected, strict=True)]
        loads = [owner.load(tf.constant("")) for owner in owners]
        with tf.compat.v1.Session() as session:
            session.run(loads)
            for number in range(60):
                places = memory.block.place_of(drawn.choice(all_ids, 12, replace=False))
                places.sort()
                ids, gradients = memory.block.row_at(places), drawn.normal(size=(12, 3)).astype(np.float32)
                memory.write_push(0, places, gradients)
                every = np.sort(memory.block.place_of(all_ids))
                before = memory.read(every)
                np.testing.assert_allclose(before, reference.get(memory.block.row_at(every), number), atol=1e-6)
                if number == 40:
                    for owner in owners:
                        owner.hold()
                    held = saved(blocks, tmp_path / "1", number)
                session.run(updates, {tag: GENERATION_STRIDE + number})
                rate = np.float32(sgd.learning_rate)
                reference.update(ids, gradients * rate, number)
                assert np.array_equal(memory.read(every, GENERATION_STRIDE + number), before)  # for one who joins
                after = reference.get(memory.block.row_at(every), number + 1)
                np.testing.assert_allclose(memory.read(every), after, atol=1e-6)
            assert memory.arrays["sweeps"].sum() > 0 or hosts > 1
            changed = [one for owner in owners for one in owner.changed(0)]
    assert content(held) == {
        int(one): tuple(values)
        for places, rows, _ in changed
        for one, values in zip(memory.block.row_at(places).tolist(), rows.tolist(), strict=True)
    }
    again = saved(blocks, tmp_path / "2", 60)
    for other in (1, 2):
        (loaded,) = fresh = private(TableLayout(blocks_of([table], other), (), 1, 0))
        for host in range(other):
            loaded.begin(host, {}, seed=SEED)
            table_files.load(again.path, fresh, host)
        every = np.sort(loaded.block.place_of(all_ids))
        np.testing.assert_allclose(loaded.read(every), reference.get(loaded.block.row_at(every), 60), atol=1e-6)


def saved(blocks: list[GrowingMemory], folder: Path, at: int) -> checkpoint.Checkpoint:
    rows = table_files.changed_rows(blocks, at, None)
    path = checkpoint_writer.write(folder, at, 1, {}, {"parameters/w": np.ones(2, np.float32)}, keep=2, rows=rows)
    return checkpoint.read_manifest(path)


def content(source: checkpoint.Checkpoint) -> dict[int, tuple[float, ...]]:
    values = {}
    for file in source.path.glob("rows-*-ids.npy"):
        rows = np.load(str(file).replace("-ids.npy", "-values.npy"))
        values |= dict(zip(np.load(file).tolist(), map(tuple, rows.tolist()), strict=True))
    return values


def test_a_merged_checkpoint_leaves_out_what_is_evicted(tmp_path: Path):
    table = Table(PATH, 60, 3, FirstValues(0, 0), 1, Growing(min_count=1, max_age=10))
    (memory,) = blocks = private(TableLayout(blocks_of([table], 1), (), 1, 12))
    memory.begin(0, {}, seed=SEED)
    base, places = None, np.sort(memory.block.place_of(any_ids(np.arange(40))))
    for at, own in ((5, places[:20]), (12, places[5:8]), (20, places[20:])):
        memory.take_up(0, own, at - 1, {}, lambda _: None)
        rows = table_files.changed_rows(blocks, at, base)
        path = checkpoint_writer.write(tmp_path, at, 1, {}, {"parameters/w": np.ones(2)}, keep=2, rows=rows)
        base = checkpoint.read_manifest(path)
    left = np.concatenate([places[5:8], places[20:]])
    assert sorted(content(base)) == sorted(memory.block.row_at(left).tolist())
    assert len(table_rows.parts_of(base)) == 1
    checkpoint.verify(base)


def test_a_table_without_room_for_another_id_says_so():
    table = Table(PATH, 30, 3, FirstValues(0, 0), 1, Growing(min_count=1, max_age=None))
    (memory,) = private(TableLayout(blocks_of([table], 1), (), 1, 40))
    memory.begin(0, {}, seed=SEED)
    places = np.sort(memory.block.place_of(any_ids(np.arange(31))))
    rows, is_trained = memory.take_up(0, places[:30], 0, {}, lambda _: None)
    assert len(np.unique(rows)) == 30
    assert is_trained.all()
    with pytest.raises(DataError, match=r"30 rows .*placement.growing=\{t:60\}"):
        memory.take_up(0, places, 1, {}, lambda _: None)


def test_what_is_saved_of_a_row_is_whole_numbers():
    (block,) = blocks_of([Table(PATH, 9, 3, FirstValues(0, 0), 1, Growing(1, None))], 2)
    (memory,) = private(TableLayout((block,), ("accumulator",), 1, 4))
    kinds = {name: (one.dtype, one.shape) for name, one in memory.saved_at(np.arange(4)).items()}
    assert kinds == {"accumulator": ("float32", (4, 3)), COUNT: ("int32", (4, 1)), UPDATED: ("int32", (4, 1))}
