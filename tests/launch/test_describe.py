"""The description of a model and its data, from a child process and then from the cache."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from trainer.config.running import running_line
from trainer.config.schema import DataConfig, ModelConfig
from trainer.faults.problems import ConfigError
from trainer.launch.describe import describe
from trainer.plan import description as describe_module
from trainer.plan.description import Description, DescriptionError, ModelProbe
from trainer.plan.downloads import mark_of
from trainer.plan.fingerprint import PartFingerprint
from trainer.plan.layout import Parameter
from trainer.plan.serialize import from_json, to_json
from trainer.workload.describe import answer

DIGIT = "features uint8 [28, 28, 1], labels uint8 []"
SMALL = Description((Parameter("dense/kernel", (4, 2), True), Parameter("norm/mean", (2,), False)), 2, 30, 10)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


def question(
    model: str = "cnn",
    data: str = "mnist_10k",
    *,
    model_options: dict[str, Any] | None = None,
    data_options: dict[str, Any] | None = None,
    user: Path | None = None,
    seed: int = 0,
) -> ModelProbe:
    return ModelProbe.about(
        ModelConfig(model, model_options or {}),
        DataConfig(data, data_options or {}),
        user=str(user) if user else None,
        seed=seed,
    )


def describe_small(question: ModelProbe) -> dict[str, Any]:
    return {"description": to_json(SMALL)}


def must_not_be_asked(question: ModelProbe) -> dict[str, Any]:
    raise AssertionError(f"a child was asked about {question}")


def test_data_that_was_not_downloaded_is_described_again_so_that_it_is(tmp_path, monkeypatch):
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    asked = []

    def child(question: ModelProbe) -> dict[str, Any]:
        asked.append(question)
        return describe_small(question)

    for _ in range(2):
        assert describe(question(data="mnist"), child) == SMALL
    assert len(asked) == 2
    mark_of("mnist").parent.mkdir()
    mark_of("mnist").touch()
    assert describe(question(data="mnist"), must_not_be_asked) == SMALL


@pytest.mark.slow
def test_a_child_process_builds_the_model_and_opens_the_data():
    assert describe(question("cnn", "mnist_10k")) == Description(
        parameters=(
            Parameter("conv/kernel", (3, 3, 1, 32), True),
            Parameter("conv/bias", (32,), True),
            Parameter("dense/kernel", (26 * 26 * 32, 128), True),
            Parameter("dense/bias", (128,), True),
            Parameter("logits/kernel", (128, 10), True),
            Parameter("logits/bias", (10,), True),
        ),
        classes=10,
        train_examples=8000,
        evaluate_examples=2000,
        layers=("conv", "flatten", "dense", "logits"),
        sums=2,
        metrics=("accuracy",),
        objective="loss: sparse_categorical_crossentropy of logits, by default; metrics: accuracy, by default",
        fingerprint={
            "train": PartFingerprint(8000, DIGIT, "749c872b982b76ef42309ee50aefbe71"),
            "evaluate": PartFingerprint(2000, DIGIT, "77a4cebbc221ebddc6270b0c9ad20c73"),
        },
    )


def test_a_description_is_the_same_after_writing_and_reading():
    assert from_json(Description, to_json(SMALL)) == SMALL


def test_the_second_answer_comes_from_the_cache_without_a_child():
    describe(question(), describe_small)
    assert describe(question(), must_not_be_asked) == SMALL


def test_a_damaged_cache_is_asked_again(cache):
    describe(question(), describe_small)
    (file,) = cache.rglob("*.json")
    file.write_text(file.read_text()[:20])
    assert describe(question(), describe_small) == SMALL


def test_a_run_needs_no_cache_that_can_be_written(cache, capsys, snapshot):
    cache.write_text("a file where the folder should be")
    assert describe(question(), describe_small) == SMALL
    assert capsys.readouterr().err == snapshot


def test_a_failure_is_not_cached():
    def fail(question: ModelProbe) -> dict[str, Any]:
        return {"failure": "out of memory", "exit_code": 70}

    with pytest.raises(DescriptionError, match="out of memory"):
        describe(question(), fail)
    assert describe(question(), describe_small) == SMALL


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(question("mlp"), id="model"),
        pytest.param(question(model_options={"filters": 8}), id="model options"),
        pytest.param(question(data="synthetic"), id="data"),
        pytest.param(question(data_options={"train_examples": 8}), id="data options"),
        pytest.param(question(seed=1), id="seed"),
    ],
)
def test_another_question_has_another_key(other):
    assert other.key() != question().key()


def test_the_key_stays_while_nothing_changes(tmp_path):
    mine = tmp_path / "mine.py"
    mine.write_text("def small(input_shape, classes): ...\n")
    assert question("small", user=mine).key() == question("small", user=mine).key()


@pytest.mark.parametrize("name", ["mine.py", "layers.py"])
def test_the_key_changes_with_the_users_file_and_with_the_files_beside_it(tmp_path, name):
    (tmp_path / "mine.py").write_text("from layers import small\n")
    (tmp_path / "layers.py").write_text("def small(input_shape, classes): ...\n")
    before = question("small", user=tmp_path / "mine.py").key()
    (tmp_path / name).write_text("def small(input_shape, classes): return None\n")
    assert question("small", user=tmp_path / "mine.py").key() != before


@pytest.mark.parametrize("pattern", ["digits.npz", "digits*.npz"])
def test_the_key_changes_with_the_data_files(tmp_path, pattern):
    asked = question(data="npz", data_options={"path": str(tmp_path / pattern)})
    (tmp_path / "digits.npz").write_bytes(b"first")
    before = asked.key()
    (tmp_path / "digits.npz").write_bytes(b"others, longer")
    assert asked.key() != before


def test_the_key_changes_with_the_files_of_a_folder(tmp_path):
    asked = question(data="images", data_options={"path": str(tmp_path)})
    before = asked.key()
    (tmp_path / "cat").mkdir()
    (tmp_path / "cat" / "one.png").write_bytes(b"first")
    assert asked.key() != before


@pytest.mark.parametrize("name", ["replica.py", "models/cnn.py"])
def test_the_key_changes_with_the_code_that_answers(tmp_path, monkeypatch, name):
    (tmp_path / "models").mkdir()
    (tmp_path / name).write_text("")
    os.utime(tmp_path / name, (1, 1))
    monkeypatch.setattr(describe_module, "__file__", str(tmp_path / "plan" / "description.py"))
    before = question().key()
    os.utime(tmp_path / name, (2, 2))
    assert question().key() != before


def test_an_error_of_a_users_function_is_reported_with_its_type(tmp_path):
    (tmp_path / "mine.py").write_text("def small(input_shape, classes):\n    raise RuntimeError('no such width')\n")
    with pytest.raises(DescriptionError, match="RuntimeError: no such width") as raised:
        describe(question("small", user=tmp_path / "mine.py"), answer)
    assert raised.value.exit_code == 65
    assert "mine.py, line 2, in small" in str(raised.value)


def test_a_users_model_and_data_are_described(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import keras, numpy as np\n"
        "def small(input_shape, classes, *, width=3):\n"
        "    return keras.Sequential([keras.layers.Dense(width, name='in'), keras.layers.Dense(classes, name='out')])\n"
        "def noise(*, count=6):\n"
        "    x, y = np.zeros((count, 5), 'float32'), np.arange(count) % 4\n"
        "    return {'train': (x, y), 'evaluate': (x[:4], y[:4])}\n"
    )
    description = describe(question("small", "noise", model_options={"width": 2}, user=tmp_path / "mine.py"), answer)
    assert (description.classes, description.sums) == (4, 2)
    assert (description.train_examples, description.evaluate_examples) == (6, 4)
    assert [(p.path.split("/", 1)[-1], p.shape) for p in description.parameters] == [
        ("in/kernel", (5, 2)),
        ("in/bias", (2,)),
        ("out/kernel", (2, 4)),
        ("out/bias", (4,)),
    ]


def test_a_users_model_class_is_built_by_calling_it(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import keras\n"
        "class Small(keras.Model):\n"
        "    def __init__(self, classes):\n"
        "        super().__init__()\n"
        "        self.flatten, self.out = keras.layers.Flatten(), keras.layers.Dense(classes, name='out')\n"
        "    def call(self, features):\n"
        "        return self.out(self.flatten(features))\n"
        "def small(input_shape, classes):\n"
        "    return Small(classes)\n"
    )
    description = describe(question("small", user=tmp_path / "mine.py"), answer)
    assert [(p.path, p.shape) for p in description.parameters] == [
        ("small/out/kernel", (784, 10)),
        ("small/out/bias", (10,)),
    ]


def test_wrong_model_options_list_the_allowed_ones():
    asked = question("cnn", model_options={"filter": 3})
    with pytest.raises(
        ConfigError, match=r"model\.options of cnn: .*'filter'; allowed: filters, units, dropout"
    ) as raised:
        describe(asked, answer)
    assert [problem.key for problem in raised.value.problems] == ["model=cnn data=mnist_10k"]


def test_an_unknown_model_lists_the_models(tmp_path, raises):
    with raises(ConfigError):
        describe(question("ccn"), answer)


def test_an_unknown_name_is_refused_with_the_users_file(tmp_path, raises):
    (tmp_path / "mine.py").write_text("def small(input_shape, classes): ...\n")
    with raises(ConfigError):
        describe(question("smal", user=tmp_path / "mine.py"), answer)


def test_a_function_that_returns_no_model_is_refused(tmp_path, raises):
    (tmp_path / "mine.py").write_text("def small(input_shape, classes): return 3\n")
    with raises(ConfigError):
        describe(question("small", user=tmp_path / "mine.py"), answer)


def test_missing_data_has_its_own_exit_code(tmp_path):
    asked = question(data="npz", data_options={"path": str(tmp_path / "digits.npz")})
    with pytest.raises(DescriptionError, match=r"digits\.npz") as raised:
        describe(asked, answer)
    assert raised.value.exit_code == 66


def test_a_value_error_in_the_users_file_is_reported_with_its_line(tmp_path: Path):
    (tmp_path / "mine.py").write_text("def bad(input_shape, classes):\n    raise ValueError('shape wrong')\n")
    question = ModelProbe(
        {"name": "bad", "options": {}}, {"name": "synthetic", "options": {}}, str(tmp_path / "mine.py"), 0
    )
    result = answer(question)
    assert result["failure"].endswith("mine.py, line 2, in bad: ValueError: shape wrong")


def test_a_frame_without_a_file_is_no_line_of_the_users(monkeypatch, tmp_path):
    """Where the command runs in the folder of the user's file: Python's own <frozen runpy> would be in it."""
    code = compile("found.append(running_line(user, threading.get_ident()))", "<frozen runpy>", "exec")
    monkeypatch.chdir(tmp_path)
    found: list[str] = []
    exec(code, {"found": found, "running_line": running_line, "user": "mine.py", "threading": threading})
    assert found == [""]
