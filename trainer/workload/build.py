"""Builds the model and opens the data set that a config names: built-in, or functions of the user's file."""

import difflib
import inspect
import math
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer.config import user_file as user
from trainer.config.words import size
from trainer.plan.layout import Parameter
from trainer.plan.tables import SparsePattern
from trainer.workload import dtype_policy, lookups, loss_scale, step
from trainer.workload import frozen as frozen_weights
from trainer.workload.adapting import Adapting
from trainer.workload.compiling import Wanted, make_objective
from trainer.workload.data import DATA_SETS, DataSet, open_data
from trainer.workload.data.examples import ArraySpec, Spec, map_nest
from trainer.workload.data.pipeline import feature_batches
from trainer.workload.models import MODELS
from trainer.workload.objective import Objective, no_values
from trainer.workload.patches import patched
from trainer.workload.paths import name_alike

FLOAT_BYTES = 4

TRAIN = "train"  # an argument of a model's function: the features to adapt layers to
STEPS = ("train_step", "test_step", "make_train_function", "make_test_function")  # what fit and evaluate run
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def open_data_set(
    name: str, options: Mapping[str, Any], *, seed: int, user_file: str | None, evaluate_steps: int | None = None
) -> DataSet:
    """Opens the data set of that name; a function of the user's file takes precedence over a built-in one.

    Args:
        evaluate_steps: number of batches in an evaluation; None: all of the data, which must end.

    Raises:
        ValueError: if it does not exist, or does not take these options.
        DataError: if the data cannot be trained on.
    """
    keras.utils.set_random_seed(seed)  # the user's file may draw numbers when it is imported
    function = _user_function(user_file, name, DATA_SETS)
    keras.utils.set_random_seed(seed)  # a pipeline that shuffles without a seed does so alike in every task
    return open_data(name, options, seed=seed, user_function=function, must_end=evaluate_steps is None)


def build_model(
    name: str,
    options: Mapping[str, Any],
    data: DataSet,
    *,
    seed: int,
    user_file: str | None,
    precision: str = dtype_policy.FLOAT32,
    with_values: bool = True,
    freezes: Sequence[Mapping[str, Any]] = (),
    adapting: Adapting | None = None,
    sparse: Sequence[SparsePattern] = (),
) -> keras.Model:
    """Builds the model of that name for a data set, with initial weights drawn from `seed`.

    Args:
        precision: Keras's dtype policy for layers without one of their own; variables are always float32.
        with_values: whether the variables of a built-in model are given values, which takes most of the time. Those of
            a user's model are: its function may read or replace them.
        freezes: which parameters are frozen, as `config.groups.freezing` gives them.
        adapting: states of layers that the function adapts; without it they adapt again.
        sparse: the Embedding layers whose rows are not in the model.

    Raises:
        ValueError: if it does not exist, does not take these options, does not return a Keras model, or the model
            trains itself.
    """
    of_user = _user_function(user_file, name, MODELS)
    function = of_user or MODELS.get(name)
    if function is None:
        near = difflib.get_close_matches(name, MODELS, n=1) or list(MODELS)[:1]
        raise ValueError(f"model.name={name} is not a model; available: {', '.join(MODELS)}; did you mean {near[0]}?")
    if of_user is None and not data.spec.classes:
        raise ValueError(
            f"model {name} has an output for each class, but the number of classes is unknown: "
            'add "classes": N to what the function of the data returns'
        )
    arguments = _arguments(function, data.spec)
    given = {TRAIN: feature_batches(data.train, data.spec.features, seed=seed)} if TRAIN in _required(function) else {}
    try:
        inspect.signature(function).bind(*arguments, **given, **options)
    except TypeError as error:
        allowed = [one for one in list(inspect.signature(function).parameters)[len(arguments) :] if one not in given]
        raise ValueError(f"model.options of {name}: {error}; allowed: {', '.join(allowed) or 'none'}") from error
    keras.utils.set_random_seed(seed)
    name_alike(function)
    with dtype_policy.in_force(precision, user_file):
        values = within_memory() if with_values or of_user else no_values()
        with values, (adapting or Adapting()).during(), lookups.building(sparse):
            model = function(*arguments, **given, **options)
        if not isinstance(model, keras.Model):
            raise ValueError(f"model {name} must return a keras.Model, not {type(model).__name__}")
        _check_trains_as_keras(model)
        if not all(layer.built for layer in model._flatten_layers()):
            with lookups.building(sparse), within_memory():
                model(map_nest(_one_example, data.spec.features))  # `build` would not build a subclassed model's layers
    dtype_policy.check_layers(model, precision)
    lookups.separate(model)
    frozen_weights.freeze(model, freezes)
    return model


