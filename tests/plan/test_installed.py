"""Without TensorFlow a command that needs it says what to install, before it starts anything."""

from __future__ import annotations

import pytest

from trainer.commands.runs import checkpoints
from trainer.commands.start import start_early
from trainer.faults import exit_codes
from trainer.faults.problems import ConfigError
from trainer.launch.processes.tasks import ProcessTasks
from trainer.plan.checks import installed


@pytest.mark.parametrize(("missing", "wheel"), [("tensorflow", "tensorflow-cpu>="), ("keras", "keras>=")])
def test_what_to_install_is_said(missing: str, wheel: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(installed, "find_spec", lambda name: None if name == missing else object())
    for needs_it in (installed.require_tensorflow, ProcessTasks, lambda: next(checkpoints.as_task.__wrapped__())):
        with pytest.raises(ConfigError) as refused:
            needs_it()
        assert exit_codes.exit_code_of(refused.value) == exit_codes.CONFIG
        (problem,) = refused.value.problems
        assert (problem.key, wheel in problem.remedy) == (missing, True)
    assert start_early([]) is None


def test_what_is_installed_is_enough():
    installed.require_tensorflow()
