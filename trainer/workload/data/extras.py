"""Imports optional packages of readers."""

import importlib
from typing import Any

from trainer.workload.data.errors import DataError


def import_extra(module: str, *, extra: str) -> Any:
    """Imports a module of an optional package.

    Args:
        extra: of this project, which installs it.

    Raises:
        DataError: if it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0].replace("_", "-")
        raise DataError(
            f"data={extra} needs the package {package}, which cannot be imported ({error}); type pip install "
            f"'trainer[{extra}]', or pip install {package}"
        ) from error
