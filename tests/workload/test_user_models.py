"""What is found out about a user's model before the start: its precision, its inputs, its warnings, and its layers."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

from trainer.config import user_file
from trainer.config.schema import ModelConfig
from trainer.plan.description import ModelProbe
from trainer.workload import describe, eager, inputs

BAD_DATA, CONFIG = 65, 2
HEAD = """\
import warnings
import keras
import numpy as np
import tensorflow as tf
from keras import layers, ops

X = np.random.default_rng(0).normal(size=(64, 4)).astype("float32")
Y = X[:, :1]


def data():
    return {"train": (X, Y), "evaluate": (X[:16], Y[:16])}


def compiled(inputs, outputs):
    model = keras.Model(inputs, outputs)
    model.compile("sgd", "mse")
    return model


"""


@pytest.fixture(autouse=True)
def _forget_the_file() -> Iterator[None]:
    before = list(sys.path)
    yield
    sys.path[:] = before
    user_file._load.cache_clear()


def answer(folder: Path, text: str, precision: str = "float32") -> dict[str, Any]:
    (folder / "mine.py").write_text(HEAD + text)
    named, data = asdict(ModelConfig("model")), {"name": "data", "options": {}}
    return describe.answer(ModelProbe(named, data, str(folder / "mine.py"), 0, precision))


def outcome_of(result: dict[str, Any]) -> tuple[int, str]:
    """The exit code, and the words of a refusal."""
    if problem := result.get("problem"):
        return CONFIG, " ".join(problem.values())
    return (result["exit_code"], result["failure"]) if "failure" in result else (0, "")


def half(body: str) -> str:
    return f"def model():\n    x = keras.Input((4,))\n{body}\n    return compiled(x, layers.Dense(1)(x))"


IN_FLOAT16 = (
    "def model():\n    x = keras.Input((4,))\n"
    "    return compiled(x, layers.Dense(1, dtype='float32')(layers.Dense(3, dtype={}, name='half')(x)))"
)
# The end of a file, train.precision, the exit code, and words of the refusal: a key, a value or a name.
PRECISIONS: dict[str, tuple[str, str, int, list[str]]] = {
    "policy in the function": (
        half("    keras.config.set_dtype_policy('mixed_float16')"),
        "float32",
        CONFIG,
        ["train.precision", "train.precision=mixed_float16"],
    ),
    "that policy in force": (half("    keras.config.set_dtype_policy('mixed_float16')"), "mixed_float16", 0, []),
    "policy as an object": (
        half("    keras.config.set_dtype_policy(keras.DTypePolicy('mixed_bfloat16'))"),
        "mixed_float16",
        CONFIG,
        ["train.precision=mixed_bfloat16"],
    ),
    "policy of the data": (
        half("") + "\nkeras.config.set_dtype_policy('mixed_float16')",
        "mixed_bfloat16",
        CONFIG,
        ["train.precision=mixed_float16"],
    ),
    "policy taken back": (
        "def model():\n    x = keras.Input((4,))\n"
        "    keras.config.set_dtype_policy('mixed_float16')\n"
        "    y = layers.Dense(3, name='half')(x)\n"
        "    keras.config.set_dtype_policy('float32')\n"
        "    return compiled(x, layers.Dense(1)(y))",
        "float32",
        CONFIG,
        ["train.precision=mixed_float16", "half"],
    ),
    "floatx": (half("    keras.config.set_floatx('float64')"), "float32", CONFIG, ["train.precision", "float64"]),
    "floatx of the file": ("keras.config.set_floatx('float16')\n" + half(""), "float32", CONFIG, ["float16"]),
    "a policy that is not offered": (
        half("    keras.config.set_dtype_policy('float64')"),
        "float32",
        CONFIG,
        ["float64"],
    ),
    "float16 in a layer": (
        IN_FLOAT16.format("'mixed_float16'"),
        "float32",
        CONFIG,
        ["layer half", "train.precision=mixed_float16"],
    ),
    "float16 beside bfloat16": (
        IN_FLOAT16.format("keras.DTypePolicy('mixed_float16')"),
        "mixed_bfloat16",
        CONFIG,
        ["layer half"],
    ),
    "float16 with a loss scale": (IN_FLOAT16.format("'mixed_float16'"), "mixed_float16", 0, []),
    "bfloat16 needs no loss scale": (IN_FLOAT16.format("'mixed_bfloat16'"), "float32", 0, []),
    "float16 inside of a layer": (
        "class Outer(layers.Layer):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.inner = layers.Dense(3, dtype='mixed_float16', name='half')\n"
        "    def call(self, x):\n        return ops.cast(self.inner(x), 'float32')\n"
        "def model():\n    x = keras.Input((4,))\n    return compiled(x, layers.Dense(1)(Outer()(x)))",
        "float32",
        CONFIG,
        ["half", "train.precision=mixed_float16"],
    ),
}


@pytest.mark.parametrize("case", PRECISIONS)
def test_a_model_computes_in_the_precision_of_the_run(tmp_path, case):
    text, precision, code, words = PRECISIONS[case]
    found, said = outcome_of(answer(tmp_path, text, precision))
    assert (found, [word for word in words if word not in said]) == (code, []), said
    assert (keras.config.dtype_policy().name, keras.config.floatx()) == ("float32", "float32")


WARNINGS = {
    "python": ("warnings.warn('half of the rows')\n" + half(""), ["mine.py, line 21: UserWarning: half of the rows"]),
    "numpy, in a loop": (
        half("    for _ in range(3):\n        np.log(-np.ones(2))"),
        ["mine.py, line 24: RuntimeWarning: invalid value encountered in log"],
    ),
    "keras": ("def model():\n    return compiled(x := keras.Input((4,)), layers.Dense(1, input_shape=(4,))(x))", None),
    "old names of libraries": (half("    warnings.warn('old', DeprecationWarning)"), []),
    "hidden by the user": ("warnings.filterwarnings('ignore')\nwarnings.warn('half')\n" + half(""), []),
    "none": (half(""), []),
}


@pytest.mark.parametrize("case", WARNINGS)
def test_the_warnings_of_a_users_code_are_told_once(tmp_path, case):
    text, expected = WARNINGS[case]
    told = answer(tmp_path, text)["description"]["warnings"]
    if expected is None:
        assert len(told) == 1
        assert "mine.py, line 22" in told[0]
        assert "input_shape" in told[0]
    else:
        assert told == expected


MASKED = "layers.Dense(1)(layers.Flatten()(layers.Masking()(layers.Reshape((2, 2))(x))))"


def test_a_warning_of_layers_that_comes_again_when_they_are_called_is_told_once(tmp_path):
    text = f"def model():\n    x = keras.Input((4,))\n    return compiled(x, {MASKED})"
    (told,) = answer(tmp_path, text)["description"]["warnings"]
    assert told.startswith("mine.py, line 23: UserWarning")


OWN_METHODS = {
    "fit": "def fit(self, *args):\n        return None",
    "predict_step": "def predict_step(self, data):\n        return 2 * self(data)",
}


@pytest.mark.parametrize("method", OWN_METHODS)
def test_methods_of_a_model_that_a_run_does_without_are_named(tmp_path, method):
    text = f"class Own(keras.Model):\n    {OWN_METHODS[method]}\n" + half("").replace("compiled", "own")
    text += "\ndef own(*args):\n    model = Own(*args)\n    model.compile('sgd', 'mse')\n    return model"
    ((doubt, _),) = answer(tmp_path, text)["description"]["doubts"]
    assert f"own {method}," in doubt


def test_code_that_needs_values_of_tensors_is_told_that_a_step_is_a_graph(tmp_path):
    text = "def loss(y, outputs):\n    return ops.mean(ops.abs(y - outputs), -1) * float(outputs.numpy().max())\n"
    code, said = outcome_of(answer(tmp_path, text + half("")))
    assert (code, "mine.py, line 22" in said, "run_eagerly" in said) == (BAD_DATA, True, True), said


LABELS = "np.ones((64, 1))"
# The labels, the outputs of the model, and the exit code; the names of the outputs are told.
NAMES: dict[str, tuple[str, str, int]] = {
    "the same": (f"{{'b': {LABELS}, 'a': {LABELS}}}", "[a, b]", 0),
    "others": (f"{{'bb': {LABELS}, 'aa': {LABELS}}}", "[a, b]", CONFIG),
    "others, by name": (f"{{'bb': {LABELS}, 'aa': {LABELS}}}", "{'a': a, 'b': b}", CONFIG),
    "one more": (f"{{'b': {LABELS}, 'a': {LABELS}, 'c': {LABELS}}}", "[a, b]", CONFIG),
}


@pytest.mark.parametrize("case", NAMES)
def test_labels_with_other_names_than_the_outputs_are_refused_with_their_names(tmp_path, case):
    labels, outputs, code = NAMES[case]
    text = (
        f"def data():\n    return {{part: (X, {labels}) for part in ('train', 'evaluate')}}\n"
        "def model():\n    x = keras.Input((4,))\n    a, b = (layers.Dense(1, name=name)(x) for name in ('a', 'b'))\n"
        f"    return compiled(x, {outputs})"
    )
    found, said = outcome_of(answer(tmp_path, text))
    assert (found, "a, b" in said) == (code, code != 0), said


def weighted(structure: str) -> str:
    """A model of `zeta` and of a hundredth of `mid`, whose inputs have a structure."""
    return (
        f"def model():\n    zeta, mid = (keras.Input((2,), name=name) for name in ('zeta', 'mid'))\n"
        f"    return compiled({structure}, layers.Dense(1)(zeta + mid * 0.01))"
    )


A, B, C = "np.ones((64, 2))", "np.ones((64, 2)) * 2", "np.ones((64, 2)) * 3"
BY_NAME, LISTED = "{'zeta': zeta, 'mid': mid}", "[zeta, mid]"
# The structure of the inputs, the features, the exit code, and the name of a feature that is told.
FEATURES: dict[str, tuple[str, str, int, str]] = {
    "one more": (BY_NAME, f"{{'alpha': {A}, 'mid': {B}, 'zeta': {C}}}", 0, "feature alpha"),
    "one more, for a list": (LISTED, f"{{'alpha': {A}, 'mid': {B}, 'zeta': {C}}}", 0, "feature alpha"),
    "one more at the end": (BY_NAME, f"{{'zz': {A}, 'mid': {B}, 'zeta': {C}}}", 0, "feature zz"),
    "in another order": (BY_NAME, f"{{'mid': {B}, 'zeta': {C}}}", 0, ""),
    "in another order, for a list": (LISTED, f"{{'zeta': {C}, 'mid': {B}}}", 0, ""),
    "by place": (LISTED, f"({C}, {B})", 0, ""),
    "another name": (BY_NAME, f"{{'alpha': {A}, 'mid': {B}}}", CONFIG, "zeta"),
    "another name, for a list": (LISTED, f"{{'alpha': {A}, 'mid': {B}}}", CONFIG, "zeta"),
    "too few": (BY_NAME, f"{{'zeta': {C}}}", CONFIG, "mid"),
    "nested": (f"{{'of': {BY_NAME}}}", f"{{'of': {{'alpha': {A}, 'mid': {B}, 'zeta': {C}}}}}", 0, "feature of/alpha"),
    "nested, too few": (f"{{'of': {BY_NAME}}}", f"{{'of': {{'mid': {B}}}}}", CONFIG, "of/zeta"),
}


@pytest.mark.parametrize("case", FEATURES)
def test_features_are_matched_with_inputs_by_their_names(tmp_path, case):
    structure, features, code, name = FEATURES[case]
    text = f"def data():\n    return {{part: ({features}, Y) for part in ('train', 'evaluate')}}\n" + weighted(
        structure
    )
    result = answer(tmp_path, text)
    found, said = outcome_of(result)
    told = said or " ".join(doubt for doubt, _ in result["description"]["doubts"])
    assert (found, name in told, told == "") == (code, True, name == ""), said
    if code == 0:
        made = user_file.load(tmp_path / "mine.py")
        model = made.model()
        model.set_weights([np.ones((2, 1)), np.zeros(1)])
        outputs = model(inputs.chosen(model, made.data()["train"][0]))
        assert np.allclose(outputs, 2 * (3 + 0.02))


@pytest.mark.parametrize(("features", "code"), [("{'alpha': X[:, 2:], 'zeta': X[:, :2]}", 0), ("{'alpha': X}", CONFIG)])
def test_one_input_takes_the_feature_of_its_name(tmp_path, features, code):
    text = (
        f"def data():\n    return {{part: ({features}, Y) for part in ('train', 'evaluate')}}\n"
        "def model():\n    zeta = keras.Input((2,), name='zeta')\n    return compiled(zeta, layers.Dense(1)(zeta))"
    )
    result = answer(tmp_path, text)
    assert outcome_of(result)[0] == code
    if code == 0:
        assert "feature alpha" in result["description"]["doubts"][0][0]
        assert result["description"]["warnings"] == []


def test_a_model_inside_of_another_must_not_guess_either(tmp_path):
    text = (
        "class Net(keras.Model):\n    def __init__(self):\n        super().__init__()\n"
        "        each = {name: keras.Input((2,), name=name) for name in 'bc'}\n"
        "        self.net = keras.Model(each, layers.Dense(1)(layers.Concatenate()([each['b'], each['c']])))\n"
        "    def call(self, x):\n        return self.net({'a': x[:, :2], 'b': x[:, 1:3], 'c': x[:, 2:]})\n"
        "def model():\n    made = Net()\n    made.compile('sgd', 'mse')\n    return made"
    )
    code, said = outcome_of(answer(tmp_path, text))
    assert code == BAD_DATA
    assert "in call" in said
    assert "'a'" in said


def test_a_model_that_says_it_is_built_is_built(tmp_path):
    text = (
        "class Net(keras.Model):\n    def __init__(self):\n        super().__init__()\n"
        "        self.net = keras.Sequential([layers.Dense(3, name='a'), layers.Dense(1, name='b')], name='net')\n"
        "    def call(self, x):\n        return self.net(x)\n"
        "def model():\n    made = Net()\n    made.compile('sgd', 'mse')\n    made.build((None, 4))\n    return made"
    )
    paths = [one["path"] for one in answer(tmp_path, text)["description"]["parameters"]]
    assert [path.split("/", 1)[1] for path in paths] == [
        f"net/{layer}/{name}" for layer in "ab" for name in ("kernel", "bias")
    ]


WORDS = """\
def data():
    words = np.array(["cat", "dog", "cow", "emu"] * 16)
    return {part: (words, (words == "dog").astype("float32")[:, None]) for part in ("train", "evaluate")}

