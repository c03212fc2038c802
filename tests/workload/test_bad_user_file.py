"""What is wrong with a user's file, model, data, loss or metrics is refused in one paragraph before anything starts."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import keras
import pytest
from snapshots import cases

from trainer.config import user_file
from trainer.config.schema import ModelConfig
from trainer.plan.description import ModelProbe
from trainer.workload import describe

HEAD = """\
import keras
import numpy as np
from keras import layers, ops

X = np.random.default_rng(0).normal(size=(64, 6)).astype("float32")
Y = (X[:, 0] > 0).astype("int64")


def data():
    return {"train": (X, Y), "evaluate": (X[:16], Y[:16])}


def model():
    return keras.Sequential([keras.Input((6,)), layers.Dense(2)])


"""
TWO_OUTPUTS = """\
def data():
    return {part: (X, {"a": Y, "b": Y}) for part in ("train", "evaluate")}

def model():
    x = keras.Input((6,))
    return keras.Model(x, {"a": layers.Dense(2)(x), "b": layers.Dense(2)(x)})
"""
CLASSES = "sparse_categorical_crossentropy"
BAD_DATA, CONFIG = 65, 2


def sequential(layers: str) -> str:
    return f"def model():\n    return keras.Sequential([keras.Input((6,)), {layers}])"


# The end of a file, alone or with what the config names, by the exit code.
ROWS: dict[int, dict[str, Any]] = {
    BAD_DATA: {
        "import": "import no_such",
        "raises": "raise OSError('no GPU')",
        "leaves": "import sys\nsys.exit('bye')",
        "imports itself": "import around",
        "model fails": "def model():\n    return 1 / 0",
        "model leaves": "def model():\n    raise SystemExit(3)",
        "model recurs": "def model():\n    return model()",
        "layer fails": (
            "class Bad(layers.Layer):\n"
            "    def call(self, x):\n"
            "        raise AttributeError('no kernel')\n"
            "def model():\n"
            "    return keras.Sequential([keras.Input((6,)), Bad()])"
        ),
        "loss fails": "def loss(y, outputs):\n    return outputs['a']",
        "metrics fail": "def metrics():\n    return [layers.AUC()]",
        "lists of batches": (
            "def data():\n    batches = [[X[i : i + 8], Y[i : i + 8]] for i in range(0, 64, 8)]\n"
            "    return {'train': tuple(batches), 'evaluate': batches}"
        ),
        "batches in a list": (
            "def data():\n    batches = [(X[i : i + 8], Y[i : i + 8]) for i in range(0, 64, 8)]\n"
            "    return {'train': batches, 'evaluate': batches}"
        ),
        "two batches in a list": (
            "def data():\n    two = [(X[:8], Y[:8]), (X[8:16], Y[8:16])]\n    return {'train': two, 'evaluate': two}"
        ),
        "data fail": "def data():\n    return open('/none/x.csv')",
        "no data": "def data():\n    pass",
        "no part": "def data():\n    return {'a': (X, Y)}",
        "lengths": "Y = Y[:16]",
        "label too large": "def data():\n    return {'train': (X, Y * 7), 'evaluate': (X, Y), 'classes': 2}",
        "label below zero": "Y -= 1",
        "labels are text": "Y = np.where(Y, 'a', 'b')",
        "NaN": "X[3, 2] = np.nan",
    },
    CONFIG: {
        "metrics in the place of loss_weights": (
            "def model():\n    m = keras.Sequential([keras.Input((6,)), layers.Dense(1)])\n"
            "    m.compile('adam', 'mse', ['mae'])\n    return m"
        ),
        "no function": ("", {"name": "modle"}),
        "no model": "def model():\n    pass",
        "another class": "class model:\n    pass",
        "model.options": ("", {"options": {"width": 3}}),
        "shape of inputs": "def model():\n    return keras.Sequential([keras.Input((7,)), layers.Dense(2)])",
        "rank of outputs": sequential("layers.Reshape((6, 1)), layers.Dense(2)"),
        "too few outputs": "Y[20] = 4",
        "nothing to train": sequential("layers.Flatten()"),
        "a layer counts": (
            "class Counts(layers.Layer):\n"
            "    def __init__(self):\n"
            "        super().__init__()\n"
            "        self.metric = keras.metrics.Mean(name='norm')\n"
            "    def call(self, x):\n"
            "        self.metric.update_state(ops.sum(x * x))\n"
            "        return x\n"
            "def model():\n"
            "    return keras.Sequential([keras.Input((6,)), Counts(), layers.Dense(2)])"
        ),
        "state that batches leave": (
            "def model():\n    x = keras.Input((6,), batch_size=8)\n"
            "    return keras.Model(x, layers.LSTM(2, stateful=True)(ops.reshape(x, (8, 2, 3))))"
        ),
        "float64": sequential("layers.Dense(2, dtype='float64')"),
        "state that float32 cannot count": (
            "class Far(layers.Layer):\n"
            "    def build(self, shape):\n"
            "        far = keras.initializers.Constant(2**25)\n"
            "        self.seen = self.add_weight((), far, 'int64', trainable=False, name='seen')\n"
            "    def call(self, x):\n"
            "        self.seen.assign_add(1)\n"
            "        return x\n"
            "def model():\n"
            "    return keras.Sequential([keras.Input((6,)), Far(name='far'), layers.Dense(2)])"
        ),
        "train_step": "class model(keras.Model):\n    def train_step(self, data):\n        return {}",
        "test_step": "class model(keras.Model):\n    def test_step(self, data):\n        return {}",
        "a loss that assigns": (
            "class Own(keras.Model):\n"
            "    def build(self, shape):\n"
            "        self.mean = self.add_weight((), 'zeros', trainable=False, name='mean')\n"
            "        super().build(shape)\n"
            "    def compute_loss(self, x, y, y_pred, sample_weight=None, training=True):\n"
            "        self.mean.assign(0.5)\n"
            "        return ops.mean(y_pred)\n"
            "def model():\n"
            "    x = keras.Input((6,))\n"
            "    return Own(x, layers.Dense(2)(x))"
        ),
        "two optimizers": (
            "class model(keras.Model):\n"
            "    def __init__(self):\n"
            "        super().__init__()\n"
            "        self.first, self.second = keras.optimizers.Adam(), keras.optimizers.Adam()"
        ),
        "softmax for logits": sequential("layers.Dense(2, 'softmax')"),
        "sigmoid for logits": (sequential("layers.Dense(1, 'sigmoid')"), {"loss": "binary_crossentropy"}),
        "logits for softmax": ("", {"loss_options": {"from_logits": False}}),
        "unknown loss": ("", {"loss": "mean_sqared_error"}),
        "unknown metric": ("", {"metrics": ["acuracy"]}),
        "loss of labels": "def loss(y):\n    return y",
        "shape of a loss": "def loss(y, outputs):\n    return ops.ones((3, 4))",
        "no loss": "def loss(y, outputs):\n    pass",
        "labels of another loss": ("Y = np.eye(2)[Y]", {"loss": CLASSES}),
        "loss of no output": (TWO_OUTPUTS, {"loss": {"a": CLASSES, "c": "mse"}}),
        "weight of no output": (TWO_OUTPUTS, {"loss": {"a": CLASSES, "b": CLASSES}, "loss_weights": {"c": 2.0}}),
        "metrics are none": "def metrics():\n    return 3",
        "a metric from above": (
            "class Lowest(keras.metrics.Metric):\n"
            "    def __init__(self):\n"
            "        super().__init__(name='lowest')\n"
            "        self.low = self.add_variable((), keras.initializers.Constant(9.0), name='low')\n"
            "    def update_state(self, y, outputs, sample_weight=None):\n"
            "        self.low.assign(ops.minimum(self.low, ops.min(outputs)))\n"
            "    def result(self):\n"
            "        return self.low.value\n"
            "def metrics():\n"
            "    return [Lowest()]"
        ),
        "the largest so far": (
            "class Largest(keras.metrics.Metric):\n"
            "    def __init__(self):\n"
            "        super().__init__(name='largest')\n"
            "        self.high = self.add_variable((), 'zeros', name='high')\n"
            "    def update_state(self, y, outputs, sample_weight=None):\n"
            "        self.high.assign(ops.maximum(self.high, ops.max(ops.abs(outputs))))\n"
            "    def result(self):\n"
            "        return self.high.value\n"
            "def metrics():\n"
            "    return [Largest()]"
        ),
        "class_weight": ("", {"class_weight": {5: 1.0}}),
        "option of a loss": (
            "def loss(y, outputs, *, gamma=2.0):\n    return ops.mean(outputs) * gamma",
            {"loss_options": {"gama": 3}},
        ),
        "option of a class": (
            (
                "class Own(keras.losses.Loss):\n"
                "    def __init__(self, gamma=2.0):\n"
                "        super().__init__()\n"
                "    def call(self, y, outputs):\n"
                "        return ops.mean(outputs, -1)"
            ),
            {"loss": "Own", "loss_options": {"gama": 3}},
        ),
        "option of a metric": (
            "def near(y, outputs, k=1):\n    return outputs[:, k]",
            {"metrics": [{"near": {"n": 3}}]},
        ),
        "loss is a number": ("", {"loss": 5}),
        "metric without a name": ("", {"metrics": [{}]}),
        "options without effect": (
            (
                "def model():\n"
                "    model = keras.Sequential([keras.Input((6,)), layers.Dense(2, 'softmax')])\n"
                f"    model.compile('adam', '{CLASSES}')\n"
                "    return model"
            ),
            {"loss_options": {"label_smoothing": 0.1}},
        ),
        "weights of one loss": (
            TWO_OUTPUTS + "def loss(y, outputs):\n    return ops.mean(outputs['a'])",
            {"loss_weights": {"a": 2.0}},
        ),
        "weights of a scalar": ("def loss(y, outputs):\n    return ops.mean(outputs)", {"class_weight": {0: 2.0}}),
        "weights of no part": (
            "def data():\n    return {part: (X, Y, np.ones((64, 3))) for part in ('train', 'evaluate')}\n"
            "def loss(y, outputs):\n    return outputs[:, 0]"
        ),
        "softmax of an output": (
            TWO_OUTPUTS.replace('"b": layers.Dense(2)(x)', '"b": layers.Dense(2, "softmax")(x)'),
            {"loss": {"a": CLASSES, "b": CLASSES}},
        ),
        "sigmoids of several labels": (
            ("Y = np.eye(3)[Y].astype('float32')\n" + sequential("layers.Dense(3, 'sigmoid')")),
            {"loss": "binary_crossentropy"},
        ),
        "logits without a last axis": (
            (
                "def model():\n    x = keras.Input((6,))\n"
                "    model = keras.Model(x, layers.Reshape(())(layers.Dense(1)(x)))\n"
                "    model.compile('adam', 'mse')\n    return model"
            ),
            {"loss": "binary_crossentropy", "loss_options": {"from_logits": False}},
        ),
        "a hook that takes no values": "def on_step(step):\n    pass",
        "a precision of the file": "keras.config.set_dtype_policy('mixed_bfloat16')",
        "one output for two classes": (sequential("layers.Dense(1)"), {"loss": CLASSES}),
        "too few outputs of one": (
            TWO_OUTPUTS.replace('"b": Y}', '"b": Y + 2}'),
            {"loss": {"a": CLASSES, "b": CLASSES}},
        ),
        "weights of unknown classes": (
            "def batches(context):\n    yield X, Y\ndef data():\n    return {'train': batches, 'evaluate': batches}",
            {"class_weight": {1: 3.0}},
        ),
        "a loss of each example": (
            "def model():\n    model = keras.Sequential([keras.Input((6,)), layers.Dense(2)])\n"
            "    model.compile('adam', keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None))\n"
            "    return model"
        ),
        "a metric of each class": (
            "Y = np.eye(2, dtype='float32')[Y]",
            {"loss": "categorical_crossentropy", "metrics": ["F1Score"]},
        ),
        "an option of no loss": (
            TWO_OUTPUTS,
            {"loss": {"a": CLASSES, "b": "mse"}, "loss_options": {"from_logits": False, "delta": 1}},
        ),
        "softmax that begins at zeros": sequential("layers.Dense(2, 'softmax', True, 'zeros')"),
        "softmax over another axis": (
            "def data():\n    y = np.eye(3, dtype='float32')[np.arange(320) % 3].reshape(64, 5, 3).transpose(0, 2, 1)\n"
            "    return {part: (X, y) for part in ('train', 'evaluate')}\n"
            "def model():\n    stacked = [layers.Dense(15), layers.Reshape((3, 5)), layers.Softmax(axis=1)]\n"
            "    model = keras.Sequential([keras.Input((6,)), *stacked])\n"
            "    model.compile('adam', keras.losses.CategoricalCrossentropy(from_logits=True, axis=1))\n"
            "    return model"
        ),
        "data.options": ("", {"data_options": {"path": 3}}),
        "weights": "def data():\n    return {part: (X, Y, np.ones((64, 3))) for part in ('train', 'evaluate')}",
    },
}


@pytest.fixture(autouse=True)
def _forget_modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The file of another test has the same name."""
    keras.utils.clear_session(free_memory=False)  # names of layers are numbered from 0 in each test
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("mine", "around", "beside_it", "user_mine"):
            del sys.modules[name]


