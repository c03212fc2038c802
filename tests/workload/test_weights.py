"""Values for a model's variables from files: what matches by name and shape is loaded, and the rest is named."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest
from keras import layers

from trainer.faults.problems import ConfigError
from trainer.workload import weights
from trainer.workload.data import DataError


def backbone() -> keras.Sequential:
    parts = [keras.Input((6,)), layers.Dense(8, name="wide"), layers.BatchNormalization(name="norm")]
    return keras.Sequential(parts, name="backbone")


def whole(*, classes: int = 2) -> keras.Model:
    """The backbone's layers directly in the model."""
    x = keras.Input((6,))
    normal = layers.Normalization(name="inputs")
    hidden = layers.BatchNormalization(name="norm")(layers.Dense(8, name="wide")(normal(x)))
    return keras.Model(x, layers.Dense(classes, name="head")(layers.Dropout(0.5)(hidden)))


def nested(*, classes: int = 2) -> keras.Model:
    x = keras.Input((6,))
    return keras.Model(x, layers.Dense(classes, name="head")(backbone()(x)))


def with_values(model: keras.Model, seed: int = 3) -> keras.Model:
    random = np.random.default_rng(seed)
    for variable in model.variables:
        variable.assign(random.uniform(1, 9, variable.shape).astype(variable.dtype))
    for layer in model.layers:
        if isinstance(layer, layers.Normalization):
            layer.finalize_state()
    return model


def values(model: keras.Model) -> dict[str, np.ndarray]:
    return {v.path: v.numpy() for v in model.variables if "seed" not in v.path}


def saved(model: keras.Model, folder: Path, suffix: str) -> str:
    path = folder / f"saved{suffix}"
    if suffix == ".npz":
        np.savez(path, **values(model))
    elif suffix == ".keras":
        model.save(path)
    else:
        model.save_weights(path)
    return str(path)


SUFFIXES = [".npz", ".keras", ".weights.h5"]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_all_values_of_the_same_model_are_loaded(suffix, tmp_path, snapshot):
    source, model = with_values(whole()), whole()
    text = weights.load(model, [saved(source, tmp_path, suffix)])
    assert text == snapshot
    for path, value in values(source).items():
        np.testing.assert_array_equal(values(model)[path], value, err_msg=path)
    examples = np.ones((3, 6), np.float32)  # what a Normalization computed of its variables follows them
    np.testing.assert_array_equal(model(examples), source(examples))


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_head_of_another_size_keeps_its_values_and_is_named(suffix, tmp_path):
    source, model = with_values(whole()), whole(classes=5)
    before = values(model)
    text = weights.load(model, [saved(source, tmp_path, suffix)])
    assert "9 variables of 11; other shapes: head/kernel (there [8, 2], here [8, 5]), head/bias (there [2]" in text
    np.testing.assert_array_equal(values(model)["head/kernel"], before["head/kernel"])
    np.testing.assert_array_equal(values(model)["wide/kernel"], values(source)["wide/kernel"])


@pytest.mark.parametrize("suffix", [".keras", ".weights.h5"])
def test_layers_are_found_by_their_names_inside_of_others(suffix, tmp_path, snapshot):
    source, model = with_values(whole()), nested(classes=3)
    text = weights.load(model, [saved(source, tmp_path, suffix)])
    assert "6 variables of 8; other shapes: head/kernel " in text
    assert text == snapshot  # those of the head and of the Normalization
    np.testing.assert_array_equal(values(model)["backbone/norm/gamma"], values(source)["norm/gamma"])


def test_names_that_keras_numbers_do_not_matter_for_the_same_model(tmp_path):
    def numbered() -> keras.Model:
        return keras.Sequential([keras.Input((4,)), layers.Dense(4), layers.Dense(4)])

    source, model = with_values(numbered()), numbered()
    assert source.layers[1].name != model.layers[0].name
    weights.load(model, [saved(source, tmp_path, ".weights.h5")])
    for one, other in zip(model.get_weights(), source.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_model_with_lora_takes_the_values_of_one_without(suffix, tmp_path):
    source, model = with_values(whole()), whole()
    model.get_layer("wide").enable_lora(2)
    text = weights.load(model, [saved(source, tmp_path, suffix)])
    assert f"{13 if suffix == '.npz' else 11}" in text
    examples = np.ones((3, 6), np.float32)
    np.testing.assert_array_equal(model(examples), source(examples))


def test_a_checkpoint_gives_its_averaged_parameters_its_state_and_its_frozen_weights(tmp_path, snapshot):
    model = nested()
    ones = {path: np.ones_like(value) for path, value in values(model).items()}
    named = {f"parameters/{path}": value for path, value in ones.items() if path.startswith("head")}
    named |= {"slots/ema/head/bias": np.float32([7, 7]), "slots/momentum/head/bias": np.float32([8, 8])}
    named["state/backbone/norm/moving_mean"] = 2 * ones["backbone/norm/moving_mean"]
    np.savez(tmp_path / "tensors.npz", **named)
    np.savez(
        tmp_path / "frozen.npz",
        **{"frozen/backbone/wide/kernel": 3 * ones["backbone/wide/kernel"], "adapted/0/mean": np.ones(3)},
    )
    text = weights.load(model, [str(tmp_path / "tensors.npz"), str(tmp_path / "frozen.npz")])
    assert text == snapshot
    found = values(model)
    assert found["head/bias"].tolist() == [7, 7]
    assert found["backbone/norm/moving_mean"].tolist() == [2] * 8
    assert (found["backbone/wide/kernel"] == 3).all()


def test_a_file_of_which_nothing_matches_is_refused(tmp_path, raises):
    np.savez(tmp_path / "other.npz", **{"conv/kernel": np.ones(3), "head/bias": np.ones(9)})
    with raises(ConfigError):
        weights.load(nested(), [str(tmp_path / "other.npz")])


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_damaged_file_is_named(suffix, tmp_path, raises):
    path = tmp_path / f"damaged{suffix}"
    path.write_bytes(b"PK\3\4 this is no archive")
    with raises(DataError):
        weights.load(nested(), [str(path)])