KEYS = tf.constant(["cat", "dog", "cow"])
FILL = tf.lookup.KeyValueTensorInitializer(KEYS, tf.range(3, dtype=tf.int64))
TABLE = tf.lookup.StaticHashTable(FILL, 4)
BUCKETS = tf.lookup.StaticVocabularyTable(FILL, 2)
HELD = {"animals": [TABLE]}
CHANGED = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, 4)
CHANGED.insert(KEYS, tf.range(3, dtype=tf.int64))
DENSE = tf.lookup.experimental.DenseHashTable(tf.string, tf.int64, 4, "", "$")
DENSE.insert(KEYS, tf.range(3, dtype=tf.int64))
VECTORS = tf.lookup.experimental.MutableHashTable(tf.string, tf.float32, tf.zeros([5]))
VECTORS.insert(KEYS, tf.eye(3, 5))
NOT_TRACKED = keras.Variable(np.ones(5), name="outside")
VARIABLE = tf.Variable(tf.ones([5]))
GENERATOR = tf.random.Generator.from_seed(1)
SEEDS = keras.random.SeedGenerator(1)

class Looks(layers.Layer):
    def call(self, x, training=False):
        return function(x, training)
    def compute_output_shape(self, shape):
        return (*shape, 5)

def ids(x):
    return tf.one_hot(TABLE.lookup(x), 5)