def _check_trains_as_keras(model: keras.Model) -> None:
    name = type(model).__name__
    if sum(isinstance(value, keras.optimizers.Optimizer) for value in vars(model).values()) > 1:
        raise ValueError(f"{name} has several optimizers; models that need them, such as GANs, cannot be trained here")
    for step_of_keras in STEPS:
        if getattr(type(model), step_of_keras) is not getattr(keras.Model, step_of_keras):
            raise ValueError(
                f"{name} overrides {step_of_keras}, which would not run: steps are computed on many workers; "
                "override compute_loss(x, y, y_pred, sample_weight) or compute_metrics instead"
            )
    for variable in model.trainable_variables:
        if getattr(variable, "overwrite_with_gradient", False):
            raise ValueError(
                f"{variable.path} is replaced by its gradient, as after quantize(), which is not supported"
            )
    for layer in model._flatten_layers(include_self=False):
        if isinstance(layer, keras.layers.RNN) and layer.stateful:
            raise ValueError(
                f"layer {layer.name} is stateful: it carries state from batch to batch within a process, which cannot "
                "be shared between workers or kept in a checkpoint; remove stateful=True"
            )


def check_hooks(user_file: str | None) -> None:
    """Checks that hooks take a step and values.

    Raises:
        ValueError: if one does not.
    """
    functions = user.definitions(user_file) if user_file else {}
    for name in user.HOOKS:
        try:
            inspect.signature(functions[name]).bind(0, {}) if name in functions else None
        except TypeError as error:
            raise ValueError(f"{name} of {user_file}: {error}; write def {name}(step, logs)") from error


def _arguments(function: Callable[..., Any], spec: Spec) -> list[Any]:
    """Returns the arguments of a model's function besides its options, chosen by name, or else by number.

    Raises:
        ValueError: if it takes something that is not known about the data.
    """
    required = [name for name, kind in _required(function).items() if kind in POSITIONAL and name != TRAIN]
    if inspect.isclass(function) and required != ["spec"]:
        return []
    if not set(required) <= {"spec", "input_shape", "classes"}:
        required = ["spec"] if len(required) == 1 else ["input_shape", "classes"]
    if "classes" in required and spec.classes == 0 and spec.labels is not None:
        raise ValueError(
            "the function of the model takes the number of classes, which a stream does not show; return it with the "
            'data: {"classes": NUMBER, "train": ..., "evaluate": ...}'
        )
    return [spec if name == "spec" else getattr(spec, name) for name in required]


def _required(function: Callable[..., Any]) -> dict[str, Any]:
    """Returns the arguments that a function cannot be called without, and their kinds."""
    parameters = inspect.signature(function).parameters.values()
    named = (*POSITIONAL, inspect.Parameter.KEYWORD_ONLY)
    return {one.name: one.kind for one in parameters if one.kind in named and one.default is one.empty}


def _one_example(spec: ArraySpec) -> Any:
    shape = (1, *(size or 1 for size in spec.shape))
    if spec.dtype == "string":
        return tf.fill(shape, "a")  # a word, because some layers take no empty sequence
    return keras.ops.zeros(shape, spec.dtype)


def open_objective(
    model: keras.Model,
    data: DataSet,
    wanted: Wanted,
    *,
    user_file: str | None,
    size: int | None = None,
    frozen: Collection[str] = (),
) -> Objective:
    """Returns the loss and the metrics that the config, the user's file or the model names; see `make_objective`."""
    functions = user.definitions(user_file) if user_file else {}
    return make_objective(model, data.spec, wanted, functions=functions, size=size, frozen=frozen)


def parameters_of(model: keras.Model, precision: str, frozen: Collection[str] = ()) -> list[Parameter]:
    """Returns the parameters of a model, without its frozen weights, and those of its training."""
    return [*step.parameters_of(model, frozen), *([loss_scale.PARAMETER] if precision == dtype_policy.SCALED else [])]


def initial_values(model: keras.Model, precision: str, frozen: Collection[str] = ()) -> dict[str, Any]:
    """Returns the initial values of `parameters_of`, by path."""
    own = (
        {loss_scale.PARAMETER.path: np.array(loss_scale.FIRST, np.float32)} if precision == dtype_policy.SCALED else {}
    )
    return step.initial_values(model, frozen) | own


def _user_function(user_file: str | None, name: str, built_in: Mapping[str, Any]) -> Callable[..., Any] | None:
    """Returns the function of that name in the user's file, or None; raises ValueError if the name is unknown."""
    if user_file is None:
        return None
    function = getattr(user.load(user_file), name, None)
    if function is None and name not in built_in:
        raise ValueError(f"{name} is neither a function of {user_file} nor one of {', '.join(built_in)}")
    return function if callable(function) else None


def memory_bytes() -> int:
    """Returns the size of this machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def within_memory() -> Iterator[None]:
    """Refuses layers built in this context whose variables do not fit into memory.

    Raises:
        ValueError: when a layer is built whose variable does not fit.
    """
    add_weight, limit, total = keras.layers.Layer.add_weight, memory_bytes(), 0

    def add_if_it_fits(layer: keras.layers.Layer, shape: Any = None, *arguments: Any, **options: Any) -> Any:
        nonlocal total
        axes = [int(axis or 1) for axis in shape] if isinstance(shape, Iterable) else []  # of any type that Keras takes
        nbytes = FLOAT_BYTES * math.prod(axes)
        total += nbytes
        if total > limit:
            raise ValueError(
                f"layer {layer.path}: a variable {axes} takes {size(nbytes)}, and with it the model takes "
                f"{size(total)}; this machine's memory is {size(limit)}"
            )
        return add_weight(layer, shape, *arguments, **options)

    with patched((keras.layers.Layer, "add_weight", add_if_it_fits)):
        yield
