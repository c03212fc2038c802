"""The optimizer of a model's compile() as keys of the config."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
from keras import optimizers
from keras.optimizers.schedules import (
    CosineDecay,
    CosineDecayRestarts,
    ExponentialDecay,
    LearningRateSchedule,
    PiecewiseConstantDecay,
    PolynomialDecay,
)
from keras_optimizers import keras_optimizer
from omegaconf import OmegaConf
from quick_config import load

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
    section, problems = resolve_optimizer(OptimizerConfig(OptimizerName.adam), (), found)
    assert not problems
    assert found.left_out == ()
    again = keras_optimizer(section)
    assert type(again) is type(optimizer)
    ours, theirs = again.get_config(), optimizer.get_config()
    assert [name for name in theirs if ours[name] != theirs[name] and name != "name"] == []


@pytest.mark.parametrize("steps", [12.5, np.int64(20), np.float32(12.5)], ids=lambda steps: type(steps).__name__)
def test_steps_of_a_schedule_are_any_number_and_a_task_reads_them_again(steps):
    rate = CosineDecay(0.0, steps, warmup_target=0.1, warmup_steps=steps)
    section, problems = resolve_optimizer(load([]).optimizer, (), compiled(optimizers.SGD(rate)))
    assert not problems
    again = OmegaConf.to_object(OmegaConf.structured(section.schedule))
    assert (again.decay_steps, again.warmup_steps) == (float(steps), float(steps))


def test_an_optimizer_by_its_name_has_its_defaults():
    assert compiled("lion").settings["learning_rate"] == 0.001
    assert compiled(optimizer="lion") == compiled("lion")


def test_a_model_that_names_no_optimizer_has_none():
    assert compiled(loss="mse") is None
    assert compiled_optimizer.read(keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])) is None


def test_a_model_that_is_loaded_has_the_optimizer_that_it_was_saved_with(tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile(optimizers.Adam(0.25), "mse")
    model.save(tmp_path / "model.keras")
    with compiled_optimizer.noted():
        found = compiled_optimizer.read(keras.models.load_model(tmp_path / "model.keras"))
    assert (found.name, found.settings["learning_rate"], found.left_out) == ("adam", 0.25, ())


class Own(optimizers.SGD):
    """May do anything."""


class Noam(LearningRateSchedule):
    """The schedule of the Transformer."""

    def __call__(self, step: Any) -> Any:
        return 0.25 / keras.ops.sqrt(keras.ops.cast(step + 1, "float32"))


def trained(optimizer: optimizers.Optimizer) -> optimizers.Optimizer:
    """One that has made an update, as that of a model that was loaded."""
    optimizer.apply([np.ones(2, "float32")], [keras.Variable(np.ones(2, "float32"))])
    return optimizer


EXCLUDING = optimizers.AdamW(0.01, weight_decay=0.02)
EXCLUDING.exclude_from_weight_decay(var_names=["bias"])
PATCHED = optimizers.SGD(0.5)
PATCHED.apply = lambda *_: None
LATE = CosineDecay(0.125, 80, warmup_target=0.2, warmup_steps=10)

# What compile() is given: which keys of the config replace what has no key, and what is to be typed, among others.
LEFT_OUT: dict[str, tuple[Any, list[str], str]] = {
    "steps of a tenth": (optimizers.SGD(PiecewiseConstantDecay([5], [0.5, 0.25])), ["learning_rate"], "rate=0.5"),
    "linear": (optimizers.AdamW(PolynomialDecay(0.5, 40, 0.0)), ["learning_rate"], "optimizer.learning_rate=0.5"),
    "a late warm-up": (optimizers.SGD(LATE), ["learning_rate"], "optimizer.learning_rate=0.125"),
    "restarts": (optimizers.SGD(CosineDecayRestarts(0.5, 40)), ["learning_rate"], "optimizer.learning_rate=0.5"),
    "a schedule of one's own": (optimizers.Adam(Noam()), ["learning_rate"], "optimizer.learning_rate=0.25"),
    "a function": (optimizers.Adam(lambda: 0.5), ["learning_rate"], "optimizer.learning_rate=0.5"),
    "clipnorm": (optimizers.SGD(0.1, clipnorm=0.01), ["clip_norm"], "optimizer.clip_norm="),
    "several": (optimizers.Adam(Noam(), clipvalue=0.5, amsgrad=True), ["learning_rate", "clip_norm", "name"], ""),
    "accumulation": (optimizers.Adam(0.5, gradient_accumulation_steps=4), ["name"], "train.accumulate=4"),
    "a fixed loss scale": (optimizers.Adam(0.5, loss_scale_factor=8.0), ["name"], "optimizer.learning_rate=0.5"),
    "a default that is true": (optimizers.Adafactor(0.5, relative_step=False), ["name"], "optimizer=adafactor"),
    "an average that overwrites": (optimizers.SGD(0.5, use_ema=True, ema_overwrite_frequency=9), ["ema"], "ema=0.99"),
    "no decay of some": (EXCLUDING, ["weight_decay"], "optimizer.weight_decay=0.02"),
    "a loss scale": (optimizers.LossScaleOptimizer(optimizers.SGD(0.5), initial_scale=8.0), ["name"], ""),
    "nadam": (optimizers.Nadam(0.5), ["name"], "optimizer=adam optimizer.learning_rate=0.5"),
    "nadam by its name": ("nadam", ["name"], "optimizer=adam optimizer.learning_rate=0.001"),
    "a subclass": (Own(ExponentialDecay(0.5, 30, 0.75)), ["name"], "optimizer=sgd optimizer.learning_rate=0.5"),
    "a method replaced": (PATCHED, ["name"], "optimizer=sgd optimizer.learning_rate=0.5"),
    "muon": (optimizers.Muon(0.5), ["name"], "optimizer=adamw"),
    "slots of an earlier training": (trained(optimizers.Adam(0.5)), ["name"], "optimizer=adam"),
    "a schedule that has begun": (trained(optimizers.SGD(CosineDecay(0.5, 40))), ["name"], "optimizer=sgd"),
}


@pytest.mark.parametrize("case", LEFT_OUT)
def test_what_cannot_be_reproduced_is_refused_unless_the_config_replaces_it(case):
    optimizer, keys, typed = LEFT_OUT[case]
    found = compiled(optimizer)
    _, problems = resolve_optimizer(load([]).optimizer, (), found)
    assert [problem.key for problem in problems] == [f"optimizer.{key}" for key in keys]
    assert typed in problems[0].remedy
    replaced = {"name": "optimizer=adam", "learning_rate": "optimizer.learning_rate=0.1"}
    chosen = [replaced.get(key, f"optimizer.{key}=0.5") for key in keys]
    config = load(chosen)
    assert resolve_optimizer(config.optimizer, config.given, found)[1] == []


def test_what_changes_nothing_is_no_reason_to_refuse():
    scaled = optimizers.LossScaleOptimizer(optimizers.SGD(0.3))
    for optimizer in (
        scaled,
        optimizers.SGD(0.3, ema_overwrite_frequency=5),
        optimizers.SGD(0.3, clipnorm=0.0),
        trained(optimizers.SGD(0.3)),
    ):
        assert compiled(optimizer).left_out == ()


def test_the_loss_scale_of_keras_is_not_part_of_it():
    policy = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_float16")
    try:
        assert compiled(optimizers.SGD(0.3)).name == "sgd"
    finally:
        keras.config.set_dtype_policy(policy)
