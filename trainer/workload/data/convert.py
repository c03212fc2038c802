"""Turns array-likes of users into arrays of types that TensorFlow has."""

from typing import Any

import numpy as np

from trainer.workload.data.errors import DataError
from trainer.workload.data.examples import ArraySpec, Batch, Nest, map_nest

ALLOWED = "allowed: numbers, booleans and text, e.g. x.astype('float32')"
REPLACE = "remove such examples, or replace the values, e.g. np.nan_to_num(x)"
LEAVE_OUT = "remove such examples, or use a loss that ignores such labels"  # replaced values would be learned
RAGGED = "is ragged: its examples have different sizes; pad or cut them, e.g. x.to_tensor()"
NOT_DENSE = {
    "RaggedTensor": RAGGED,
    "RaggedTensorSpec": RAGGED,
    "SparseTensor": "is sparse; make it dense, e.g. tf.sparse.to_dense(x)",
}


def to_batch(given: Batch, source: str) -> Batch:
    """Returns arrays as TensorFlow takes them, in the shapes of `as_arrays`.

    Raises:
        DataError: if an array cannot be used.
    """
    return as_arrays(given, source).map(native)


def as_arrays(given: Batch, source: str) -> Batch:
    """Returns arrays of the given types and shapes.

    Arrays are not copied: they stay in memory, or in a mapped file.

    Raises:
        DataError: if an array cannot be used.
    """
    named = zip(Batch._fields, given, strict=True)
    features, labels, weights = (_arrays(nest, f"{source} {name}") for name, nest in named)
    return Batch(features, labels, weights)


def native(array: np.ndarray) -> np.ndarray:
    """Converts values to the types for TensorFlow: floats to float32, text to bytes in UTF-8."""
    if array.dtype.kind in "UO":
        return np.array([_encoded(one) for one in array.flat], object).reshape(array.shape)
    with np.errstate(over="ignore"):
        return array.astype(_native(array.dtype), copy=False)


def check_finite(values: np.ndarray, name: str, numbers: np.ndarray | None = None, *, remedy: str = REPLACE) -> None:
    """Raises DataError if examples [B, ...] hold a value that is not finite; their numbers [B] tell which.

    Text and integers are never refused.
    """
    if values.dtype.kind != "f":
        return
    bad = ~np.isfinite(values).reshape(len(values), -1).all(axis=1)
    if bad.any():
        which = "an example" if numbers is None else f"example {numbers[bad.argmax()]}"
        raise DataError(f"{name}: {which} holds a value that is not finite as float32 (NaN or infinity); {remedy}")


def spec_of(batch: Batch) -> Batch:
    """Returns the structure of one example of a batch: nests of `ArraySpec`."""

    def spec(array: np.ndarray) -> ArraySpec:
        return ArraySpec(array.shape[1:], "string" if is_text(array) else str(_native(array.dtype)))

    return batch.map(spec)


def is_text(array: np.ndarray) -> bool:
    return array.dtype.kind in "SUO"


def _native(dtype: np.dtype) -> np.dtype:
    return np.dtype(np.float32) if dtype.kind == "f" else dtype.newbyteorder("=")


def _encoded(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


def _arrays(nest: Nest, name: str) -> Nest:
    return map_nest(lambda values: _array(values, name), _without_lists(nest, name))


def _without_lists(nest: Nest, name: str) -> Nest:
    """Turns lists of numbers or texts into arrays, and a list of arrays into a tuple, as tf.data needs it."""
    refuse_not_dense(nest, name)
    if isinstance(nest, dict):
        return {key: _without_lists(one, name) for key, one in nest.items()}
    if isinstance(nest, list | tuple):
        is_nest = any(isinstance(one, dict) or (hasattr(one, "ndim") and np.ndim(one)) for one in nest)
        return tuple(_without_lists(one, name) for one in nest) if is_nest else _as_array(nest, name)
    return nest


def refuse_not_dense(value: Any, name: str) -> None:
    """Raises DataError for a tensor that is ragged or sparse, or a spec of ragged ones; sparse batches become dense."""
    kind = type(value).__name__
    if kind in NOT_DENSE:
        raise DataError(f"{name}: {NOT_DENSE[kind]}")


def _array(values: Any, name: str) -> np.ndarray:
    """Returns [N, ...] of a type that TensorFlow has."""
    array = _as_array(values, name)
    if array.ndim == 0 and array.dtype.kind == "O":
        hint = "; make it dense: x.toarray()" if hasattr(values, "toarray") else f"; {ALLOWED}"
        raise DataError(f"{name}: is an object of type {type(values).__name__}{hint}")
    if array.dtype.kind == "O":
        _check_texts(array, name)
    elif array.dtype.kind not in "biufSU":
        raise DataError(f"{name}: type {array.dtype} cannot be used; {ALLOWED}")
    if array.ndim == 0 or array.size == 0:
        raise DataError(f"{name}: shape {list(array.shape)} has no examples; at least one is needed")
    return array


def _as_array(values: Any, name: str) -> np.ndarray:
    if isinstance(values, np.ma.MaskedArray):
        raise DataError(f"{name}: is a masked array; replace what is masked, e.g. x.filled(0)")
    try:
        return np.asanyarray(values)
    except ValueError as error:  # a list of lists of different lengths
        raise DataError(f"{name}: its examples have different sizes ({error}); pad or cut them") from error


def _check_texts(array: np.ndarray, name: str) -> None:
    for number, value in enumerate(array.flat):
        if not isinstance(value, str | bytes):
            example = number // (array.size // len(array))
            remedy = "replace missing texts by ''" if _is_missing(value) else ALLOWED
            kind = f"{value!r}, which is not text" if _is_missing(value) else f"a {type(value).__name__}"
            raise DataError(f"{name}: type object, and example {example} is {kind}; {remedy}")


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, float) and np.isnan(value)) or type(value).__name__ == "NAType"
