"""Numbers as a person reads them."""

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