def answer(folder: Path, text: str, named: dict[str, Any] | None = None) -> dict[str, Any]:
    (folder / "mine.py").write_text(HEAD + text + "\n")
    (folder / "around.py").write_text("from mine import later\n")
    config = asdict(ModelConfig("model")) | (named or {})
    data = {"name": "data", "options": config.pop("data_options", {})}
    return describe.answer(ModelProbe(config, data, str(folder / "mine.py"), seed=1))


@pytest.mark.slow(but=["loss fails", "no loss", "two optimizers", "labels are text", "a metric from above"])
@pytest.mark.parametrize(("code", "case"), cases(ROWS))
def test_it_is_refused_in_one_paragraph(code, case, tmp_path, snapshot):
    text, named = case if isinstance(case, tuple) else (case, {})
    result = answer(tmp_path, text, named)
    said = result["problem"]["message"] if code == CONFIG else result["failure"]
    assert result.get("exit_code", CONFIG) == code
    assert "\n" not in said
    assert said == snapshot
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix == ".py") == ["around.py", "mine.py"]


def test_a_file_may_print_start_threads_and_import_files_beside_it(tmp_path):
    (tmp_path / "beside_it.py").write_text("width = 2\n")
    text = (
        "import threading, time\n"
        "import beside_it\n"
        "from . import beside_it as the_same\n"
        "from .beside_it import width\n"
        "threading.Thread(target=time.sleep, args=(0.1,)).start()\n"
        "print('{', end='')\n"
        "def model():\n"
        "    return keras.Sequential([keras.Input((6,)), layers.Dense(width, name='out')])"
    )
    parameters = answer(tmp_path, text)["description"]["parameters"]
    assert [one["path"].split("/", 1)[-1] for one in parameters] == ["out/kernel", "out/bias"]


