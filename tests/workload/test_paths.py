"""Variables and layers have unique paths: Keras's own, or with the names of the nested models around them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from trainer.engine.vectors.snapshot import Snapshot
from trainer.plan.tables import SparsePattern
from trainer.task.export import export
from trainer.workload import build, frozen, lookups, step, weights
from trainer.workload.layer_devices import pinned
from trainer.workload.paths import Paths


def tower(name: str, *rest: Callable[[str], keras.Model]) -> keras.Model:
    """[N, 4] -> [N, 4], by a layer named fc1 and, of each of `rest`, a model within."""
    x = keras.Input((4,))
    hidden = layers.Dense(4, name="fc1")(x)
    for make in rest:
        hidden = make("inner")(hidden)
    return keras.Model(x, hidden, name=name)


def towers(*names: str, head: str = "head") -> keras.Model:
    x = keras.Input((4,))
    joined = layers.Concatenate()([tower(name)(x) for name in names])
    return keras.Model(x, layers.Dense(2, name=head)(joined))


def three_levels() -> keras.Model:
    x = keras.Input((4,))
    both = [tower("left", tower)(x), tower("right", tower)(x)]
    return keras.Model(x, layers.Dense(2, name="fc1")(layers.Add()(both)))


def used_twice() -> keras.Model:
    x, shared = keras.Input((4,)), tower("shared")
    return keras.Model(x, layers.Dense(2, name="head")(shared(shared(x))))


class Listed(keras.Model):
    """Models in a list, all of the same name."""

    def __init__(self) -> None:
        super().__init__(name="listed")
        self.towers = [tower("tower") for _ in range(3)]
        self.head = layers.Dense(2, name="head")

    def call(self, x: Any) -> Any:
        return self.head(sum(one(x) for one in self.towers))


class Twins(layers.Layer):
    """Two variables and two layers of the same name."""

    def build(self, shape: Any) -> None:
        self.a, self.b = (self.add_weight(shape=(4, 4), name="w") for _ in range(2))
        self.c, self.d = layers.Dense(4, name="d"), layers.Dense(4, name="d")
        self.c.build((None, 4))
        self.d.build((None, 4))

    def call(self, x: Any) -> Any:
        return self.c(x @ self.a) + self.d(x @ self.b)


def twins() -> keras.Model:
    x = keras.Input((4,))
    return keras.Model(x, layers.Dense(2, name="head")(Twins(name="twins")(x)))


def partly() -> keras.Model:
    """Layers of one name and with other variables, as some have trained before."""
    x, y = keras.Input((4,)), keras.Input((4,))
    inner = keras.Model(y, layers.Dropout(0.1)(layers.PReLU(name="own")(y)), name="inner")
    return keras.Model(x, layers.Dense(2, name="own")(inner(x)))


def listed() -> keras.Model:
    model = Listed()
    model(keras.ops.ones((1, 4)))
    return model


def of(prefix: str, *names: str) -> list[str]:
    return [f"{prefix}{name}/{part}" for name in names or ("",) for part in ("kernel", "bias")]


# The paths of a model's variables, and of its layers with variables.
MODELS: dict[str, tuple[Callable[[], keras.Model], list[str], list[str]]] = {
    "one tower": (lambda: towers("a"), of("", "fc1", "head"), ["fc1", "head"]),
    "two towers": (lambda: towers("a", "b"), of("", "a/fc1", "b/fc1", "head"), ["a/fc1", "b/fc1", "head"]),
    "a name outside too": (lambda: towers("a", head="fc1"), of("", "a/fc1", "fc1"), ["a/fc1", "fc1"]),
    "three levels": (
        three_levels,
        of("", "left/fc1", "left/inner/fc1", "right/fc1", "right/inner/fc1", "fc1"),
        ["left/fc1", "left/inner/fc1", "right/fc1", "right/inner/fc1", "fc1"],
    ),
    "used twice": (used_twice, of("", "fc1", "head"), ["fc1", "head"]),
    "in a list": (
        listed,
        of("", "tower/fc1", "tower_1/fc1", "tower_2/fc1", "listed/head"),
        ["tower/fc1", "tower_1/fc1", "tower_2/fc1", "listed/head"],
    ),
    "in a layer": (
        twins,
        [*of("", "head"), "twins/w", "twins/w_1", *of("", "twins/d", "twins/d_1")],
        ["head", "twins/d", "twins/d_1", "twins"],
    ),
    "no variable twice": (partly, ["own/alpha", "own/kernel", "own/bias"], ["inner/own", "own"]),
}


@pytest.mark.parametrize("name", MODELS)
def test_every_variable_and_layer_has_a_path_of_its_own(name):
    build, variables, with_variables = MODELS[name]
    model = build()
    paths = Paths(model)
    assert sorted(paths.named(model.variables)) == sorted(variables)
    flat = [layer for layer in model._flatten_layers(include_self=False) if layer.path]
    assert len({paths[layer] for layer in flat}) == len(flat)
    own = [one for one in flat if one.variables and not isinstance(one, keras.Model)]
    assert sorted(paths[one] for one in own) == sorted(with_variables)
    other = build()
    assert list(Paths(other).named(other.variables)) == list(paths.named(model.variables))  # in every task


@pytest.mark.parametrize("suffix", [".npz", ".weights.h5", ".keras"])
@pytest.mark.parametrize("name", ["two towers", "three levels", "in a list"])
def test_what_was_exported_is_loaded_into_another_model(name, suffix, tmp_path: Path, snapshot):
    source, model = MODELS[name][0](), MODELS[name][0]()
    draws = np.random.default_rng(1)
    values = {
        path: draws.normal(size=v.shape).astype("float32") for path, v in Paths(source).named(source.variables).items()
    }
    export(Snapshot(1, values, {}, {}), source, tmp_path, formats=["keras", "weights"])
    file = {".npz": "params.npz", ".weights.h5": "model.weights.h5", ".keras": "model.keras"}[suffix]
    if (tmp_path / file).exists():  # a class without get_config has no model.keras
        assert weights.load(model, [str(tmp_path / file)]) == snapshot
        for path, value in step.initial_values(model).items():
            np.testing.assert_array_equal(value, values[path], err_msg=path)


def test_one_of_two_towers_can_be_frozen():
    model = towers("a", "b")
    frozen.freeze(model, [{"match": ["a/*"], "frozen": True}])
    assert [p.path for p in step.parameters_of(model) if p.trainable] == of("", "b/fc1", "head")


def test_one_of_two_towers_can_be_pinned():
    model, scopes = towers("a", "b"), dict[str, str]()

    def call(x: tf.Tensor) -> Any:
        with pinned(model, {"b/fc1": "/cpu:1"}, scopes):
            return model(x)

    graph = tf.function(call, autograph=False).get_concrete_function(tf.TensorSpec([1, 4])).graph
    products = [operation for operation in graph.get_operations() if operation.type == "MatMul"]
    assert [operation.device for operation in products] == ["", "/device:CPU:1", ""]
    assert {"a/fc1", "b/fc1", "head"} <= set(scopes.values()) <= set(step.layers_of(model))


def test_tables_of_two_towers_are_two():
    def embedding(name: str) -> keras.Model:
        ids = keras.Input((), dtype="int64")
        return keras.Model(ids, layers.Embedding(10, 3, name="ids")(ids), name=name)

    with lookups.building([SparsePattern("ids")]):
        ids = keras.Input((), dtype="int64")
        joined = layers.Concatenate()([embedding("user")(ids), embedding("item")(ids)])
        model = keras.Model(ids, layers.Dense(1, name="out")(joined))
    lookups.separate(model)
    called = lookups.recorded(lambda: model(tf.zeros([1], tf.int64)))
    assert [one.path for one in called] == ["user/ids/embeddings", "item/ids/embeddings"]
    assert [table.path for table in lookups.tables_of(model, called)] == [one.path for one in called]


def test_two_models_of_keras_are_told_apart():
    def backbone(name: str) -> keras.Model:
        return keras.applications.MobileNetV2(
            input_shape=(32, 32, 3), alpha=0.35, weights=None, include_top=False, pooling="avg", name=name
        )

    x = keras.Input((32, 32, 3))
    model = keras.Model(x, layers.Dense(2)(layers.Concatenate()([backbone("near")(x), backbone("far")(x)])))
    parameters = [p.path for p in step.parameters_of(model)]
    assert len(set(parameters)) == len(model.weights)
    assert {"near/Conv1/kernel", "far/Conv1/kernel", "near/bn_Conv1/gamma"} <= set(parameters)


NAMELESS = """
import keras
import numpy as np
from keras import layers

