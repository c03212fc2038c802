"""Sets Keras's dtype policy from `train.precision`, and refuses user code that sets another one."""

from collections.abc import Iterator
from contextlib import contextmanager

import keras

from trainer.config.schema import Precision
from trainer.faults.problems import ConfigError, Problem

FLOAT32 = Precision.float32.value
SCALED = Precision.mixed_float16.value  # needs a loss scale
KEY = "train.precision"


@contextmanager
def in_force(precision: str, user_file: str | None) -> Iterator[None]:
    """Gives layers in this context the dtype policy of `precision`, unless they have their own; restores it afterwards.

    Raises:
        ConfigError: if the user's code, before or in the context, sets another policy or another floatx.
    """
    _check_globals((FLOAT32, precision), precision, user_file)
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(precision)
    try:
        yield
        _check_globals((precision,), precision, user_file)
    finally:
        keras.config.set_dtype_policy(before)


def check_layers(model: keras.Model, precision: str) -> None:
    """Refuses layers that compute in float16 if no loss scale keeps small gradients from vanishing.

    Raises:
        ConfigError: for the first such layer.
    """
    for layer in [*model._flatten_layers(include_self=False), model] if precision != SCALED else []:
        if layer.compute_dtype == "float16":
            message = f"layer {layer.path or layer.name} computes in float16, and {precision} has no loss scale"
            remedy = f"type {KEY}={SCALED}, or leave the layer's dtype out"
            raise ConfigError([Problem(KEY, "not-supported", message, remedy)])


def _check_globals(allowed: tuple[str, ...], precision: str, user_file: str | None) -> None:
    """Refuses a policy or floatx that the user's code has set globally, and resets it."""
    policy, floatx = keras.config.dtype_policy().name, keras.config.floatx()
    if floatx == FLOAT32 and policy in allowed:
        return
    keras.config.set_floatx(FLOAT32)
    keras.config.set_dtype_policy(FLOAT32)
    name = policy if policy not in allowed else floatx
    what = "the dtype policy" if policy not in allowed else "floatx to"
    is_known = name in [each.value for each in Precision]
    remedy = (
        f"type {KEY}={name} instead" if is_known else f"leave it out; {KEY} has {', '.join(p.value for p in Precision)}"
    )
    message = f"{user_file or 'keras.json'} sets {what} {name}, but {KEY}={precision} is in force"
    raise ConfigError([Problem(KEY, "conflict", message, remedy)])
