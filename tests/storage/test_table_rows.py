"""Rows of tables in checkpoints: what changed, in parts that may be linked and merged, whatever is killed."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import time
from pathlib import Path

import numpy as np
import pytest

from trainer.plan.tables import FirstValues, Table, blocks_of
from trainer.storage import checkpoint, checkpoint_writer, table_rows
from trainer.storage.checkpoint import Checkpoint, CheckpointError
from trainer.storage.table_rows import ChangedRows, Rows, parts_of

SLOTS = ["accumulator"]
TABLES = [Table("a/embeddings", 60, 3, FirstValues(0, 0), 1), Table("b/embeddings", 40, 3, FirstValues(0, 0), 1)]
BLOCKS = blocks_of(TABLES, 2)
ALL = 100


def changed(step: int, ids: np.ndarray, base: Checkpoint | None) -> ChangedRows:
    """Rows whose values say when they were changed."""
    values = np.full((len(ids), 3), step, np.float32) + ids[:, None].astype(np.float32) / 1000
    return ChangedRows(step, BLOCKS, [Rows(ids, values, {"accumulator": -values})], SLOTS, base)


def save(folder: Path, step: int, ids: np.ndarray, base: Checkpoint | None, keep: int = 2) -> Checkpoint:
    path = checkpoint_writer.write(
        folder, step, 1, {}, {"parameters/w": np.ones(2, np.float32)}, keep=keep, rows=changed(step, ids, base)
    )
    return checkpoint.read_manifest(path)


def content(source: Checkpoint) -> dict[int, tuple[float, float]]:
    found = {}
    for _, rows in table_rows.read(source, BLOCKS[0], SLOTS):
        pairs = zip(rows.values[:, 0].tolist(), rows.saved["accumulator"][:, 0].tolist(), strict=True)
        found |= zip(rows.ids.tolist(), pairs, strict=True)
    return found


def test_a_checkpoint_has_the_last_value_of_each_row_in_few_parts(tmp_path):
    drawn, base, expected = np.random.default_rng(1), None, {}
    for step in range(1, 40):
        ids = drawn.permutation(ALL)[: drawn.integers(0, 12)]
        base = save(tmp_path, step, ids, base)
        expected |= {int(one): step for one in ids}
        found = content(base)
        assert {row: round(value - row / 1000) for row, (value, _) in found.items()} == expected
        assert all(slot == -value for value, slot in found.values())
        assert len(parts_of(base)) <= table_rows.MOST_PARTS
        assert sum(part.rows for part in parts_of(base)) <= 3 * max(len(expected), 12)
        checkpoint.verify(base)
    assert [int(path.name) for path in checkpoint.finished(tmp_path)] == [38, 39]
    copy = checkpoint_writer.copy(base.path, tmp_path / "best", {"note.json": "{}"})
    assert content(checkpoint.read_manifest(copy)) == content(base)


def test_unchanged_parts_are_linked(tmp_path):
    first = save(tmp_path, 10, np.arange(50), None)
    second = save(tmp_path, 20, np.arange(5), first)
    names = [path.name for path in first.path.glob("rows-*")]
    assert len(names) == 3
    assert all((first.path / name).samefile(second.path / name) for name in names)
    assert [part._asdict() for part in parts_of(second)] == [
        {"step": 10, "width": 3, "rows": 50, "block": "3"},
        {"step": 20, "width": 3, "rows": 5, "block": "3"},
    ]


def test_a_damaged_part_is_found(tmp_path, raises):
    saved = save(tmp_path, 10, np.arange(50), None)
    file = next(saved.path.glob("rows-*-values.npy"))
    damaged = bytearray(file.read_bytes())
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    with raises(CheckpointError):
        checkpoint.verify(checkpoint.read_manifest(saved.path))


@pytest.mark.parametrize(
    "tables", [[TABLES[0]._replace(rows=61), TABLES[1]], [TABLES[0]._replace(width=4), TABLES[1]], TABLES[:1], []]
)
def test_a_checkpoint_of_other_tables_is_refused(tmp_path, tables, raises):
    saved = save(tmp_path, 10, np.arange(50), None)
    with raises(CheckpointError):
        table_rows.check_fits(saved, blocks_of(tables, 3), SLOTS)
    table_rows.check_fits(saved, blocks_of(TABLES, 3), SLOTS)
    with raises(CheckpointError):
        table_rows.check_fits(saved, BLOCKS, ["momentum", "velocity"])


def test_a_row_that_is_not_finite_is_named_by_its_table():
    rows = Rows(np.array([70]), np.full((1, 3), np.nan, np.float32), {})
    assert ChangedRows(1, BLOCKS, [rows], []).first_bad() == "b/embeddings"


def ids_of(step: int) -> np.ndarray:
    """The rows that change in a step."""
    return np.random.default_rng(step).permutation(ALL)[:20]


def save_for_ever(folder: Path) -> None:
    """Checkpoints of one step after the other, from the newest that there is."""
    base = checkpoint.newest_valid(folder)[0]
    while True:
        step = base.step + 1 if base else 1
        base = save(folder, step, ids_of(step), base)


@pytest.mark.slow
def test_checkpoints_are_valid_whenever_their_writer_is_killed(tmp_path):
    """20 times, at random moments; the newest has exactly the rows of the steps that led to it."""
    context, moments = multiprocessing.get_context("fork"), random.Random(3)
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for _ in range(20):
        writer = context.Process(target=save_for_ever, args=(folder,))
        writer.start()
        time.sleep(moments.uniform(0.01, 0.2))  # a moment is what the test is about
        os.kill(writer.pid, signal.SIGKILL)
        writer.join()
        newest, skipped = checkpoint.newest_valid(folder)
        assert skipped == []
        last = newest.step if newest else 0
        expected = {int(row): step for step in range(1, last + 1) for row in ids_of(step)}
        found = content(newest) if newest else {}
        assert {row: round(value - row / 1000) for row, (value, _) in found.items()} == expected
    assert last > 5
