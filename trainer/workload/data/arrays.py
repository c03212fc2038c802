"""Makes data sets of numpy arrays, which are checked once and gathered from in the graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.workload.data.examples import (
    ArraySpec,
    Batch,
    DataError,
    DataSet,
    Examples,
    Nest,
    Spec,
    describe_nest,
    leaves_of,
    map_nest,
)

if TYPE_CHECKING:
    import tensorflow as tf

ALIGNMENT_BYTES = 64  # of arrays that TensorFlow uses in place; it copies others, and both copies stay in memory
ROWS = 4096  # examples checked at a time, so that checks need little memory


def from_arrays(
    train: Sequence[Nest],
    evaluate: Sequence[Nest],
    *,
    source: str,
    scale: float | None = None,
    classes: int | None = None,
) -> DataSet:
    """A data set of numpy arrays, which keep their type; float64 becomes float32.

    Args:
        train: features, labels and, if wanted, weights: each an array [N, ...], or dicts, tuples and lists of arrays.
            Labels of integers are classes, [N] or [N, 1] or of any shape; others are targets.
        evaluate: the same, of other examples.
        source: their origin, for messages.
        scale: factor of the features, which become float32; None: they stay as they are.
        classes: number of classes; None: the largest integer label + 1, or the last size of float labels.

    Raises:
        DataError: if there are no examples, shapes or lengths differ, a value is not a finite number, or a label is not
            in 0..classes-1.
    """
    parts = {"train": train, "evaluate": evaluate}
    batches = {part: Batch(*given) for part, given in parts.items()}
    checked = {part: _checked(batch, f"{source}, {part}") for part, batch in batches.items()}
    specs = {part: spec_of(batch) for part, batch in checked.items()}
    check_alike(specs["train"], specs["evaluate"], source)
    labels = {part: batch.labels for part, batch in checked.items()}
    if all(isinstance(one, np.ndarray) for one in labels.values()):
        classes = classes or _count_classes(labels)
        for part in parts:
            _check_range(labels[part], classes, f"{source}, {part} labels")
    spec = Spec(*specs["train"], classes=classes or 0)
    if scale is not None:
        spec = replace(spec, features=map_nest(lambda one: ArraySpec(one.shape, "float32"), spec.features))
    return DataSet(_examples(checked["train"], scale), _examples(checked["evaluate"], scale), spec)


def open_arrays(given: Sequence[Nest], source: str) -> tuple[Examples, Batch]:
    """One part alone: its examples, and what they look like."""
    batch = _checked(Batch(*given), source)
    return _examples(batch, None), spec_of(batch)


def _examples(batch: Batch, scale: float | None) -> Examples:
    arrays = leaves_of(batch)
    count = len(arrays[0][1])

    def fetch(indices: tf.Tensor, tensors: tuple[tf.Tensor, ...]) -> Batch:
        import tensorflow as tf

        rest = iter(tensors)
        features, labels, weights = map_nest(lambda _: tf.gather(next(rest), indices), batch)
        if scale is not None:
            features = map_nest(lambda one: tf.cast(one, tf.float32) * scale, features)
        return Batch(features, labels, weights)

    return Examples(count, tuple(_align(array) for _, array in arrays), fetch)


def _checked(batch: Batch, source: str) -> Batch:
    """The same arrays as TensorFlow takes them.

    Raises:
        DataError: if an array cannot be used, or has another length than the others.
    """
    checked = to_batch(batch, source)
    for name, nest in checked._asdict().items():
        for _, array in leaves_of(nest):
            _check_finite(array, f"{source} {name}")
    lengths = {name: len(array) for name, array in leaves_of(checked)}
    if not lengths:
        raise DataError(f"{source}: there are no arrays; return features, e.g. numpy arrays [examples, ...]")
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} {list(array.shape)}" for name, array in leaves_of(checked))
        raise DataError(
            f"{source}: arrays have different numbers of examples: {listed}; each needs one row per example"
        )
    return checked


def to_batch(given: Batch, source: str) -> Batch:
    """Arrays of types that TensorFlow has; numbers [N] as features and targets [N, 1], classes [N, 1] as [N].

    Raises:
        DataError: if an array cannot be used.
    """
    named = zip(Batch._fields, given, strict=True)
    features, labels, weights = (_arrays(nest, f"{source} {name}") for name, nest in named)
    labels = map_nest(_without_last_axis, labels)
    if isinstance(features, np.ndarray) and features.ndim == 1 and features.dtype.kind != "S":
        features = features[:, None]
    if isinstance(labels, np.ndarray) and labels.ndim == 1 and labels.dtype.kind == "f":
        labels = labels[:, None]
    return Batch(features, labels, weights)


def _align(array: np.ndarray) -> np.ndarray:
    """The same values, in memory that TensorFlow can use without a copy."""
    if array.flags.c_contiguous and array.ctypes.data % ALIGNMENT_BYTES == 0:
        return array
    memory = np.empty(array.nbytes + ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT_BYTES
    aligned = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    aligned[...] = array
    return aligned


def _arrays(nest: Nest, name: str) -> Nest:
    return map_nest(lambda values: _array(values, name), _without_lists(nest))


def _without_lists(nest: Nest) -> Nest:
    """The nest with lists of numbers or texts as arrays; a list of arrays becomes a tuple, as tf.data needs it."""
    if isinstance(nest, dict):
        return {name: _without_lists(one) for name, one in nest.items()}
    if isinstance(nest, list | tuple):
        is_nest = any(isinstance(one, dict) or (hasattr(one, "ndim") and np.ndim(one)) for one in nest)
        return tuple(map(_without_lists, nest)) if is_nest else np.asarray(nest)
    return nest


def _array(values: Any, name: str) -> np.ndarray:
    """[N, ...] of a type that TensorFlow has; no float64."""
    array = np.asarray(values)
    if array.dtype.kind == "O" and all(isinstance(one, str | bytes) for one in array.flat):
        array = array.astype(np.str_) if isinstance(next(iter(array.flat), ""), str) else array.astype(np.bytes_)
    if array.dtype.kind == "U":
        array = np.char.encode(array, "utf-8")
    if array.dtype.kind not in "biufS":
        raise DataError(
            f"{name}: have type {array.dtype}; allowed: numbers, booleans and text, e.g. x.astype('float32')"
        )
    if array.ndim == 0 or array.size == 0:
        raise DataError(f"{name}: have shape {list(array.shape)}, so there are no examples; at least one is needed")
    if array.dtype.kind != "f":
        return array
    with np.errstate(over="ignore"):
        return array.astype(np.float32, copy=False)


def _without_last_axis(labels: np.ndarray) -> np.ndarray:
    """Classes [N, 1] as [N]."""
    return labels[:, 0] if labels.dtype.kind in "biu" and labels.ndim == 2 and labels.shape[1] == 1 else labels


def _check_finite(array: np.ndarray, name: str) -> None:
    if array.dtype.kind != "f":
        return
    for row in range(0, len(array), ROWS):
        block = array[row : row + ROWS]
        bad = ~np.isfinite(block).reshape(len(block), -1).all(axis=1)
        if bad.any():
            example = row + int(bad.argmax())
            raise DataError(
                f"{name}: example {example} holds a value that is not finite as float32 (NaN or infinity); "
                "remove such examples, or replace the values, e.g. np.nan_to_num(x)"
            )


def spec_of(batch: Batch) -> Batch:
    """What one example of a batch looks like: nests of `ArraySpec`."""

    def spec(array: np.ndarray) -> ArraySpec:
        return ArraySpec(array.shape[1:], "string" if array.dtype.kind == "S" else str(array.dtype))

    return Batch(*(map_nest(spec, nest) for nest in batch))


def check_alike(train: Batch, evaluate: Batch, source: str) -> None:
    """Raises DataError unless the examples of both parts look the same."""
    for name, one, other in zip(Batch._fields, train, evaluate, strict=True):
        if not _are_alike(one, other):
            raise DataError(
                f"{source}, {name}: an example to train on is {describe_nest(one)}, one to evaluate on is "
                f"{describe_nest(other)}; both must be the same"
            )


def _are_alike(one: Nest, other: Nest) -> bool:
    """Whether two specs are the same, but for sizes that are open in one of them."""
    if map_nest(lambda _: 0, one) != map_nest(lambda _: 0, other):
        return False
    pairs = zip(leaves_of(one), leaves_of(other), strict=True)
    return all(
        a.dtype == b.dtype
        and len(a.shape) == len(b.shape)
        and all(None in sizes or sizes[0] == sizes[1] for sizes in zip(a.shape, b.shape, strict=True))
        for (_, a), (_, b) in pairs
    )


def _count_classes(labels: dict[str, np.ndarray]) -> int:
    if labels["train"].dtype.kind == "f":
        return int((labels["train"].shape[1:] or (1,))[-1])
    return max(int(part.max()) for part in labels.values()) + 1


def _check_range(labels: np.ndarray, classes: int, name: str) -> None:
    """Integer labels must be classes; a model of one output tells two classes apart."""
    last = max(classes, 2) - 1
    if labels.dtype.kind not in "biu":
        return
    bad = (labels < 0) | (labels > last)
    if bad.any():
        place = tuple(int(i) for i in np.argwhere(bad)[0])
        raise DataError(
            f"{name}: example {place[0]} has label {labels[place]}, allowed: 0..{last} ({classes} classes); "
            "correct the label, or the number of classes"
        )