def test_a_model_may_be_imported_from_a_package_beside_it(tmp_path):
    (tmp_path / "beside_it").mkdir()
    (tmp_path / "beside_it/__init__.py").write_text("from .nets import *\n")
    (tmp_path / "beside_it/nets.py").write_text("def net(*, width=2):\n    pass\ndef _other():\n    pass\n")
    (tmp_path / "mine.py").write_text("from beside_it import net as model\n")
    assert user_file.functions(tmp_path / "mine.py") == {"model": {"width": 2}}


def test_a_model_may_be_imported_from_a_file_beside_it(tmp_path):
    text = "def other(spec, *, width=2):\n    return keras.Sequential([keras.Input((6,)), layers.Dense(width)])"
    (tmp_path / "beside_it.py").write_text(HEAD + text)
    named = {"name": "model", "options": {"width": 3}, "loss": CLASSES}
    parameters = answer(tmp_path, "from beside_it import other as model", named)["description"]["parameters"]
    assert [one["shape"] for one in parameters] == [[6, 3], [3]]


def test_labels_and_outputs_that_are_broadcast_are_doubted(tmp_path):
    text = "def data():\n    return {part: (X, X[:, :2]) for part in ('train', 'evaluate')}\n"
    text += "def model():\n    return keras.Sequential([keras.Input((6,)), layers.Dense(WIDTH)])\n"
    settings = {"name": "model", "loss": "mse", "metrics": ["mae"]}
    for width, count in (1, 1), (2, 0):
        (folder := tmp_path / str(width)).mkdir()
        result = answer(folder, text.replace("WIDTH", str(width)), settings)
        assert len(result["description"]["doubts"]) == count


