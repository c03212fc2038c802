"""Bad data is refused with the file, the record, what was found, what is allowed and what to type."""

from __future__ import annotations

import gzip
import struct

import keras
import numpy as np
import pytest
import tensorflow as tf

from trainer.plan.downloads import is_missing
from trainer.workload.data import DataError, MissingInputError, find_data_error, open_data
from trainer.workload.data.arrays import from_arrays
from trainer.workload.data.idx import read_idx
from trainer.workload.data.pipeline import training_batches

X = np.ones((4, 2, 2, 1), np.float32)
Y = np.array([0, 1, 2, 1])


def floats(*values):
    return tf.train.Feature(float_list=tf.train.FloatList(value=values))


def integers(*values):
    return tf.train.Feature(int64_list=tf.train.Int64List(value=values))


def blob(*values):
    return tf.train.Feature(bytes_list=tf.train.BytesList(value=values))


def example(**features):
    given = {"image": floats(1, 2, 3, 4), "label": integers(1)} | features
    present = {name: feature for name, feature in given.items() if feature is not None}
    return tf.train.Example(features=tf.train.Features(feature=present)).SerializeToString()


def write(path, *records):
    with tf.io.TFRecordWriter(str(path)) as writer:
        for record in records:
            writer.write(record)
    return path


def open_records(path, **options):
    given = {"train": str(path), "evaluate": str(path), "shape": [2, 2, 1], "classes": 3} | options
    return open_data("tfrecord", given, seed=0)


@pytest.fixture
def whole(tmp_path):
    """A good file of three records of 64 bytes each."""
    return write(tmp_path / "a.tfrecord", *[example()] * 3)


# Any data set


def test_an_unknown_data_set_is_refused_with_the_available_names(raises):
    with raises(ValueError):
        open_data("mnst", {}, seed=0)


def test_an_unknown_option_is_refused_with_the_available_ones(raises):
    with raises(ValueError):
        open_data("npz", {"path": "a", "file": "b"}, seed=0)


def test_a_missing_option_is_named():
    with pytest.raises(ValueError, match="data.options of npz: missing a required .*'path'"):
        open_data("npz", {}, seed=0)


@pytest.mark.parametrize("option", ["train_examples", "evaluate_examples", "classes"])
def test_a_synthetic_set_of_nothing_is_refused(option, raises):
    with raises(ValueError):
        open_data("synthetic", {option: 0}, seed=0)


# Arrays


@pytest.mark.parametrize(
    "train",
    [
        pytest.param((X, Y[:3]), id="lengths differ"),
        pytest.param((X[:0], Y[:0]), id="no examples"),
        pytest.param((X.astype(str), Y), id="text"),
        pytest.param((np.array([{}] * 4), Y), id="objects"),
        pytest.param((X[:, :1], Y), id="shapes"),
        pytest.param((X.astype(np.uint8), Y), id="types"),
        pytest.param((X, Y.astype(float)), id="targets and classes"),
    ],
)
def test_arrays_that_cannot_be_trained_on_are_refused(train, raises):
    with raises(DataError):
        from_arrays(train, (X, Y), source="mine", classes=3)


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e39], ids=str)
def test_a_feature_that_is_not_finite_is_refused(value, raises):
    features = X.astype(np.float64)
    features[3, 1, 0, 0] = value
    with raises(DataError):
        from_arrays((X, Y), (features, Y), source="mine")


# .npz files


def test_a_missing_npz_file_is_missing_input(tmp_path):
    with pytest.raises(MissingInputError, match="none.npz: no such file .* type data.options.path=/PATH/TO/FILE"):
        open_data("npz", {"path": str(tmp_path / "none.npz")}, seed=0)


def test_a_folder_is_not_an_npz_file(tmp_path, raises):
    with raises(DataError):
        open_data("npz", {"path": str(tmp_path)}, seed=0)


@pytest.mark.parametrize("content", [pytest.param(b"", id="empty"), pytest.param(b"x_train,y_train\n1,2\n", id="text")])
def test_a_file_that_is_not_an_npz_is_refused(tmp_path, content, raises):
    (tmp_path / "a.npz").write_bytes(content)
    with raises(DataError):
        open_data("npz", {"path": str(tmp_path / "a.npz")}, seed=0)


@pytest.mark.parametrize("damage", ["cut", "flip"])
def test_a_damaged_npz_file_is_refused(tmp_path, damage, raises):
    np.savez(tmp_path / "a.npz", x_train=X, y_train=Y, x_test=X, y_test=Y)
    content = bytearray((tmp_path / "a.npz").read_bytes())
    if damage == "flip":
        content[180] ^= 1  # within the data of x_train
    (tmp_path / "a.npz").write_bytes(content if damage == "flip" else content[:-100])
    with raises(DataError):
        open_data("npz", {"path": str(tmp_path / "a.npz")}, seed=0)


