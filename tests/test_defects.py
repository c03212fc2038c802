"""Each defect that tests/defects.py seeds has its place in the code."""

from __future__ import annotations

from pathlib import Path

import pytest
from defects import DEFECTS, Defect, seed

CHECKOUT = Path(__file__).parents[1]


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda one: one.name)
def test_a_defect_can_be_seeded(tmp_path: Path, defect: Defect):
    right = (CHECKOUT / "trainer" / defect.file).read_text()
    copy = tmp_path / "trainer" / defect.file
    copy.parent.mkdir(parents=True)
    copy.write_text(right)
    seed(defect, tmp_path)
    assert copy.read_text() != right
