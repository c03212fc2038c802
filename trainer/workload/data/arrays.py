"""Makes data sets of numpy arrays, which are checked once, and not copied if they are large."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from trainer.workload.data.convert import LEAVE_OUT, REPLACE, as_arrays, check_finite, is_text, native, spec_of
from trainer.workload.data.errors import DataError
from trainer.workload.data.examples import (
    ArraySpec,
    Batch,
    DataSet,
    Examples,
    LabelFault,
    Nest,
    Opened,
    Preprocessing,
    Spec,
    describe_nest,
    leaves_of,
    map_nest,
    read_rows,
)

if TYPE_CHECKING:
    import tensorflow as tf

SMALL_NBYTES = 64 * 2**20  # arrays up to this size are copied to memory that TensorFlow gathers from
ALIGNMENT_BYTES = 64  # of arrays that TensorFlow uses in place; it copies others, and both copies stay in memory
LABELS = "labels"  # a field of `Batch`
ROWS = 4096  # examples checked at a time, so that checks need little memory


def from_arrays(
    train: Sequence[Nest],
    evaluate: Sequence[Nest],
    *,
    source: str,
    scale: float | None = None,
    classes: int | None = None,
    ids: Mapping[str, int] | None = None,
) -> DataSet:
    """Makes a data set of numpy arrays, which keep their type; float64 becomes float32.

    Args:
        train: features, labels and optional weights: each an array [N, ...], or dicts, tuples and lists of arrays.
            Labels of integers are classes, [N] or [N, 1] or of any shape; others are targets.
        evaluate: the same, of other examples.
        source: their origin, for messages.
        scale: factor of the features, which become float32; None: they are unchanged.
        classes: number of classes; None: the largest integer label + 1, or the last size of float labels.
        ids: number of ids, by the name of the feature, if features are a dict.

    Raises:
        DataError: if there are no examples, shapes or lengths differ, or a feature or weight is not a finite number.
            Faulty labels are left to the loss: see `DataSet.faults`.
    """
    parts = {"train": train, "evaluate": evaluate}
    batches = {part: Batch(*given) for part, given in parts.items()}
    checked = {part: _checked(batch, f"{source}, {part}") for part, batch in batches.items()}
    faults = [label_fault(batch.labels, part, f"{source}, {part}") for part, batch in checked.items()]
    specs = {part: spec_of(batch) for part, batch in checked.items()}
    check_alike(specs["train"], specs["evaluate"], source)
    labels = {part: batch.labels for part, batch in checked.items()}
    if all(isinstance(one, np.ndarray) for one in labels.values()):
        for part in parts:
            _check_no_text(labels[part], f"{source}, {part} labels")
        classes = classes or _count_classes(labels)
        faults += [_no_class(labels[part], classes, part, f"{source}, {part}") for part in parts]
    spec, preprocessing = Spec(*specs["train"], classes=classes or 0), None
    if scale is not None:
        preprocessing = partial(scaling, spec.features, scale)
        spec = replace(spec, features=map_nest(lambda one: ArraySpec(one.shape, "float32"), spec.features))
    if ids:
        known = {name: one._replace(ids=ids.get(name)) for name, one in spec.features.items()}
        spec = replace(spec, features=known)
    to_train, to_evaluate = (_examples(batch, scale, f"{source}, {part}") for part, batch in checked.items())
    return DataSet(to_train, to_evaluate, spec, preprocessing, faults=tuple(filter(None, faults)))


def scaling(spec: Nest, scale: float) -> Preprocessing:
    """Multiplies all features, which become float32.

    Args:
        spec: of raw inputs.
    """
    return Preprocessing(spec, partial(_scaled, scale=scale))


def _scaled(features: Nest, *, scale: float) -> Nest:
    import tensorflow as tf

    return map_nest(lambda one: tf.cast(one, tf.float32) * scale, features)


def open_arrays(given: Sequence[Nest], source: str) -> Opened:
    """Opens a single part."""
    batch = _checked(Batch(*given), source)
    return Opened(_examples(batch, None, source), spec_of(batch), label_fault(batch.labels, "", source))


def _examples(batch: Batch, scale: float | None, source: str) -> Examples:
    """Converts small arrays for TensorFlow at once; of others, each batch when it is read."""
    leaves = leaves_of(batch)
    held = tuple(_align(native(array)) for _, array in leaves if _is_small(array))
    is_held = [_is_small(array) for _, array in leaves]
    read = [(name, array) for name, array in leaves if not _is_small(array)]

    def fetch(indices: tf.Tensor, tensors: tuple[tf.Tensor, ...], *, checks_labels: bool = True) -> Batch:
        import tensorflow as tf

        of_read = iter(_read(read, indices, source, checks_labels=checks_labels) if read else [])
        of_held = iter(tensors)
        gathered = iter([tf.gather(next(of_held), indices) if one else next(of_read) for one in is_held])
        features, labels, weights = batch.map(lambda _: next(gathered))
        if scale is not None:
            features = _scaled(features, scale=scale)
        return Batch(features, labels, weights)

    return Examples(len(leaves[0][1]), held, fetch, batch, partial(fetch, checks_labels=False))


def _is_small(array: np.ndarray) -> bool:
    return array.nbytes <= SMALL_NBYTES


def _read(
    arrays: list[tuple[str, np.ndarray]], indices: tf.Tensor, source: str, *, checks_labels: bool
) -> list[tf.Tensor]:
    """Returns rows of arrays that are not in the graph."""

    def rows(numbers: np.ndarray) -> list[np.ndarray]:
        found = [native(array[numbers]) for _, array in arrays]
        for (name, array), values in zip(arrays, found, strict=True):
            is_label = name.partition("/")[0] == LABELS
            if is_mapped(array) and (checks_labels or not is_label):  # the file has not been read before
                check_finite(values, f"{source} {name}", numbers, remedy=LEAVE_OUT if is_label else REPLACE)
        return found

    specs = leaves_of(spec_of(Batch(tuple(array for _, array in arrays))))
    return read_rows(rows, indices, [one for _, one in specs])


def is_mapped(array: np.ndarray) -> bool:
    """Whether the array, or its base, is a file mapped into memory."""
    base: Any = array
    while base is not None:
        if isinstance(base, np.memmap | mmap.mmap):
            return True
        base = getattr(base, "base", None)
    return False


def _checked(batch: Batch, source: str) -> Batch:
    """Returns the arrays in the shapes that are trained on.

    Raises:
        DataError: if an array cannot be used, or has another length than the others.
    """
    checked = as_arrays(batch, source)
    for name, nest in checked._asdict().items():
        for _, array in leaves_of(nest) if name != LABELS else ():
            _check_all_finite(array, f"{source} {name}")
    lengths = {name: len(array) for name, array in leaves_of(checked)}
    if not lengths:
        raise DataError(f"{source}: there are no arrays; return features, e.g. numpy arrays [examples, ...]")
    if len(set(lengths.values())) > 1:
        listed = ", ".join(f"{name} {list(array.shape)}" for name, array in leaves_of(checked))
        raise DataError(
            f"{source}: arrays have different numbers of examples: {listed}; each needs one row per example"
        )
    return checked


def _align(array: np.ndarray) -> np.ndarray:
    """Copies an array, if needed, into memory that TensorFlow can use directly."""
    if is_text(array) or (array.flags.c_contiguous and array.ctypes.data % ALIGNMENT_BYTES == 0):
        return array  # text is copied in any case
    memory = np.empty(array.nbytes + ALIGNMENT_BYTES, np.uint8)
    start = -memory.ctypes.data % ALIGNMENT_BYTES
    aligned = memory[start : start + array.nbytes].view(array.dtype).reshape(array.shape)
    aligned[...] = array
    return aligned


def label_fault(labels: Nest, part: str, source: str) -> LabelFault | None:
    """Returns the first label that is not finite; None if all are finite, or are checked when read."""
    for name, array in leaves_of(labels, LABELS):
        try:
            _check_all_finite(array, f"{source} {name}", remedy=LEAVE_OUT)
        except DataError as error:
            finite = np.isfinite(native(array)).reshape(len(array), -1).all(axis=1)
            return LabelFault(part, int(finite.argmin()), frozenset(), str(error))
    return None


def _check_all_finite(array: np.ndarray, name: str, *, remedy: str = REPLACE) -> None:
    if array.dtype.kind != "f" or (is_mapped(array) and not _is_small(array)):  # these are checked when read
        return
    for row in range(0, len(array), ROWS):
        block = native(array[row : row + ROWS])
        check_finite(block, name, np.arange(row, row + len(block)), remedy=remedy)


def check_alike(train: Batch, evaluate: Batch, source: str) -> None:
    """Raises DataError unless the examples of both parts have the same structure; one part may have no weights."""
    for name, one, other in zip(Batch._fields, train, evaluate, strict=True):
        is_without = name == "weights" and (one is None or other is None)
        if not is_without and not are_alike(one, other):
            raise DataError(
                f"{source}, {name}: a training example is {describe_nest(one)}, but an evaluation example is "
                f"{describe_nest(other)}; both must be the same"
            )


def are_alike(one: Nest, other: Nest) -> bool:
    """Whether two specs are equal, except for sizes that are open in one of them."""
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


def _check_no_text(labels: np.ndarray, name: str) -> None:
    if is_text(labels):
        raise DataError(f"{name} are text; give classes as integers, e.g. np.unique(y, return_inverse=True)[1]")


def _no_class(labels: np.ndarray, classes: int, part: str, source: str) -> LabelFault | None:
    """Returns the first integer that is not a class; a model with one output has two classes."""
    last = max(classes, 2) - 1
    if labels.dtype.kind not in "biu":
        return None
    fault, values = None, set[int]()
    for row in range(0, len(labels), ROWS):
        block = labels[row : row + ROWS]
        bad = (block < 0) | (block > last)
        if not bad.any():
            continue
        place = tuple(int(i) for i in np.argwhere(bad)[0])
        values.update(map(int, np.unique(block[bad])))
        fault = fault or LabelFault(
            part,
            row + place[0],
            frozenset(),
            f"{source} labels: example {row + place[0]} has label {block[place]}, allowed: 0..{last}; correct the "
            f"label, or the number of classes; if it stands for no label, give the loss ignore_class={block[place]}; "
            "labels that are not classes must be floats",
        )
    return fault and fault._replace(values=frozenset(values))
