"""The table of commands."""

from __future__ import annotations

import importlib
import inspect

import pytest

from trainer.commands.command import COMMANDS
from trainer.config.schema import Mode


@pytest.mark.parametrize("mode", Mode)
def test_every_mode_has_a_command(mode: Mode) -> None:
    run = importlib.import_module(COMMANDS[mode]).run
    assert list(inspect.signature(run).parameters) == ["config", "start"]
    assert f"mode={mode.name}" in (importlib.import_module(COMMANDS[mode]).__doc__ or "").splitlines()[0]
