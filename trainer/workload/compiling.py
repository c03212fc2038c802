"""Compiles a model: chooses its loss and metrics from the config, the user's file, or its own `compile()`."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import keras

from trainer.workload import tracing
from trainer.workload.accuracy import ACCURACY, accuracy_of, is_of_logits
from trainer.workload.data.examples import ArraySpec, Nest, Spec, describe_nest
from trainer.workload.keras_names import make_loss, make_losses, make_metric
from trainer.workload.objective import Objective

INTEGERS = "sparse_categorical_crossentropy"  # the loss for classes, unless another is named
FROM_CONFIG, FROM_FILE = "from the config", "of the user's file"
FROM_COMPILE, BY_DEFAULT = "from compile()", "by default"


@dataclass(frozen=True)
class Wanted:
    """The loss and metrics that the config names."""

    loss: Nest = None  # a name, or names by output
    loss_options: Mapping[str, Any] = field(default_factory=dict)
    loss_weights: Any = None
    metrics: Any = None  # names and {name: options}, in a list or by output
    class_weight: Any = None  # {class: weight}

    @classmethod
    def of(cls, model: Mapping[str, Any]) -> Wanted:
        """Takes the keys of `model` in a config."""
        return cls(**{one.name: model[one.name] for one in fields(cls)})


class Chosen(NamedTuple):
    """A loss or metrics, with their names and origin for people."""

    value: Any
    text: str
    takes_options: bool = False  # those of the config
    is_whole: bool = False  # a function of all labels and all outputs; any other loss is Keras's, by output


def make_objective(
    model: keras.Model,
    spec: Spec,
    wanted: Wanted,
    *,
    functions: Mapping[str, Any] | None = None,
    size: int | None = None,
    frozen: Collection[str] = (),
) -> Objective:
    """Compiles a model.

    Args:
        spec: of its data.
        functions: what the user's file defines, by name.
        size, frozen: as in `Objective`.

    Raises:
        ValueError: if a name is unknown, no loss is named and none can be chosen, or an option has no effect.
    """
    functions = functions or {}
    compiled_by_user = bool(model.compiled)
    loss = _choose_loss(model, spec, wanted, functions)
    _check_effect(wanted, loss)
    metrics = _choose_metrics(model, wanted, functions, loss)
    weights = wanted.loss_weights
    if weights is None and compiled_by_user and model._compile_loss is not None:
        weights = model._compile_loss._user_loss_weights
        if any(isinstance(one, str) for one in keras.tree.flatten(weights)):
            raise ValueError(
                f"compile() got loss_weights={weights}, which must be numbers; its third positional argument is "
                "loss_weights: type compile(optimizer, loss, metrics=[...])"
            )
    weighted = model._compile_metrics._user_weighted_metrics if compiled_by_user and model._compile_metrics else None
    text = f"loss: {loss.text}; metrics: {metrics.text}"
    text += f"; weighted metrics: {_names(weighted)} {FROM_COMPILE}" if weighted else ""
    keras.Model.compile(  # a model's own may take other arguments, and has been called
        model,
        optimizer="sgd",  # never used
        loss=None if loss.is_whole else loss.value,
        loss_weights=None if loss.is_whole else weights,
        metrics=metrics.value,
        weighted_metrics=weighted,
    )
    return Objective(
        model,
        whole_loss=loss.value if loss.is_whole else None,
        class_weights=_class_weights(wanted.class_weight, spec),
        size=size,
        text=text,
        is_given_compiled=compiled_by_user,
        is_given_loss=loss.text.endswith(FROM_COMPILE),
        frozen=frozen,
    )


def _choose_loss(model: keras.Model, spec: Spec, wanted: Wanted, functions: Mapping[str, Any]) -> Chosen:
    compiled = _compiled_loss(model)
    named = wanted.loss
    if named is None and "loss" in functions and _is_loss(functions["loss"], model):
        named = "loss"
    if isinstance(named, str) and named in functions:
        loss = make_loss(named, wanted.loss_options, functions)
        return Chosen(loss, f"{named} {FROM_FILE}", True, is_whole=not isinstance(loss, keras.losses.Loss))
    if named is not None:
        losses = make_losses(named, wanted.loss_options, functions)
        return Chosen(losses, f"{_names(named)} {FROM_CONFIG}", True)
    if type(model).compute_loss is not keras.Model.compute_loss:
        return Chosen(compiled, f"compute_loss of {type(model).__name__}")
    if compiled is not None:
        return Chosen(compiled, f"{_names(compiled)} {FROM_COMPILE}")
    if spec.labels is None or (model.compiled and _adds_losses(model, spec)):
        return Chosen(None, "of its layers")
    if isinstance(spec.labels, ArraySpec) and "int" in spec.labels.dtype:
        loss = make_loss(INTEGERS, wanted.loss_options, {})
        taken = "logits" if is_of_logits(loss) else "probabilities"
        return Chosen(loss, f"{INTEGERS} of {taken}, {BY_DEFAULT}", True)
    raise ValueError(
        f"no loss is named, and the labels are {describe_nest(spec.labels)}; type model.loss=mean_squared_error, "
        "binary_crossentropy or another of keras.losses, or have the model's function call compile(loss=...)"
    )


def _adds_losses(model: keras.Model, spec: Spec) -> bool:
    with suppress(Exception):  # of many types; the trial says what is wrong with the model
        return tracing.adds_losses(Objective(model), spec)
    return False


def _check_effect(wanted: Wanted, loss: Chosen) -> None:
    """Refuses settings that the loss does not take."""
    if wanted.loss_options and not loss.takes_options:
        raise ValueError(
            f"model.loss_options={dict(wanted.loss_options)} has no effect on the loss {loss.text}; set its options "
            "there, or name a loss: model.loss=NAME"
        )
    if wanted.loss_weights is not None and (loss.is_whole or loss.value is None):
        raise ValueError(
            f"model.loss_weights={wanted.loss_weights} has no effect: the loss, {loss.text}, is not a loss of each "
            "output; weight its parts there"
        )


def _is_loss(function: Any, model: keras.Model) -> bool:
    """Whether it is a loss of all labels and outputs; another of that name may be, or have made, that of `compile()`.

    Raises:
        ValueError: if it does not take them, and there is no other loss.
    """
    has_another = _compiled_loss(model) is not None or type(model).compute_loss is not keras.Model.compute_loss
    if _is_among(function, _compiled_loss(model)) or (isinstance(function, keras.losses.Loss) and has_another):
        return False
    if inspect.isclass(function) or not callable(function):
        return inspect.isclass(function) and issubclass(function, keras.losses.Loss)
    try:
        inspect.signature(function).bind("labels", "outputs")
    except TypeError as error:
        if has_another:
            return False
        raise ValueError(f"loss of the user's file is called as loss(y, outputs): {error}") from error
    return True


def _class_weights(named: Any, spec: Spec) -> tuple[float, ...]:
    """Returns the weight of each class; None if no class has one."""
    if not named:
        return ()
    if not isinstance(spec.labels, ArraySpec):
        raise ValueError(
            f"model.class_weight needs one array of labels, but the labels are {describe_nest(spec.labels)}; "
            "return weights with the data instead: (x, y, weights)"
        )
    are_counted = "int" in spec.labels.dtype or (spec.labels.shape[-1:] or (1,))[-1] != 1
    if spec.classes == 0 and are_counted:
        raise ValueError(
            'model.class_weight needs the number of classes, and a stream does not show it; return {"classes": NUMBER, '
            '"train": ..., "evaluate": ...} with the data'
        )
    # One output tells two classes apart; integer labels may be one-hot.
    classes = max(spec.classes, 2, *(size or 0 for size in spec.labels.shape[-1:]))
    try:
        weights = {int(number): float(weight) for number, weight in named.items()}
        is_valid = all(number >= 0 and 0 <= weight < math.inf for number, weight in weights.items())
        is_valid = is_valid and (not are_counted or max(weights) < classes)
    except (AttributeError, TypeError, ValueError):
        is_valid = False
    if not is_valid:
        allowed = f" (0..{classes - 1})" if are_counted else ""
        raise ValueError(f"model.class_weight={named} is not a mapping from classes{allowed} to weights (0 or more)")
    return tuple(weights.get(number, 1.0) for number in range(max(classes, max(weights) + 1)))


def _compiled_loss(model: keras.Model) -> Any:
    return model._compile_loss._user_loss if model.compiled and model._compile_loss is not None else None


def _choose_metrics(model: keras.Model, wanted: Wanted, functions: Mapping[str, Any], loss: Chosen) -> Chosen:
    if wanted.metrics is not None:
        metrics = _map_metrics(lambda one: make_metric(one, functions), wanted.metrics)
        return Chosen(metrics, f"{_names(wanted.metrics) or 'none'} {FROM_CONFIG}")
    compiled = model._compile_metrics._user_metrics if model.compiled and model._compile_metrics is not None else None
    if inspect.isroutine(functions.get("metrics")) and not _is_among(functions["metrics"], compiled):
        made = _made_metrics(functions["metrics"])
        if isinstance(made, dict) and all(isinstance(one, keras.metrics.Metric) for one in made.values()):
            for name, one in made.items():
                one.name = name
            made = list(made.values())
        return Chosen(made, f"{_names(made)} {FROM_FILE}")
    if compiled or loss.text.endswith(FROM_COMPILE):
        return Chosen(compiled, f"{_names(compiled)} {FROM_COMPILE}" if compiled else "none")
    metric = accuracy_of(loss.value)
    return Chosen(None, "none") if metric is None else Chosen([metric], f"{ACCURACY}, {BY_DEFAULT}")


def _is_among(function: Any, nest: Any) -> bool:
    return any(one is function for one in keras.tree.flatten(nest))


def _made_metrics(function: Callable[[], Any]) -> Any:
    try:
        inspect.signature(function).bind()
    except TypeError as error:
        raise ValueError(f"metrics() of the user's file is called without arguments: {error}") from error
    made = function()
    if isinstance(made, list | tuple | dict):
        return made
    raise ValueError(
        f"metrics of the user's file returned an object of type {type(made).__name__}; return "
        '{"auc": keras.metrics.AUC()}, or a list of metrics'
    )


def _name_of(one: Any) -> str:
    one = getattr(one, "func", one)  # of a partial
    return str(getattr(one, "name", None) or getattr(one, "__name__", one))


def _map_metrics(function: Callable[[Any], Any], metrics: Any, *, is_of_output: bool = False) -> Any:
    """Maps metrics in a list, in lists by output, or in a mapping by output; any other mapping is {name: options}."""
    if isinstance(metrics, Mapping) and not is_of_output:
        return {output: _map_metrics(function, ones, is_of_output=True) for output, ones in metrics.items()}
    if isinstance(metrics, list | tuple):
        return [_map_metrics(function, one) if isinstance(one, list | tuple) else function(one) for one in metrics]
    return [function(metrics)]


def _names(nest: Any) -> str:
    """Returns a nest of losses or metrics for people."""
    if isinstance(nest, Mapping):
        return ", ".join(name if _is_options(one) else f"{name}: {_names(one)}" for name, one in nest.items())
    if isinstance(nest, Sequence) and not isinstance(nest, str):
        return ", ".join(map(_names, nest))
    return nest if isinstance(nest, str) else _name_of(nest)


def _is_options(value: Any) -> bool:
    """Whether a mapping has options of a metric, {AUC: {num_thresholds: 50}}, and not metrics of an output."""
    return isinstance(value, Mapping)
