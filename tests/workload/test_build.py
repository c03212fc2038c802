"""A model can be built without the values of its variables, which a step is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from objectives import make_step

from trainer.workload import step
from trainer.workload.build import build_model
from trainer.workload.data import DataSet
from trainer.workload.data.examples import ArraySpec, Batch, Spec
from trainer.workload.frozen import freeze

UNREAD: Any = None
SPEC = Spec(ArraySpec((32, 32, 3), "float32"), ArraySpec((), "int64"), None, 10)
DATA = DataSet(UNREAD, UNREAD, SPEC)
SEED = np.int64([7, 1])


def build(name: str, *, with_values: bool, user_file: str | None = None, **options: Any) -> keras.Model:
    return build_model(name, options, DATA, seed=5, user_file=user_file, with_values=with_values)


def gradients(model: keras.Model, values: dict[str, Any]) -> dict[str, Any]:
    run = tf.function(make_step(model), autograph=False)
    features = tf.constant(np.random.default_rng(1).normal(size=(2, 32, 32, 3)).astype(np.float32))
    state = {p.path: values[p.path] for p in step.parameters_of(model) if not p.trainable}
    return dict(run(values, state, tf.constant(SEED), Batch(features, tf.constant([1, 2]))).gradients)


@pytest.mark.slow(but=["mlp-options0"])
@pytest.mark.long(but=["mlp-options0", "cnn-options1"])
@pytest.mark.parametrize(("name", "options"), [("mlp", {}), ("cnn", {"dropout": 0.3}), ("resnet20", {})])
def test_a_model_without_values_computes_the_same_gradients(name: str, options: dict[str, Any]):
    whole, bare = (build(name, with_values=having, **options) for having in (True, False))
    assert step.parameters_of(bare) == step.parameters_of(whole)
    assert step.layers_of(bare) == step.layers_of(whole)
    values = {path: tf.constant(value) for path, value in step.initial_values(whole).items()}
    expected = gradients(whole, values)
    for path, value in gradients(bare, values).items():
        np.testing.assert_array_equal(value, expected[path], err_msg=path)


def test_a_model_without_values_never_gets_any():
    bare = build("mlp", with_values=False)
    build("mlp", with_values=True)
    with keras.StatelessScope():
        keras.ops.ones(1)
    assert [v._value for v in bare.variables] == [None] * 6


def test_the_model_of_a_user_always_has_values(tmp_path: Path):
    file = tmp_path / "models.py"
    file.write_text(
        "import keras\n"
        "def halved(input_shape, classes):\n"
        "    inputs = keras.Input(input_shape)\n"
        "    dense = keras.layers.Dense(classes)\n"
        "    model = keras.Model(inputs, dense(keras.layers.Flatten()(inputs)))\n"
        "    dense.set_weights([weight / 2 for weight in dense.get_weights()])\n"
        "    return model\n"
    )
    models = [build("halved", with_values=having, user_file=str(file)) for having in (True, False)]
    kernels = [next(iter(step.initial_values(model).values())) for model in models]
    np.testing.assert_array_equal(*kernels)


def test_a_layer_with_all_of_its_weights_frozen_is_a_frozen_layer():
    dense = [layers.Dense(3, name=name) for name in ("a", "b")]
    norm = layers.BatchNormalization(name="norm")
    x = keras.Input((2,))
    model = keras.Model(x, dense[1](norm(dense[0](x))))
    freeze(model, [{"match": ["a/*", "norm/*", "b/bias"], "frozen": True}, {"match": ["a/bias"], "frozen": False}])
    assert [v.path for v in model.trainable_variables] == ["a/bias", "b/kernel"]
    assert (norm.trainable, dense[1].trainable) == (False, True)