@tf.function
def traced(x):
    return ids(x) if tf.size(x) > 1 else ids(x) * 2.0

def model():
    x = keras.Input((), dtype="string")
    return compiled(x, layers.Dense(1)(Looks(name="looks")(x)))

def function(x, training):
    return {}
"""
# What a layer returns; what it uses that a graph cannot, or nothing.
RESOURCES = {
    "a table": ("ids(x)", ""),
    "spare buckets": ("tf.one_hot(BUCKETS.lookup(x), 5)", ""),
    "a table in a dict": ("tf.one_hot(HELD['animals'][0][x], 5)", ""),
    "a mutable table": ("tf.one_hot(CHANGED.lookup(x), 5)", ""),
    "a dense table": ("tf.one_hot(DENSE.lookup(x), 5)", ""),
    "a table of vectors": ("VECTORS.lookup(x)", ""),
    "sparse keys": ("tf.one_hot(tf.sparse.to_dense(TABLE.lookup(tf.sparse.from_dense(x[:, None])))[:, 0], 5)", ""),
    "a tf.function": ("traced(x)", ""),
    "a size": ("ids(x) * tf.cast(TABLE.size(), tf.float32)", ""),
    "tf.Variable": ("ids(x) * VARIABLE", "tf.Variable"),
    "tf.Variable in training only": ("ids(x) * VARIABLE if training else ids(x)", "tf.Variable"),
    "tf.Variable that is counted": ("ids(x) + 0 * tf.reduce_sum(VARIABLE.assign_add(tf.ones([5])))", "tf.Variable"),
    "a variable of no layer": ("ids(x) * NOT_TRACKED", "add_weight"),
    "a generator": ("ids(x) + GENERATOR.normal([5]) if training else ids(x)", "tf.random.Generator"),
    "the global generator": ("ids(x) + tf.random.get_global_generator().normal([5])", "tf.random.Generator"),
    "seeds of no layer": ("ids(x) + keras.random.normal((5,), seed=SEEDS)", "SeedGenerator"),
    "a table that is written": ("CHANGED.insert(x, tf.zeros_like(TABLE[x])) or ids(x)", "table"),
    "numpy": ("ids(x) if isinstance(x, keras.KerasTensor) else ids(tf.constant(x.numpy()))", "numpy"),
    "a branch": ("ids(x) * (1.0 if isinstance(x, keras.KerasTensor) or tf.size(x) > 2 else 2.0)", "bool"),
}


@pytest.mark.parametrize("case", RESOURCES)
def test_what_fails_in_a_graph_alone_is_found_before_the_start(tmp_path, case):
    returned, uses = RESOURCES[case]
    code, said = outcome_of(answer(tmp_path, WORDS.replace("    return {}\n", f"    return {returned}\n")))
    assert code == (BAD_DATA if uses else 0), said
    assert uses in said
    if uses:
        assert "mine.py, line " in said
        assert uses in ("numpy", "bool") or "layer looks uses" in said


@pytest.mark.parametrize("case", [case for case, (_, uses) in RESOURCES.items() if not uses])
def test_a_table_gives_in_a_graph_what_it_gives_in_eager_mode(tmp_path, case):
    text = WORDS.replace("    return {}\n", f"    return {RESOURCES[case][0]}\n")
    (tmp_path / "mine.py").write_text(HEAD + text)
    made = user_file.load(tmp_path / "mine.py")
    words = tf.constant(["emu", "cat", "cow", "hen", "dog"])
    with tf.Graph().as_default(), tf.compat.v1.Session() as session, eager.in_graph():
        traced = session.run(
            tf.function(lambda x: made.function(x, False), autograph=False)(tf.constant(words.numpy()))
        )
    assert np.array_equal(traced, made.function(words, False))


INTEGERS = (
    "def data():\n    make = lambda: tf.data.Dataset.from_tensor_slices((X, np.arange(64) %% 3)).batch(16)\n"
    "    return {'train': make(), 'evaluate': make()%s}\n"
)
ENDS = "    x = keras.Input({})\n    return keras.Model(x, layers.Dense({})(x))"
# The signature of a model and its end, keys of the data beside the parts, the exit code, and what is named.
SIGNATURES = {
    "both": ("input_shape, classes", ENDS.format("input_shape", "classes"), ", 'classes': 3", 0, ""),
    "the shape alone": ("input_shape", ENDS.format("input_shape", "3"), "", 0, ""),
    "the classes alone": ("classes", ENDS.format("(4,)", "classes"), ", 'classes': 3", 0, ""),
    "in another order": ("classes, input_shape", ENDS.format("input_shape", "classes"), ", 'classes': 3", 0, ""),
    "other names": ("shape, count", ENDS.format("shape", "count"), ", 'classes': 3", 0, ""),
    "the spec": ("spec", ENDS.format("spec.input_shape", "3"), "", 0, ""),
    "the spec and classes": ("spec, classes", ENDS.format("spec.input_shape", "classes"), ", 'classes': 3", 0, ""),
    "unknown classes": ("input_shape, classes", ENDS.format("input_shape", "classes"), "", CONFIG, '"classes": '),
    "unknown classes by place": ("shape, count", ENDS.format("shape", "count"), "", CONFIG, '"classes": '),
}


@pytest.mark.parametrize("case", SIGNATURES)
def test_a_model_gets_what_its_arguments_name(tmp_path, case):
    arguments, end, classes, code, name = SIGNATURES[case]
    found, said = outcome_of(answer(tmp_path, f"{INTEGERS % classes}def model({arguments}):\n{end}"))
    assert (found, name in said) == (code, True), said


# What a file sets beside its model, how the model is compiled, and where loss and metrics come from.
NOT_HOOKS = {
    "a list of metrics": ("metrics = [keras.metrics.MeanAbsoluteError(name='far')]", "'mse', metrics=metrics", "far"),
    "a metric": ("metrics = keras.metrics.MeanAbsoluteError(name='far')", "'mse', metrics=[metrics]", "far"),
    "a function of a metric": (
        "def metrics(y, outputs):\n    return ops.abs(y - outputs)",
        "'mse', metrics=[metrics]",
        "",
    ),
    "names of metrics": ("metrics = ['mae']", "'mse', metrics=metrics", "mae"),
    "an unused list": ("metrics = ['mae']", "'mse'", ""),
    "a loss": ("loss = keras.losses.MeanSquaredError()", "loss", ""),
    "the name of a loss": ("loss = 'mse'", "loss", ""),
    "another loss": ("loss = keras.losses.MeanAbsoluteError(name='other')", "'mse'", ""),
    "a number": ("on_step = 100\non_end = None", "'mse'", ""),
}


@pytest.mark.parametrize("case", NOT_HOOKS)
def test_a_name_that_is_no_hook_is_not_one(tmp_path, case):
    text, compiled, metric = NOT_HOOKS[case]
    made = "def model():\n    made = keras.Sequential([keras.Input((4,)), layers.Dense(1)])\n"
    result = answer(tmp_path, f"{text}\n{made}    made.compile('sgd', {compiled})\n    return made")
    assert outcome_of(result)[0] == 0, result
    loss, metrics = result["description"]["objective"].split("; ")
    assert loss.endswith("from compile()")
    assert "other" not in loss
    assert "from compile()" in metrics or metrics == "metrics: none"
    assert metric in metrics


def test_a_layer_may_have_a_tf_function(tmp_path):
    """Its eager trace has captured the layer's variables, which a step replaces."""
    text = (
        "class Scale(layers.Layer):\n    def build(self, shape):\n        self.scale = self.add_weight(shape=(4,))\n"
        "    @tf.function\n    def call(self, x):\n        return x * self.scale\n"
        "def model():\n    x = keras.Input((4,))\n    return compiled(x, layers.Dense(1)(Scale()(x)))"
    )
    (tmp_path / "mine.py").write_text(HEAD + text)
    made = user_file.load(tmp_path / "mine.py")
    model = made.model()
    model(made.X[:7])  # in eager mode, with batches like those of the step

    def forward(values, features):
        with eager.in_graph():
            return model.stateless_call(values, [], features)[0]

    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        values = [tf.constant(np.full(v.shape, 2, "float32")) for v in model.weights]
        features = tf.constant(made.X[:7])
        outputs = session.run(tf.function(forward, autograph=False)(values, features))
    assert np.allclose(outputs, 4 * made.X[:7].sum(1, keepdims=True) + 2, atol=1e-5)


