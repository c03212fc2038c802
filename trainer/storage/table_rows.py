"""The rows of tables in a checkpoint: only those that training has changed, in parts.

    rows-000001200-16-ids.npy               [n] int64, rising: rows of the block of tables that are 16 wide
    rows-000001200-16-values.npy            [n, 16] float32
    rows-000001200-16-slot-accumulator.npy  [n, 16] float32, for each slot of the optimizer

A part has the rows that were changed since the previous checkpoint, with the step in its name. A checkpoint has its own
part and those before (as hard links if possible); of a row in several parts, the last one counts.
Once parts have as many rows together as all of them should, or are many, they are merged into one. Rows that no part
has are at their first values, which follow from the seed. Rows are named by table and id, never by host: a checkpoint
loads into a cluster of any shape.

    rows-000001200-16-user.embeddings-ids.npy  and so on: of a table that grows, whose rows are named by their ids
    ...-slot-count.npy, ...-slot-updated.npy   [n, 1] int32: how often each id was seen, and the step after which last
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trainer.plan.tables import UPDATED, Block, Table, slot_dtype, slot_width
from trainer.storage.atomic import link_or_copy
from trainer.storage.checkpoint import Checkpoint, CheckpointError

FACT = "tables"  # among the facts of a checkpoint
IDS, VALUES, SLOT = "ids", "values", "slot-"
MOST_PARTS = 16
AT_ONCE = 2**18  # rows


class Part(NamedTuple):
    """The rows of a block that were changed since the previous part."""

    step: int
    width: int
    rows: int
    block: str  # its name

    def file(self, kind: str) -> str:
        return f"rows-{self.step:09d}-{self.block}-{kind}.npy"


class Rows(NamedTuple):
    """Rows of a block."""

    ids: np.ndarray  # [n] int64
    values: np.ndarray  # [n, width] float32
    saved: Mapping[str, np.ndarray]  # [n, k] each: slots of the optimizer, and what else belongs to a row


@dataclass(frozen=True)
class ChangedRows:
    """The rows of tables that a checkpoint must write: those changed since another checkpoint."""

    step: int
    blocks: Sequence[Block]
    rows: Sequence[Rows]  # of each block, in any order
    slots: Sequence[str]  # of the optimizer
    base: Checkpoint | None = None  # the other one; None: all rows that were ever changed are here

    @property
    def nbytes(self) -> int:
        arrays = ((one.ids, one.values, *one.saved.values()) for one in self.rows)
        return sum(array.nbytes for of_block in arrays for array in of_block)

    def first_bad(self) -> str | None:
        """Returns the path of a table with a row that is not finite."""
        for block, one in zip(self.blocks, self.rows, strict=True):
            if np.isfinite(one.values.sum(dtype=np.float64)):  # one pass; in float64 no sum of float32 overflows
                continue
            finite = np.isfinite(one.values).all(axis=1)
            row = one.ids[int(np.argmin(finite))] if block.growing is None else 0
            return [path for path, begin in block.begins.items() if begin <= row][-1]
        return None

    def write(self, folder: Path) -> tuple[dict[str, Any], list[str]]:
        """Writes and links the files of all parts into a folder.

        Returns:
            The checkpoint's facts about tables, and the names of the files.
        """
        parts: list[Part] = []
        before = parts_of(self.base) if self.base else []
        for block, rows in zip(self.blocks, self.rows, strict=True):
            older = [part for part in before if part.block == block.name]
            order = np.argsort(rows.ids)
            own = Part(self.step, block.width, len(order), block.name)
            if own.rows:
                ordered = {name: values[order] for name, values in rows.saved.items()}
                _save(folder, own, Rows(rows.ids[order], rows.values[order], ordered))
            if self.base is not None and older and self._is_to_merge(older, own):
                merged = self._merge(folder, self.base.path, older, own, block)
                parts += [merged] if merged.rows else []
                continue
            for name in [name for part in older for name in _files(part, block.saved(self.slots))]:
                assert self.base is not None
                link_or_copy(self.base.path / name, folder / name)
            parts += [*older, *([own] if own.rows else [])]
        saved = {block.name: block.saved(self.slots) for block in self.blocks}
        facts = {
            "blocks": {block.name: [[one.path, _rows_of(one)] for one in block.tables] for block in self.blocks},
            "slots": list(self.slots),
            "parts": [part._asdict() for part in parts],
        }
        return {FACT: facts}, [name for part in parts for name in _files(part, saved[part.block])]

    def _is_to_merge(self, older: Sequence[Part], own: Part) -> bool:
        total = own.rows + sum(part.rows for part in older)
        return len(older) >= MOST_PARTS or total > 2 * max(part.rows for part in (*older, own))

    def _merge(self, folder: Path, base: Path, older: Sequence[Part], own: Part, block: Block) -> Part:
        """Writes one part with the rows of all parts, except evicted ones, in place of `own`."""
        saved = block.saved(self.slots)
        sources = [_open(base, part, saved) for part in older]
        if own.rows:
            sources.append(_open(folder, own, saved))
        ids = self._remaining(np.unique(np.concatenate([source.ids for source in sources])), sources, block)
        merged = own._replace(rows=len(ids))
        if not merged.rows:
            for name in _files(own, saved):
                (folder / name).unlink(missing_ok=True)
            return merged
        temporary = merged._replace(step=self.step + 10**9)  # a name that no part has
        targets = _create(folder, temporary, saved)
        targets.ids[:] = ids
        for begin in range(0, len(ids), AT_ONCE):
            own_ids = ids[begin : begin + AT_ONCE]
            for source in sources:  # the last counts
                first = np.searchsorted(source.ids, own_ids[0])
                end = np.searchsorted(source.ids, own_ids[-1], side="right")
                at = np.searchsorted(own_ids, source.ids[first:end])
                remains = own_ids[at] == source.ids[first:end]
                at = begin + at[remains]
                targets.values[at] = source.values[first:end][remains]
                for name, values in source.saved.items():
                    targets.saved[name][at] = values[first:end][remains]
        for array in (targets.ids, targets.values, *targets.saved.values()):
            array.flush()  # type: ignore[attr-defined]
        for old, new in zip(_files(temporary, saved), _files(merged, saved), strict=True):
            (folder / old).replace(folder / new)
        return merged

    def _remaining(self, ids: np.ndarray, sources: Sequence[Rows], block: Block) -> np.ndarray:
        """Returns the ids of all sources whose rows are not evicted."""
        if block.growing is None:
            return ids
        updated = np.zeros(len(ids), np.int64)
        for source in sources:  # the last counts
            updated[np.searchsorted(ids, source.ids)] = source.saved[UPDATED][:, 0]
        return ids[~block.growing.is_evicted(updated, self.step)]


def parts_of(checkpoint: Checkpoint) -> list[Part]:
    """Returns the parts in a checkpoint, in the order in which they count."""
    parts = checkpoint.facts.get(FACT, {}).get("parts", ())
    return [Part(**{"block": str(part["width"])} | part) for part in parts]  # earlier versions had one for each width


def read(checkpoint: Checkpoint, block: Block, slots: Sequence[str]) -> Iterator[tuple[int, Rows]]:
    """Yields (step, rows) of a block in a checkpoint, some at a time; of a repeated row, the last one counts.

    Args:
        slots: of the optimizer, to read; the checkpoint must have them.
    """
    for part in parts_of(checkpoint):
        if part.block != block.name:
            continue
        source = _open(checkpoint.path, part, block.saved(slots))
        for begin in range(0, part.rows, AT_ONCE):
            cut = slice(begin, begin + AT_ONCE)
            arrays = {name: np.asarray(values[cut]) for name, values in source.saved.items()}
            yield part.step, Rows(np.asarray(source.ids[cut]), np.asarray(source.values[cut]), arrays)


def check_fits(checkpoint: Checkpoint, blocks: Sequence[Block], slots: Sequence[str] | None) -> None:
    """Raises a CheckpointError unless a checkpoint has these tables.

    Args:
        slots: of the optimizer; None: they are not needed.
    """
    facts = checkpoint.facts.get(FACT, {"blocks": {}, "slots": slots})
    theirs = {path: (rows, int(name.partition("-")[0])) for name, of in facts["blocks"].items() for path, rows in of}
    ours = {table.path: (_rows_of(table), table.width) for block in blocks for table in block.tables}
    remedy = "choose another directory with run=PATH, or start over with resume=never"
    for path in sorted(theirs.keys() | ours.keys()):
        if theirs.get(path) != ours.get(path):
            there, here = (_shape(tables.get(path)) for tables in (theirs, ours))
            problem = f"does not fit this run: table {path} ({there} there, {here} here)"
            raise CheckpointError(checkpoint.path, problem, remedy)
    if slots is not None and set(facts["slots"]) != set(slots):
        theirs_and_ours = [", ".join(names) or "nothing" for names in (facts["slots"], slots)]
        problem = "keeps {} for each row, but this run's optimizer keeps {}".format(*theirs_and_ours)
        raise CheckpointError(checkpoint.path, problem, remedy)


def _rows_of(table: Table) -> int | None:
    """Returns the number of rows; None for a table that grows."""
    return None if table.growing else table.rows


def _shape(shape: tuple[int | None, int] | None) -> str:
    if shape is None:
        return "no such table"
    return f"rows of {shape[1]} that grow" if shape[0] is None else f"{shape[0]} rows of {shape[1]}"


def _files(part: Part, saved: Sequence[str]) -> list[str]:
    return [part.file(kind) for kind in (IDS, VALUES, *(f"{SLOT}{name}" for name in saved))]


def _open(folder: Path, part: Part, saved: Sequence[str]) -> Rows:
    """Opens the arrays of a part, memory-mapped."""
    ids, values, *others = (np.load(folder / name, mmap_mode="r") for name in _files(part, saved))
    return Rows(ids, values, dict(zip(saved, others, strict=True)))


def _create(folder: Path, part: Part, saved: Sequence[str]) -> Rows:
    def array(kind: str, dtype: str, *shape: int) -> Any:
        little_endian = np.dtype(dtype).newbyteorder("<")
        return np.lib.format.open_memmap(folder / part.file(kind), "w+", little_endian, (part.rows, *shape))

    others = {name: array(f"{SLOT}{name}", slot_dtype(name), slot_width(name, part.width)) for name in saved}
    return Rows(array(IDS, "int64"), array(VALUES, "float32", part.width), others)


def _save(folder: Path, part: Part, rows: Rows) -> None:
    targets = _create(folder, part, list(rows.saved))
    targets.ids[:], targets.values[:] = rows.ids, rows.values
    for name, values in rows.saved.items():
        targets.saved[name][:] = values
    for array in (targets.ids, targets.values, *targets.saved.values()):
        array.flush()  # type: ignore[attr-defined]
