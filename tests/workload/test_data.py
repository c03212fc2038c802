"""Each data set has the examples that it should have."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import types

import numpy as np
import pytest
import tensorflow as tf

from trainer.workload.data import DATA_SETS, DataError, DataSet, Examples, arrays, find_data_error, open_data
from trainer.workload.data.arrays import from_arrays
from trainer.workload.data.examples import ArraySpec, Spec, describe_nest
from trainer.workload.data.records import index_records, masked_crc32c

IMAGES = np.arange(6 * 2 * 2, dtype=np.uint8).reshape(6, 2, 2, 1) * 10
LABELS = np.array([0, 1, 2, 2, 1, 0])


def fetch(examples, *indices):
    """Features and labels of these examples, as a v1 session returns them."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        arrays = tuple(tf.compat.v1.placeholder(array.dtype, array.shape) for array in examples.arrays)
        wanted = list(examples.fetch(tf.constant(indices, tf.int64), arrays)[:2])
        return session.run(wanted, dict(zip(arrays, examples.arrays, strict=True)))


def floats(values):
    return tf.train.Feature(float_list=tf.train.FloatList(value=np.ravel(values)))


def blob(value):
    return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value]))


def write_records(path, features, labels):
    with tf.io.TFRecordWriter(str(path)) as writer:
        for feature, label in zip(features, labels, strict=True):
            number = tf.train.Feature(int64_list=tf.train.Int64List(value=[label]))
            example = tf.train.Example(features=tf.train.Features(feature={"image": feature, "label": number}))
            writer.write(example.SerializeToString())


def open_records(folder, **options):
    pattern = f"{folder}/*.tfrecord"
    return open_data(
        "tfrecord", {"train": pattern, "evaluate": pattern, "shape": [2, 2, 1], "classes": 3, **options}, seed=0
    )


def test_importing_the_data_sets_does_not_import_tensorflow():
    code = "import sys, trainer.workload.data; assert not {'tensorflow', 'keras'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_mnist_10k_is_split_eight_to_two_with_every_digit_in_both():
    data = open_data("mnist_10k", {}, seed=0)
    assert (data.train.count, data.evaluate.count, data.spec.classes) == (8000, 2000, 10)
    assert data.spec.input_shape == (28, 28, 1)
    assert np.bincount(data.evaluate.arrays[1]).tolist() == [179, 253, 218, 189, 192, 154, 187, 206, 216, 206]


def test_mnist_10k_evaluates_on_every_fifth_image():
    data = open_data("mnist_10k", {}, seed=0)
    assert data.train.arrays[1][:8].tolist() == [7, 2, 1, 0, 1, 4, 9, 5]  # the file starts 7 2 1 0 4 1 4 9 5 9
    assert data.evaluate.arrays[1][:2].tolist() == [4, 9]


def test_bytes_are_scaled_when_they_are_fetched_if_that_is_asked_for():
    data = from_arrays((IMAGES, LABELS), (IMAGES, LABELS), source="images", scale=1 / 255)
    features, labels = fetch(data.train, 5, 0)
    np.testing.assert_allclose(features, IMAGES[[5, 0]] / 255, rtol=1e-6)
    assert (features.dtype, labels.dtype, labels.tolist()) == (np.float32, np.int64, [0, 0])


@pytest.mark.parametrize("dtype", [np.uint8, np.int32, np.int64, np.float32, np.bool_])
def test_arrays_keep_their_type_and_scale(dtype):
    images = IMAGES.astype(dtype)
    data = from_arrays((images, LABELS), (images, LABELS), source="images")
    features, _ = fetch(data.train, 5, 0)
    assert (features.dtype, features.tolist()) == (dtype, images[[5, 0]].tolist())


def test_examples_may_be_nests_of_arrays_and_texts():
    x = {"age": np.arange(4.0), "place": (np.array(["Rom", "Oslo", "Bern", "Ufa"]), np.arange(8).reshape(4, 2))}
    y, weights = [LABELS[:4], np.eye(4)], np.arange(4.0)
    data = from_arrays((x, y, weights), (x, y, weights), source="mine")
    features, labels = fetch(data.train, 3, 1)
    assert features["age"].tolist() == [3.0, 1.0]
    assert [one.tolist() for one in features["place"]] == [[b"Ufa", b"Oslo"], [[6, 7], [2, 3]]]
    assert [one.tolist() for one in labels] == [[2, 1], [[0, 0, 0, 1], [0, 1, 0, 0]]]
    assert describe_nest(data.spec.features) == "{age: float32 [], place: (string [], int64 [2])}"
    assert describe_nest(data.spec.weights) == "float32 []"


