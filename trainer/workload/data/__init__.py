"""The built-in data sets; each is a plain function from options to a `DataSet`."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from trainer.workload.data.clicks import clicks
from trainer.workload.data.criteo_files import criteo
from trainer.workload.data.csv_files import csv
from trainer.workload.data.downloads import cifar10, fashion_mnist, mnist
from trainer.workload.data.errors import DataError, MissingInputError, find_data_error
from trainer.workload.data.examples import DataSet, Examples
from trainer.workload.data.hf import hf
from trainer.workload.data.idx import mnist_10k
from trainer.workload.data.images import images
from trainer.workload.data.npz import npy, npz
from trainer.workload.data.oracle import oracle
from trainer.workload.data.parquet import parquet
from trainer.workload.data.sources import open_parts
from trainer.workload.data.synthetic import synthetic
from trainer.workload.data.tfds import tfds
from trainer.workload.data.tfrecord import tfrecord

DATA_SETS: dict[str, Callable[..., DataSet]] = {
    "mnist_10k": mnist_10k,
    "mnist": mnist,
    "fashion_mnist": fashion_mnist,
    "cifar10": cifar10,
    "npz": npz,
    "npy": npy,
    "clicks": clicks,
    "criteo": criteo,
    "csv": csv,
    "parquet": parquet,
    "images": images,
    "tfrecord": tfrecord,
    "tfds": tfds,
    "hf": hf,
    "synthetic": synthetic,
    "oracle": oracle,
}

__all__ = ["DATA_SETS", "DataError", "DataSet", "Examples", "MissingInputError", "find_data_error", "open_data"]


def open_data(
    name: str,
    options: Mapping[str, Any],
    *,
    seed: int,
    user_function: Callable[..., Any] | None = None,
    must_end: bool = True,
) -> DataSet:
    """Opens a data set.

    Args:
        name: one of DATA_SETS, or of the user's function.
        options: its keyword arguments.
        seed: of the run; given to a function that has an argument `seed`, unless the options have one.
        user_function: used instead of the table; returns a DataSet, or {"train": SOURCE, "evaluate": SOURCE} and if
            need be "classes"; sources.py has the kinds of sources.
        must_end: whether an evaluation reads all examples.

    Raises:
        ValueError: if there is no such data set, or it does not take these options.
        DataError: if the data cannot be trained on.
        MissingInputError: if a file does not exist.
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
    return (
        opened if isinstance(opened, DataSet) else open_parts(opened, f"data set {name}", seed=seed, must_end=must_end)
    )
