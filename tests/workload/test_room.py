"""A model that does not fit into memory is refused before anything is allocated."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf

from trainer.workload import build
from trainer.workload.build import within_memory

TOO_LARGE = {
    "one variable": lambda: keras.layers.Dense(4_000_000_000)(keras.Input((64,))),
    "an embedding": lambda: keras.layers.Embedding(4_000_000_000, 64)(keras.Input((3,), dtype="int64")),
    "a recurrent layer": lambda: keras.layers.LSTM(2_000_000)(keras.Input((3, 8))),
    "a convolution": lambda: keras.layers.Conv2D(2_000_000_000, 3)(keras.Input((8, 8, 3))),
    "a layer within a model": lambda: keras.Sequential([keras.Input((64,)), keras.layers.Dense(4_000_000_000)]),
}


@pytest.mark.parametrize("kind", TOO_LARGE)
def test_a_model_larger_than_memory_is_refused_with_its_size(monkeypatch: pytest.MonkeyPatch, kind: str):
    monkeypatch.setattr(build, "memory_bytes", lambda: 2**30)
    with within_memory(), pytest.raises(ValueError, match=r"\d+\.\d\d GiB.* 1\.00 GiB"):
        TOO_LARGE[kind]()
    keras.layers.Dense(2)(keras.Input((3,)))


def test_the_sum_of_all_variables_counts(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(build, "memory_bytes", lambda: 4 * 30)
    with within_memory():
        hidden = keras.layers.Dense(5)(keras.Input((3,)))
        with pytest.raises(ValueError, match="layer"):
            keras.layers.Dense(5)(hidden)


@pytest.mark.parametrize("shape", [(3, 4), [3, 4], tf.TensorShape([3, 4]), np.array([3, 4]), (), None])
def test_shapes_of_variables_are_of_any_type_that_keras_takes(shape: object):
    with within_memory():
        variable = keras.layers.Layer().add_weight(shape)
    assert variable.shape in ((3, 4), ())
