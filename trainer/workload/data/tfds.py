"""Reads a data set that TensorFlow Datasets has prepared in a folder."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainer.workload.data.columns import Columns, check_columns
from trainer.workload.data.errors import DataError
from trainer.workload.data.examples import DataSet
from trainer.workload.data.extras import import_extra
from trainer.workload.data.files import check_folder
from trainer.workload.data.records import index_records, read_at
from trainer.workload.data.sources import open_parts


def tfds(
    *,
    path: str,
    label: str | Sequence[str] | None = None,
    columns: str | Sequence[str] | None = None,
    train: str = "train",
    evaluate: str = "test",
    classes: int | None = None,
) -> DataSet:
    """Reads a prepared data set of array_record or TFRecord files, one example at a time, at any index.

    Args:
        path: the folder with its version, e.g. ~/tensorflow_datasets/mnist/3.0.1.
        label: feature that is the label, or several; None: that of the data set's `supervised_keys`.
        columns: features: one, or several for a dict; None: as in `supervised_keys`, else all but the labels.
        train: the split to train on, or a part of it, e.g. "train[:90%]".
        evaluate: the split to evaluate on, or a part of it.
        classes: number of classes; None: that of the label's `ClassLabel`.
    """
    library = import_extra("tensorflow_datasets", extra="tfds")
    folder = check_folder(path, option="data.options.path")
    try:
        builder = library.builder_from_directory(str(folder))
    except Exception as error:  # of many types
        raise DataError(
            f"{folder}: is not a prepared data set ({error}); give the folder with its version, e.g. "
            "data.options.path=~/tensorflow_datasets/mnist/3.0.1"
        ) from error
    features, supervised = builder.info.features, builder.info.supervised_keys
    if supervised and label is None:
        label, columns = supervised[1], columns or supervised[0]
    check_columns(list(features), label, columns, str(folder))
    if classes is None and isinstance(label, str):
        classes = getattr(features[label], "num_classes", None)
    parts = {"train": _rows(builder, train, "train"), "evaluate": _rows(builder, evaluate, "evaluate")}
    return open_parts(
        {name: Columns(rows, label, columns) for name, rows in parts.items()} | {"classes": classes}, path, seed=0
    )


def _rows(builder: Any, split: str, option: str) -> Any:
    try:
        files = builder.info.splits[split].file_instructions
    except (KeyError, ValueError, AssertionError) as error:
        raise DataError(
            f"{builder.data_dir}: has no split {split!r}, only {', '.join(builder.info.splits)}; type "
            f"'data.options.{option}=NAME', or a part, e.g. 'data.options.{option}=train[:90%]'"
        ) from error
    if builder.info.file_format.value == "tfrecord":
        return _Records(files, builder.info.features)
    return builder.as_data_source(split)


class _Records:
    """The examples of TFRecord files."""

    def __init__(self, files: Sequence[Any], features: Any) -> None:
        self._paths, self._features = [Path(one.filename) for one in files], features
        places: list[tuple[np.ndarray, ...]] = []
        for number, (path, one) in enumerate(zip(self._paths, files, strict=True)):
            offsets, lengths = (column[one.skip : one.skip + one.take] for column in index_records(path))
            places.append((np.full(len(offsets), number, np.int32), offsets, lengths))
        self._places = [np.concatenate(column) for column in zip(*places, strict=True)]

    def __len__(self) -> int:
        return len(self._places[0])

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        records, _ = read_at(self._paths, *(column[indices] for column in self._places))
        return [self._features.deserialize_example_np(record) for record in records]
