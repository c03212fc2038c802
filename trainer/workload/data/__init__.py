"""The data sets a config can name; each is a plain function from options to a `DataSet`."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from trainer.workload.data.arrays import check_alike, from_arrays
from trainer.workload.data.downloads import cifar10, fashion_mnist, mnist
from trainer.workload.data.examples import (
    ArraySpec,
    Batch,
    DataError,
    DataSet,
    Examples,
    MissingInputError,
    Spec,
    find_data_error,
    leaves_of,
)
from trainer.workload.data.idx import mnist_10k
from trainer.workload.data.npz import npy, npz
from trainer.workload.data.oracle import oracle
from trainer.workload.data.sources import is_arrays, open_source
from trainer.workload.data.synthetic import synthetic
from trainer.workload.data.tfrecord import tfrecord

DATA_SETS: dict[str, Callable[..., DataSet]] = {
    "mnist_10k": mnist_10k,
    "mnist": mnist,
    "fashion_mnist": fashion_mnist,
    "cifar10": cifar10,
    "npz": npz,
    "npy": npy,
    "tfrecord": tfrecord,
    "synthetic": synthetic,
    "oracle": oracle,
}

__all__ = ["DATA_SETS", "DataError", "DataSet", "Examples", "MissingInputError", "find_data_error", "open_data"]


def open_data(
    name: str, options: Mapping[str, Any], *, seed: int, user_function: Callable[..., Any] | None = None
) -> DataSet:
    """Opens a data set.

    Args:
        name: one of DATA_SETS, or of the user's function.
        options: its keyword arguments.
        seed: of the run; given to a function that has an argument `seed`, unless the options have one.
        user_function: used instead of the table; returns a DataSet, or {"train": SOURCE, "evaluate": SOURCE} and if
            need be "classes"; sources.py has the kinds of sources.

    Raises:
        ValueError: if there is no such data set, or it does not take these options.
        DataError: if the data cannot be trained on.
        MissingInputError: if a file is not there.
    """
    function = user_function or DATA_SETS.get(name)
    if function is None:
        raise ValueError(f"data.name={name} is not a data set; type data=NAME with one of {', '.join(DATA_SETS)}")
    parameters = inspect.signature(function).parameters
    if "seed" in parameters:
        options = {"seed": seed, **options}
    try:
        inspect.signature(function).bind(**options)
    except TypeError as error:
        allowed = ", ".join(parameters) or "none"
        raise ValueError(f"data.options of {name}: {error}; allowed: {allowed}") from error
    opened = function(**options)
    return opened if isinstance(opened, DataSet) else _convert(opened, name, seed)


def _known_sizes(spec: Batch) -> int:
    return sum(size is not None for _, one in leaves_of(spec) for size in one.shape)


def _convert(opened: Any, name: str, seed: int) -> DataSet:
    """What a user's function returned, as a data set."""
    source = f"data set {name}"
    if not isinstance(opened, dict) or not {"train", "evaluate"} <= opened.keys():
        given = f"a dict of {sorted(opened)}" if isinstance(opened, dict) else f"a {type(opened).__name__}"
        remedy = 'return {"train": (x, y), "evaluate": (x, y)}; weights may follow: (x, y, weights)'
        raise DataError(f"{source}: its function returned {given}; {remedy}")
    parts = {part: opened[part] for part in ("train", "evaluate")}
    parts = {part: (given,) if isinstance(given, np.ndarray | dict) else given for part, given in parts.items()}
    classes = opened.get("classes")
    if all(map(is_arrays, parts.values())):
        return from_arrays(*parts.values(), source=source, classes=classes)
    sources = {part: open_source(given, f"{source}, {part}", seed=seed) for part, given in parts.items()}
    check_alike(sources["train"].spec, sources["evaluate"].spec, source)
    spec = min((one.spec for one in sources.values()), key=_known_sizes)  # open sizes are open in both
    if classes is None and isinstance(spec.labels, ArraySpec) and spec.labels.dtype.startswith("float"):
        classes = (spec.labels.shape or (1,))[-1]
    return DataSet(sources["train"].examples, sources["evaluate"].examples, Spec(*spec, classes=classes or 0))
