"""Layers adapt to the data once; tasks give them what they have learned, and read nothing."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from trainer.workload import frozen
from trainer.workload.adapting import Adapting, not_adapted
from trainer.workload.data import DataError
from trainer.workload.data.arrays import open_arrays
from trainer.workload.data.examples import Batch, Stream, StreamContext
from trainer.workload.data.pipeline import feature_batches

pytestmark = pytest.mark.slow

RANDOM = np.random.default_rng(1)
COLUMNS = {
    "age": RANDOM.normal(40, 10, (300, 1)).astype("float32"),
    "city": RANDOM.integers(0, 30, (300, 1)),
    "text": np.array([[f"w{i % 7} é{i % 3} {'b' * (i % 11)}"] for i in range(300)]),
}
LAYERS = {
    "normalization": (layers.Normalization, "age"),
    "discretization": (functools.partial(layers.Discretization, num_bins=6), "age"),
    "integers": (functools.partial(layers.IntegerLookup, num_oov_indices=2), "city"),
    "texts": (layers.StringLookup, "text"),
    "inverse": (functools.partial(layers.StringLookup, invert=True), "text"),
    "counts": (functools.partial(layers.TextVectorization, output_mode="count", max_tokens=9), "text"),
    "tokens": (layers.TextVectorization, "text"),
    "tf-idf": (
        functools.partial(layers.TextVectorization, output_mode="tf_idf", max_tokens=40, pad_to_max_tokens=True),
        "text",
    ),
}


def dataset(columns: dict[str, np.ndarray] = COLUMNS) -> tf.data.Dataset:
    return feature_batches(*_opened(columns), seed=1)


def _opened(columns: dict[str, np.ndarray]) -> Any:
    examples, spec, _ = open_arrays((columns,), "test")
    return examples, spec.features


def unreadable() -> tf.data.Dataset:
    """What fails whoever reads a batch."""

    def fail() -> Iterator[Any]:
        raise AssertionError("the data was read")
        yield

    specs = {name: tf.TensorSpec([None, 1], dataset().element_spec[name].dtype) for name in COLUMNS}
    return tf.data.Dataset.from_generator(fail, output_signature=specs)


def adapt(make: Any, column: str, train: tf.data.Dataset, adapting: Adapting) -> Any:
    layer = make()
    with adapting.during():
        layer.adapt(train.map(lambda batch: batch[column]))
    return layer


@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_takes_what_another_has_learned(kind, tmp_path):
    make, column = LAYERS[kind]
    recording = Adapting()
    first = adapt(make, column, dataset(), recording)
    frozen.write(tmp_path / "frozen.npz", frozen.Frozen({}, recording.states))
    taking = Adapting(frozen.read(tmp_path / "frozen.npz").adapted)
    second = adapt(make, column, unreadable(), taking)
    plain = make()
    plain.adapt(COLUMNS[column] if kind != "normalization" else dataset().map(lambda batch: batch[column]))
    inputs = np.array([[1], [2], [40]]) if kind in ("inverse", "discretization") else COLUMNS[column][:50]
    expected = np.asarray(plain(inputs))
    np.testing.assert_array_equal(np.asarray(first(inputs)), expected)
    np.testing.assert_array_equal(np.asarray(second(inputs)), expected)
    assert frozen.describe({}, taking.states) == frozen.describe({}, recording.states)
    if hasattr(plain, "get_vocabulary"):
        assert second.get_vocabulary() == plain.get_vocabulary()
        assert second.vocabulary_size() == plain.vocabulary_size()


def test_an_adapted_layer_is_saved_with_its_model(tmp_path):
    recording = Adapting()
    adapt(layers.TextVectorization, "text", dataset(), recording)
    layer = adapt(layers.TextVectorization, "text", unreadable(), Adapting(recording.states))
    inputs = keras.Input((1,), dtype="string")
    keras.Model(inputs, layer(inputs)).save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    texts = tf.constant(COLUMNS["text"][:5])
    np.testing.assert_array_equal(np.asarray(loaded(texts)), np.asarray(layer(texts)))


def test_a_feature_space_adapts_its_layers():
    def space() -> Any:
        features = {"age": "float_normalized", "city": keras.utils.FeatureSpace.integer_categorical()}
        return keras.utils.FeatureSpace(features, output_mode="concat")

    columns = {name: COLUMNS[name] for name in ("age", "city")}
    recording, spaces = Adapting(), [space(), space()]
    with recording.during():
        spaces[0].adapt(dataset(columns))
    with Adapting(recording.states).during():
        spaces[1].adapt(dataset(columns))
    assert len(recording.states) == 2
    rows = {name: values[:9] for name, values in columns.items()}
    np.testing.assert_array_equal(np.asarray(spaces[1](rows)), np.asarray(spaces[0](rows)))


def test_a_layer_that_was_not_adapted_before_is_refused(raises):
    recording = Adapting()
    adapt(layers.Normalization, "age", dataset(), recording)
    taking = Adapting(recording.states)
    with raises(DataError):
        adapt(lambda: layers.StringLookup(name="looks"), "text", dataset(), taking)


def test_a_normalization_that_has_adapted_to_nothing_is_found():
    x = keras.Input((3,))
    given, missing, adapted = (
        layers.Normalization(mean=0.0, variance=1.0),
        layers.Normalization(),
        layers.Normalization(),
    )
    adapted.adapt(np.random.default_rng(0).normal(size=(9, 3)))
    assert not_adapted(keras.Model(x, adapted(missing(given(x))))) == [missing.path]


def test_layers_adapt_as_keras_has_it_afterwards():
    before = layers.Normalization.adapt
    with Adapting().during():
        assert layers.Normalization.adapt is not before
    assert layers.Normalization.adapt is before


def test_the_features_of_a_stream_are_those_of_one_epoch():
    def open_batches(context: StreamContext) -> Iterator[Batch]:
        assert (context.replica, context.replicas, context.epoch) == (0, 1, 0)
        yield from (Batch(np.full((2, 3), number, np.float32), np.zeros(2)) for number in range(4))

    stream = Stream(open_batches, Batch(None), "test")
    spec = open_arrays((np.zeros((2, 3), np.float32),), "test").spec
    layer = layers.Normalization()
    layer.adapt(feature_batches(stream, spec.features, seed=1))
    np.testing.assert_allclose(np.ravel(layer.mean), [1.5, 1.5, 1.5])