def test_lists_of_numbers_are_arrays():
    data = from_arrays(([1, 2, 3], [0, 1, 0]), ([1, 2, 3], [0, 1, 0]), source="mine")
    assert [one.tolist() for one in fetch(data.train, 2)] == [[3], [0]]
    assert data.spec.input_shape == (1,)  # of a layer


def test_doubles_become_floats_and_are_not_scaled():
    data = from_arrays((IMAGES.astype(float), LABELS), (IMAGES.astype(float), LABELS), source="images")
    features, _ = fetch(data.train, 1)
    assert (features.dtype, features.max()) == (np.float32, 70)


def test_labels_keep_their_shape():
    data = from_arrays((IMAGES, LABELS[:, None]), (IMAGES, LABELS[:, None]), source="images")
    assert (data.spec.classes, fetch(data.train, 1, 2)[1].tolist()) == (3, [[1], [2]])
    targets = np.linspace(0, 1, 6)
    data = from_arrays((IMAGES, targets), (IMAGES, targets), source="images")
    assert (data.spec.classes, fetch(data.train, 5)[1].tolist()) == (1, [1.0])


def test_one_output_separates_two_classes():
    data = from_arrays((IMAGES, LABELS % 2), (IMAGES, LABELS % 2), source="images", classes=1)
    assert data.spec.classes == 1


ARRAYS = {"x_train": IMAGES, "y_train": LABELS, "x_test": IMAGES[:2], "y_test": LABELS[:2]}


def save_npz(folder, arrays):
    np.savez(folder / "a.npz", **arrays)
    return "npz", str(folder / "a.npz")


def save_npy(folder, arrays):
    for name, array in arrays.items():
        (folder / name).parent.mkdir(exist_ok=True)
        np.save(folder / f"{name}.npy", array)
    return "npy", str(folder)


@pytest.mark.parametrize("save", [save_npz, save_npy])
def test_npz_and_npy_files_keep_types_unless_features_are_scaled(tmp_path, save):
    name, path = save(tmp_path, ARRAYS)
    data = open_data(name, {"path": path}, seed=0)
    assert (data.train.count, data.evaluate.count, data.spec.classes) == (6, 2, 3)
    assert (data.spec.features.dtype, fetch(data.train, 1)[0].max()) == ("uint8", 70)
    scaled = open_data(name, {"path": path, "scale": 0.5}, seed=0)
    assert (scaled.spec.features.dtype, fetch(scaled.train, 1)[0].max()) == ("float32", 35)


@pytest.mark.parametrize("save", [save_npz, save_npy])
def test_npz_and_npy_files_may_hold_several_inputs_and_weights(tmp_path, save):
    several = {f"x_{part}/{name}": IMAGES[:2] for part in ("train", "test") for name in ("one", "two")}
    labels = {"y_train": LABELS[:2], "y_test": LABELS[:2], "w_train": np.ones(2), "w_test": np.ones(2)}
    name, path = save(tmp_path, several | labels)
    spec = open_data(name, {"path": path}, seed=0).spec
    assert describe_nest(spec.features) == "{one: uint8 [2, 2, 1], two: uint8 [2, 2, 1]}"
    assert describe_nest(spec.weights) == "float32 []"


LARGE = {
    "image": IMAGES,
    "doubles": np.linspace(0, 1, 12).reshape(6, 2),
    "halves": np.linspace(0, 1, 6).astype("float16"),
    "big endian": np.arange(6).astype(">i4"),
    "columns": np.arange(12.0).reshape(2, 6).T,
    "texts": np.array([f"té{number}" for number in range(6)], object),
    "bytes": np.array([b"a\0", b"\0", b"", b"b", b"c", b"d"], object),
}


def test_large_arrays_stay_where_they_are_and_give_the_same_bits(monkeypatch):
    def values(examples):
        features, labels = fetch(examples, 5, 0, 3)
        return {name: (one.dtype, one.shape, one.tolist()) for name, one in features.items()}, labels.tolist()

    small = from_arrays((LARGE, LABELS), (LARGE, LABELS), source="mine")
    monkeypatch.setattr(arrays, "SMALL_NBYTES", 0)
    large = from_arrays((LARGE, LABELS), (LARGE, LABELS), source="mine")
    assert values(large.train) == values(small.train)
    assert values(small.train)[0]["bytes"][2] == [b"d", b"a\0", b"b"]
    assert (large.spec, large.train.arrays) == (small.spec, ())


def test_a_mapped_file_is_read_and_checked_batch_by_batch(tmp_path, monkeypatch, snapshot):
    monkeypatch.setattr(arrays, "SMALL_NBYTES", 0)
    x = np.linspace(0, 1, 2000).reshape(1000, 2)
    x[700, 1] = np.nan
    np.save(tmp_path / "x.npy", x)
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    one, other = ((part, np.arange(500) % 2) for part in (mapped[500:], mapped[:500]))
    data = from_arrays(one, other, source="mine")
    assert fetch(data.train, 3)[0].tolist() == [x[503].astype("float32").tolist()]
    with pytest.raises(tf.errors.OpError) as raised:
        fetch(data.train, 3, 200)
    error = find_data_error(raised.value)
    assert str(error) == snapshot


