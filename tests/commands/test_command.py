"""The table of commands."""

from __future__ import annotations

import importlib
import inspect
import io
import subprocess
import sys

import pytest

from trainer import __main__
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


def test_a_character_that_the_locale_lacks_is_escaped(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii"))
    __main__._open_standard_streams()
    print("runs/größe \N{BOX DRAWINGS HEAVY HORIZONTAL}", flush=True)
    assert written.getvalue() == b"runs/gr\\xf6\\xdfe \\u2501\n"
