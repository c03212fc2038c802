"""Runs of earlier versions are read, and continue.

`old_run` is what this command left with the version before keys were renamed, without its exports and logs:

    python -m trainer cluster=1ps2w model=mlp model.options={width:4,depth:1} data=synthetic
      data.options={train_examples:60,evaluate_examples:12,shape:[3],classes:2} train.batch_size=12 train.steps=20
      checkpoint.every=10 evaluate.every=10 evaluate.batch_size=12 summary.every=5 summary.journal=true
      export.formats=[] report.at_end=false run=run
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from runs import Run

from trainer.commands.check import claims
from trainer.observe import runs
from trainer.observe.report import page
from trainer.storage import checkpoint
from trainer.storage.run_directory import RunDirectory

OLD_RUN = Path(__file__).parent / "old_run"


@pytest.fixture
def old_run(tmp_path: Path) -> Path:
    return shutil.copytree(OLD_RUN, tmp_path / "run")


def test_its_config_has_the_new_keys(old_run: Path):
    config = RunDirectory(old_run).read_config()
    assert (config.history.every, config.history.journal, config.given) == (5, True, ())


def test_what_it_did_is_read(old_run: Path):
    facts = runs.read(old_run)
    assert (facts.state, facts.step, facts.steps, facts.checkpoints) == ("done", 20, 20, (10, 20))
    assert [claim.problems for claim in claims.examine(RunDirectory(old_run)) if claim.problems] == []
    assert page.write(old_run, file=old_run / "new.html").stat().st_size > 0


@pytest.mark.cluster
def test_it_continues_to_the_bits_of_a_run_of_this_version(old_run: Path, finish: Callable[..., Run], tmp_path: Path):
    recorded = values_at(old_run, 20)
    continued = finish("continue", f"run={old_run}", "train.steps=40").summary()
    stored = RunDirectory(OLD_RUN).read_config()
    options = [f"model.options={{width:{stored.model.options['width']},depth:1}}", "train.steps=40", "evaluate.every=0"]
    options += ["data.options={train_examples:60,evaluate_examples:12,shape:[3],classes:2}", "checkpoint.every=20"]
    new = finish("cluster=1ps2w", "model=mlp", "data=synthetic", "train.batch_size=12", *options, "run=new")
    assert (continued["resumed_from"] is not None, continued["steps"]) == (True, 40)
    assert continued["final_loss"] == pytest.approx(new.summary()["final_loss"], rel=1e-5)
    computed = values_at(new.directory, 20)
    np.testing.assert_allclose(computed, recorded, rtol=1e-4, atol=1e-6)
    if np.array_equal(computed, recorded):  # a processor with other instructions computes other last bits
        assert continued["params_sha256"] == new.summary()["params_sha256"]


def values_at(run: Path, step: int) -> np.ndarray:
    """All values of parameters and slots in a run's checkpoint of a step."""
    tensors = checkpoint.load(checkpoint.read_manifest(run / f"checkpoints/{step:09d}"))
    return np.concatenate([np.ravel(tensors[name]) for name in sorted(tensors)])
