"""Optional packages: without one its tests are skipped, except where all must be there."""

from __future__ import annotations

import importlib
import os
from typing import Any

import pytest

MUST_BE_THERE = "TRAINER_TESTS_NEED_EXTRAS"  # set by the commands that install them


def optional(module: str, what: str) -> Any:
    """Imports a module.

    Args:
        what: is not tested without it.
    """
    if MUST_BE_THERE in os.environ:
        return importlib.import_module(module)
    return pytest.importorskip(module, reason=f"NO {what} WAS TESTED: make .venv/extras")
