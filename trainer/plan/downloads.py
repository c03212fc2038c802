"""Finds which data sets of Keras are on this machine, because isolated tasks cannot download them."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

DOWNLOADED = ("mnist", "fashion_mnist", "cifar10")


def keras_home() -> Path:
    """Returns the folder of Keras's downloads."""
    return Path(os.environ.get("KERAS_HOME") or Path.home() / ".keras")


def mark_of(name: str) -> Path:
    """Returns the file that marks a data set as completely downloaded."""
    return keras_home() / "datasets" / f"{name}.complete"


def is_missing(data: Mapping[str, Any]) -> bool:
    """Whether a data set, as {"name": ..., "options": ...}, may still have to be downloaded."""
    return data["name"] in DOWNLOADED and not data["options"].get("path") and not mark_of(data["name"]).exists()
