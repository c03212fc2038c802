"""A frozen backbone of Keras's own: nothing of it travels, and it is stored once."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
from quick_config import load

from trainer.config.schema import ModelConfig
from trainer.plan.description import FROZEN_FILE, Description, ModelProbe
from trainer.plan.devices import Machine
from trainer.plan.make import make_plan
from trainer.plan.serialize import from_json
from trainer.workload import describe, frozen

USER_FILE = """
import keras
import numpy as np


def pictures():
    x = np.random.default_rng(0).integers(0, 255, (16, 32, 32, 3), "uint8")
    return {"train": (x, np.arange(16) % 5), "evaluate": (x, np.arange(16) % 5)}


def tuned(spec):
    backbone = keras.applications.MobileNetV2(spec.features.shape, include_top=False, weights=None, pooling="avg")
    backbone.trainable = False
    x = keras.Input(spec.features.shape)
    hidden = backbone(keras.layers.Rescaling(1 / 127.5, -1)(x), training=False)
    return keras.Model(x, keras.layers.Dense(5, name="head")(hidden))
"""
HEAD_NBYTES = 4 * 5 * (1280 + 1)  # kernel and bias


@pytest.mark.slow
def test_only_the_head_of_a_frozen_mobilenet_travels(tmp_path: Path):
    (tmp_path / "own.py").write_text(USER_FILE)
    model, data = asdict(ModelConfig("tuned")), {"name": "pictures", "options": {}}
    answer = describe.answer(ModelProbe(model, data, str(tmp_path / "own.py"), 1, store=str(tmp_path)))
    description: Description = from_json(Description, answer["description"])
    assert [parameter.path for parameter in description.parameters] == ["head/kernel", "head/bias"]
    config = load(["cluster=1ps2w", "train.batch_size=16", "strategy=sync", "strategy.wire=float32"])
    plan = make_plan(config, description, Machine(cores=2, gpus=0))
    (nbytes,) = set(plan.link_nbytes().values())
    assert 2 * HEAD_NBYTES <= nbytes < 2 * HEAD_NBYTES + 1024  # pulled and pushed, with metrics and tags
    assert plan.frozen.nbytes == 4 * 2_257_984
    stored = frozen.read(tmp_path / FROZEN_FILE)
    assert frozen.describe(stored.weights) == plan.frozen
    assert sum(value.size for value in stored.weights.values()) == 2_257_984
    assert all(value.dtype == np.float32 for value in stored.weights.values())
