"""Turns the values of a column into ids, of which an embedding has a row each."""

from __future__ import annotations

import hashlib

import numpy as np

from trainer.workload.data.convert import is_text
from trainer.workload.data.examples import DataError

VOCABULARY = "vocabulary"

Rule = str | int  # "vocabulary", or the number of ids that values are hashed to


def check_rule(rule: object, option: str) -> None:
    """Raises DataError unless it is a rule."""
    is_count = isinstance(rule, int) and not isinstance(rule, bool) and rule > 0
    if rule != VOCABULARY and not is_count:
        raise DataError(
            f"{option}={rule}, it must be {VOCABULARY}, or the number of ids to hash to; e.g. {option}=1000"
        )


def to_ids(
    column: np.ndarray, rule: Rule, name: str, source: str, *, known: np.ndarray | slice
) -> tuple[np.ndarray, int]:
    """The ids of values, of the column's shape, and how many ids there are: they are 0..count-1.

    Args:
        column: [N, ...] of integers or texts.
        rule: `vocabulary` numbers the values from 1, integers by size and texts by the alphabet; a number hashes each
            value, as text, to 0..number-1, the same in every run and in every column.
        name: of the column.
        source: its origin, for messages.
        known: the examples whose values are the vocabulary; the id of other values is 0.
    """
    if column.dtype.kind == "f":
        raise DataError(
            f"{source}, column {name}: has numbers that are no integers, or missing ones, which cannot be ids; type "
            f"data.options.dtypes.{name}=string to take them as text"
        )
    values, places = np.unique(column.astype(str) if is_text(column) else column, return_inverse=True)
    if rule == VOCABULARY:
        is_known = np.zeros(len(values), bool)
        is_known[places.reshape(column.shape)[known]] = True
        ids, count = np.where(is_known, np.cumsum(is_known), 0), int(is_known.sum()) + 1
    else:
        count = int(rule)
        ids = np.array([_hash(str(value)) % count for value in values], np.int64)
    return ids[places].reshape(column.shape), count


def _hash(value: str) -> int:
    """64 bits, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(value.encode(), digest_size=8).digest(), "little")
