"""Converts the optimizer of a compiled model to keys of the config, and such keys to an optimizer."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import keras
import numpy as np
from keras.optimizers import schedules

from trainer.config.schema import OptimizerConfig, ScheduleName
from trainer.config.words import count
from trainer.plan.description import CompiledOptimizer, LeftOut
from trainer.workload.keras_internals import Trainer
from trainer.workload.loss_scale import FIRST, GROWTH_STEPS
from trainer.workload.patches import patched

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
COMMON = ("name", "learning_rate", "weight_decay", "global_clipnorm", "use_ema", "ema_momentum")  # read for every class
EXCLUDED = ("_exclude_from_weight_decay", "_exclude_from_weight_decay_pattern")  # set by exclude_from_weight_decay
STATELESS = 2  # variables of an optimizer without slots: its updates and its learning rate
NEAREST = {"adadelta": "adagrad", "adamax": "adam", "muon": "adamw", "nadam": "adam"}  # for unsupported classes


@contextmanager
def noted() -> Iterator[None]:
    """Records for `read` whether compiled models name an optimizer; Keras gives the others an RMSprop.

    It patches the defining class: to load a compiled model, Keras asks if its class overrides `compile`.
    """
    compile_model = Trainer.compile

    def compile_and_note(model: keras.Model, *args: Any, **options: Any) -> None:
        model._names_optimizer = bool(args) or "optimizer" in options
        compile_model(model, *args, **options)

    with patched((Trainer, "compile", compile_and_note)):
        yield


def read(model: keras.Model) -> CompiledOptimizer | None:
    """Returns the optimizer that a model was compiled with; None if `compile` named none."""
    optimizer, scale = getattr(model, "optimizer", None), None  # a class that compiles in its own way loads without
    if not model.compiled or optimizer is None or not getattr(model, "_names_optimizer", True):
        return None
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):  # wrapped by Keras for mixed_float16, or by the user
        optimizer, scale = optimizer.inner_optimizer, optimizer
    attributes, name = ATTRIBUTES.get(type(optimizer)), type(optimizer).__name__.lower()
    rate, left_out = _read_rate(optimizer._learning_rate)
    if attributes is None:
        return CompiledOptimizer(name, {}, (_of_another_class(optimizer, rate),))
    left_out += _updates_before(optimizer, _typed(name, rate))
    settings = {KEYS.get(attribute, attribute): _plain(getattr(optimizer, attribute)) for attribute in attributes}
    settings |= {"weight_decay": _plain(optimizer.weight_decay or 0.0), "clip_norm": _plain(optimizer.global_clipnorm)}
    settings["ema"] = _plain(optimizer.ema_momentum) if optimizer.use_ema else None
    left_out += [*_without_key(optimizer, attributes, _typed(name, rate)), *_of_scale(scale)]
    return CompiledOptimizer(name, settings | rate, tuple(left_out))


def _updates_before(optimizer: Any, anew: str) -> Iterator[LeftOut]:
    """Yields the state of an optimizer that has trained: its updates would continue from slots that are reset here."""
    updates = int(optimizer.iterations)
    if updates and (len(optimizer.variables) > STATELESS or callable(optimizer._learning_rate)):
        text = f"an optimizer that has already made {count(updates, 'update')}, e.g. one of a loaded model"
        yield LeftOut(text, "name", f"type {anew} to begin with a new one, or compile the model again")


def _of_another_class(optimizer: keras.optimizers.Optimizer, rate: Mapping[str, Any]) -> LeftOut:
    kind = type(optimizer)
    base = next((base.__name__.lower() for base in kind.__mro__ if base in ATTRIBUTES), None)
    nearest = base or NEAREST.get(kind.__name__.lower(), "adam")
    names = ", ".join(sorted(kind.__name__.lower() for kind in ATTRIBUTES))
    remedy = f"type {_typed(nearest, rate)} to train with {nearest} instead; available: {names}"
    return LeftOut(f"the optimizer {kind.__name__}", "name", remedy)


def _without_key(optimizer: Any, attributes: Collection[str], instead: str) -> Iterator[LeftOut]:
    """Yields settings that differ from the defaults of the class and have no key."""
    for name, default in type(optimizer)().get_config().items():
        value = getattr(optimizer, name, default)
        is_read = name in COMMON or name in attributes or (name == "ema_overwrite_frequency" and not optimizer.use_ema)
        if is_read or value == default or not (value or default):
            continue
        if name in ("clipnorm", "clipvalue"):
            limit = value if name == "clipnorm" else "NUMBER"
            remedy = f"type optimizer.clip_norm={limit} to limit the norm of the whole gradient instead"
            yield LeftOut(f"{name}={value}", "clip_norm", remedy)
        elif name == "ema_overwrite_frequency":
            remedy = f"type optimizer.ema={optimizer.ema_momentum} to average without overwriting the weights"
            yield LeftOut(f"{name}={value}", "ema", remedy)
        elif name == "gradient_accumulation_steps":
            remedy = f"remove it; use a train.batch_size {value} times as large, and train.accumulate={value}"
            yield LeftOut(f"{name}={value}", "name", remedy)
        else:
            yield LeftOut(f"{name}={value}", "name", f"remove it, or type {instead} to train without it")
    for name in vars(optimizer):
        if callable(getattr(type(optimizer), name, None)):
            yield LeftOut(f"an optimizer whose {name} is replaced", "name", f"type {instead} to train without it")
    if optimizer.weight_decay and any(getattr(optimizer, name, None) for name in EXCLUDED):
        decay = f"optimizer.weight_decay={_plain(optimizer.weight_decay)}"
        remedy = f"type {decay} 'optimizer.groups=[{{match: [PATTERN], weight_decay: 0}}]' instead"
        yield LeftOut("exclude_from_weight_decay", "weight_decay", remedy)


def _of_scale(scale: keras.optimizers.LossScaleOptimizer | None) -> Iterator[LeftOut]:
    """Yields a loss scale that changes differently from that of train.precision=mixed_float16."""
    if scale is not None and (scale.initial_scale, scale.dynamic_growth_steps) != (FIRST[0], GROWTH_STEPS):
        text = f"LossScaleOptimizer(initial_scale={scale.initial_scale:g}, "
        text += f"dynamic_growth_steps={scale.dynamic_growth_steps})"
        yield LeftOut(text, "name", "give compile() its inner optimizer; train.precision=mixed_float16 scales the loss")


def _typed(name: str, rate: Mapping[str, Any]) -> str:
    """Returns the overrides for an optimizer with the learning rate and the schedule of another."""
    schedule = rate.get("schedule", {})
    keys = {"learning_rate": rate.get("learning_rate", "RATE")} | {f"schedule.{key}": schedule[key] for key in schedule}
    return " ".join([f"optimizer={name}", *(f"optimizer.{key}={str(keys[key]).lower()}" for key in keys)])


def make(section: OptimizerConfig) -> keras.optimizers.Optimizer:
    """Returns Keras's optimizer with the settings of a config, at its rate before schedules, without slots."""
    kind = next(kind for kind in ATTRIBUTES if kind.__name__.lower() == section.name.value)
    settings = {attribute: getattr(section, KEYS.get(attribute, attribute)) for attribute in ATTRIBUTES[kind]}
    settings |= {"weight_decay": section.weight_decay or None, "global_clipnorm": section.clip_norm}
    settings |= {} if section.ema is None else {"use_ema": True, "ema_momentum": section.ema}
    return kind(section.learning_rate, name=section.name.value, **settings)


