"""A^n + B^n on one device and on two: examples/matpow.py."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

import numpy as np
import pytest

PATH = Path(__file__).resolve().parents[2] / "examples" / "matpow.py"
spec = importlib.util.spec_from_file_location("matpow", PATH)
assert spec is not None
assert spec.loader is not None
matpow = importlib.util.module_from_spec(spec)
spec.loader.exec_module(matpow)


def test_each_form_says_where_its_products_ran(capsys):
    assert matpow.main(["--power", "4", "--size", "8"]) == 0
    one, two, end = capsys.readouterr().out.splitlines()
    assert one.startswith("one device")
    assert one.endswith("A: 3 on /cpu:0, B: 3 on /cpu:0")
    assert two.endswith("A: 3 on /cpu:0, B: 3 on /cpu:1")
    assert end.endswith("bit for bit")


def test_the_sum_is_that_of_the_powers():
    def total(power: int) -> np.ndarray:
        options = argparse.Namespace(power=power, size=6, seed=1)
        return matpow.measure(options, ["/cpu:0", "/cpu:1"])[0]

    graph = matpow.build(argparse.Namespace(power=1, size=6, seed=1), ["/cpu:0", "/cpu:0"])
    with matpow.v1.Session(graph=graph) as session:
        session.run("fill")
        a, b = session.run(["A/Read/ReadVariableOp:0", "B/Read/ReadVariableOp:0"])
    expected = sum(np.linalg.matrix_power(matrix.astype(float), 3) for matrix in (a, b))
    np.testing.assert_allclose(total(3), expected, rtol=1e-4, atol=1e-5)
    assert not np.array_equal(a, b)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--devices", "/cpu:0", "/gpu:99"], "no device /gpu:99; a device is /cpu:N"),
        (["--devices", "cpu", "/tpu:0"], "no device cpu, /tpu:0"),
        (["--power", "0"], "at least 1"),
    ],
)
def test_what_cannot_be_computed_is_refused(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        matpow.main(arguments)
    assert message in capsys.readouterr().err
