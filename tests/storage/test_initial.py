"""Which files first values come from."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from quick_config import load

from trainer.faults.problems import ConfigError
from trainer.storage import checkpoint_writer, initial
from trainer.storage.checkpoint import CheckpointError
from trainer.storage.initial import MissingWeightsError


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with two checkpoints, the first of them the best, and an export."""
    frozen = tmp_path / "run" / "frozen.npz"
    frozen.parent.mkdir()
    np.savez(frozen, **{"frozen/table": np.ones(3)})
    for step in (5, 10):
        tensors = {"parameters/kernel": np.full(2, step, np.float32)}
        checkpoint_writer.write(frozen.parent / "checkpoints", step, 1, {}, tensors, keep=3, shared=[frozen])
    checkpoint_writer.copy(frozen.parent / "checkpoints" / "000000005", frozen.parent / "best", {"note.json": "{}"})
    (frozen.parent / "export").mkdir()
    np.savez(frozen.parent / "export" / "params.npz", kernel=np.ones(2))
    return frozen.parent


def names(run: Path, *files: str) -> tuple[str, ...]:
    return tuple(str(run / name) for name in files)


def test_a_run_gives_its_best_checkpoint_or_else_its_newest_or_else_its_export(run):
    best = names(run, "best/000000005/tensors.npz", "best/000000005/frozen.npz")
    assert initial.files_of(str(run)) == best
    assert initial.files_of(str(run / "best")) == best
    checkpoint_writer.remove_folder(run / "best" / "000000005")
    newest = names(run, "checkpoints/000000010/tensors.npz", "checkpoints/000000010/frozen.npz")
    assert initial.files_of(str(run)) == newest
    (run / "checkpoints").rename(run / "elsewhere")
    assert initial.files_of(str(run)) == names(run, "export/params.npz")
    assert initial.files_of(str(run / "export")) == names(run, "export/params.npz")


def test_a_checkpoint_or_a_file_may_be_named_itself(run):
    folder = run / "checkpoints" / "000000005"
    assert initial.files_of(str(folder)) == (str(folder / "tensors.npz"), str(folder / "frozen.npz"))
    assert initial.files_of(str(run / "export/params.npz")) == names(run, "export/params.npz")


def test_what_is_missing_damaged_or_something_else_is_refused(run, tmp_path, raises):
    with raises(MissingWeightsError) as missing:
        initial.files_of(str(tmp_path / "runz"))
    assert missing.value.exit_code == 66
    with raises(ConfigError):
        initial.files_of(__file__)
    damaged = run / "checkpoints" / "000000005"
    (damaged / "frozen.npz").unlink()
    np.savez(damaged / "frozen.npz", **{"frozen/table": np.zeros(3)})
    with raises(CheckpointError):
        initial.files_of(str(damaged))


def test_the_checkpoint_that_a_run_will_resume(run):
    given = ["model=cnn", "data=mnist_10k"]

    def resumed(*overrides):
        config = load([*given, *overrides])
        return initial.resumed(config.run, config.resume)

    assert resumed() is None
    assert resumed(f"run={run}", "resume=never") is None
    newest = run / "checkpoints" / "000000010"
    assert resumed(f"run={run}") == newest
    (newest / "manifest.json").write_text("{}")
    assert resumed(f"resume={run}") == run / "checkpoints" / "000000005"
    assert resumed(f"resume={run}/best/000000005") == run / "best" / "000000005"
    frozen = run / "frozen.npz"
    frozen.write_bytes(bytes(frozen.stat().st_size))  # the file of all of them
    assert resumed(f"resume={run}") is None
