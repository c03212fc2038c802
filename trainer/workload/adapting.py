"""Adapts preprocessing layers to the data once in a run: `adapt` records its result, or restores a recorded one.

A model's function calls `adapt` in every task. It reads the data in the process that describes the model; in all
others, and when a run resumes, the layers get the state that they learned there.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from trainer.workload.data.errors import DataError
from trainer.workload.keras_internals import IndexLookup
from trainer.workload.patches import patched
from trainer.workload.paths import Paths

State = Mapping[str, np.ndarray]  # what a layer has learned, by name

KINDS: tuple[type, ...] = (
    keras.layers.Normalization,
    keras.layers.Discretization,
    keras.layers.TextVectorization,
    keras.layers.StringLookup,
    keras.layers.IntegerLookup,
    IndexLookup,
)


class Adapting:
    """The states that the layers of a model learn, in the order in which they are adapted."""

    def __init__(self, recorded: Sequence[State] | None = None) -> None:
        """Layers restore `recorded`; without it they adapt, and their states are recorded."""
        self._is_recording = recorded is None
        self.states: list[State] = list(recorded or ())
        self._next, self._is_inside = 0, False

    @contextmanager
    def during(self) -> Iterator[None]:
        """Makes layers adapt through this object inside the context."""
        with patched(*((kind, "adapt", self._replacing(vars(kind)["adapt"])) for kind in KINDS)):
            yield

    def _replacing(self, adapt: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(adapt)
        def adapt_once(layer: Any, *args: Any, **options: Any) -> None:
            if self._is_inside:  # a layer that adapts as its base class, or another one, does
                adapt(layer, *args, **options)
                return
            self._is_inside = True
            try:
                if self._is_recording:
                    adapt(layer, *args, **options)
                    self.states.append({"kind": _text(type(layer).__name__), **_learned(layer)})
                else:
                    _take(layer, self._pop(layer))
            finally:
                self._is_inside = False

        return adapt_once

    def _pop(self, layer: Any) -> State:
        number, self._next = self._next, self._next + 1
        state = self.states[number] if number < len(self.states) else None
        if state is None or bytes(state["kind"]).decode() != type(layer).__name__:
            raise DataError(
                f"layer {layer.name} is number {number + 1} to be adapted, but this run adapted another one then: "
                "the model's function must adapt the same layers in every task; if it was changed, type resume=never"
            )
        return state


def not_adapted(model: keras.Model) -> list[str]:
    """Returns the paths of layers that normalize by a mean and a variance but were never adapted."""
    layers, paths = model._flatten_layers(include_self=False), Paths(model)
    own = [
        one for one in layers if isinstance(one, keras.layers.Normalization) and one.built and one.input_mean is None
    ]
    return [paths[one] for one in own if not one.adapt_mean.numpy().any() and (one.adapt_variance.numpy() == 1).all()]


def _learned(layer: Any) -> dict[str, np.ndarray]:
    if isinstance(layer, keras.layers.Normalization):
        shape = [-1 if size is None else size for size in layer._build_input_shape]
        return {"shape": np.array(shape), "mean": layer.adapt_mean.numpy(), "variance": layer.adapt_variance.numpy()}
    if isinstance(layer, keras.layers.Discretization):
        return {"bin_boundaries": np.array(layer.bin_boundaries, np.float64)}
    lookup = _lookup(layer)
    table = lookup.lookup_table
    keys, values = (one.numpy() for one in table.export())
    tokens, numbers = (values, keys) if lookup.invert else (keys, values)
    learned = _pack(tokens[np.argsort(numbers)])
    if lookup.output_mode == "tf_idf":
        learned["idf_weights"] = lookup.idf_weights_const.numpy()
    return learned


def _take(layer: Any, state: State) -> None:
    """Restores the state that a layer learned elsewhere."""
    if isinstance(layer, keras.layers.Normalization):
        if not layer.built:
            layer.build(tuple(None if size < 0 else int(size) for size in state["shape"]))
        layer.adapt_mean.assign(state["mean"])
        layer.adapt_variance.assign(state["variance"])
        layer.finalize_state()
        return
    if isinstance(layer, keras.layers.Discretization):
        layer.bin_boundaries = state["bin_boundaries"].tolist()
        return
    lookup = _lookup(layer)
    lookup.lookup_table = lookup._lookup_table_from_tokens(_unpack(state, lookup.vocabulary_dtype))
    if lookup.output_mode == "tf_idf":
        lookup.idf_weights = tf.Variable(state["idf_weights"], trainable=False)
        lookup.idf_weights_const = lookup.idf_weights.value()
    lookup._record_vocabulary_size()


def _lookup(layer: Any) -> Any:
    return layer._lookup_layer if isinstance(layer, keras.layers.TextVectorization) else layer


def _pack(tokens: np.ndarray) -> dict[str, np.ndarray]:
    """Packs texts as bytes and lengths, because an array of texts would make all as long as the longest."""
    if tokens.dtype.kind != "O":
        return {"tokens": tokens}
    lengths = np.array([len(one) for one in tokens], np.int64)
    return {"tokens": np.frombuffer(b"".join(tokens), np.uint8), "lengths": lengths}


def _unpack(state: State, dtype: str) -> tf.Tensor:
    if "lengths" not in state:
        return tf.constant(state["tokens"], dtype)
    joined, ends = state["tokens"].tobytes(), np.cumsum(state["lengths"])
    return tf.constant(
        [joined[end - length : end] for end, length in zip(ends, state["lengths"], strict=True)], tf.string
    )


def _text(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), np.uint8)
