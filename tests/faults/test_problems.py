"""Codes of problems."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import pytest

from trainer.faults.problems import KINDS, Kind, Problem

ROOT = Path(__file__).parents[2]


def test_every_kind_has_a_meaning_and_is_used():
    code = "".join(path.read_text() for folder in ("trainer", "bench") for path in (ROOT / folder).rglob("*.py"))
    assert set(KINDS) == set(get_args(Kind))
    assert {kind for kind in KINDS if code.count(f'"{kind}"') < 3} == set()  # the type and the table have it too


@pytest.mark.parametrize(
    ("key", "about", "code"),
    [
        ("train.steps", "", "train.steps/out-of-range"),
        ("cluster.hosts[12]", "", "cluster.hosts/out-of-range"),
        ("mine/experiment/bad.yaml:3 train.steps", "train.steps", "train.steps/out-of-range"),
    ],
)
def test_a_code_is_the_key_and_the_kind(key, about, code):
    assert Problem(key, "out-of-range", "too many", "fewer", about).code == code
