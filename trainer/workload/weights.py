"""Loads a model's variables from files of a checkpoint, an export, or Keras.

Arrays of `.npz` have the paths of the variables as names. A `.weights.h5`, which a `.keras` file contains too, has
none: it is read as Keras's `load_weights` does if it is of the same model, else by the names of the layers.
"""

import contextlib
import warnings
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import h5py
import keras
import numpy as np

from trainer.config.words import count, some
from trainer.faults.problems import ConfigError, Problem
from trainer.workload.data.errors import DataError
from trainer.workload.keras_internals import saving_lib
from trainer.workload.paths import Paths, is_seed

PREFIXES = ("parameters/", "state/", "frozen/", "slots/ema/")  # of names in a checkpoint; a later one wins
TENSORS = "tensors.npz"  # of a checkpoint
IN_KERAS = "model.weights.h5"  # the file of a `.keras` archive
NOT_OF_THE_MODEL = ("optimizer", "_metrics", "_loss_tracker", "_compile_metrics", "_compile_loss")
NAMED_AT_MOST = 5

Shapes = Mapping[str, tuple[int, ...]]


class Loaded(NamedTuple):
    """The result for a model's variables, by path, or by the path of a layer and a number."""

    loaded: list[str]
    missing: list[str]
    misfits: list[str]  # with both shapes
    unused: int  # arrays of the file

    def describe(self) -> str:
        found = count(len(self.loaded), "variable")
        notes = [
            *([f"not in it: {some(self.missing, NAMED_AT_MOST)}"] if self.missing else []),
            *([f"other shapes: {some(self.misfits, NAMED_AT_MOST)}"] if self.misfits else []),
            *([f"{count(self.unused, 'array')} in it not used"] if self.unused else []),
        ]
        return "; ".join([f"{found} of {len(self.loaded) + len(self.missing) + len(self.misfits)}", *notes])


def load(model: keras.Model, files: Sequence[str]) -> str:
    """Loads the variables that match by name and shape; returns a sentence about those that did and did not.

    Raises:
        ConfigError: if nothing matches.
        DataError: if a file is damaged.
    """
    first = files[0]
    try:
        result = _load_arrays(model, _read_arrays(files)) if first.endswith(".npz") else _load_h5(model, first)
    except (OSError, zipfile.BadZipFile, KeyError, ValueError) as error:
        raise DataError(f"model.init: {first} cannot be read ({error}); give another one") from error
    source = Path(first).parent if Path(first).name == TENSORS else first
    if not result.loaded:
        message = f"nothing in {source} has the name and the shape of a variable of the model; {result.describe()}"
        raise ConfigError([Problem("model.init", "no-match", message, "give values of another model, or leave it out")])
    return f"initial values from {source}: {result.describe()}"


def assign(model: keras.Model, values: Mapping[str, np.ndarray]) -> None:
    """Assigns values to the variables of these paths, and updates layers that cache results computed from them."""
    for path, variable in Paths(model).named(model.variables).items():
        if path in values:
            value = values[path]
            variable.assign(value if "float" in variable.dtype else np.rint(value))
    for layer in model._flatten_layers(include_self=False):
        if isinstance(layer, keras.layers.Normalization) and layer.built and layer.input_mean is None:
            layer.finalize_state()


def read_npz(file: Path) -> dict[str, np.ndarray]:
    with np.load(file, allow_pickle=False) as archive:
        return {name: archive[name] for name in archive.files}


# Arrays by path


def _read_arrays(files: Sequence[str]) -> dict[str, np.ndarray]:
    named: dict[str, np.ndarray] = {}
    for file in files:
        named |= read_npz(Path(file))
    if not any(name.startswith("parameters/") for name in named):
        return named
    by_path: dict[str, np.ndarray] = {}
    for prefix in PREFIXES:
        by_path |= {name.removeprefix(prefix): value for name, value in named.items() if name.startswith(prefix)}
    return by_path


def _load_arrays(model: keras.Model, values: Mapping[str, np.ndarray]) -> Loaded:
    shapes = {path: tuple(v.shape) for path, v in Paths(model).named(model.variables).items()}
    loaded = [path for path, shape in shapes.items() if path in values and values[path].shape == shape]
    misfits = [
        _misfit(path, values[path].shape, shape)
        for path, shape in shapes.items()
        if path in values and path not in loaded
    ]
    assign(model, {path: values[path] for path in loaded})
    return Loaded(loaded, [path for path in shapes if path not in values], misfits, len(values.keys() - shapes.keys()))


def _misfit(name: str, theirs: tuple[int, ...], ours: tuple[int, ...]) -> str:
    return f"{name} (there {list(theirs)}, here {list(ours)})"


# Layers of a .weights.h5


class _Layer(NamedTuple):
    """The values that Keras saves for one layer, under its position in the model."""

    name: str  # with those of the layers that it is in
    shapes: Shapes  # by Keras's number


