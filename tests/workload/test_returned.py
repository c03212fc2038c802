"""What a function of the data may return, as Keras's users write it."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from trainer.workload.data.errors import DataError
from trainer.workload.data.returned import parts_of
from trainer.workload.data.sources import open_parts

X, Y, V, W = (np.full((count, 2), count, np.float32) for count in (6, 6, 4, 4))
SIX, FOUR = (X, Y), (V, W)
BOTH = (SIX, FOUR)
STREAMS = tuple(tf.data.Dataset.from_tensor_slices(each).batch(2) for each in (SIX, FOUR))


class Sequence(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return X[:2], Y[:2]


# What is returned: the sources to train on and to evaluate on, and how many doubts there are.
TAKEN: dict[str, tuple[Any, Any, Any, int]] = {
    "train and evaluate": ({"train": SIX, "evaluate": FOUR, "classes": 3}, SIX, FOUR, 0),
    "train and test": ({"train": SIX, "test": FOUR}, SIX, FOUR, 0),
    "train and validation": ({"train": SIX, "validation": FOUR}, SIX, FOUR, 0),
    "train and val": ({"val": FOUR, "train": SIX}, SIX, FOUR, 0),
    "what is named wins": ({"train": SIX, "test": SIX, "evaluate": FOUR}, SIX, FOUR, 0),
    "arrays by name": ({"x_train": X, "y_train": Y, "x_test": V, "y_test": W}, SIX, FOUR, 0),
    "capital letters": ({"X_train": X, "y_train": Y, "X_val": V, "y_val": W}, SIX, FOUR, 0),
    "weights": (
        {"x_train": X, "y_train": Y, "sample_weight_train": X, "x_test": V, "y_test": W, "w_test": V},
        (X, Y, X),
        (V, W, V),
        0,
    ),
    "load_data": (BOTH, SIX, FOUR, 0),
    "load_data, as lists": ([[X, Y], [V, W]], [X, Y], [V, W], 0),
    "two streams": (STREAMS, *STREAMS, 0),
    "train alone": ({"train": SIX}, SIX, SIX, 1),
    "a pair": (SIX, SIX, SIX, 1),
    "a pair with weights": ((X, Y, X), (X, Y, X), (X, Y, X), 1),
    "a pair with several inputs": (({"a": X, "b": X}, Y), ({"a": X, "b": X}, Y), ({"a": X, "b": X}, Y), 1),
    "a stream": (STREAMS[0], STREAMS[0], STREAMS[0], 1),
    "arrays to train on": ({"x_train": X, "y_train": Y}, SIX, SIX, 1),
}
REFUSED: dict[str, Any] = {
    "nothing": None,
    "an array": X,
    "two that may be meant": {"train": SIX, "validation": FOUR, "test": FOUR},
    "an unknown name": {"train": SIX, "holdout": FOUR},
    "no train": {"evaluate": FOUR},
    "features alone": {"age": X, "size": X},
    "inputs and outputs, or two parts": ((X, X), (Y, Y)),
    "three parts": (SIX, FOUR, FOUR),
    "four": (X, Y, V, W),
    "other lengths": (X, W),
    "lists of numbers": ([1, 2], [3, 4]),
    "an iterator": iter([SIX]),
}


def is_same(one: Any, other: Any) -> bool:
    return all(a is b for a, b in zip(tf.nest.flatten(one), tf.nest.flatten(other), strict=True))


@pytest.mark.parametrize("case", TAKEN)
def test_what_is_unambiguous_is_taken(case):
    returned, train, evaluate, doubts = TAKEN[case]
    parts = parts_of(returned, "mine")
    assert is_same(parts.train, train)
    assert is_same(parts.evaluate, evaluate)
    assert len(parts.doubts) == doubts


@pytest.mark.parametrize("case", REFUSED)
def test_what_may_mean_several_things_is_refused(case):
    with pytest.raises(DataError, match=r"mine: its function returned .*\"train\": .*\"evaluate\": "):
        parts_of(REFUSED[case], "mine")


@pytest.mark.parametrize("returned", [SIX, STREAMS[0], Sequence(), BOTH], ids=lambda one: type(one).__name__)
def test_it_becomes_a_data_set(returned):
    data = open_parts(returned, "mine", seed=0)
    assert data.spec.features.shape == (2,)
    assert len(data.doubts) == (returned is not BOTH)
