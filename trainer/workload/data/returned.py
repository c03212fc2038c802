"""Finds the training and the evaluation data in what a user's function returned."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from trainer.workload.data.dataset_steps import is_dataset
from trainer.workload.data.errors import DataError
from trainer.workload.data.examples import Batch, leaves_of
from trainer.workload.data.py_dataset import is_py_dataset

TRAIN, EVALUATE = "train", "evaluate"
NAMES = ("test", "validation", "valid", "val", "eval", "dev")  # of evaluation data, if only one of them is present
ARRAY = re.compile(r"(x|y|w|weights|sample_weight)_(\w+)", re.IGNORECASE)  # e.g. x_train
FIELDS = {"x": 0, "y": 1}
REMEDY = 'return {"train": (x, y), "evaluate": (x, y)}; weights may follow: (x, y, weights)'
ALONE = ("the data has nothing to evaluate on, so the training examples are used", REMEDY)


class Returned(NamedTuple):
    """The sources of the examples."""

    train: Any
    evaluate: Any
    classes: Any = None
    doubts: tuple[tuple[str, str], ...] = ()  # (message, remedy)


def parts_of(returned: Any, source: str) -> Returned:
    """Splits a returned value into sources, if it can mean one thing only.

    Args:
        source: names the data set in messages.

    Raises:
        DataError: if it has another form, or is ambiguous.
    """
    if isinstance(returned, Mapping):
        parts = _by_name(returned, source)
    elif _is_source(returned):
        parts = {TRAIN: returned}
    elif isinstance(returned, tuple | list) and len(returned) == 2 and (_are_sources(returned) or _are_pairs(returned)):
        parts = dict(zip((TRAIN, EVALUATE), returned, strict=True))
    elif isinstance(returned, tuple) and _is_pair(returned) and not all(map(_is_pair, returned)):
        parts = {TRAIN: returned}
    else:
        raise DataError(f"{source}: its function returned an object of type {type(returned).__name__}; {REMEDY}")
    classes = returned.get("classes") if isinstance(returned, Mapping) else None
    if EVALUATE not in parts:
        return Returned(parts[TRAIN], parts[TRAIN], classes, (ALONE,))
    return Returned(parts[TRAIN], parts[EVALUATE], classes)


def _by_name(returned: Mapping[str, Any], source: str) -> dict[str, Any]:
    parts = {name: value for name, value in returned.items() if name != "classes"}
    if TRAIN not in parts and parts and all(ARRAY.fullmatch(str(name)) for name in parts):
        parts = _joined(parts)
    others = [name for name in NAMES if name in parts]
    if EVALUATE not in parts and len(others) == 1:
        parts[EVALUATE] = parts.pop(others[0])
    if TRAIN not in parts or (EVALUATE not in parts and len(parts) > 1):
        which = f'; name one of {" and ".join(others)} "evaluate"' if len(others) > 1 else ""
        raise DataError(f"{source}: its function returned a dict of {sorted(map(str, returned))}; {REMEDY}{which}")
    return {name: parts[name] for name in (TRAIN, EVALUATE) if name in parts}


def _joined(arrays: Mapping[str, Any]) -> dict[str, tuple[Any, ...]]:
    """Turns {"x_train": x, "y_train": y} into {"train": (x, y)}."""
    parts: dict[str, list[Any]] = {}
    for name, value in arrays.items():
        field, part = name.lower().split("_", 1) if not name.lower().startswith("sample_") else ("w", name[14:].lower())
        parts.setdefault(part, [None, None, None])[FIELDS.get(field, 2)] = value
    return {part: tuple(fields if fields[2] is not None else fields[:2]) for part, fields in parts.items()}


def _is_source(value: Any) -> bool:
    return is_dataset(value) or is_py_dataset(value)


def _are_sources(values: Sequence[Any]) -> bool:
    return all(map(_is_source, values))


def _is_pair(value: Any) -> bool:
    """Whether a value is (x, y) or (x, y, weights), with the same number of examples each."""
    if not isinstance(value, tuple | list) or not 2 <= len(value) <= len(Batch._fields):
        return False
    lengths = _lengths(value)
    return len(lengths) == 1 and None not in lengths


def _are_pairs(values: Sequence[Any]) -> bool:
    """Whether all are pairs of different lengths; with equal lengths they may be (inputs, outputs)."""
    return all(map(_is_pair, values)) and len(_lengths(values)) == 2


def _lengths(nest: Any) -> set[int | None]:
    shapes = [np.shape(leaf) if hasattr(leaf, "shape") else None for _, leaf in leaves_of(nest)]
    return {shape[0] if shape else None for shape in shapes}
