"""Finds the objects that loading `model.keras` elsewhere needs, and checks that it loads with them."""

import json
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np

from trainer.workload.error_text import first_line

OPEN_SIZES = (1, 64)  # tried in place of sizes that are None
LAMBDA, FUNCTION = "__lambda__", "function"  # class names that Keras gives to functions


class Needs(NamedTuple):
    """The objects that a file needs but does not contain."""

    objects: tuple[str, ...]  # names of classes and functions that are not Keras's
    is_unsafe: bool  # whether it contains code, from Lambda layers

    def describe(self) -> str:
        """Describes what `load_model` needs; empty if nothing."""
        objects = f"custom_objects with {', '.join(f'`{name}`' for name in self.objects)} of your code"
        given = [*([objects] if self.objects else []), *(["`safe_mode=False`"] if self.is_unsafe else [])]
        return f"; needs {' and '.join(given)}" if given else ""


def needs_of(path: Path) -> Needs:
    """Reads the references of a `.keras` file, without loading it."""
    with zipfile.ZipFile(path) as archive:
        nodes = [*_nodes(json.loads(archive.read("config.json")))]
    names = [_name_of(node) for node in nodes]
    return Needs(tuple(dict.fromkeys(filter(None, names))), any(node["class_name"] == LAMBDA for node in nodes))


def check_loads(path: Path, model: keras.Model, objects: Mapping[str, Any]) -> str:
    """Loads a saved model with exactly the objects it needs, if it uses more than Keras's classes.

    Keras loads the code of a Lambda layer without the globals of its file; calling it shows whether it needs any.

    Args:
        objects: what the user's file defines, by name.

    Returns:
        A note on how to load it, if needed.

    Raises:
        Exception: of any type, if it cannot be loaded, or computes something else than the model.
    """
    needs = needs_of(path)
    if not needs.describe():
        return ""
    registered = dict(keras.saving.get_custom_objects())
    known = {**objects, **{type(one).__name__: type(one) for one in model._flatten_layers()}, **registered}
    custom = {name: known[name] for name in needs.objects if name in known}
    with _nothing_registered():
        try:
            loaded, note = keras.models.load_model(path, custom_objects=custom, safe_mode=False), ""
        except Exception as error:  # loading runs code of any kind
            loaded = keras.models.load_model(path, custom_objects=custom, safe_mode=False, compile=False)
            note = f"load {path.name} with compile=False: its loss cannot be loaded ({first_line(error)})"
        _check_same_weights(model, loaded)
        reason = _check_same_outputs(model, loaded)
    not_compared = f"its weights are the model's, but its outputs were not compared: {reason}" if reason else ""
    return "; ".join(filter(None, (note, not_compared)))


def _nodes(config: Any) -> Iterator[dict[str, Any]]:
    """Yields the parts of a config that describe an object."""
    if isinstance(config, dict):
        if "class_name" in config:
            yield config
        for value in config.values():
            yield from _nodes(value)
    elif isinstance(config, list):
        for value in config:
            yield from _nodes(value)


def _name_of(node: Mapping[str, Any]) -> str:
    """Returns the name of an object that is not Keras's; empty for others."""
    if node["class_name"] == FUNCTION:
        return str(node["config"])
    is_kerass = str(node.get("module") or "").partition(".")[0] in ("keras", "builtins")
    return "" if is_kerass else str(node.get("registered_name") or "")


@contextmanager
def _nothing_registered() -> Iterator[None]:
    """Hides from Keras, in this context, all classes and functions that the user's code has registered."""
    registry = keras.saving.get_custom_objects()
    before = dict(registry)
    registry.clear()
    try:
        yield
    finally:
        registry.update(before)


def _check_same_weights(model: keras.Model, loaded: keras.Model) -> None:
    for value, other in zip(model.get_weights(), loaded.get_weights(), strict=True):
        np.testing.assert_array_equal(other, value)


def _check_same_outputs(model: keras.Model, loaded: keras.Model) -> str:
    """Compares the outputs of both for inputs of ones, if the model declares its inputs; returns why it cannot."""
    reason = ""
    for size in OPEN_SIZES if getattr(model, "inputs", None) else ():
        try:
            of_model = _computed_of_ones(model, size)
        except Exception as error:  # of many types, e.g. of a convolution for which they are too small
            reason = f"the model fails for inputs of ones ({first_line(error)})"
            continue
        for value, other in zip(of_model, _computed_of_ones(loaded, size), strict=True):
            np.testing.assert_allclose(np.asarray(other), np.asarray(value), rtol=1e-3, atol=1e-5)
        return ""
    return reason


def _computed_of_ones(model: keras.Model, size: int) -> list[Any]:
    """Returns the outputs for one example; `size` replaces the open sizes."""
    return keras.tree.flatten(model(keras.tree.map_structure(lambda one: _ones(one, size), model.input)))


def _ones(tensor: Any, size: int) -> Any:
    shape = [tensor.shape[0] or 1, *(each or size for each in tensor.shape[1:])]
    return np.full(shape, "a") if tensor.dtype == "string" else np.ones(shape, tensor.dtype)
