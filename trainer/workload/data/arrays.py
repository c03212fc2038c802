"""Makes data sets of numpy arrays, which are checked once and gathered from in the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.workload.data.examples import DataError, DataSet, Examples

if TYPE_CHECKING:
    import tensorflow as tf

ALIGNMENT_BYTES = 64  # of arrays that TensorFlow uses in place; it copies others, and both copies stay in memory
ROWS = 4096  # examples checked at a time, so that checks need little memory


def from_arrays(
    train: tuple[Any, Any],
    evaluate: tuple[Any, Any],
    *,
    source: str,
    scale: float | None = None,
    classes: int | None = None,
) -> DataSet:
    """A data set of numpy arrays.

    Bytes become float32 when a batch is fetched; all other features become float32 here.

    Args:
        train: features [N, ...] and labels: integers [N] or [N, 1] (classes), or floats [N, ...] (targets).
        evaluate: the same, of other examples.
        source: their origin, for messages.
        scale: factor of the features; None: 1/255 for bytes, 1 for others.
        classes: number of classes; None: the largest integer label + 1, or the last size of float labels.

    Raises:
        DataError: if there are no examples, shapes or lengths differ, a value is not a finite number, or a label is not
            in 0..classes-1.
    """
    parts = {"train": train, "evaluate": evaluate}
    features = {part: _features(x, f"{source}, {part} features") for part, (x, _) in parts.items()}
    labels = {part: _labels(y, f"{source}, {part} labels") for part, (_, y) in parts.items()}
    for part, x in features.items():
        if len(x) != len(y := labels[part]):
            raise DataError(
                f"{source}, {part}: {len(x)} features but {len(y)} labels; there must be one label for each example, "
                f"features {list(x.shape)}, labels {list(y.shape)}"
            )
    _check_alike(features, f"{source}, features")
    _check_alike(labels, f"{source}, labels")
    classes = classes or _count_classes(labels)
    for part in parts:
        _check_range(labels[part], classes, f"{source}, {part} labels")
    if scale is None:
        scale = 1 / 255 if features["train"].dtype == np.uint8 else 1.0
    fetch = _gather(scale)
    sets = {p: Examples(len(features[p]), (_align(features[p]), _align(labels[p])), fetch) for p in parts}
    return DataSet(sets["train"], sets["evaluate"], features["train"].shape[1:], classes)


def _align(array: np.ndarray) -> np.ndarray:
    """The same values, in memory that TensorFlow can use without a copy."""
    if array.flags.c_contiguous and array.ctypes.data % ALIGNMENT_BYTES == 0:
        return array
    memory = np.empty(array.nbytes + ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT_BYTES
    aligned = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    aligned[...] = array
    return aligned


def _gather(scale: float) -> Callable[[tf.Tensor, tuple[tf.Tensor, ...]], tuple[tf.Tensor, tf.Tensor]]:
    def fetch(indices: tf.Tensor, arrays: tuple[tf.Tensor, ...]) -> tuple[tf.Tensor, tf.Tensor]:
        import tensorflow as tf

        features, labels = (tf.gather(array, indices) for array in arrays)
        features = tf.cast(features, tf.float32)
        if scale != 1:
            features *= scale
        return features, labels if labels.dtype.is_floating else tf.cast(labels, tf.int64)

    return fetch


def _features(values: Any, name: str) -> np.ndarray:
    """[N, ...] as bytes or finite float32; numbers [N] become [N, 1]."""
    array = _numbers(values, name)
    array = array if array.dtype == np.uint8 else _finite(array, name)
    return array[:, None] if array.ndim == 1 else array


def _labels(values: Any, name: str) -> np.ndarray:
    """Classes as bytes or int64, [N, 1] made [N]; or targets as finite float32, [N] made [N, 1]."""
    array = _numbers(values, name)
    if array.dtype.kind == "f":
        array = _finite(array, name)
        return array[:, None] if array.ndim == 1 else array
    array = array if array.dtype == np.uint8 else array.astype(np.int64)
    return array[:, 0] if array.ndim == 2 and array.shape[1] == 1 else array


def _numbers(values: Any, name: str) -> np.ndarray:
    array = np.asarray(values)
    if array.dtype.kind not in "biuf":
        raise DataError(f"{name}: have type {array.dtype}; allowed: integers and floats, e.g. x.astype('float32')")
    if array.ndim == 0 or array.size == 0:
        raise DataError(f"{name}: have shape {list(array.shape)}, so there are no examples; at least one is needed")
    return array


def _finite(array: np.ndarray, name: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        array = array.astype(np.float32, copy=False)
    for row in range(0, len(array), ROWS):
        block = array[row : row + ROWS]
        bad = ~np.isfinite(block).reshape(len(block), -1).all(axis=1)
        if bad.any():
            example = row + int(bad.argmax())
            raise DataError(
                f"{name}: example {example} holds a value that is not finite as float32 (NaN or infinity); "
                "remove such examples, or replace the values, e.g. np.nan_to_num(x)"
            )
    return array


def _check_alike(parts: dict[str, np.ndarray], name: str) -> None:
    """Raises DataError unless the examples of both parts have the same shape, and both or neither are floats."""
    train, evaluate = parts["train"], parts["evaluate"]
    if train.shape[1:] != evaluate.shape[1:] or (train.dtype.kind == "f") != (evaluate.dtype.kind == "f"):
        raise DataError(
            f"{name}: an example to train on is {train.dtype} {list(train.shape[1:])}, one to evaluate on is "
            f"{evaluate.dtype} {list(evaluate.shape[1:])}; both must be the same"
        )


def _count_classes(labels: dict[str, np.ndarray]) -> int:
    if labels["train"].dtype.kind == "f":
        return int(labels["train"].shape[-1])
    return max(int(part.max()) for part in labels.values()) + 1


def _check_range(labels: np.ndarray, classes: int, name: str) -> None:
    """Integer labels must be classes; a model of one output tells two classes apart."""
    last = max(classes, 2) - 1
    bad = (labels < 0) | (labels > last)
    if labels.dtype.kind != "f" and bad.any():
        place = tuple(int(i) for i in np.argwhere(bad)[0])
        raise DataError(
            f"{name}: example {place[0]} has label {labels[place]}, allowed: 0..{last} ({classes} classes); "
            "correct the label, or the number of classes"
        )
