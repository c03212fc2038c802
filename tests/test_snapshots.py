"""The files of messages, and the tests that compare with them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from snapshots import Snapshot, SnapshotFile, parse

pytest_plugins = ["pytester"]

TESTS = Path(__file__).parent
FILES = sorted(TESTS.rglob("messages.txt"))


def snapshot(folder: Path, name: str = "test_a.py::test_b[c]", is_rewriting: bool = False) -> Snapshot:
    return Snapshot(SnapshotFile(folder / "messages.txt"), name, {str(folder): "TMP"}, is_rewriting)


def test_what_was_written_is_found_again(tmp_path):
    writing = snapshot(tmp_path, is_rewriting=True)
    assert writing == f"two lines of {tmp_path}\n\n    at 0x7f00aa11bb22\n"
    assert writing == {"a": 1, "b": 2}
    writing.file.write()
    assert (tmp_path / "messages.txt").read_text() == (
        "test_a.py::test_b[c]\n    two lines of TMP\n\n        at 0x...\n\n"
        "test_a.py::test_b[c] #2\n    a: 1\n    b: 2\n"
    )
    reading = snapshot(tmp_path)
    assert reading == f"two lines of {tmp_path}\n\n    at 0x7f00aa11bb33"
    assert reading == ["a: 1", "b: 2"]


def test_another_text_or_one_comparison_too_many_is_a_difference(tmp_path):
    writing = snapshot(tmp_path, is_rewriting=True)
    assert writing == "a"
    writing.file.write()
    reading = snapshot(tmp_path)
    assert reading != "b"
    assert reading.differences()[-2:] == ["-a", "+b"]
    assert reading != "a"


def test_rewriting_keeps_the_texts_of_tests_that_do_not_run_and_forgets_those_that_are_gone(pytester, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(TESTS), prepend=os.pathsep)
    old = ["test_a.py::test_b", "test_a.py::test_b #2", "test_a.py::test_c[1]", "test_a.py::test_c[2]"]
    (pytester.path / "messages.txt").write_text("".join(f"{name}\n    old\n" for name in old))
    pytester.makepyfile(
        test_a="""
            import pytest

            def test_b(snapshot):
                assert "new" == snapshot

            @pytest.mark.parametrize("number", [2])
            def test_c(snapshot, number):
                assert number == snapshot
        """
    )
    arguments = ["-p", "snapshots", "-p", "no:cacheprovider", "-n", "0", "-k", "test_b"]
    assert pytester.runpytest_subprocess(*arguments).ret == 1
    assert pytester.runpytest_subprocess(*arguments, "--rewrite-snapshots").ret == 0
    texts = SnapshotFile(pytester.path / "messages.txt").texts
    assert texts == {"test_a.py::test_b": "new", "test_a.py::test_c[2]": "old"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.parent.name)
def test_every_text_belongs_to_a_test(path):
    for name in parse(path.read_text()):
        module, test = name.partition("[")[0].split(" #")[0].split("::")
        assert f"def {test}(" in (path.parent / module).read_text()
