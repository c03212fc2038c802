"""Real clusters whose model begins with given values: loaded, adapted to the data, or frozen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from runs import Run

pytestmark = pytest.mark.cluster

USER_FILE = """
import keras
import numpy as np
from keras import layers

SHIFT = 0.0
X = np.random.default_rng(0).normal(3 + SHIFT, 2, (400, 6)).astype("float32")
Y = (X[:, 0] > 3 + SHIFT).astype("int64")


def rows():
    return {"train": (X, Y), "evaluate": (X[:100], Y[:100])}


def tuned(spec, *, train):
    inputs, wide = layers.Normalization(name="inputs"), layers.Dense(16, "relu", name="wide")
    inputs.adapt(train)
    x = keras.Input(spec.features.shape)
    model = keras.Model(x, layers.Dense(2, name="head")(wide(inputs(x))))
    wide.enable_lora(4)
    return model
"""
KERNEL = np.random.default_rng(5).normal(size=(6, 16)).astype(np.float32)


@pytest.fixture
def given(tmp_path: Path) -> list[str]:
    (tmp_path / "own.py").write_text(USER_FILE)
    np.savez(tmp_path / "first.npz", **{"wide/kernel": KERNEL, "wide/bias": np.ones(16), "other": np.ones(3)})
    own = [f"user={tmp_path}/own.py", "model=tuned", "data=rows", f"model.init={tmp_path}/first.npz"]
    return [*own, "train.batch_size=48", "checkpoint.every=8", "seed=1"]


def exported(run: Run) -> dict[str, np.ndarray]:
    with np.load(run.directory / "export" / "params.npz") as arrays:
        return dict(arrays)


def test_a_run_begins_with_given_values_and_resumes_when_their_sources_have_changed(start, finish, given, tmp_path):
    run = finish(*given, "cluster=1ps2w", "train.steps=16")
    words = "2 variables of 9; not in it: inputs/mean, inputs/variance, inputs/count, wide/lora_kernel_a, "
    assert f"initial values from {tmp_path}/first.npz: {words}" in run.output
    assert run.plan()["frozen"]["paths"] == ["inputs/mean", "inputs/variance", "inputs/count", "wide/kernel"]
    frozen = run.directory / "frozen.npz"
    paths = sorted((run.directory / "checkpoints").glob("*/frozen.npz"))
    assert [path.parent.name for path in paths] == ["000000008", "000000016"]
    assert {path.stat().st_ino for path in paths} == {frozen.stat().st_ino}
    first = exported(run)
    np.testing.assert_array_equal(first["wide/kernel"], KERNEL)
    np.testing.assert_allclose(first["inputs/mean"], 3.0, atol=0.5)
    (tmp_path / "own.py").write_text(USER_FILE.replace("SHIFT = 0.0", "SHIFT = 50.0"))
    (tmp_path / "first.npz").unlink()
    # The values come from the checkpoint, whose data the file no longer gives; so it is named.
    named = f"resume={run.directory / 'checkpoints' / '000000016'}"
    longer = start(*given, "cluster=2w", "train.steps=24", f"run={run.directory}", named)
    assert longer.wait() == 0, longer.output
    assert "resumes at step 16" in longer.output
    second = exported(longer)
    for path in ("inputs/mean", "inputs/variance", "wide/kernel"):
        np.testing.assert_array_equal(second[path], first[path])
    assert (second["wide/lora_kernel_b"] != first["wide/lora_kernel_b"]).any()
    anew = start(*given, "cluster=1ps2w", "resume=never", f"run={run.directory}")
    assert anew.wait() == 66
    assert f"model.init={tmp_path}/first.npz: {tmp_path}/first.npz does not" in anew.output


@pytest.mark.long
def test_given_values_have_the_same_bits_in_every_cluster(start, finish, given, tmp_path):
    runs = [
        finish(*given, f"cluster={cluster}", "train.steps=24", f"run={tmp_path / cluster}")
        for cluster in ("1ps2w", "2ps2w", "2w", "1ps2w1e")
    ]
    assert len({run.summary()["params_sha256"] for run in runs}) == 1
    stopped = finish(*given, "cluster=1ps2w", "train.steps=12", f"run={tmp_path / 'stopped'}")
    resumed = start(*given, "cluster=1ps2w", "train.steps=24", f"run={stopped.directory}")
    assert resumed.wait() == 0, resumed.output
    assert resumed.summary()["params_sha256"] == runs[0].summary()["params_sha256"]
    from_run = finish(*given[:-4], f"model.init={runs[3].directory}", *given[-3:], "cluster=local", "train.steps=1")
    assert f"initial values from {runs[3].directory}/best/" in from_run.output
    assert "9 variables of 9" in from_run.output
