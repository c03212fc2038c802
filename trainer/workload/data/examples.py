"""The types of a data set: examples that can be fetched at any index, in any order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from trainer.faults import exit_codes
from trainer.faults.exit_codes import TrainerError

if TYPE_CHECKING:
    import tensorflow as tf


class DataError(TrainerError, ValueError):
    """Data that cannot be trained on; names the file or data set, the record, its contents and what to type."""

    exit_code = exit_codes.BAD_DATA


class MissingInputError(DataError):
    """A file that does not exist."""

    exit_code = exit_codes.INPUT_MISSING


@dataclass(frozen=True)
class Examples:
    """Examples with random access.

    `fetch` takes indices [B] of int64 in 0..count-1 and `arrays` as tensors, and returns features [B, ...] of float32
    and labels [B, ...] of int64 (classes) or float32 (targets). It is traced once, in graph mode.
    """

    count: int
    arrays: tuple[np.ndarray, ...]  # from which `fetch` gathers; fed to the graph once
    fetch: Callable[[tf.Tensor, tuple[tf.Tensor, ...]], tuple[tf.Tensor, tf.Tensor]]


@dataclass(frozen=True)
class DataSet:
    """Examples to train on, others to evaluate on, and the shapes that a model for them must have."""

    train: Examples
    evaluate: Examples
    input_shape: tuple[int, ...]  # of one example
    classes: int  # outputs of a model: classes, or values of a float label


def find_data_error(error: BaseException) -> DataError | None:
    """The DataError inside what `Session.run` raised, if reading or decoding a batch failed.

    Args:
        error: a `tf.errors.OpError`, or the UnicodeDecodeError that TensorFlow's Python layer raises when the bytes of
            a damaged record are part of its message.
    """
    text = error.object.decode(errors="replace") if isinstance(error, UnicodeDecodeError) else str(error)
    _, marker, rest = text.partition("Error in user-defined function passed to MapDataset")
    if not marker:
        return None
    reason = rest.partition("::Map: ")[2] or rest.partition(": ")[2]
    first = reason.split("\n\t")[0].split("\nTraceback")[0].strip()  # without graph nodes and traceback
    own = first.removeprefix("DataError: ")  # raised by one of this package's readers: complete
    return DataError(own if own != first else f"{first}; type data.options.verify=true to find all such records")