class _Recorder(saving_lib.NpzIOStore):  # type: ignore[misc]
    """Collects the values that Keras would save, and writes nothing."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}  # by place
        self.saved: dict[str, dict[str, Any]] = {}  # variables and arrays

    def __bool__(self) -> bool:
        return True

    def make(self, path: str, metadata: Mapping[str, str] | None = None) -> dict[str, Any]:
        self.names[path] = (metadata or {}).get("name", "")
        return self.saved.setdefault(path, {})


class _Values(saving_lib.NpzIOStore):  # type: ignore[misc]
    """Provides the values that a model loads."""

    def __init__(self, values: Mapping[str, Mapping[str, np.ndarray]]) -> None:
        self._values = values

    def __bool__(self) -> bool:
        return True

    def get(self, path: str) -> dict[str, np.ndarray]:
        return dict(self._values.get(path, {}))

    def has_path(self, path: str) -> bool:
        return any(place == path or place.startswith(f"{path}/") for place in self._values)


def _load_h5(model: keras.Model, file: str) -> Loaded:
    recorder, paths_of_model = _Recorder(), Paths(model)
    saving_lib._save_state(model, recorder, None, "", set())
    saved = {
        place: values
        for place, values in recorder.saved.items()
        if values and not place.startswith(NOT_OF_THE_MODEL) and not any(map(_is_seed, values.values()))
    }
    ours = {place: _Layer(_chain(recorder.names, place), _shapes(values)) for place, values in saved.items()}
    with _open_h5(file) as opened:
        theirs = _layers_in(opened)
        is_same = all(place in theirs and theirs[place].shapes == layer.shapes for place, layer in ours.items())
        places = {place: place for place in ours} if is_same else _matches(ours, theirs)
        loaded, missing, misfits = list[str](), list[str](), list[str]()
        values = {}
        for place, layer in ours.items():
            shapes = theirs[places[place]].shapes if place in places else {}
            paths = {key: _path_of(value, paths_of_model, f"{layer.name}/{key}") for key, value in saved[place].items()}
            if shapes == layer.shapes:
                values[place] = {key: opened[f"{places[place]}/vars/{key}"][()] for key in shapes}
                loaded += paths.values()
            else:
                missing += [path for key, path in paths.items() if key not in shapes]
                misfits += [_misfit(paths[key], shapes[key], layer.shapes[key]) for key in paths if key in shapes]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what is not loaded, which the caller learns too
        saving_lib._load_state(model, _Values(values), None, "", True, set(), set(), {})
    used = {places[place] for place in values}
    return Loaded(loaded, missing, misfits, sum(len(one.shapes) for place, one in theirs.items() if place not in used))


def _is_seed(value: Any) -> bool:
    return isinstance(value, keras.Variable) and is_seed(value)


def _path_of(value: Any, paths: Paths, otherwise: str) -> str:
    return paths[value] if isinstance(value, keras.Variable) else otherwise


def _shapes(values: Mapping[str, Any]) -> Shapes:
    return {key: tuple(value.shape) for key, value in values.items()}


def _chain(names: Mapping[str, str], place: str) -> str:
    """Returns the name of the layer at a position, after those of the layers around it."""
    parts = place.split("/")
    places = ["/".join(parts[:end]) for end in range(1, len(parts) + 1)]
    return "/".join(names[one] for one in places if names.get(one))


def _layers_in(opened: h5py.File) -> dict[str, _Layer]:
    found: dict[str, Shapes] = {}
    names: dict[str, str] = {}

    def visit(name: str, item: Any) -> None:
        place, _, last = name.rpartition("/")
        if last == "vars" and isinstance(item, h5py.Group) and not place.startswith(NOT_OF_THE_MODEL):
            names[place] = str(item.attrs.get("name", ""))
            found[place] = {key: tuple(one.shape) for key, one in item.items()}

    opened.visititems(visit)
    return {
        place: _Layer(_chain(names, place), shapes)
        for place, shapes in found.items()
        if shapes and "seed_generator" not in place.rpartition("/")[2]
    }


def _matches(ours: Mapping[str, _Layer], theirs: Mapping[str, _Layer]) -> dict[str, str]:
    """Maps our positions to theirs, by equal full names of layers, or by unique last names."""
    by_name, by_last = _unique(theirs, last=False), _unique(theirs, last=True)
    own_last = _unique(ours, last=True)
    found = {}
    for place, layer in ours.items():
        last = layer.name.rpartition("/")[2]
        if layer.name in by_name:
            found[place] = by_name[layer.name]
        elif last in by_last and last in own_last:
            found[place] = by_last[last]
    return found


def _unique(layers: Mapping[str, _Layer], *, last: bool) -> dict[str, str]:
    """Returns the position by name, for names of a single layer."""
    names = {place: layer.name.rpartition("/")[2] if last else layer.name for place, layer in layers.items()}
    every = list(names.values())
    return {name: place for place, name in names.items() if every.count(name) == 1}


@contextlib.contextmanager
def _open_h5(file: str) -> Iterator[h5py.File]:
    if not file.endswith(".keras"):
        with h5py.File(file, "r") as opened:
            yield opened
        return
    with zipfile.ZipFile(file) as archive, archive.open(IN_KERAS) as inner, h5py.File(inner, "r") as opened:
        yield opened
