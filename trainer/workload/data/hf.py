"""Reads a data set of the Hugging Face library `datasets` from a folder."""

from collections.abc import Mapping, Sequence
from typing import Any

from trainer.workload.data.columns import Columns, check_columns
from trainer.workload.data.errors import DataError
from trainer.workload.data.examples import DataSet
from trainer.workload.data.extras import import_extra
from trainer.workload.data.files import check_folder
from trainer.workload.data.parts import divide, is_fraction
from trainer.workload.data.sources import open_parts


def hf(
    *,
    path: str,
    label: str | Sequence[str] | None = None,
    columns: str | Sequence[str] | None = None,
    train: str = "train",
    evaluate: str | float | None = None,
    classes: int | None = None,
) -> DataSet:
    """Reads a folder that `save_to_disk` wrote, mapped into memory: one copy for all tasks.

    Args:
        path: the folder.
        label: column of the labels, or several; None: no labels.
        columns: features: one column, or several for a dict; None: all other columns.
        train: the split to train on, if the folder has several.
        evaluate: the split to evaluate on, or the share of the examples of `train`; None: test.
        classes: number of classes; None: that of the label's `ClassLabel`.
    """
    library = import_extra("datasets", extra="hf")
    folder = check_folder(path, option="data.options.path")
    try:
        opened = library.load_from_disk(str(folder))
    except Exception as error:  # of many types
        raise DataError(f"{folder}: cannot be read ({error}); write it with dataset.save_to_disk(path)") from error
    parts = _parts(opened, str(folder), train, "test" if evaluate is None else evaluate)
    features: Mapping[str, Any] = parts["train"].features
    check_columns(list(features), label, columns, str(folder))
    if classes is None and isinstance(label, str):
        classes = getattr(features[label], "num_classes", None)
    sources = {name: Columns(_Rows(part), label, columns) for name, part in parts.items()}
    return open_parts({**sources, "classes": classes}, path, seed=0)


class _Rows:
    """The rows of a split, as numpy arrays."""

    def __init__(self, split: Any) -> None:
        self._split = split.with_format("numpy")

    def __len__(self) -> int:
        return len(self._split)

    def __getitems__(self, indices: list[int]) -> list[dict[str, Any]]:
        columns = self._split[indices]
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _parts(opened: Any, folder: str, train: str, evaluate: str | float) -> dict[str, Any]:
    splits = dict(opened) if isinstance(opened, dict) else {train: opened}
    has_fraction = is_fraction(evaluate)
    for option, name in (("train", train), *(() if has_fraction else (("evaluate", evaluate),))):
        if name not in splits:
            raise DataError(
                f"{folder}: has no split {name!r}, only {', '.join(splits)}; type data.options.{option}=NAME, or "
                "data.options.evaluate=0.2 for a share of the split that is trained on"
            )
    if not has_fraction:
        return {"train": splits[train], "evaluate": splits[evaluate]}
    rows = divide(len(splits[train]), float(evaluate), folder)
    return {name: splits[train].select(chosen) for name, chosen in zip(("train", "evaluate"), rows, strict=True)}
