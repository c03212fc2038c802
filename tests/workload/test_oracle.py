"""The oracle: parameters that count how often each example was used, exactly, and the expected counts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from forks import Forks
from objectives import make_step
from runs import Run

from trainer.commands.check.example_counts import check_counts, expected_counts
from trainer.workload import step as replica
from trainer.workload.build import build_model
from trainer.workload.data import open_data
from trainer.workload.data.examples import Batch
from trainer.workload.data.order import batch_indices
from trainer.workload.models import oracle

pytestmark = pytest.mark.slow

EXACT = ["model=oracle", "data=oracle", "optimizer=sgd", "optimizer.learning_rate=48", "train.batch_size=48"]
DATA = open_data("oracle", {"examples": 8}, seed=0)
SEED = np.int64([7, 1])
CROSSENTROPY = "sparse_categorical_crossentropy"


def step(numbers: list[int], *, parts: int = 2, precision: str = "float32", **how: object) -> replica.StepOutput:
    """One replica step of the oracle of eight examples on those of these numbers."""
    options = {"examples": 8, "parts": parts}
    model = build_model("oracle", options, DATA, seed=0, user_file=None, precision=precision)
    run = tf.function(make_step(model, **how), autograph=False)
    values = {path: tf.constant(value) for path, value in replica.initial_values(model).items()}
    features = tf.constant(np.float32(numbers)[:, None])
    return run(values, {}, tf.constant(SEED), Batch(features, tf.zeros(len(numbers), tf.int64)))


def counted(examples: dict[int, float]) -> list[float]:
    return [examples.get(number, 0.0) for number in range(8)]


# ---- the data and the model


def test_the_feature_of_an_example_is_its_number():
    features, labels, _ = DATA.train.fetch(tf.constant([3, 0, 7], tf.int64), tuple(map(tf.constant, DATA.train.arrays)))
    assert features.numpy().tolist() == [[3], [0], [7]]
    assert labels.numpy().tolist() == [0, 0, 0]
    assert (DATA.train.count, DATA.evaluate.count, DATA.spec.input_shape, DATA.spec.classes) == (8, 8, (1,), 2)


@pytest.mark.parametrize("examples", [0, 2**24 + 1])
def test_numbers_that_float32_cannot_distinguish_are_refused(examples, raises):
    with raises(ValueError):
        open_data("oracle", {"examples": examples}, seed=0)


def test_every_part_is_another_parameter_that_starts_at_zero():
    model = oracle((1,), 2, examples=8, parts=3)
    assert [v.path for v in model.variables] == ["counts_0/counts", "counts_1/counts", "counts_2/counts"]
    assert [v.shape for v in model.variables] == [(8,)] * 3
    assert not any(v.numpy().any() for v in model.variables)


def test_names_do_not_depend_on_the_models_built_before():
    first, second = (oracle((1,), 2) for _ in range(2))
    assert [v.path for v in first.variables] == [v.path for v in second.variables]


def test_the_gradient_of_an_example_is_minus_its_share_of_the_batch():
    gradients = step([1, 4, 5, 6]).gradients
    assert {path: g.numpy().tolist() for path, g in gradients.items()} == {
        "counts_0/counts": counted({1: -0.25, 4: -0.25, 5: -0.25, 6: -0.25}),
        "counts_1/counts": counted({1: -0.25, 4: -0.25, 5: -0.25, 6: -0.25}),
    }


def test_an_example_that_is_twice_in_a_batch_counts_twice():
    gradients = step([3, 3, 0, 7], parts=1).gradients
    assert gradients["counts_0/counts"].numpy().tolist() == counted({3: -0.5, 0: -0.25, 7: -0.25})


@pytest.mark.parametrize("how", [{"accumulate": 2}, {"precision": "mixed_bfloat16"}, {"precision": "mixed_float16"}])
def test_the_gradient_is_the_same_however_it_is_computed(how):
    assert step([3, 3, 0, 7], **how).gradients["counts_0/counts"].numpy().tolist() == counted(
        {3: -0.5, 0: -0.25, 7: -0.25}
    )


def test_logits_are_zero_and_classify_every_example():
    outcome = step([1, 2])
    assert outcome.loss.numpy() == pytest.approx(np.log(2))
    assert outcome.sums.numpy().tolist() == [2.0, 2.0]  # right, of all
    assert oracle((1,), 3).output_shape == (None, 3)


def test_an_example_that_the_model_does_not_count_is_an_error_with_a_remedy():
    with pytest.raises(tf.errors.InvalidArgumentError, match="model.options.examples=8 is not data.options.examples"):
        step([0, 8])


def test_other_data_is_refused(raises):
    with raises(ValueError):
        oracle((28, 28, 1), 10)


@pytest.mark.parametrize("options", [{"parts": 0}, {"examples": 0}])
def test_a_model_that_counts_nothing_is_refused(options, raises):
    with raises(ValueError):
        oracle((1,), 2, **options)


# ---- what is expected


@pytest.mark.long(but=["11-6-20"])
@pytest.mark.parametrize(("steps", "batch_size", "examples"), [(3, 4, 10), (7, 12, 12), (11, 6, 20)])
def test_expected_counts_follow_the_order_of_the_data(steps, batch_size, examples):
    used = [
        batch_indices(5, step, batch_size=batch_size, replica=i, replicas=2, count=examples).numpy()
        for step in range(steps)
        for i in range(2)
    ]
    expected = np.bincount(np.concatenate(used), minlength=examples)
    assert expected_counts(5, steps, batch_size, examples).tolist() == expected.tolist()


def test_expecting_imports_no_tensorflow(tmp_path: Path, python: Forks):
    code = """
