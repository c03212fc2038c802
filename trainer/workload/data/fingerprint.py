"""Computes the fingerprint of a data set: from all examples of small arrays, or from a fixed sample."""

import hashlib
from collections.abc import Iterable

import numpy as np

from trainer.plan.fingerprint import Fingerprint, PartFingerprint
from trainer.workload.data.convert import is_text, spec_of
from trainer.workload.data.examples import Batch, DataSet, Examples, Stream, count_of, describe_nest, leaves_of

ALL_NBYTES = 4 * 2**20  # up to this size arrays are digested as a whole, in a few milliseconds
SAMPLE_NBYTES = 2 * 2**20  # of larger arrays
ROWS = (16, 1024)  # sampled examples of larger arrays, at least and at most
READ_ROWS = 16  # sampled examples if each has to be read or decoded
TEXT_NBYTES = 64


def fingerprint_of(data: DataSet) -> Fingerprint:
    """Returns the fingerprint of each part."""
    return {part: _of_part(examples) for part, examples in {"train": data.train, "evaluate": data.evaluate}.items()}


def _of_part(examples: Examples | Stream) -> PartFingerprint:
    if isinstance(examples, Stream):
        sample: Batch | None = examples.first
    else:
        sample = _of_arrays(examples.whole) if examples.whole is not None else _fetched(examples)
    if sample is None:
        return PartFingerprint(count_of(examples), "", "")
    fields = spec_of(sample)._asdict().items()
    structure = ", ".join(f"{name} {describe_nest(nest)}" for name, nest in fields if nest is not None)
    return PartFingerprint(count_of(examples), structure, _digest(array for _, array in leaves_of(sample)))


def _of_arrays(whole: Batch) -> Batch:
    """Returns all examples of small arrays, and a sample of large ones."""
    arrays = [array for _, array in leaves_of(whole)]
    count, nbytes = len(arrays[0]), sum(map(_nbytes, arrays))
    if nbytes <= ALL_NBYTES:
        return whole
    chosen = _spread(count, int(np.clip(SAMPLE_NBYTES * count // nbytes, *ROWS)))
    return whole.map(lambda array: array[chosen])


def _nbytes(array: np.ndarray) -> int:
    """Returns the bytes to digest; text counts for more than its bytes, because it takes longer."""
    return array.size * TEXT_NBYTES if is_text(array) else array.nbytes


def _spread(count: int, chosen: int) -> np.ndarray:
    """Returns `chosen` indices, spread evenly from the first example to the last."""
    return np.unique(np.linspace(0, count - 1, min(count, chosen)).astype(np.int64))


def _fetched(examples: Examples) -> Batch | None:
    """Reads a few examples; None if that fails, which training will report."""
    import tensorflow as tf

    arrays = tuple(tf.constant(array) for array in examples.arrays)
    try:
        batch = Batch(*examples.fetch(tf.constant(_spread(examples.count, READ_ROWS)), arrays))
    except (tf.errors.OpError, UnicodeDecodeError):  # the latter for a damaged record
        return None
    return batch.map(lambda tensor: tensor.numpy())


def _digest(arrays: Iterable[np.ndarray]) -> str:
    sha256 = hashlib.sha256()
    for array in arrays:
        sha256.update(f"{array.dtype.kind} {array.shape}".encode())
        if is_text(array):
            for text in array.flat:
                encoded = text.encode() if isinstance(text, str) else bytes(text)
                sha256.update(len(encoded).to_bytes(8, "little") + encoded)
        else:
            sha256.update(np.ascontiguousarray(array).data)
    return sha256.hexdigest()[:32]
