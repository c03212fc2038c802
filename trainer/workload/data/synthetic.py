"""Makes random examples with labels that a model can learn, without files."""

import math
from collections.abc import Sequence

import numpy as np

from trainer.workload.data.arrays import ROWS, from_arrays
from trainer.workload.data.examples import DataSet

TEACHER, TRAIN, EVALUATE = 0, 1, 2  # independent streams of one seed


def synthetic(
    *,
    seed: int,
    train_examples: int = 8192,
    evaluate_examples: int = 2048,
    shape: Sequence[int] = (28, 28, 1),
    classes: int = 10,
) -> DataSet:
    """Makes features uniform in [-1, 1]; the label is the largest of `classes` random linear functions (the teacher).

    The same seed gives the same bits with every numpy and on every machine: raw generator output, and exact sums.
    """
    smallest = min(shape, default=1)
    _check_sizes(train_examples=train_examples, evaluate_examples=evaluate_examples, shape=smallest, classes=classes)
    teacher = _odd_numbers(seed, TEACHER, math.prod(shape) * classes).reshape(-1, classes)
    train, evaluate = (
        _examples(_odd_numbers(seed, stream, count * math.prod(shape)).reshape(count, -1), teacher, shape)
        for stream, count in ((TRAIN, train_examples), (EVALUATE, evaluate_examples))
    )
    return from_arrays(train, evaluate, source="synthetic", classes=classes)


def _check_sizes(**sizes: int) -> None:
    for option, size in sizes.items():
        if size < 1:
            raise ValueError(f"data.options.{option} is {size}; it must be at least 1")


def _odd_numbers(seed: int, stream: int, count: int) -> np.ndarray:
    """Returns [count] of the odd numbers -255..255 as int16, uniform; odd, because they are symmetric about zero."""
    words = np.random.PCG64([seed, stream]).random_raw(-(-count // 8)).astype("<u8")
    return words.view(np.uint8)[:count].astype(np.int16) * 2 - 255


def _examples(values: np.ndarray, teacher: np.ndarray, shape: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Returns features [N, *shape] and labels [N] from odd numbers [N, D] and a teacher [D, classes]."""
    # float64 holds these sums of products exactly, so no order of summing and no BLAS can change a label.
    weights = teacher.astype(np.float64)
    blocks = (values[row : row + ROWS].astype(np.float64) for row in range(0, len(values), ROWS))
    labels = np.concatenate([(block @ weights).argmax(axis=1) for block in blocks])
    return (values / np.float32(255)).reshape(len(values), *shape), labels