def test_what_keras_clips_is_trained_with_a_warning_if_the_author_of_the_model_chose_the_loss(tmp_path, snapshot):
    text = (
        "def model():\n    model = keras.Sequential([keras.Input((6,)), layers.Dense(1)])\n"
        "    model.compile('adam', 'binary_crossentropy')\n    return model"
    )
    ((message, remedy),) = answer(tmp_path, text)["description"]["doubts"]
    assert message == snapshot
    assert remedy == snapshot


def test_a_model_compiled_without_a_loss_has_those_that_its_layers_add(tmp_path, snapshot):
    text = (
        "class Adds(layers.Layer):\n    def call(self, x):\n        self.add_loss(x[0, 0])\n        return x\n"
        "def model():\n    model = keras.Sequential([keras.Input((6,)), layers.Dense(3, {}), {}])\n"
        "    model.compile('adam')\n    return model"
    )
    regularized = "kernel_regularizer='l2'"
    chosen = [answer(tmp_path, text.format(regularized, one))["description"]["objective"] for one in ("Adds()", "")]
    assert chosen[0] == "loss: of its layers; metrics: none"
    assert chosen[1] == snapshot


def test_small_logits_are_no_probabilities(tmp_path):
    """Those of a model that was not trained often lie in 0..1, by chance."""
    text = (
        "def model():\n"
        "    small, half = keras.initializers.RandomUniform(0, 0.01), keras.initializers.Constant(0.5)\n"
        "    return keras.Sequential([keras.Input((6,)), layers.Dense(1, None, True, small, half)])"
    )
    assert "description" in answer(tmp_path, text, {"loss": "binary_crossentropy"})


