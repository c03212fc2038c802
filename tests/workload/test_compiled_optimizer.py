"""The optimizer of a model's compile() as keys of the config."""

from __future__ import annotations

from typing import Any

import keras
import pytest
from keras import optimizers
from keras.optimizers.schedules import CosineDecay, ExponentialDecay, PiecewiseConstantDecay
from keras_optimizers import keras_optimizer

from trainer.config.schema import OptimizerConfig, OptimizerName
from trainer.plan.description import CompiledOptimizer
from trainer.plan.resolve import resolve_optimizer
from trainer.workload import compiled_optimizer


def compiled(*optimizer: Any, **options: Any) -> CompiledOptimizer | None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    with compiled_optimizer.noted():
        model.compile(*optimizer, **options)
    return compiled_optimizer.read(model)


WARM_UP = CosineDecay(0.0, 80, alpha=0.1, warmup_target=0.01, warmup_steps=10)


@pytest.mark.parametrize(
    "optimizer",
    [
        optimizers.SGD(0.3, momentum=0.9, nesterov=True),
        optimizers.Adam(ExponentialDecay(0.3, 30, 0.7, staircase=True), beta_1=0.8, epsilon=1e-5),
        optimizers.AdamW(WARM_UP, weight_decay=0.02, global_clipnorm=1.5),
        optimizers.RMSprop(CosineDecay(0.3, 50, alpha=0.2), rho=0.8, momentum=0.5, centered=True),
        optimizers.Adagrad(0.3, initial_accumulator_value=0.2, use_ema=True, ema_momentum=0.95),
        optimizers.Lion(0.3, beta_1=0.8, beta_2=0.95, weight_decay=0.1),
        optimizers.Adafactor(0.3, beta_2_decay=-0.7, epsilon_1=1e-20, epsilon_2=0.1, clip_threshold=2.0),
        optimizers.Lamb(0.3, beta_1=0.8, beta_2=0.95, epsilon=1e-6),
        optimizers.Ftrl(
            0.3,
            learning_rate_power=-0.7,
            initial_accumulator_value=0.2,
            l1_regularization_strength=0.01,
            l2_regularization_strength=0.02,
            l2_shrinkage_regularization_strength=0.03,
            beta=0.04,
        ),
    ],
    ids=lambda optimizer: optimizer.name,
)
def test_every_optimizer_is_taken_with_all_that_it_has(optimizer):
    found = compiled(optimizer)
    section = OptimizerConfig(OptimizerName.adam)
    assert not resolve_optimizer(section, found)
    assert found.left_out == ()
    again = keras_optimizer(section)
    assert type(again) is type(optimizer)
    ours, theirs = again.get_config(), optimizer.get_config()
    assert [name for name in theirs if ours[name] != theirs[name] and name != "name"] == []


def test_an_optimizer_by_its_name_has_its_defaults():
    assert compiled("lion").settings["learning_rate"] == 0.001
    assert compiled(optimizer="lion") == compiled("lion")


def test_a_model_that_names_no_optimizer_has_none():
    assert compiled(loss="mse") is None
    assert compiled_optimizer.read(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])) is None


def test_what_has_no_key_is_left_out():
    found = compiled(optimizers.Adam(PiecewiseConstantDecay([5], [0.1, 0.2]), clipvalue=0.5, amsgrad=True))
    assert found.left_out == ("amsgrad=True", "clipvalue=0.5", "learning_rate=PiecewiseConstantDecay")
    assert "learning_rate" not in found.settings
    late = compiled(optimizers.SGD(CosineDecay(0.1, 80, warmup_target=0.2, warmup_steps=10)))
    assert late.left_out == ("learning_rate=CosineDecay with a warm-up that does not begin at 0",)


def test_another_optimizer_has_no_settings():
    class Own(optimizers.SGD):
        """May do anything."""

    assert [compiled(one) for one in (optimizers.Nadam(), Own())] == [
        CompiledOptimizer("nadam", None, ()),
        CompiledOptimizer("own", None, ()),
    ]


def test_the_loss_scale_of_keras_is_not_part_of_it():
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        assert compiled(optimizers.SGD(0.3)).name == "sgd"
    finally:
        keras.config.set_dtype_policy(policy)
