"""The contributions of each worker: tables, histograms and their JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from trainer.engine.sharded import staleness


def table(*workers: Sequence[int], dropped: Sequence[int] = ()) -> staleness.Table:
    """Counts gradients by worker: those applied, with their staleness, and those dropped."""
    counts = staleness.empty(len(workers))
    for worker, stalenesses in enumerate(workers):
        for steps in stalenesses:
            staleness.add_applied(counts, worker, steps)
    for worker in dropped:
        staleness.add_dropped(counts, worker)
    return counts


def test_an_empty_table_has_a_row_of_zeros_for_each_worker():
    assert staleness.empty(3).tolist() == [[0] * 35] * 3


def test_a_gradient_is_counted_for_its_worker_alone():
    assert staleness.histogram(table([], [2], []))[:, :4].tolist() == [[0, 0, 0, 0], [0, 0, 1, 0], [0, 0, 0, 0]]


def test_gradients_are_counted_by_staleness():
    assert staleness.histogram(table([0, 0, 0, 1, 3]))[0, :5].tolist() == [3, 1, 0, 1, 0]


def test_the_last_bin_counts_everything_at_or_above_it():
    (row,) = staleness.histogram(table([30, 31, 32, 1000])).tolist()
    assert row == [0] * 30 + [1, 3]


def test_a_dropped_gradient_is_in_no_bin():
    assert staleness.histogram(table([], dropped=[0])).tolist() == [[0] * 32]


def test_the_json_names_each_worker():
    assert list(staleness.to_json(table([], []))) == ["worker:0", "worker:1"]


def test_the_json_has_the_counts_and_the_staleness():
    assert staleness.to_json(table([0, 0, 1, 4], dropped=[0, 0]))["worker:0"] == {
        "applied": 4,
        "dropped": 2,
        "staleness_mean": 1.25,
        "staleness_max": 4,
        "staleness_histogram": [2, 1, 0, 0, 1],
    }


def test_mean_and_maximum_are_exact_above_the_last_bin():
    row = staleness.to_json(table([0, 31, 1000]))["worker:0"]
    assert (row["staleness_mean"], row["staleness_max"]) == (343.667, 1000)
    assert row["staleness_histogram"] == [1] + [0] * 30 + [2]


def test_the_maximum_stays_when_smaller_ones_follow():
    assert staleness.to_json(table([5, 2, 0]))["worker:0"]["staleness_max"] == 5


def test_a_worker_that_had_nothing_applied_has_no_staleness():
    assert staleness.to_json(table([], dropped=[0]))["worker:0"] == {
        "applied": 0,
        "dropped": 1,
        "staleness_mean": None,
        "staleness_max": None,
        "staleness_histogram": [],
    }


def test_a_table_of_numpy_numbers_can_be_written_as_json():
    row = staleness.to_json(table([0, 1], dropped=[0]).astype(np.int64))
    assert json.loads(json.dumps(row)) == row