def test_an_npz_file_without_an_array_names_it_and_the_others(tmp_path, raises):
    np.savez(tmp_path / "a.npz", x_train=X, labels=Y)
    with raises(DataError):
        open_data("npz", {"path": str(tmp_path / "a.npz")}, seed=0)


def test_pickles_in_an_npz_file_are_not_executed(tmp_path):
    np.savez(tmp_path / "a.npz", x_train=np.array([{}]), y_train=Y, x_test=X, y_test=Y)
    with pytest.raises(DataError, match="cannot be read .*allow_pickle=False"):
        open_data("npz", {"path": str(tmp_path / "a.npz")}, seed=0)


# Downloads


def test_without_a_network_the_message_says_which_file_to_put_where(monkeypatch, tmp_path, raises):
    def fail():
        raise OSError("URL fetch failure on https://example.org: no route to host")

    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    monkeypatch.setattr(keras.datasets.cifar10, "load_data", fail)
    with raises(MissingInputError):
        open_data("cifar10", {"path": None}, seed=0)
    assert is_missing({"name": "cifar10", "options": {"path": None}})


def test_data_that_was_downloaded_needs_no_network_again(monkeypatch, tmp_path):
    images, labels = np.zeros((4, 32, 32, 3), np.uint8), np.array([0, 1, 2, 3])
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    monkeypatch.setattr(keras.datasets.cifar10, "load_data", lambda: ((images, labels), (images, labels)))
    open_data("cifar10", {"path": None}, seed=0)
    assert not is_missing({"name": "cifar10", "options": {}})
    assert is_missing({"name": "mnist", "options": {}})
    assert not is_missing({"name": "mnist", "options": {"path": "mine.npz"}})
    assert not is_missing({"name": "mnist_10k", "options": {}})


def test_images_of_another_shape_are_refused(tmp_path, raises):
    np.savez(tmp_path / "a.npz", x_train=X, y_train=Y, x_test=X, y_test=Y)
    with raises(DataError):
        open_data("cifar10", {"path": str(tmp_path / "a.npz")}, seed=0)


# IDX files


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"\0\0\x08\x01", id="not compressed"),
        pytest.param(gzip.compress(b"\0\0\x08\x01\0\0\0\2AB")[:-9], id="cut"),
        pytest.param(gzip.compress(b"hello"), id="not IDX"),
        pytest.param(gzip.compress(b"\0\0\x08\x03" + bytes(12)), id="images for labels"),
        pytest.param(gzip.compress(b"\0\0\x08\x01\0\0\0\3AB"), id="too short"),
    ],
)
def test_a_damaged_idx_file_is_refused(tmp_path, content, raises):
    (tmp_path / "labels.gz").write_bytes(content)
    with raises(DataError):
        read_idx(tmp_path / "labels.gz", dimensions=1)


# TFRecord files


def changed(change):
    """Replaces what the file holds."""
    return lambda path: path.write_bytes(change(path.read_bytes())) and path


def flipped(number, place):
    """Flips a bit at a place of a record."""

    def flip(content):
        place_in_file = len(content) // 3 * number + place
        return content[:place_in_file] + bytes([content[place_in_file] ^ 1]) + content[place_in_file + 1 :]

    return changed(flip)


def record(**features):
    """Has a second record with other features."""
    return lambda path: write(path, example(), example(**features))


