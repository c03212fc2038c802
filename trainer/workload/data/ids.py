"""Turns the values of a column into ids for the rows of an embedding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.workload.data.convert import is_text
from trainer.workload.data.errors import DataError
from trainer.workload.data.examples import ArraySpec, DataSet, Nest, Preprocessing

if TYPE_CHECKING:
    import tensorflow as tf

VOCABULARY = "vocabulary"

Rule = str | int  # "vocabulary", or the number of ids that values are hashed to


@dataclass(frozen=True)
class Numbering:
    """The rule by which the ids of a column, 0..count-1, follow from its values."""

    count: int
    dtype: str  # of the values: string or int64
    vocabulary: np.ndarray | None  # values with the ids 1, 2, ...; others have 0; None: ids are hashes


def check_rule(rule: object, option: str) -> None:
    """Raises DataError unless a value is a rule."""
    is_count = isinstance(rule, int) and not isinstance(rule, bool) and rule > 0
    if rule != VOCABULARY and not is_count:
        raise DataError(f"{option}={rule} must be {VOCABULARY}, or the number of ids to hash to; e.g. {option}=1000")


def to_ids(
    column: np.ndarray, rule: Rule, name: str, source: str, *, known: np.ndarray | slice
) -> tuple[np.ndarray, Numbering]:
    """Returns the ids of values, in the column's shape.

    Args:
        column: [N, ...] of integers or texts.
        rule: `vocabulary` numbers the values from 1, integers by size and texts by the alphabet; a number hashes each
            value, as text, to 0..number-1 with Fingerprint64 of FarmHash, as `keras.layers.Hashing` does.
        name: of the column.
        source: its origin, for messages.
        known: the examples whose values are the vocabulary; the id of other values is 0.
    """
    if column.dtype.kind == "f":
        raise DataError(
            f"{source}, column {name}: has missing or non-integer numbers, which cannot be ids; type "
            f"data.options.dtypes.{name}=string to take them as text"
        )
    if column.dtype.kind == "b":
        column = column.astype(np.int64)
    dtype = "string" if is_text(column) else "int64"
    values, places = np.unique(column.astype(str) if is_text(column) else column, return_inverse=True)
    if rule == VOCABULARY:
        is_known = np.zeros(len(values), bool)
        is_known[places.reshape(column.shape)[known]] = True
        ids = np.where(is_known, np.cumsum(is_known), 0)
        numbering = Numbering(int(is_known.sum()) + 1, dtype, values[is_known])
    else:
        ids, numbering = _hashes(values, int(rule)), Numbering(int(rule), dtype, None)
    return ids[places].reshape(column.shape), numbering


def _hashes(values: np.ndarray, count: int) -> np.ndarray:
    import tensorflow as tf

    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        texts = tf.compat.v1.placeholder(tf.string, [None])
        return session.run(_hashed(texts, count), {texts: [str(value).encode() for value in values]})


def _hashed(texts: tf.Tensor, count: int) -> tf.Tensor:
    import tensorflow as tf

    return tf.strings.to_hash_bucket_fast(texts, count)


def numberings_of(data: DataSet) -> dict[str, Any]:
    """Returns the rules for ids of a data set, by feature, in a form that can be compared."""
    made = data.preprocessing
    if not isinstance(made, partial) or made.func is not preprocessing:
        return {}
    return {
        name: (one.count, one.dtype, None if one.vocabulary is None else one.vocabulary.tolist())
        for name, one in made.args[1].items()
    }


def preprocessing(features: Mapping[str, ArraySpec], numberings: Mapping[str, Numbering]) -> Preprocessing:
    """Returns the preprocessing that turns values of columns into ids, as `to_ids` does."""
    import tensorflow as tf

    def lookup(one: Numbering) -> Callable[[tf.Tensor], tf.Tensor]:
        if one.vocabulary is None:
            return lambda values: _hashed(values if values.dtype == tf.string else tf.as_string(values), one.count)
        keys = tf.constant(one.vocabulary.tolist(), one.dtype)
        ids = tf.range(1, one.count, dtype=tf.int64)
        table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, ids), 0)
        tables.append(table)
        return lambda values: table[values]

    tables: list[Any] = []
    lookups = {name: lookup(one) for name, one in numberings.items()}

    def apply(values: Nest) -> Nest:
        return {name: lookups[name](one) if name in lookups else one for name, one in values.items()}

    given = {
        name: ArraySpec(one.shape, numberings[name].dtype) if name in numberings else one
        for name, one in features.items()
    }
    return Preprocessing(given, apply, tables)
