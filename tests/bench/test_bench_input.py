"""The share of a step that waits for data, and the files that stand in for data sets."""

from __future__ import annotations

from dataclasses import replace

import pytest
from quick_config import load

from bench import input as bench_input
from bench.input import BATCH, Case, WaitShare
from trainer.workload.data import DATA_SETS, DataSet, Examples, mnist_10k, open_data

pytestmark = pytest.mark.slow

NOTHING = WaitShare(Case("four numbers", "mlp", []), 2.0, (0.2, 0.25, 0.3))  # waits 0.5 ms
CNN = WaitShare(Case("mnist_10k", "cnn", []), 50.0, (0.01, 0.02, 0.03))  # 1 ms: 0.5 of them for data
SLOW = WaitShare(Case("png", "cnn", []), 50.0, (0.10, 0.11, 0.30))  # 5.5 ms


def test_the_wait_that_every_step_has_is_not_for_data():
    assert NOTHING.for_data(NOTHING.wait_ms) == 0
    assert CNN.for_data(NOTHING.wait_ms) == pytest.approx(0.01)
    assert SLOW.for_data(NOTHING.wait_ms) == pytest.approx(0.1)


def test_the_table_names_cases_that_wait_more_than_the_limit(snapshot):
    lines = bench_input.page("here", [NOTHING, CNN, SLOW], ["mnist is left out: no file"]).splitlines()
    assert "| mnist_10k | cnn | 50.0 | 1.00 | 1.0 to 3.0 % | 1.0 % |" in lines
    assert lines[-2:] == snapshot


def test_a_table_without_waits_says_so():
    assert bench_input.page("here", [NOTHING, CNN], []).splitlines()[-1] == "All are below 2%, as wished."


# No data to learn from, and readers whose speed is that of the user's files.
NOT_MEASURED = {"oracle", "npy", "csv", "criteo", "parquet", "images", "tfds", "hf"}


def few(data: DataSet) -> DataSet:
    """A data set of as many examples as one batch has."""

    def first(examples: Examples) -> Examples:
        arrays = tuple(array[:BATCH] for array in examples.arrays)
        return replace(examples, count=BATCH, arrays=arrays)

    return replace(data, train=first(data.train), evaluate=first(data.evaluate))


@pytest.mark.long
def test_every_data_set_has_a_case_that_opens_and_holds_a_batch(tmp_path, monkeypatch):
    write_npz = bench_input.write_npz
    monkeypatch.setattr(bench_input, "write_npz", lambda path, count, shape: write_npz(path, BATCH, shape))
    monkeypatch.setattr(bench_input, "mnist_10k", lambda: few(mnist_10k()))
    covered = set()
    for case in bench_input.cases(tmp_path):
        config = load([*case.overrides, f"model={case.model}"])
        data = open_data(config.data.name, config.data.options, seed=0)
        assert data.train.count >= BATCH, case.name
        covered.add(config.data.name)
    assert covered == set(DATA_SETS) - NOT_MEASURED