# What is done to a file of three records; it returns the path to read.
DAMAGES = {
    "missing": lambda path: path.with_name("none.tfrecord"),
    "no match": lambda path: path.with_name("*.csv"),
    "folder": lambda path: path.parent,
    "empty": lambda path: path.write_bytes(b"") or path,
    "short text": changed(lambda _: b"hello"),
    "long text": changed(lambda _: b"x_train,y_train\n" * 20),
    "gzip": changed(gzip.compress),
    "cut by 1 byte": changed(lambda content: content[:-1]),
    "cut by 4 bytes": changed(lambda content: content[:-4]),
    "cut by 30 bytes": changed(lambda content: content[:-30]),
    "cut within a length": changed(lambda content: content + b"\0\0\0"),
    "flipped bit in a length": flipped(1, 0),
    "flipped bit in a record": flipped(2, 20),
    "no example": lambda path: write(path, example(), b"\xff\xffhello"),
    "no image": record(image=None),
    "no label": record(label=None),
    "type": record(image=blob(b"abcd")),
    "no values": record(image=tf.train.Feature()),
    "label type": record(label=floats(1)),
    "shape": record(image=floats(1, 2)),
    "NaN": record(image=floats(1, 2, 3, np.nan)),
    "two labels": record(label=integers(1, 2)),
    "label above": record(label=integers(3)),
    "label below": record(label=integers(-1)),
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_file_is_refused_with_its_place_and_exit_code(whole, refused, kind):
    path = DAMAGES[kind](whole)
    before = sorted(whole.parent.rglob("*"))
    refused(66 if kind in ("missing", "no match") else 65, open_records, path)
    assert sorted(whole.parent.rglob("*")) == before


PNG = b"\x89PNG\r\n\x1a\n" + bytes(8) + struct.pack(">II", 3, 2)


@pytest.mark.parametrize(
    ("encoding", "image"),
    [("raw", blob(b"abc")), ("raw", blob(b"a", b"b")), ("png", blob(b"abcd")), ("png", blob(PNG))],
    ids=["raw size", "two blobs", "no png", "png size"],
)
def test_an_image_that_cannot_be_decoded_is_named(tmp_path, refused, encoding, image):
    good = {"raw": blob(b"abcd"), "png": blob(tf.io.encode_png(np.zeros((2, 2, 1), np.uint8)).numpy())}
    path = write(tmp_path / "a.tfrecord", example(image=good[encoding]), example(image=image))
    refused(65, open_records, path, encoding=encoding)


@pytest.mark.parametrize(
    "options",
    [
        {"encoding": "jpeg"},
        {"encoding": "png", "shape": [4]},
        {"shape": [2, 0]},
        {"classes": 0},
        {"compression": "gzip"},
        {"train_examples": 4},
    ],
    ids=["encoding", "png shape", "size zero", "no classes", "compression", "number of records"],
)
def test_options_that_do_not_fit_the_records_are_refused(whole, refused, options):
    refused(65, open_records, whole, **options)


# Records that turn out to be bad while a run reads them, because they were not all verified


def read_batch(data):
    """What a session raises for the first batch, as find_data_error reads it."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        batches = training_batches(data.train, seed=0, start=0, stop=1, batch_size=2, replica=0, replicas=1)
        session.run(batches.initializer, batches.feed_dict)
        with pytest.raises((tf.errors.OpError, UnicodeDecodeError)) as raised:
            session.run(batches.batch.features)
    return find_data_error(raised.value)


@pytest.mark.parametrize(
    "record",
    [
        pytest.param(example(image=None), id="missing"),
        pytest.param(example(image=floats(1)), id="shape"),
        pytest.param(b"\xff\xffhello", id="garbage"),
    ],
)
def test_a_bad_record_met_in_training_is_a_data_error(tmp_path, record, raises):
    data = open_records(write(tmp_path / "a.tfrecord", example(), record), verify=False)
    with raises(DataError):
        raise read_batch(data)


def test_a_file_that_shrinks_under_a_run_is_a_data_error(tmp_path, raises):
    path = write(tmp_path / "a.tfrecord", *[example()] * 2)
    data = open_records(path)
    path.write_bytes(path.read_bytes()[:-30])
    with raises(DataError):
        raise read_batch(data)


def test_other_errors_of_a_session_are_not_data_errors():
    assert find_data_error(tf.errors.UnavailableError(None, None, "Connection reset by peer")) is None


# What the command does with them: the process that opens the data reports them before any task starts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "options", "code"),
    [("none.tfrecord", [], 66), ("a.tfrecord", ["data.options.classes=1"], 65), ("a.tfrecord", [], 2)],
    ids=["missing", "label", "few records"],
)
def test_the_command_ends_with_that_code_before_any_task_starts(whole, python, snapshot, name, options, code):
    path = whole.with_name(name)
    files = [f"data.options.{part}={path}" for part in ("train", "evaluate")]
    shape = ["data.options.shape=[2,2,1]", "data.options.classes=3"]
    arguments = ["cluster=1ps2w", "model=mlp", "data=tfrecord", *files, *shape, *options]
    ended = python.run("-m", "trainer", *arguments, cwd=whole.parent)
    assert (ended.returncode, ended.stdout) == (code, ""), ended.stderr
    assert ended.stderr == snapshot
    assert [path.name for path in whole.parent.iterdir()] == ["a.tfrecord"]


def test_one_file_is_enough_for_many_workers(tmp_path):
    """Records are read at any index, so workers need no separate files."""
    data = open_records(write(tmp_path / "a.tfrecord", *[example(image=floats(n, 0, 0, 0)) for n in range(12)]))

    def first_batch(replica, replicas):
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            batches = training_batches(
                data.train, seed=0, start=0, stop=1, batch_size=8, replica=replica, replicas=replicas
            )
            session.run(batches.initializer, batches.feed_dict)
            return session.run(batches.batch.features)[:, 0, 0, 0].tolist()

    parts = [first_batch(replica, 4) for replica in range(4)]
    assert [len(part) for part in parts] == [2, 2, 2, 2]
    assert [value for part in parts for value in part] == first_batch(0, 1)
