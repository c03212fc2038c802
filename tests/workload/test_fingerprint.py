"""The ways in which the same config may give other data in another process, and what the fingerprint says of each."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from trainer.config.unrepeatable import suspects
from trainer.plan.fingerprint import OtherDataError, PartFingerprint, check_same, digest
from trainer.workload.build import open_data_set
from trainer.workload.data import open_data
from trainer.workload.data.fingerprint import READ_ROWS, fingerprint_of

pytestmark = pytest.mark.slow

HEAD = """
import concurrent.futures, glob, os, random, threading, time, uuid
import numpy as np
import tensorflow as tf
X = np.arange(400, dtype="float32").reshape(200, 2)
def parts(x):
    return {"train": (x[:150], x[:150, 0]), "evaluate": (x[150:], x[150:, 0])}
def data():
"""

# The rest of a user's file, by name, and the lines that are suspected, counted from the first line of `data`.
OTHER_DATA: dict[str, tuple[str, list[int]]] = {
    "numpy's generator": ("return parts(np.random.default_rng().permutation(X))", [1]),
    "an old generator of numpy": ("return parts(np.random.RandomState().permutation(X))", [1]),
    "Python's generator": ("rows = list(X); random.Random().shuffle(rows); return parts(np.stack(rows))", [1]),
    "the system's generator": ("return parts(X + int.from_bytes(os.urandom(2), 'big'))", [1]),
    "TensorFlow's generator": (
        "g = tf.random.Generator.from_non_deterministic_state(); return parts(X + g.normal(X.shape).numpy())",
        [1],
    ),
    "the clock": ("return parts(X + time.time() % 1000)", [1]),
    "the environment": ("return parts(X * float(os.environ['HALF_OF_THE_TASKS']))", [1]),
    "the process": ("CALLS.append(0)\n    return parts(X + len(CALLS))", []),
    "the order of files": (
        "return parts(np.concatenate([np.load(f'files/{name}') for name in os.listdir('files')]))",
        [1],
    ),
    "a file that changes": ("return parts(np.load('files/0.npy').repeat(2, 0))", []),
    "threads": (
        "with concurrent.futures.ThreadPoolExecutor(8) as pool:\n"
        "        done = concurrent.futures.as_completed([pool.submit(wait, x) for x in X])\n"
        "        return parts(np.stack([future.result() for future in done]))",
        [1, 2],
    ),
    "a shuffled tf.data": (
        "train = tf.data.Dataset.from_tensor_slices((X, X[:, 0])).shuffle(200, seed=int(time.time_ns() % 2**31))\n"
        "    return {'train': train.batch(10), 'evaluate': (X, X[:, 0])}",
        [1],
    ),
    "a stream that was read before": ("return {'train': lambda context: TWICE(), 'evaluate': (X, X[:, 0])}", []),
    "an object with __getitem__": ("return {'train': Rows(), 'evaluate': (X, X[:, 0])}", []),
    "the number of examples": ("return parts(X[len(os.environ['HALF_OF_THE_TASKS']) :])", [1]),
    "the type": ("return parts(X.astype('int32') if os.getenv('HALF_OF_THE_TASKS') == '1' else X)", [1]),
}
ELSEWHERE = """
CALLS = COUNTED
def wait(x):
    time.sleep(random.SystemRandom().random() / 100)
    return x
def TWICE():
    CALLS.append(0)
    start = 10 * len(CALLS)
    yield X[start : start + 10], X[start : start + 10, 0]
class Rows:
    def __len__(self):
        return 200
    def __getitem__(self, index):
        return X[index] + random.SystemRandom().random(), X[index, 0]
"""
SAME_DATA = {
    "global generators": "random.shuffle(rows := list(X)); return parts(np.random.permutation(np.stack(rows)))",
    "TensorFlow's global seed": "return parts(X + tf.random.normal(X.shape).numpy())",
    "a shuffled tf.data": (
        "train = tf.data.Dataset.from_tensor_slices((X, X[:, 0])).shuffle(200).batch(10)\n"
        "    return {'train': train, 'evaluate': (X, X[:, 0])}"
    ),
    "sorted files": "return parts(np.concatenate([np.load(name) for name in sorted(glob.glob('files/*'))]))",
    "a large array": "return parts(np.tile(X, (100, 50)) + np.random.rand(20000, 100))",
}
SHARED: list[int] = []  # survives from one process to the next, as a file or a service does


def write(folder: Path, body: str) -> Path:
    folder.mkdir()
    file = folder / "mine.py"
    counted = "__import__('sys').modules['test_fingerprint'].SHARED"
    file.write_text(HEAD + "    " + body + "\n" + ELSEWHERE.replace("COUNTED", counted))
    return file


@pytest.fixture
def two_processes(tmp_path, monkeypatch) -> Callable[[str], tuple[dict[str, PartFingerprint], ...]]:
    """The fingerprints that two processes take of the data of a user's file, on machines that differ."""
    monkeypatch.chdir(tmp_path)
    listdir = os.listdir

    def take(body: str) -> tuple[dict[str, PartFingerprint], ...]:
        taken = []
        for number in (1, 20):
            shutil.rmtree("files", ignore_errors=True)
            Path("files").mkdir()
            for name in range(4):
                np.save(f"files/{name}.npy", np.full((100, 2), name + (number if "repeat" in body else 0), np.float32))
            monkeypatch.setenv("HALF_OF_THE_TASKS", str(number))
            monkeypatch.setattr(os, "listdir", lambda path=".", n=number: sorted(listdir(path), reverse=n == 1))
            file = write(tmp_path / f"process{number}", body)
            taken.append(dict(fingerprint_of(open_data_set("data", {}, seed=1, user_file=str(file)))))
        monkeypatch.undo()
        return tuple(taken)

    return take


@pytest.mark.parametrize("way", OTHER_DATA)
def test_other_data_is_found_and_its_cause_is_named(way, two_processes, tmp_path):
    body, lines = OTHER_DATA[way]
    first, second = two_processes(body)
    named = suspects(tmp_path / "process1" / "mine.py")
    numbers = [int(re.findall(r"\d+", text)[0]) - HEAD.count("\n") for text in named]
    assert sorted({number for number in numbers if number <= body.count("\n") + 1}) == lines
    with pytest.raises(OtherDataError) as raised:
        check_same(first, second, source="data", whose="there", suspects=named)
    assert raised.value.exit_code == 65
    assert all(text in str(raised.value) for text in named)
    assert digest(first) != digest(second)


@pytest.mark.parametrize("way", SAME_DATA)
def test_the_same_data_have_the_same_fingerprint(way, two_processes):
    first, second = two_processes(SAME_DATA[way])
    check_same(first, second, source="data", whose="there", suspects=[])
    assert first == second


def test_a_plan_without_fingerprints_is_compared_with_nothing():
    check_same({}, {"train": PartFingerprint(1, "x", "y")}, source="data", whose="there", suspects=[])
    assert digest({}) == ""


def test_of_examples_that_have_to_be_read_few_are_read():
    read: list[int] = []

    class Rows:
        def __len__(self) -> int:
            return 10_000

        def __getitem__(self, index: int) -> tuple[np.ndarray, int]:
            read.append(index)
            return np.zeros(3, np.float32), index

    data = open_data("rows", {}, seed=0, user_function=lambda: {"train": Rows(), "evaluate": Rows()})
    read.clear()
    fingerprint_of(data)
    assert len(read) == 2 * READ_ROWS
    assert (min(read), max(read)) == (0, 9_999)
