"""Selects the features that a model is called with: those that it has inputs for, by name.

Keras takes the entries of a mapping in the order of their sorted names, so an entry without an input would shift all
later ones to wrong inputs.
"""

from collections.abc import Iterator
from typing import Any

import keras

from trainer.workload.data.examples import Nest, describe_nest


def chosen(model: keras.Model, features: Nest) -> Nest:
    """Returns the features that a functional model takes; for other models, all of them unchanged."""
    inputs = _inputs_of(model)
    if isinstance(inputs, list) and isinstance(features, tuple):
        return list(features)
    if _is_input(inputs) and isinstance(features, dict):
        return features.get(inputs.name, features)
    return _by_name(inputs, features)


def unused(model: keras.Model, features: Nest) -> list[str]:
    """Lists the features that the model has no input for, e.g. city, user/age.

    Raises:
        ValueError: if an input has no feature.
    """
    inputs = _inputs_of(model)
    listed = [inputs] if _is_input(inputs) else inputs
    if isinstance(listed, list | tuple) and isinstance(features, dict) and all(map(_is_input, listed)):
        inputs = {each.name: each for each in listed}  # as Keras takes them
    if missing := [*_missing(inputs, features)]:
        raise ValueError(
            f"the model has the input {missing[0]}, but the features are {describe_nest(features)}: give a feature "
            "that name, or remove the input from the model"
        )
    return [*_unused(inputs, features)]


def _inputs_of(model: keras.Model) -> Nest:
    """Returns the input tensors of a functional model as a nest; empty for a model with its own `call`."""
    return getattr(getattr(model, "_functional", None) or model, "_inputs_struct", None)


def _is_input(value: Any) -> bool:
    return isinstance(value, keras.KerasTensor)


def _by_name(inputs: Nest, features: Nest) -> Nest:
    if isinstance(inputs, dict) and isinstance(features, dict):
        return {name: _by_name(each, features.get(name)) for name, each in inputs.items()}
    return features


def _pairs(inputs: Nest, features: Nest) -> bool:
    return isinstance(inputs, dict) and isinstance(features, dict)


def _missing(inputs: Nest, features: Nest, prefix: str = "") -> Iterator[str]:
    for name, each in inputs.items() if _pairs(inputs, features) else ():
        if name in features:
            yield from _missing(each, features[name], f"{prefix}{name}/")
        elif not (_is_input(each) and getattr(each._keras_history.operation, "optional", False)):
            yield f"{prefix}{name}"


def _unused(inputs: Nest, features: Nest, prefix: str = "") -> Iterator[str]:
    for name, each in features.items() if _pairs(inputs, features) else ():
        if name in inputs:
            yield from _unused(inputs[name], each, f"{prefix}{name}/")
        else:
            yield f"{prefix}{name}"
