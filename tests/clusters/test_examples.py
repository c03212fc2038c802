"""Every example runs by the command in its first lines, and reaches what it promises there."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted((ROOT / "examples").glob("*.py"))
EXAMPLES = {path.stem: path for path in FILES if "python -m trainer user=" in path.read_text()}

pytestmark = pytest.mark.cluster


def read(path: Path) -> tuple[list[str], dict[str, float]]:
    """The overrides that an example is run with, and the scores it promises: loss and mae at most, others at least."""
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    command = re.search(r"^ {4}python -m trainer (.*?)\n\n", text, re.DOTALL | re.MULTILINE)
    assert command is not None
    promised = {name: float(value) for name, value in re.findall(r"\b(eval_\w+) (\d+\.\d+)", text)}
    assert promised
    return shlex.split(command[1].replace("\\\n", " ").replace("examples/", f"{ROOT}/examples/")), promised


@pytest.mark.long(but=["two_outputs"])
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_reaches_what_it_promises(finish, name):
    overrides, promised = read(EXAMPLES[name])
    summary = finish("seed=1", *overrides).summary()
    for score, value in promised.items():
        found = summary[score]
        assert found <= value if score.endswith(("loss", "mae")) else found >= value, f"{score} is {found}"
