"""What `model.keras` needs to be loaded elsewhere, and whether it loads with that."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np

from trainer.workload.error_text import first_line

OPEN_SIZES = (1, 64)  # that are tried
LAMBDA, FUNCTION = "__lambda__", "function"  # class names that Keras gives to functions


class Needs(NamedTuple):
    """What a file does not have itself."""

    objects: tuple[str, ...]  # names of classes and functions that are not Keras's
    is_unsafe: bool  # whether it has code, that of Lambda layers

    def describe(self) -> str:
        """Says what to give to `load_model`; empty if nothing."""
        objects = f"custom_objects with {', '.join(f'`{name}`' for name in self.objects)} of your code"
        given = [*([objects] if self.objects else []), *(["`safe_mode=False`"] if self.is_unsafe else [])]
        return f"; needs {' and '.join(given)}" if given else ""


def needs_of(path: Path) -> Needs:
    """Reads what a `.keras` file refers to; nothing is loaded."""
    with zipfile.ZipFile(path) as archive:
        nodes = [*_nodes(json.loads(archive.read("config.json")))]
    names = [_name_of(node) for node in nodes]
    return Needs(tuple(dict.fromkeys(filter(None, names))), any(node["class_name"] == LAMBDA for node in nodes))


def check_loads(path: Path, model: keras.Model, objects: Mapping[str, Any]) -> str:
    """Loads a model that was saved, with nothing that it does not need, if it has more than Keras's own classes.

    Keras gives the code of a Lambda layer no globals of the file that it is from, so a call shows whether it needs one.

    Args:
        objects: what the user's file defines, by name.

    Returns:
        What to know before one loads it, if anything.

    Raises:
        Exception: of any type, if it cannot be loaded, or does not compute what the model does.
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
        except Exception as error:  # of many types
            loaded = keras.models.load_model(path, custom_objects=custom, safe_mode=False, compile=False)
            note = f"load {path.name} with compile=False: its loss cannot be loaded ({first_line(error)})"
        _check_same(model, loaded)
    return note


def _nodes(config: Any) -> Iterator[dict[str, Any]]:
    """The parts of a config that stand for an object."""
    if isinstance(config, dict):
        if "class_name" in config:
            yield config
        for value in config.values():
            yield from _nodes(value)
    elif isinstance(config, list):
        for value in config:
            yield from _nodes(value)


def _name_of(node: Mapping[str, Any]) -> str:
    """The name of an object that is not Keras's; empty for the others."""
    if node["class_name"] == FUNCTION:
        return str(node["config"])
    is_kerass = str(node.get("module") or "").partition(".")[0] in ("keras", "builtins")
    return "" if is_kerass else str(node.get("registered_name") or "")


@contextmanager
def _nothing_registered() -> Iterator[None]:
    """Within, Keras finds no class or function that a user's code has registered."""
    registry = keras.saving.get_custom_objects()
    before = dict(registry)
    registry.clear()
    try:
        yield
    finally:
        registry.update(before)


def _check_same(model: keras.Model, loaded: keras.Model) -> None:
    """Compares what both compute of ones, where a model shows what it takes, and can compute them."""
    if not getattr(model, "inputs", None):
        return
    for size in OPEN_SIZES:
        try:
            of_model = _computed_of_ones(model, size)
        except Exception:  # of many types, e.g. of a convolution for which they are too small
            continue
        for value, other in zip(of_model, _computed_of_ones(loaded, size), strict=True):
            np.testing.assert_allclose(np.asarray(other), np.asarray(value), rtol=1e-3, atol=1e-5)
        return


def _computed_of_ones(model: keras.Model, size: int) -> list[Any]:
    """The outputs for one example; `size` stands for the sizes that are open."""
    outputs: list[Any] = keras.tree.flatten(model(keras.tree.map_structure(lambda one: _ones(one, size), model.input)))
    return outputs


def _ones(tensor: Any, size: int) -> Any:
    shape = [tensor.shape[0] or 1, *(each or size for each in tensor.shape[1:])]
    return np.full(shape, "a") if tensor.dtype == "string" else np.ones(shape, tensor.dtype)
