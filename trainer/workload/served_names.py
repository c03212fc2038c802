"""Names of the inputs and outputs of an exported model."""

import re
from collections.abc import Sequence

import keras

from trainer.workload.data.examples import Nest, leaves_of
from trainer.workload.keras_internals import to_snake_case
from trainer.workload.paths import free_name

INPUT, OUTPUT = "input", "output"


def input_names(model: keras.Model, nest: Nest) -> dict[str, str]:
    """Returns names for the inputs of an exported model, by path in the nest; a single array is called inputs."""
    return _names(nest, _listed(model, "inputs"), INPUT)


def output_names(model: keras.Model, nest: Nest) -> dict[str, str]:
    """Returns names for the outputs of a model, by path in the nest; a single tensor has an empty name."""
    return {place: name if place else "" for place, name in _names(nest, _listed(model, "outputs"), OUTPUT).items()}


def _names(nest: Nest, listed: Sequence[str], kind: str) -> dict[str, str]:
    """Names the items of a mapping by its keys, and those of a list as the model does, or by number."""
    places = [place for place, _ in leaves_of(nest)]
    if not isinstance(nest, list | tuple) or hasattr(nest, "_fields"):
        chosen = places
    elif len(listed) == len(places):
        chosen = [name or f"{kind}_{place}" for name, place in zip(listed, places, strict=True)]
    else:
        chosen = [f"{kind}_{place}" for place in places]
    names: dict[str, str] = {}
    for place, name in zip(places, chosen, strict=True):
        names[place] = free_name(re.sub(r"\W", "_", name) or f"{kind}s", set(names.values()))
    return names


def _listed(model: keras.Model, which: str) -> list[str]:
    """Returns the names of a functional model's inputs or outputs in order; empty for those named by Keras."""
    layers = [tensor._keras_history.operation for tensor in getattr(model, which, None) or ()]
    return [
        "" if re.fullmatch(rf"{to_snake_case(type(one).__name__)}(_\d+)?", one.name) else one.name for one in layers
    ]
