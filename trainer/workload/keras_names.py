"""Makes losses and metrics from their names: those of Keras, and those of the user's file."""

import difflib
import functools
import inspect
from collections.abc import Mapping
from typing import Any

import keras

from trainer.workload.data.examples import Nest, leaves_of, map_nest
from trainer.workload.keras_internals import to_snake_case

LOGITS = "from_logits"  # an option of losses and metrics; Keras's default is false, the config's true
ALIASES = {  # Keras's own
    "bce": "binary_crossentropy",
    "mse": "mean_squared_error",
    "mae": "mean_absolute_error",
    "mape": "mean_absolute_percentage_error",
    "msle": "mean_squared_logarithmic_error",
    "kld": "kl_divergence",
    "rmse": "root_mean_squared_error",
}
BY_SHAPES = ("accuracy", "acc", "crossentropy", "ce")  # Keras chooses one of several metrics by the shapes


def make_loss(name: Any, options: Mapping[str, Any], functions: Mapping[str, Any]) -> Any:
    """Returns a loss by its name in keras.losses (mean_squared_error or MeanSquaredError) or in the user's file.

    Args:
        options: its keyword arguments.
        functions: definitions of the user's file, by name.

    Raises:
        ValueError: if the name is unknown, or it does not take these options.
    """
    if not isinstance(name, str):
        raise ValueError(f"model.loss={name!r} is not a name; type e.g. model.loss=mean_squared_error")
    if name in functions:
        return _of_file(functions[name], options, f"model.loss_options of {name}", ("labels", "outputs"))
    kind = _find(keras.losses, name, keras.losses.Loss)
    if kind is None:
        near = _near(keras.losses, name, keras.losses.Loss, functions)
        raise ValueError(f"model.loss={name} is not a loss of Keras or of the user's file; {near}")
    return _make(kind, options, f"model.loss_options of {name}")


def make_losses(names: Nest, options: Mapping[str, Any], functions: Mapping[str, Any]) -> Nest:
    """Returns losses by output, each with the options that it takes; see `make_loss`.

    Raises:
        ValueError: also if none of several takes an option.
    """
    listed = [one for _, one in leaves_of(names)]
    if len(listed) < 2:
        return map_nest(lambda name: make_loss(name, options, functions), names)
    taken = {name: _taken(name, options, functions) for name in listed if isinstance(name, str)}
    if unused := [option for option in options if not any(option in each for each in taken.values())]:
        raise ValueError(f"model.loss_options: none of {', '.join(taken)} takes {', '.join(unused)}")
    return map_nest(
        lambda name: make_loss(name, taken.get(name, {}) if isinstance(name, str) else {}, functions), names
    )


def _taken(name: str, options: Mapping[str, Any], functions: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options that a loss takes."""
    kind = functions.get(name) or _find(keras.losses, name, keras.losses.Loss)
    parameters = inspect.signature(kind).parameters if callable(kind) else {}
    return {option: value for option, value in options.items() if option in parameters}


def make_metric(given: Any, functions: Mapping[str, Any]) -> Any:
    """Returns a metric by its name in keras.metrics or in the user's file, or by {name: options}.

    Raises:
        ValueError: if it is neither, the name is unknown, or it does not take these options.
    """
    name, options = next(iter(given.items())) if isinstance(given, Mapping) and len(given) == 1 else (given, None)
    options = {} if options is None else options
    if not isinstance(name, str) or not isinstance(options, Mapping):
        raise ValueError(
            f"model.metrics: {given!r} is not a metric; give a list of NAME or {{NAME: {{option: value}}}}"
        )
    if name in functions:
        return _of_file(functions[name], options, f"model.metrics, options of {name}", ("labels", "outputs"))
    if name in BY_SHAPES and not options:
        return name
    kind = _find(keras.metrics, name, keras.metrics.Metric)
    if kind is None:
        near = _near(keras.metrics, name, keras.metrics.Metric, functions)
        raise ValueError(f"model.metrics: {name} is not a metric of Keras or of the user's file; {near}")
    return _make(kind, {"name": to_snake_case(name), **options}, f"model.metrics, options of {name}")


def _of_file(value: Any, options: Mapping[str, Any], key: str, arguments: tuple[str, ...]) -> Any:
    """Makes a class of the user's file with the options, or binds them to a function of each batch's `arguments`."""
    if not options and not inspect.isclass(value):
        return value
    try:
        inspect.signature(value).bind(*(() if inspect.isclass(value) else arguments), **options)
    except TypeError as error:
        raise ValueError(f"{key}: {error}") from error
    if inspect.isclass(value):
        return value(**options)
    return functools.update_wrapper(functools.partial(value, **options), value)  # Keras asks for its __name__


def _make(kind: type, options: Mapping[str, Any], key: str) -> Any:
    own = {LOGITS: True} if LOGITS in inspect.signature(kind).parameters else {}
    try:
        return kind(**(own | dict(options)))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{key}: {error}") from error


def _find(module: Any, name: str, base: type) -> Any:
    """Returns a class of a Keras module by its own name, in snake_case, or by an alias."""
    plain = ALIASES.get(name, name).replace("_", "").lower()
    return next((kind for own, kind in vars(module).items() if own.lower() == plain and _is_kind(kind, base)), None)


def _is_kind(value: Any, base: type) -> bool:
    return inspect.isclass(value) and issubclass(value, base) and value is not base


def _near(module: Any, name: str, base: type, functions: Mapping[str, Any]) -> str:
    names = sorted(own for own, kind in vars(module).items() if _is_kind(kind, base))
    by_plain = {own.replace("_", "").lower(): own for own in [*names, *functions]}
    near = difflib.get_close_matches(name.replace("_", "").lower(), by_plain, n=3)
    return f"did you mean {' or '.join(by_plain[one] for one in near)}?" if near else f"available: {', '.join(names)}"
