"""Numbers and lists as a person reads them."""

from __future__ import annotations

import pytest

from trainer.config import words


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (11_534_336, "11.0 MiB"), (5 * 2**29, "2.50 GiB")],
)
def test_sizes_have_units(nbytes, text):
    assert words.size(nbytes) == text


@pytest.mark.parametrize(("number", "text"), [(0, "0 tasks"), (1, "1 task"), (1200, "1,200 tasks")])
def test_a_count_of_one_is_singular(number, text):
    assert words.count(number, "task") == text


@pytest.mark.parametrize(("names", "text"), [("a", "a"), ("ab", "a and b"), ("abc", "a, b and c")])
def test_a_list_ends_with_and(names, text):
    assert words.listed(names) == text


def test_a_long_list_is_shortened():
    assert words.some(["a", "b", "c", "d"], 2) == "a, b and 2 more"
