"""Reads the optimizer that a model was compiled with, as keys of the config, and makes one from such keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
from keras.optimizers import schedules

from trainer.config.schema import OptimizerConfig
from trainer.plan.description import CompiledOptimizer

# Keys of the config by attribute of the optimizer, where they differ.
KEYS = {
    "initial_accumulator_value": "initial_accumulator",
    "l1_regularization_strength": "l1",
    "l2_regularization_strength": "l2",
    "l2_shrinkage_regularization_strength": "l2_shrinkage",
}
ADAM = ("beta_1", "beta_2", "epsilon")
ATTRIBUTES: Mapping[type, tuple[str, ...]] = {
    keras.optimizers.SGD: ("momentum", "nesterov"),
    keras.optimizers.Adam: ADAM,
    keras.optimizers.AdamW: ADAM,
    keras.optimizers.RMSprop: ("rho", "momentum", "epsilon", "centered"),
    keras.optimizers.Adagrad: ("initial_accumulator_value", "epsilon"),
    keras.optimizers.Lion: ("beta_1", "beta_2"),
    keras.optimizers.Adafactor: ("beta_2_decay", "epsilon_1", "epsilon_2", "clip_threshold"),
    keras.optimizers.Lamb: ADAM,
    keras.optimizers.Ftrl: ("learning_rate_power", "initial_accumulator_value", "beta", *list(KEYS)[1:]),
}
# Attributes that the config has no key for, if they are set.
WITHOUT_KEY = ("amsgrad", "clipnorm", "clipvalue", "ema_overwrite_frequency", "gradient_accumulation_steps")


@contextmanager
def noted() -> Iterator[None]:
    """Notes for `read` whether models that are compiled name an optimizer; Keras gives the others an RMSprop."""
    compile_model = keras.Model.compile

    def compile_and_note(model: keras.Model, *args: Any, **options: Any) -> None:
        model._names_optimizer = bool(args) or "optimizer" in options
        compile_model(model, *args, **options)

    keras.Model.compile = compile_and_note
    try:
        yield
    finally:
        keras.Model.compile = compile_model


def read(model: keras.Model) -> CompiledOptimizer | None:
    """The optimizer that a model was compiled with; none, where `compile` names none."""
    if not model.compiled or model.optimizer is None or not getattr(model, "_names_optimizer", True):
        return None
    optimizer = model.optimizer
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):  # by Keras, for mixed_float16
        optimizer = optimizer.inner_optimizer
    attributes, name = ATTRIBUTES.get(type(optimizer)), type(optimizer).__name__
    if attributes is None:
        return CompiledOptimizer(name.lower(), None, ())
    settings = {KEYS.get(attribute, attribute): _plain(getattr(optimizer, attribute)) for attribute in attributes}
    settings |= {"weight_decay": _plain(optimizer.weight_decay or 0.0), "clip_norm": _plain(optimizer.global_clipnorm)}
    settings["ema"] = _plain(optimizer.ema_momentum) if optimizer.use_ema else None
    left_out = [f"{one}={getattr(optimizer, one)}" for one in WITHOUT_KEY if getattr(optimizer, one, None)]
    rate, unknown = _read_rate(optimizer._learning_rate)
    if getattr(optimizer, "_exclude_from_weight_decay", None) is not None:
        left_out.append("exclude_from_weight_decay (optimizer.groups can say it)")
    return CompiledOptimizer(name.lower(), settings | rate, (*left_out, *unknown))


def make(section: OptimizerConfig) -> keras.optimizers.Optimizer:
    """The optimizer of Keras with the settings of a config, at its learning rate before schedules; it has no slots."""
    kind = next(kind for kind in ATTRIBUTES if kind.__name__.lower() == section.name.value)
    settings = {attribute: getattr(section, KEYS.get(attribute, attribute)) for attribute in ATTRIBUTES[kind]}
    settings |= {"weight_decay": section.weight_decay or None, "global_clipnorm": section.clip_norm}
    settings |= {} if section.ema is None else {"use_ema": True, "ema_momentum": section.ema}
    return kind(section.learning_rate, name=section.name.value, **settings)


def _read_rate(rate: Any) -> tuple[dict[str, Any], list[str]]:
    """(settings, what has no key) of a learning rate or its schedule."""
    if type(rate) is schedules.ExponentialDecay:
        keys = {"decay_steps": rate.decay_steps, "decay_rate": _plain(rate.decay_rate), "staircase": rate.staircase}
        return _scheduled(rate.initial_learning_rate, "exponential", keys), []
    if type(rate) is schedules.CosineDecay and (not rate.warmup_target or rate.initial_learning_rate == 0):
        warms_up = bool(rate.warmup_target)
        keys = {
            "decay_steps": rate.decay_steps,
            "final_fraction": _plain(rate.alpha),
            "warmup_steps": rate.warmup_steps if warms_up else 0,
        }
        return _scheduled(rate.warmup_target if warms_up else rate.initial_learning_rate, "cosine", keys), []
    if callable(rate):
        text = f"learning_rate={type(rate).__name__}"
        warms_up = type(rate) is schedules.CosineDecay
        return {}, [f"{text} with a warm-up that does not begin at 0" if warms_up else text]
    return {"learning_rate": _plain(rate)}, []


def _scheduled(peak: Any, name: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    return {"learning_rate": _plain(peak), "schedule": {"name": name, **keys}}


def _plain(value: Any) -> Any:
    """A number as it was written: variables and tensors have the nearest float32."""
    if value is None or isinstance(value, bool | int | float):
        return value
    return float(str(np.float32(np.asarray(value))))