@pytest.mark.parametrize(
    ("name", "stored", "shape"),
    [
        ("mnist", (28, 28), (28, 28, 1)),
        ("fashion_mnist", (28, 28, 1), (28, 28, 1)),
        ("cifar10", (32, 32, 3), (32, 32, 3)),
    ],
)
def test_a_local_file_takes_the_place_of_a_download(tmp_path, name, stored, shape):
    x, y = np.zeros((3, *stored), np.uint8), np.array([[0], [9], [4]])
    np.savez(tmp_path / "local.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    data = open_data(name, {"path": str(tmp_path / "local.npz")}, seed=0)
    assert (data.train.count, data.spec.input_shape, data.spec.classes) == (3, shape, 10)


def test_synthetic_examples_are_the_same_bits_everywhere():
    data = open_data("synthetic", {"train_examples": 100, "evaluate_examples": 10, "shape": [4]}, seed=3)
    features, labels = data.train.arrays
    assert hashlib.sha256(features.astype("<f4").tobytes()).hexdigest()[:16] == "f6bf440f0be370ed"
    assert labels[:12].tolist() == [7, 9, 2, 5, 6, 0, 9, 2, 7, 6, 7, 1]


def test_synthetic_sets_differ_by_seed_and_between_training_and_evaluation():
    one, other = (open_data("synthetic", {"shape": [4]}, seed=seed) for seed in (0, 1))
    assert not np.array_equal(one.train.arrays[0], other.train.arrays[0])
    assert not np.array_equal(one.train.arrays[0][:2048], one.evaluate.arrays[0])


def test_a_linear_model_learns_synthetic_labels():
    data = open_data("synthetic", {"shape": [16], "classes": 4}, seed=0)
    (x, y), (x_test, y_test) = data.train.arrays, data.evaluate.arrays
    weights = np.linalg.lstsq(x, np.eye(4)[y], rcond=None)[0]
    assert ((x_test @ weights).argmax(axis=1) == y_test).mean() > 0.85


def test_an_option_of_the_data_set_wins_over_the_seed_of_the_run():
    fixed, same = (open_data("synthetic", {"shape": [4], "seed": 7}, seed=seed) for seed in (0, 1))
    assert np.array_equal(fixed.train.arrays[0], same.train.arrays[0])


def test_every_option_of_a_data_set_is_a_keyword():
    for function in DATA_SETS.values():
        code: types.CodeType = function.__code__
        assert code.co_argcount == 0


def test_records_are_read_at_any_index_over_several_files(tmp_path):
    write_records(tmp_path / "a.tfrecord", map(floats, IMAGES[:4]), LABELS[:4])
    write_records(tmp_path / "b.tfrecord", map(floats, IMAGES[4:]), LABELS[4:])
    data = open_records(tmp_path)
    features, labels = fetch(data.train, 5, 0, 3)
    assert data.train.count == 6
    assert np.array_equal(features, IMAGES[[5, 0, 3]])
    assert labels.tolist() == LABELS[[5, 0, 3]].tolist()


@pytest.mark.parametrize("encoding", ["raw", "png"])
def test_images_in_records_are_scaled_to_one(tmp_path, encoding):
    encode = {"raw": lambda image: image.tobytes(), "png": lambda image: tf.io.encode_png(image).numpy()}[encoding]
    write_records(tmp_path / "a.tfrecord", [blob(encode(image)) for image in IMAGES], LABELS)
    features, _ = fetch(open_records(tmp_path, encoding=encoding).train, 4, 1)
    assert features.shape == (2, 2, 2, 1)
    np.testing.assert_allclose(features, IMAGES[[4, 1]] / 255, rtol=1e-6)


NAMED = {
    "age": {"dtype": "int64"},
    "pixels": {"dtype": "float32", "shape": [2, 1]},
    "town": {"dtype": "string", "shape": [1]},
}


def write_named(path, count=3):
    """Records of an age, two pixels and a town."""
    with tf.io.TFRecordWriter(str(path)) as writer:
        for number in range(count):
            age = tf.train.Feature(int64_list=tf.train.Int64List(value=[number]))
            feature = {"age": age, "label": age, "pixels": floats([number, 0.5]), "town": blob(b"town%d" % number)}
            writer.write(tf.train.Example(features=tf.train.Features(feature=feature)).SerializeToString())


def test_records_may_hold_several_features_of_their_own_types(tmp_path):
    write_named(tmp_path / "a.tfrecord")
    data = open_records(tmp_path, features=NAMED)
    assert describe_nest(data.spec.features) == "{age: int64 [], pixels: float32 [2, 1], town: string [1]}"
    features, labels = fetch(data.train, 2, 0)
    assert (features["age"].tolist(), features["pixels"].tolist()) == ([2, 0], [[[2], [0.5]], [[0], [0.5]]])
    assert (features["town"].tolist(), labels.tolist()) == ([[b"town2"], [b"town0"]], [2, 0])


@pytest.mark.parametrize(
    "changed",
    [
        {"age": {"dtype": "int8"}},
        {"age": {"dtype": "float32"}},
        {"pixels": {"dtype": "float32"}},
        {"size": {"dtype": "int64"}},
    ],
)
def test_several_features_that_do_not_fit_the_records_are_refused(tmp_path, changed, raises):
    write_named(tmp_path / "a.tfrecord")
    with raises(DataError):
        open_records(tmp_path, features=NAMED | changed)


def test_checksums_of_records_are_those_of_tensorflow(tmp_path):
    write_records(tmp_path / "a.tfrecord", map(floats, IMAGES), LABELS)
    content = np.frombuffer((tmp_path / "a.tfrecord").read_bytes(), np.uint8)
    for offset, length in zip(*index_records(tmp_path / "a.tfrecord"), strict=True):
        record, stored = content[offset : offset + length], content[offset + length : offset + length + 4]
        assert masked_crc32c(record[None]) == stored.view("<u4")


def test_more_files_than_may_be_open_are_read(tmp_path):
    for number in range(70):
        write_records(tmp_path / f"{number:02}.tfrecord", [floats(np.full(4, number))], [number % 3])
    features, _ = fetch(open_records(tmp_path, verify=False).train, *range(70), 0)
    assert features[:, 0, 0, 0].tolist() == [*range(70), 0]


def test_a_function_of_the_user_may_return_arrays():
    def mine(*, copies):
        return {"train": (np.repeat(IMAGES, copies, 0), np.repeat(LABELS, copies)), "evaluate": (IMAGES, LABELS)}

    data = open_data("mine", {"copies": 2}, seed=0, user_function=mine)
    assert (data.train.count, data.evaluate.count, data.spec.input_shape, data.spec.classes) == (12, 6, (2, 2, 1), 3)


def test_a_function_of_the_user_may_name_the_number_of_classes():
    def mine():
        return {"train": (IMAGES, LABELS), "evaluate": (IMAGES, LABELS), "classes": 10}

    assert open_data("mine", {}, seed=0, user_function=mine).spec.classes == 10


def test_a_function_of_the_user_gets_the_seed_if_it_has_an_argument_for_it():
    def mine(*, seed):
        return {"train": (IMAGES, LABELS + seed), "evaluate": (IMAGES, LABELS)}

    assert open_data("mine", {}, seed=4, user_function=mine).spec.classes == 7


def test_a_function_of_the_user_may_return_a_data_set():
    examples = Examples(1, (), lambda indices, arrays: (indices, indices))
    mine = DataSet(examples, examples, Spec(ArraySpec((1,), "float32"), ArraySpec((), "int64"), None, 2))
    assert open_data("mine", {}, seed=0, user_function=lambda: mine) is mine


def test_clicks_are_a_function_of_the_seed_with_few_common_ids():
    options = {"train_examples": 5000, "evaluate_examples": 100, "fields": 3, "numbers": 2, "rows": 1000}
    one, again, other = (open_data("clicks", options, seed=seed) for seed in (3, 3, 4))
    assert all(np.array_equal(*pair) for pair in zip(one.train.arrays, again.train.arrays, strict=True))
    assert not all(np.array_equal(*pair) for pair in zip(one.train.arrays, other.train.arrays, strict=True))
    ids = next(array for array in one.train.arrays if array.dtype == np.int64)
    assert ids.shape == (5000, 3)
    assert (ids.min(), ids.max() < 1000) == (0, True)
    counts = np.sort(np.bincount(ids[:, 0], minlength=1000))[::-1]
    assert counts[0] > 500
    assert np.count_nonzero(counts) > 300
    labels = one.train.arrays[-1]
    assert 0.2 < labels.mean() < 0.8


def test_an_id_has_an_effect_on_clicks():
    data = open_data("clicks", {"train_examples": 20_000, "fields": 1, "numbers": 1, "rows": 5}, seed=1)
    ids = next(array for array in data.train.arrays if array.dtype == np.int64)[:, 0]
    labels = data.train.arrays[-1][:, 0]
    means = [labels[ids == one].mean() for one in range(5)]
    assert max(means) - min(means) > 0.1
