"""A model of click-through rates: an embedding for each field of ids, and a multilayer perceptron."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import keras


def ctr(spec: Any, *, rows: int = 10_000, width: int = 16, hidden: Sequence[int] = (256, 128)) -> keras.Model:
    """Embeddings of all ids beside the numbers - Dense, relu for each of `hidden` - Dense.

    Args:
        spec: features {numbers: [numbers], ids: [fields]}, as `data=clicks` has them.
        rows: ids of each field.
        width: of an embedding. The layers are named field0, field1, ..., for `placement.sparse=[field*]`.
        hidden: units of each hidden layer.

    Returns:
        A model from the features to logits [N, 1] of a click.
    """
    import keras

    if not isinstance(spec.features, dict) or set(spec.features) != {"numbers", "ids"}:
        raise ValueError("model ctr takes features {numbers, ids}; type data=clicks, or write a model of your own")
    sizes = {name: one.shape[0] for name, one in spec.features.items()}
    numbers = keras.Input((sizes["numbers"],), name="numbers")
    ids = keras.Input((sizes["ids"],), dtype="int64", name="ids")
    embedded = [keras.layers.Embedding(rows, width, name=f"field{n}")(ids[:, n]) for n in range(sizes["ids"])]
    x = keras.layers.Concatenate(name="concatenate")([numbers, *embedded])
    for number, units in enumerate(hidden):
        x = keras.layers.Dense(units, activation="relu", name=f"dense{number}")(x)
    return keras.Model({"numbers": numbers, "ids": ids}, keras.layers.Dense(1, name="logit")(x), name="ctr")