def _read_rate(rate: Any) -> tuple[dict[str, Any], list[LeftOut]]:
    """Returns (settings, what has no key) of a learning rate or its schedule."""
    if type(rate) is schedules.ExponentialDecay:
        keys = {"decay_rate": _plain(rate.decay_rate), "staircase": rate.staircase}
        return _scheduled(rate, rate.initial_learning_rate, "exponential", keys), []
    if type(rate) is schedules.CosineDecay and (not rate.warmup_target or rate.initial_learning_rate == 0):
        warms_up = bool(rate.warmup_target)
        keys = {"final_fraction": _plain(rate.alpha), "warmup_steps": _plain(rate.warmup_steps) if warms_up else 0}
        return _scheduled(rate, rate.warmup_target if warms_up else rate.initial_learning_rate, "cosine", keys), []
    if callable(rate):
        names = ", ".join(name.value for name in ScheduleName)
        remedy = f"type optimizer.learning_rate={_first_of(rate)}, and optimizer.schedule.name with one of {names}"
        text = f"learning_rate={getattr(rate, '__name__', type(rate).__name__)}"
        late = " with a warm-up that does not start at 0" if type(rate) is schedules.CosineDecay else ""
        return {}, [LeftOut(text + late, "learning_rate", remedy)]
    return {"learning_rate": _plain(rate)}, []


def _first_of(rate: Any) -> Any:
    """Returns the rate of the first step, if it can be computed."""
    with suppress(Exception):  # it is the user's code
        return _plain(rate(0) if isinstance(rate, schedules.LearningRateSchedule) else rate())
    return "RATE"


def _scheduled(rate: Any, peak: Any, name: str, keys: Mapping[str, Any]) -> dict[str, Any]:
    return {"learning_rate": _plain(peak), "schedule": {"name": name, "decay_steps": _plain(rate.decay_steps), **keys}}


def _plain(value: Any) -> Any:
    """Returns a number as it was written: variables and tensors have the nearest float32."""
    if value is None or isinstance(value, bool | int | float):
        return value
    return float(str(np.float32(np.asarray(value))))
