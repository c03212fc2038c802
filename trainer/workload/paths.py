"""Unique paths of a model's variables and layers, used by plans, checkpoints, patterns and exports.

Keras's own path is used if it is unique in the model. Keras leaves out the names of the nested models that a
layer is in, so that two towers may both have a "fc1/kernel": these become "query/fc1/kernel" and "item/fc1/kernel".
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import keras

from trainer.workload.keras_internals import global_state

COUNTERS = "object_name_uids"  # Keras's name for the counters with which it names layers: dense, dense_1
SEED = "seed_generator_state"  # the name of the variable of a seed generator


_counters: dict[Callable[..., Any], dict[str, int]] = {}  # by function: counters before its first call


def name_alike(function: Callable[..., Any]) -> None:
    """Makes Keras name the layers of the next call of a function like those of its first call in this process."""
    counters = global_state.get_global_attribute(COUNTERS, defaultdict(int), set_to_default=True)
    before = _counters.setdefault(function, dict(counters))
    counters.clear()
    counters.update(before)


class Paths:
    """The unique paths of a model's layers and variables, except those of seed generators."""

    def __init__(self, model: keras.Model) -> None:
        """Reads the model as it is now; layers without a path, such as inputs, get none."""
        layers = [layer for layer in model._flatten_layers(include_self=False) if layer.path]
        variables = [v for v in model.variables if not is_seed(v)]
        shared_layers, shared_variables = _shared(layers), _shared(variables)
        if not shared_layers and not shared_variables:
            self._by_id = {id(one): one.path for one in (*layers, *variables)}
            return
        places = _places(model)
        of_layers = {id(layer): places[id(layer)] for layer in layers if layer.path in shared_layers}
        self._by_id = _unique(layers, of_layers) | _unique(variables, _places_of(variables, shared_variables, places))

    def __getitem__(self, one: keras.Layer | keras.Variable) -> str:
        """Returns the path of a layer or a variable."""
        return self._by_id.get(id(one)) or str(one.path)

    def named(self, variables: Iterable[keras.Variable]) -> dict[str, keras.Variable]:
        """Returns variables by path, without those of seed generators."""
        return {self[v]: v for v in variables if not is_seed(v)}


def is_seed(variable: keras.Variable) -> bool:
    return bool(variable.path.endswith(SEED))


class _Place(NamedTuple):
    """The position of a layer in a model."""

    layer: keras.Layer
    names: tuple[str, ...]  # of the model, of the layers around this one, and its own
    unique: tuple[str, ...]  # the same, numbered where sibling layers have the same name

    def complete(self, path: str) -> str:
        """Adds to the path of the layer, or of one of its variables, the names that Keras leaves out."""
        parts = tuple(path.split("/"))
        sizes = range(min(len(parts), len(self.names)), 0, -1)
        overlap = next((size for size in sizes if self.names[-size:] == parts[:size]), 0)
        begin = 0 if overlap == len(self.names) else 1  # the model's name is included only if Keras did so
        return "/".join([*self.unique[begin:], *parts[overlap:]])


def _places(model: keras.Model) -> dict[int, _Place]:
    """Returns the position of each layer by id; for a layer that is used several times, the outermost."""
    root = _Place(model, (model.name,), (model.name,))
    places, pending = {id(model): root}, [root]
    for outer in pending:
        names: set[str] = set()
        for layer in _inner(outer.layer):
            if id(layer) not in places:
                unique = free_name(layer.name, names)
                names.add(unique)
                places[id(layer)] = _Place(layer, (*outer.names, layer.name), (*outer.unique, unique))
                pending.append(places[id(layer)])
    return places


def _places_of(
    variables: Sequence[keras.Variable], shared: set[str], places: Mapping[int, _Place]
) -> dict[int, _Place]:
    """Returns the positions of layers that have variables with shared paths, by the id of each of their variables."""
    known = {id(v) for v in variables}
    found: dict[int, _Place] = {}
    for place in places.values():
        inner = {id(v) for layer in _inner(place.layer) for v in layer.variables}
        own = [v for v in place.layer.variables if id(v) in known and id(v) not in inner]
        if any(v.path in shared for v in own):
            found |= {id(v): place for v in own}
    return found


def _inner(layer: keras.Layer) -> list[keras.Layer]:
    return layer._flatten_layers(include_self=False, recursive=False)


def _shared(paths: Sequence[keras.Layer | keras.Variable]) -> set[str]:
    return {path for path, count in Counter(one.path for one in paths).items() if count > 1}


def _unique(named: Sequence[keras.Layer | keras.Variable], places: Mapping[int, _Place]) -> dict[int, str]:
    """Returns paths by id: Keras's own, but complete ones for items in `places`, numbered if even these are shared."""
    paths = {id(one): one.path for one in named if id(one) not in places}
    taken = set(paths.values())
    for one in named:
        if id(one) in places:
            paths[id(one)] = free_name(places[id(one)].complete(one.path), taken)
            taken.add(paths[id(one)])
    return {id(one): paths[id(one)] for one in named}


def free_name(name: str, taken: set[str]) -> str:
    """Returns the name, or the first of name_1, name_2, ... that is not taken."""
    number, free = 0, name
    while free in taken:
        number += 1
        free = f"{name}_{number}"
    return free