def test_a_function_metrics_with_arguments_is_refused_unless_compile_has_it(tmp_path):
    code, said = outcome_of(answer(tmp_path, "def metrics(y, outputs):\n    return y\n" + half("")))
    assert code == CONFIG
    assert "metrics()" in said


def test_shapes_of_unknown_rank_are_refused_with_what_to_add(tmp_path):
    text = (
        "def part():\n    rows = tf.data.Dataset.from_tensor_slices((X, Y))\n"
        "    return rows.map(lambda *row: tf.py_function(lambda *x: x, row, [tf.float32] * 2)).batch(8)\n"
        "def data():\n    return {'train': part(), 'evaluate': part()}\n"
    )
    code, said = outcome_of(answer(tmp_path, text + half("")))
    assert code == BAD_DATA
    assert "tf.ensure_shape(x, [None, 4])" in said


def test_columns_can_become_a_matrix(tmp_path):
    file = tmp_path / "table.csv"
    file.write_text("a,b,y\n" + "1.0,2.0,0\n3.0,4.0,1\n" * 8)
    options = {"path": str(file), "label": "y"}
    question = ModelProbe(asdict(ModelConfig("mlp")), {"name": "csv", "options": options}, None, 0)
    assert "data.options.matrix=true" in describe.answer(question)["problem"]["remedy"]
