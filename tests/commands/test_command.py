"""The table of commands."""

from __future__ import annotations

import importlib
import inspect
import subprocess
import sys

import pytest

from trainer.commands.command import COMMANDS
from trainer.config.schema import Mode


@pytest.mark.parametrize("mode", Mode)
def test_every_mode_has_a_command(mode: Mode) -> None:
    run = importlib.import_module(COMMANDS[mode]).run
    assert list(inspect.signature(run).parameters) == ["config", "start"]
    assert f"mode={mode.name}" in (importlib.import_module(COMMANDS[mode]).__doc__ or "").splitlines()[0]


def test_a_launcher_imports_neither_tensorflow_nor_numpy():
    heavy = "{'tensorflow', 'keras', 'numpy', 'docker'}"
    program = f"import sys, trainer.commands.train; print({heavy} & set(sys.modules))"
    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "set()\n"