import sys
from trainer.commands.check.example_counts import expected_counts
print(expected_counts(0, 3, 4, 9).sum(), {'tensorflow', 'keras'} & set(sys.modules))
"""
    assert python.run("-c", code, cwd=tmp_path).stdout == "12 set()\n"


def test_counts_as_expected_are_no_problem():
    counts = {"counts_0/counts": np.float32([2, 3, 2.0001]), "other/kernel": np.float32([7])}
    assert check_counts(counts, np.array([2, 3, 2])) == []


def test_a_problem_names_the_parameter_the_examples_and_by_how_much(snapshot):
    counts = {"counts_0/counts": np.float32([2, 2, 2, 5]), "counts_1/counts": np.float32([2, 3, 3, 4])}
    assert check_counts(counts, np.array([2, 3, 3, 2])) == snapshot


def test_at_most_ten_examples_are_named_in_a_message(snapshot):
    (problem,) = check_counts({"counts_0/counts": np.zeros(96)}, np.ones(96, np.int64))
    assert problem == snapshot


@pytest.mark.parametrize("value", [1.5, np.nan, np.inf])
def test_a_count_that_is_not_an_integer_is_a_problem(value, snapshot):
    (problem,) = check_counts({"counts_0/counts": np.float32([1, value])}, np.array([1, 1]))
    assert problem == snapshot


def test_counts_of_another_number_of_examples_are_a_problem(snapshot):
    problems = check_counts({"counts_0/counts": np.float32([1, 1])}, np.array([1]))
    assert problems == snapshot


def test_parameters_without_counts_are_a_problem(snapshot):
    assert check_counts({"dense/kernel": np.float32([1])}, np.array([1])) == snapshot


# ---- real runs


@pytest.mark.long  # test_check.py has one process, and 2ps2w
@pytest.mark.cluster
@pytest.mark.parametrize("cluster", ["2ps4w", "4w"])
def test_a_run_uses_every_example_exactly_as_often_as_the_order_has_it(finish: Callable[..., Run], cluster: str):
    run = finish(f"cluster={cluster}", *EXACT, "train.steps=41", "seed=3")
    expected = expected_counts(3, 41, 48, 96)
    assert expected.sum() == 41 * 48
    assert sorted(set(expected)) == [20, 21]
    for path in ("export/params.npz", "checkpoints/000000041/tensors.npz"):
        assert check_counts(run.directory / path, expected) == []
    with np.load(run.directory / "export/params.npz") as counts:
        assert all((counts[name] == expected).all() for name in counts.files)  # to the last bit


@pytest.mark.long
@pytest.mark.cluster
def test_each_of_two_shards_has_its_own_counts(finish: Callable[..., Run]):
    run = finish("cluster=2ps2w", *EXACT, "train.steps=5")
    held = [[piece["path"] for piece in shard["trainable"]] for shard in run.plan()["shards"]]
    assert held == [["counts_0/counts"], ["counts_1/counts"]]


@pytest.mark.cluster
def test_a_model_of_fewer_examples_than_the_data_ends_the_run_with_a_message(start: Callable[..., Run]):
    run = start("cluster=local", *EXACT, "model.options.examples=50")
    assert run.wait() != 0
    assert "model.options.examples=50 is not data.options.examples" in run.output


@pytest.mark.long
@pytest.mark.cluster
def test_the_exported_model_is_loaded_by_keras(finish: Callable[..., Run]):
    run = finish("cluster=local", *EXACT, "train.steps=4")
    code = f"""
import keras, numpy, trainer.workload.models.counts
model = keras.models.load_model({str(run.directory / "export/model.keras")!r})
print(model.variables[0].numpy().tolist() == [2.0] * 96, model(numpy.float32([[5]])).numpy().tolist())
"""
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ, check=True)
    assert loaded.stdout.splitlines()[-1] == "True [[0.0, 0.0]]"
