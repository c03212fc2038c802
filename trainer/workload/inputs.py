"""Which features a model is called with: those that it has inputs for, by their names.

Keras takes the entries of a mapping in the order of their sorted names, so one that the model has no input for would
move all that follow it to other inputs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras

from trainer.workload.data.examples import Nest, describe_nest


def chosen(model: keras.Model, features: Nest) -> Nest:
    """The features as a functional model takes them; any other gets them as they are."""
    inputs = _inputs_of(model)
    if isinstance(inputs, list) and isinstance(features, tuple):
        return list(features)
    if _is_input(inputs) and isinstance(features, dict):
        return features.get(inputs.name, features)
    return _by_name(inputs, features)


def unused(model: keras.Model, features: Nest) -> list[str]:
    """The names of features that the model has no input for: city, user/age.

    Raises:
        ValueError: if an input is none of the features.
    """
    inputs = _inputs_of(model)
    listed = [inputs] if _is_input(inputs) else inputs
    if isinstance(listed, list | tuple) and isinstance(features, dict) and all(map(_is_input, listed)):
        inputs = {each.name: each for each in listed}  # as Keras takes them
    if missing := [*_missing(inputs, features)]:
        raise ValueError(
            f"the model has the input {missing[0]}, and the features are {describe_nest(features)}: give a feature "
            "that name, or take it from the model"
        )
    return [*_unused(inputs, features)]


def _inputs_of(model: keras.Model) -> Nest:
    """The nest of tensors that a functional model was made with; none, where its `call` takes what it likes."""
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
