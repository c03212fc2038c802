"""The exit code that each error carries."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.faults.exit_codes import IncompleteError, NotFiniteError, RollbackError, RunInUseError, exit_code_of
from trainer.faults.problems import ConfigError
from trainer.observe.peers import PeerError
from trainer.observe.placement.verify import PlacementError
from trainer.plan.description import DescriptionError
from trainer.storage.checkpoint import CheckpointError
from trainer.workload.data import DataError, MissingInputError


class UnavailableError(Exception):
    """Named as TensorFlow's own."""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError([]), 2),
        (DataError("bad record"), 65),
        (NotFiniteError("loss is NaN"), 65),
        (MissingInputError("no file"), 66),
        (PeerError("worker:1"), 69),
        (UnavailableError(), 69),
        (PlacementError("elsewhere"), 70),
        (KeyError("unexpected"), 70),
        (RunInUseError("runs/1"), 73),
        (PermissionError("disk"), 74),
        (IncompleteError("ps:0"), 75),
        (RollbackError("step 41", step=41), 75),
        (CheckpointError(Path("x"), "damaged"), 76),
        (DescriptionError("no memory", 66), 66),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else str(value),
)
def test_an_error_carries_its_exit_code(error: Exception, code: int) -> None:
    assert exit_code_of(error) == code