outside = layers.Dense(3)


def tower(x):
    inputs = keras.Input(x.shape[1:])
    return keras.Model(inputs, layers.Dense(4)(inputs))(x)


def model(spec):
    ids = keras.Input((2,), dtype="int32")
    hidden = layers.Flatten()(layers.Embedding(9, 4, name="ids")(ids))
    return keras.Model(ids, layers.Dense(1)(outside(tower(tower(hidden)))))


def data():
    x = np.zeros((10, 2), "int32")
    return {"train": (x, x), "evaluate": (x, x)}
"""


def test_a_model_that_is_built_again_has_the_same_paths_but_for_what_lies_on_the_hosts(tmp_path):
    """Its layers have no names of their own; the second one is what is exported."""
    file = str(tmp_path / "nameless.py")
    Path(file).write_text(NAMELESS)
    data = build.open_data_set("data", {}, seed=1, user_file=file)
    sparse, dense, again = (
        build.build_model("model", {}, data, seed=1, user_file=file, sparse=patterns)
        for patterns in ([SparsePattern("ids")], [], [])
    )
    paths = [list(Paths(model).named(model.variables)) for model in (sparse, dense, again)]
    assert paths[0] == [path for path in paths[1] if path != "ids/embeddings"]
    assert paths[1] == paths[2]
    values = {path: np.ones(v.shape, np.float32) for path, v in Paths(sparse).named(sparse.variables).items()}
    export(Snapshot(1, values, {}, {}), dense, tmp_path / "export", formats=["weights"])
    assert np.asarray(dense.layers[-1].kernel).tolist() == [[1.0]] * 3


def test_values_that_no_variable_takes_are_no_export(tmp_path):
    model = towers("a", "b")
    values = {path: np.asarray(v) for path, v in Paths(model).named(model.variables).items()}
    with pytest.raises(ValueError, match="other/kernel"):
        export(Snapshot(1, values | {"other/kernel": np.zeros(1, np.float32)}, {}, {}), model, tmp_path)