def test_outputs_near_0_and_1_are_not_refused(tmp_path):
    """A sigmoid that is resized overshoots."""
    text = (
        "Y = np.ones((64, 9, 9, 1), 'float32')\n"
        "def model():\n"
        "    model = keras.Sequential([keras.Input((6,)), layers.Dense(36, 'sigmoid'), layers.Reshape((6, 6, 1))])\n"
        "    model.add(layers.Resizing(9, 9, 'bicubic'))\n"
        "    model.compile('adam', keras.losses.BinaryCrossentropy())\n"
        "    return model"
    )
    result = answer(tmp_path, text)
    assert "description" in result, result


def test_a_function_that_makes_a_loss_is_not_the_loss(tmp_path):
    text = (
        "def loss(margin=1.0):\n"
        "    return lambda y, outputs: ops.mean(ops.maximum(margin - outputs[:, 0], 0))\n"
        "def model():\n"
        "    model = keras.Sequential([keras.Input((6,)), layers.Dense(2)])\n"
        "    model.compile('adam', loss(margin=2.0))\n"
        "    return model"
    )
    assert "from compile()" in answer(tmp_path, text)["description"]["objective"]


def test_a_model_may_have_a_compile_of_its_own(tmp_path):
    text = (
        "class Distiller(keras.Model):\n"
        "    def __init__(self, student):\n"
        "        super().__init__()\n"
        "        self.student = student\n"
        "    def compile(self, optimizer, metrics, student_loss):\n"
        "        super().compile(optimizer=optimizer, metrics=metrics)\n"
        "        self.student_loss = student_loss\n"
        "    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, allow_empty=False):\n"
        "        return self.student_loss(y, y_pred)\n"
        "    def call(self, x):\n"
        "        return self.student(x)\n"
        "def model():\n"
        "    made = Distiller(keras.Sequential([layers.Dense(2)]))\n"
        "    made.compile('adam', ['accuracy'], keras.losses.SparseCategoricalCrossentropy(from_logits=True))\n"
        "    return made"
    )
    assert answer(tmp_path, text)["description"]["objective"].startswith("loss: compute_loss of Distiller")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("print('hello')\nimport sys\nsys.exit('bye')", 65),
        ("class model(keras.Model):\n    def train_step(self, data):\n        return {}", 2),
    ],
    ids=["65", "2"],
)
def test_the_command_ends_with_that_code_and_leaves_nothing(python, tmp_path, text, code, snapshot):
    (tmp_path / "mine.py").write_text(HEAD + text + "\n")
    ended = python.run("-m", "trainer", "user=mine.py", "model=model", "data=data", "cluster=1ps2w", cwd=tmp_path)
    assert ended.returncode == code, ended.stderr
    assert ended.stderr == snapshot
    assert [path.name for path in tmp_path.iterdir() if path.name != "__pycache__"] == ["mine.py"]
