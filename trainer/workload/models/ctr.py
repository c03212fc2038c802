"""A model of click-through rates: an embedding for each field of ids, and a multilayer perceptron."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import keras


def ctr(spec: Any, *, width: int = 16, hidden: Sequence[int] = (256, 128), normalize: bool = False) -> keras.Model:
    """Builds embeddings of all ids beside the numbers - Dense, relu for each of `hidden` - Dense.

    Args:
        spec: features {name: [n]}, numbers and ids: {numbers, ids} of `data=clicks` and `data=criteo`, or one for each
            column of `data=csv` with `data.options.ids`.
        width: of an embedding. Layers are named field0, field1, ..., and field-NAME where a feature is one id.
        hidden: units of each hidden layer.
        normalize: whether the numbers pass a BatchNormalization first.

    Returns:
        A model from the features to logits [N, 1] of a click.
    """
    import keras

    _check(spec)
    inputs = {name: keras.Input(one.shape, dtype=one.dtype, name=name) for name, one in spec.features.items()}
    numbers = [_as_floats(inputs[name]) for name, one in spec.features.items() if one.ids is None]
    if normalize and numbers:
        numbers = [keras.layers.BatchNormalization(name="normalize")(keras.layers.Concatenate(name="join")(numbers))]
    embedded: list[Any] = []
    for name, one in spec.features.items():
        for place in range(one.shape[0] if one.ids else 0):
            label = f"field-{name.replace('/', '-')}" if one.shape == (1,) else f"field{len(embedded)}"
            embedded.append(keras.layers.Embedding(one.ids, width, name=label)(inputs[name][:, place]))
    x = keras.layers.Concatenate(name="concatenate")([*numbers, *embedded])
    for number, units in enumerate(hidden):
        x = keras.layers.Dense(units, activation="relu", name=f"dense{number}")(x)
    return keras.Model(inputs, keras.layers.Dense(1, name="logit")(x), name="ctr")


def _check(spec: Any) -> None:
    """Raises ValueError unless features are numbers and ids, in a dict."""
    features = spec.features if isinstance(spec.features, dict) else {}
    if not any(one.ids for one in features.values()):
        hint = "type data=clicks, or data=csv 'data.options.ids={COLUMN: vocabulary}'"
        raise ValueError(f"model ctr needs features that are known to be ids; {hint}")
    for name, one in features.items():
        if one.dtype == "string":
            raise ValueError(f"model ctr takes no text; type 'data.options.ids.{name}=vocabulary'")


def _as_floats(numbers: Any) -> Any:
    import keras

    return numbers if numbers.dtype == "float32" else keras.ops.cast(numbers, "float32")
