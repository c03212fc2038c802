"""The table of commands."""

from __future__ import annotations

import io
import os
import subprocess
import sys

from trainer import __main__
from trainer.commands.by_mode import COMMANDS, TRAINING
from trainer.commands.start import restart_as_task
from trainer.config.typed import Mode
from trainer.plan.environment import for_tasks


def test_every_mode_has_one_command() -> None:
    assert sorted([*COMMANDS, *TRAINING], key=lambda mode: mode.name) == sorted(Mode, key=lambda mode: mode.name)


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


def test_a_command_that_runs_code_of_the_user_has_the_environment_of_a_task(monkeypatch):
    """It starts again until it has, because Python reads some of it when it starts."""
    started: list[dict[str, str]] = []
    monkeypatch.setattr(os, "execve", lambda program, words, environment: started.append(dict(environment)))
    for name in for_tasks({}):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TF_ENABLE_ONEDNN_OPTS", "0")
    restart_as_task()
    assert (
        started[0].items() >= {"PYTHONHASHSEED": "0", "TF_ENABLE_ONEDNN_OPTS": "0", "PATH": os.environ["PATH"]}.items()
    )
    monkeypatch.setattr(os, "environ", started[0])
    restart_as_task()
    assert len(started) == 1
