"""Predictions are written batch by batch, and a file is complete or not there."""

from __future__ import annotations

import csv
import json

import numpy as np
import pytest

from trainer.faults.problems import ConfigError
from trainer.storage import predictions

FIRST = {
    "probabilities": np.float32([[0.1, 0.9], [1 / 3, 2 / 3]]),
    "label": np.array(["no", "yes"], "<U3"),
    "count": np.int64([1, 2**53 + 1]),
}
LAST = {"probabilities": np.float32([[np.nan, np.inf]]), "label": np.array(["no"], "<U3"), "count": np.int64([-1])}
SHAPES = {"probabilities": [3, 2], "label": [3], "count": [3]}


def test_arrays_of_an_archive_hold_what_all_batches_gave(tmp_path):
    file = tmp_path / "new" / "out.npz"
    assert predictions.write(file, iter([FIRST, LAST])) == SHAPES
    with np.load(file) as arrays:
        assert list(arrays) == list(FIRST)
        for name, values in arrays.items():
            np.testing.assert_array_equal(values, np.concatenate([FIRST[name], LAST[name]]))
            assert values.dtype == FIRST[name].dtype
    assert [path.name for path in file.parent.iterdir()] == ["out.npz"]


def test_a_table_has_a_column_for_each_number_and_every_digit(tmp_path):
    assert predictions.write(tmp_path / "out.csv", [FIRST, LAST]) == SHAPES
    with (tmp_path / "out.csv").open() as file:
        head, *rows = csv.reader(file)
    assert head == ["probabilities_0", "probabilities_1", "label", "count"]
    assert rows[0] == ["0.1", "0.9", "no", "1"]
    assert np.float32(rows[1][:2]).tolist() == FIRST["probabilities"][1].tolist()
    assert rows[1][2:] == ["yes", str(2**53 + 1)]


def test_lines_are_json_whatever_the_numbers(tmp_path):
    assert predictions.write(tmp_path / "out.jsonl", [FIRST, LAST]) == SHAPES
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert lines[0] == {"probabilities": [0.1, 0.9], "label": "no", "count": 1}
    assert lines[1]["count"] == 2**53 + 1
    assert lines[2]["probabilities"] == [None, None]


def fails():
    yield FIRST
    raise OSError("no space left")


@pytest.mark.parametrize("ending", [".npz", ".csv", ".jsonl"])
def test_what_was_there_stays_if_something_fails(tmp_path, ending):
    file = tmp_path / f"out{ending}"
    file.write_text("before")
    with pytest.raises(OSError, match="no space left"):
        predictions.write(file, fails())
    assert [path.read_text() for path in tmp_path.iterdir()] == ["before"]


def test_a_table_holds_no_images(tmp_path):
    with pytest.raises(ConfigError):
        predictions.write(tmp_path / "out.csv", [{"image": np.zeros((2, 3, 4))}])
    assert not list(tmp_path.iterdir())


PADDED = [{"tags": np.zeros((2, 3), np.float32)}, {"tags": np.ones((1, 5), np.float32)}]  # of two lengths


@pytest.mark.parametrize("ending", [".npz", ".csv"])
def test_examples_of_several_shapes_are_not_written_as_if_they_had_one(tmp_path, ending):
    with pytest.raises(ConfigError, match=r"(?s)export\.to.*\[3\].*\[5\].*jsonl"):
        predictions.write(tmp_path / f"out{ending}", PADDED)
    assert not [*tmp_path.iterdir()]


def test_lines_hold_examples_of_several_shapes(tmp_path):
    predictions.write(tmp_path / "out.jsonl", PADDED)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [len(line["tags"]) for line in lines] == [3, 3, 5]
