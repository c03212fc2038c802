"""Readers of files in formats of others: tables, folders of images, and data sets that other libraries wrote."""

from __future__ import annotations

import gzip
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from extras import optional

from trainer.workload.data import DataError, DataSet, find_data_error, open_data
from trainer.workload.data.examples import Batch, describe_nest
from trainer.workload.data.parts import divide
from trainer.workload.data.pipeline import evaluation_batches

PEOPLE = """\
name,age,height,town,grade
Ann,31,1.7,Bern,b
Bo,45,,"Ufa, East",a
Cy,18,1.6,,b
Di,77,nan,Oslo,c
"""


def read_all(data: DataSet) -> Batch:
    """What is evaluated on, as a session reads it."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        batches = evaluation_batches(data.evaluate, batch_size=1000)
        session.run(batches.initializer, batches.feed_dict)
        nothing = {name: () for name, nest in batches.batch._asdict().items() if nest is None}
        return session.run(batches.batch._replace(**nothing))


def lists(nest: Any) -> Any:
    """Arrays [N, 1] as lists of N."""
    if isinstance(nest, dict):
        return {name: lists(one) for name, one in nest.items()}
    return [value.decode() if isinstance(value, bytes) else value for value in nest.reshape(len(nest)).tolist()]


@pytest.fixture
def people(tmp_path: Path) -> Callable[..., DataSet]:
    """Opens a CSV file, of which all is evaluated on."""

    def read(text: str = PEOPLE, **options: Any) -> DataSet:
        path = tmp_path / "people.csv"
        path.write_text(text)
        return open_data("csv", {"path": str(path), "evaluate": str(path), **options}, seed=0)

    return read


def test_columns_of_a_csv_file_are_integers_floats_or_texts(people):
    data = people(label="grade", missing=0)
    features, labels, _ = read_all(data)
    assert (
        describe_nest(data.spec.features) == "{name: string [1], age: int64 [1], height: float32 [1], town: string [1]}"
    )
    assert lists(features["town"]) == ["Bern", "Ufa, East", "", "Oslo"]
    assert lists(features["age"]) == [31, 45, 18, 77]
    assert features["height"][:, 0].tolist() == np.array([1.7, 0, 1.6, 0], np.float32).tolist()
    assert (labels.tolist(), data.spec.classes) == ([1, 0, 1, 2], 3)


def test_csv_columns_may_form_a_matrix_with_weights_and_several_labels(people):
    data = people(columns=["age", "height"], matrix=True, missing=1, label=["grade", "town"], weight="age")
    features, labels, weights = read_all(data)
    assert features.tolist() == np.array([[31, 1.7], [45, 1], [18, 1.6], [77, 1]], np.float32).tolist()
    assert {name: one.tolist() for name, one in labels.items()} == {"grade": [1, 0, 1, 2], "town": [1, 3, 0, 2]}
    assert weights.tolist() == [31, 45, 18, 77]


def test_a_csv_column_that_looks_like_text_late_is_text_from_the_start(people, monkeypatch):
    monkeypatch.setattr("trainer.workload.data.csv_files.ROWS", 2)
    text = "code;x\n01;1\n02;2\n03;3\n4_0;4\n"
    data = people(text, separator=";")
    assert lists(read_all(data).features) == {"code": ["01", "02", "03", "4_0"], "x": [1, 2, 3, 4]}


def test_csv_files_may_be_compressed_have_no_header_and_other_types(tmp_path):
    for part in ("a", "b"):
        (tmp_path / f"{part}.csv.gz").write_bytes(gzip.compress(f"007,1,{part}\n8,2.5,x\n".encode()))
    options = {"path": f"{tmp_path}/*.gz", "evaluate": f"{tmp_path}/b*", "header": False, "dtypes": {"0": "string"}}
    data = open_data("csv", {**options, "label": "1"}, seed=0)
    assert (data.train.count, data.evaluate.count) == (4, 2)
    features, labels, _ = read_all(data)
    assert (lists(features), lists(labels)) == ({"0": ["007", "8"], "2": ["b", "x"]}, [1.0, 2.5])


def test_csv_columns_may_become_ids_by_a_vocabulary_of_the_examples_to_train_on_or_by_a_hash(tmp_path):
    (tmp_path / "train.csv").write_text("town,code,age\nOslo,7,1\n,3,2\nBern,7,3\n")
    (tmp_path / "test.csv").write_text("town,code,age\nBern,9,4\nRome,3,5\n")
    files = {"path": f"{tmp_path}/train.csv", "evaluate": f"{tmp_path}/test.csv"}
    data = open_data("csv", {**files, "ids": {"town": "vocabulary", "code": "vocabulary"}}, seed=0)
    features = read_all(data).features
    assert {name: one.ids for name, one in data.spec.features.items()} == {"town": 4, "code": 3, "age": None}
    assert lists(features) == {"town": [2, 0], "code": [0, 1], "age": [4, 5]}  # "" is 1, Bern 2, Oslo 3
    assert data.spec.features["town"][:2] == ((1,), "int64")

    hashed = [open_data("csv", {**files, "ids": {"town": 1000, "code": 5}}, seed=seed) for seed in (0, 1)]
    towns, codes = (lists(read_all(hashed[1]).features[name]) for name in ("town", "code"))
    assert lists(read_all(hashed[0]).features) == lists(read_all(hashed[1]).features)
    assert hashed[0].spec.features["town"].ids == 1000
    assert towns == keras.layers.Hashing(1000)(tf.constant(["Bern", "Rome"])).numpy().tolist()
    assert codes == keras.layers.Hashing(5)(tf.constant([9, 3])).numpy().tolist()


def test_an_exported_model_numbers_values_as_the_data_set_does(people):
    ids = {"name": "vocabulary", "age": "vocabulary", "town": 100}
    text = "name,age,town,height\nAnn,31,Bern,1.5\nBo,,,2\nÆsa,7,Bern,3\n".replace(",,", ",5,")
    data = people(text, ids=ids, dtypes={"height": "float32"})
    made = data.preprocessing()
    assert describe_nest(made.spec) == "{name: string [1], age: int64 [1], town: string [1], height: float32 [1]}"
    raw = read_all(people(text, dtypes={"height": "float32"})).features
    applied = {name: one.numpy() for name, one in made.apply({n: tf.constant(v) for n, v in raw.items()}).items()}
    wanted = read_all(data).features
    assert {name: one.tolist() for name, one in applied.items()} == {name: one.tolist() for name, one in wanted.items()}
    other = {
        "name": np.array([["Cy"]]),
        "age": np.array([[99]]),
        "town": np.array([["Bern"]]),
        "height": np.ones((1, 1)),
    }
    assert [int(made.apply({n: tf.constant(v) for n, v in other.items()})[name][0, 0]) for name in ("name", "age")] == [
        0,
        0,
    ]


def test_a_share_of_the_examples_is_the_same_everywhere():
    train, evaluate = divide(20, 0.2, "mine")
    assert evaluate.tolist() == [2, 4, 6, 18]
    assert sorted([*train, *evaluate]) == list(range(20))
    rows = divide(10_000, 0.25, "mine")[1]
    assert np.bincount(rows % 4).min() > 500  # no pattern


BAD_TABLES = {
    "missing number": ({}, PEOPLE),
    "no column": ({"label": "grad"}, PEOPLE),
    "text matrix": ({"matrix": True, "missing": 0}, PEOPLE),
    "lengths": ({}, "a,b\n1,2\n1,2,3\n"),
    "no rows": ({}, "a,b\n"),
    "two names": ({}, "a,a\n1,2\n"),
    "infinite": ({}, "a,b\n1,2\ninf,2\n"),
    "not UTF-8": ({}, b"a,b\n\xff,1\n"),
    "type": ({"dtypes": {"name": "float32"}}, PEOPLE),
    "unknown type": ({"dtypes": {"name": "int8"}}, PEOPLE),
    "rounded type": ({"dtypes": {"a": "int64"}}, "a,b\n9007199254740993,1\n5.0,2\n"),
    "fraction": ({"dtypes": {"a": "int64"}}, "a,b\n5.5,1\n5.0,2\n"),
    "separator": ({"separator": "::"}, PEOPLE),
    "share": ({"evaluate": 1.5}, PEOPLE),
    "small share": ({"evaluate": 0.01, "missing": 0}, PEOPLE),
    "other columns": ({"evaluate": "other.csv"}, PEOPLE),
    "ids of fractions": ({"ids": {"height": 10}, "missing": 0}, PEOPLE),
    "rule of ids": ({"ids": {"town": "hash"}}, PEOPLE),
    "no ids": ({"ids": {"town": 0}}, PEOPLE),
    "ids of no column": ({"ids": {"twon": 9}, "missing": 0}, PEOPLE),
    "ids of a label": ({"ids": {"grade": 9}, "label": "grade"}, PEOPLE),
    "ids in a matrix": ({"ids": {"town": 9}, "matrix": True}, PEOPLE),
    "nothing left": ({"label": ["a", "b"]}, "a,b\n1,2\n"),
}


@pytest.mark.parametrize("kind", BAD_TABLES)
def test_a_csv_file_that_cannot_be_used_is_refused(tmp_path, monkeypatch, kind, raises):
    options, text = BAD_TABLES[kind]
    monkeypatch.chdir(tmp_path)
    Path("people.csv").write_bytes(text if isinstance(text, bytes) else text.encode())
    Path("other.csv").write_text("b\n1\n")
    with raises(DataError):
        open_data("csv", {"path": "people.csv", "evaluate": "people.csv", **options}, seed=0)


# Criteo


def criteo_lines(count: int, *, first: int = 0) -> bytes:
    """Lines whose numbers and ids follow from their place; what is missing is empty."""
    lines = []
    for line in range(first, first + count):
        numbers = ["" if line % 3 == 0 and place == 1 else str(line - 2 + place) for place in range(13)]
        ids = ["" if line % 4 == 0 and place == 2 else f"{line * 26 + place:08x}" for place in range(26)]
        lines.append("\t".join([str(line % 2), *numbers, *ids]))
    return ("\n".join(lines) + "\n").encode()


def test_files_of_criteo_are_converted_once_and_mapped(tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.workload.data.criteo_files.LINES", 3)
    (tmp_path / "day_0").write_bytes(criteo_lines(4))
    (tmp_path / "day_1.gz").write_bytes(gzip.compress(criteo_lines(4, first=4)))
    options = {"path": f"{tmp_path}/day_*", "rows": 50, "cache": f"{tmp_path}/arrays", "evaluate": 0.25}
    data = open_data("criteo", options, seed=0)
    features, labels, _ = read_all(data)
    assert (data.train.count, labels.tolist()) == (6, [[0], [1]])  # the last lines
    assert describe_nest(data.spec.features) == "{numbers: float32 [13], ids: int32 [26]}"
    assert data.spec.features["ids"].ids == 50
    numbers = [[0 if line % 3 == 0 and place == 1 else line - 2 + place for place in range(13)] for line in (6, 7)]
    assert np.allclose(features["numbers"], np.log1p(numbers))
    ids = [
        [0 if line % 4 == 0 and place == 2 else 1 + (line * 26 + place) % 49 for place in range(26)] for line in (6, 7)
    ]
    assert features["ids"].tolist() == ids
    monkeypatch.setattr("trainer.workload.data.criteo_files._convert", None)  # the arrays are there
    assert read_all(open_data("criteo", options, seed=1)).features["ids"].tolist() == ids
    named = {**options, "path": f"{tmp_path}/day_0", "evaluate": f"{tmp_path}/day_1.gz"}
    monkeypatch.undo()
    assert read_all(open_data("criteo", named, seed=0)).features["ids"][2:].tolist() == ids


BAD_CRITEO = {
    "few values": (criteo_lines(2) + b"1\t2\n", {}),
    "no number": (b"x" + criteo_lines(2)[1:], {}),
    "no id": (criteo_lines(2)[:-2] + b"z\n", {}),
    "cut off": (gzip.compress(criteo_lines(2000))[:-9], {}),
    "one line": (criteo_lines(1), {}),
    "rows": (criteo_lines(2), {"rows": 1}),
    "cache": (criteo_lines(9), {"cache": "day_0/x"}),
}


@pytest.mark.parametrize("kind", BAD_CRITEO)
def test_a_file_of_criteo_that_cannot_be_used_is_refused_and_nothing_is_left(tmp_path, monkeypatch, kind, raises):
    content, options = BAD_CRITEO[kind]
    monkeypatch.chdir(tmp_path)
    Path("day_0").write_bytes(content)
    with raises(DataError):
        open_data("criteo", {"path": "day_0", **options}, seed=0)
    assert {path.name for path in tmp_path.iterdir() if path.is_dir() and not (path / "ids.npy").exists()} == set()


# Images


COLORS = {"blue": (0, 0, 255), "red": (255, 0, 0)}


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Five images of each color, of several sizes and formats."""
    for name, color in COLORS.items():
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(5):
            image = np.full((4 + number, 6, 3), color, np.uint8)
            kind, encode = (("png", tf.io.encode_png), ("jpg", tf.io.encode_jpeg))[number % 2]
            (tmp_path / "photos" / name / f"{number}.{kind}").write_bytes(encode(image).numpy())
    return tmp_path / "photos"


def test_images_of_folders_are_decoded_resized_and_labelled_by_the_order_of_names(photos):
    data = open_data("images", {"path": str(photos), "evaluate": str(photos), "size": [3, 2]}, seed=0)
    features, labels, _ = read_all(data)
    assert describe_nest(data.spec.features) == "float32 [3, 2, 3]"
    assert (labels.tolist(), data.spec.classes) == ([0] * 5 + [1] * 5, 2)
    for label, color in enumerate(COLORS.values()):
        assert np.abs(features[labels == label] - color).max() < 3
    assert not any(isinstance(array, np.ndarray) and array.nbytes > 1000 for array in data.train.arrays)


def test_images_may_be_scaled_and_divided(photos):
    data = open_data("images", {"path": str(photos), "size": [3, 2], "channels": 1, "scale": 1 / 255}, seed=0)
    assert (data.train.count, data.evaluate.count) == (8, 2)
    assert 0 < read_all(data).features.max() < 0.4


BAD_IMAGES: dict[str, tuple[Callable[[Path], Any], dict[str, Any], str]] = {
    "no folders": (lambda path: path / "red", {}),
    "no image": (lambda path: (path / "green").mkdir() or path, {}),
    "text": (lambda path: (path / "red/a.png").write_text("a") and path, {}),
    "empty": (lambda path: (path / "red/a.png").touch() or path, {}),
    "size": (lambda path: path, {"size": [0, 2]}),
    "other": (lambda path: path, {"evaluate": "few"}),
    "nowhere": (lambda path: path / "none", {}),
}


@pytest.mark.parametrize("kind", BAD_IMAGES)
def test_folders_that_cannot_be_used_are_refused(photos, monkeypatch, kind, raises):
    change, options = BAD_IMAGES[kind]
    monkeypatch.chdir(photos.parent)
    Path("few").mkdir()
    Path("few/red").symlink_to(photos / "red")
    with raises(DataError):
        open_data("images", {"path": str(change(photos)), "size": [3, 2], **options}, seed=0)


def test_a_damaged_image_is_found_at_the_start_or_said_when_it_is_met(photos, snapshot):
    file = photos / "red" / "0.png"
    file.write_bytes(file.read_bytes()[:40])
    options = {"path": str(photos), "evaluate": str(photos), "size": [3, 2]}
    with pytest.raises(DataError, match=r"red/0.png: cannot be decoded"):
        open_data("images", {**options, "verify": True}, seed=0)
    with pytest.raises(tf.errors.OpError) as raised:
        read_all(open_data("images", options, seed=0))
    assert str(find_data_error(raised.value)) == snapshot


# Of other libraries


@pytest.mark.parametrize(
    ("name", "module", "package"),
    [
        ("parquet", "pyarrow", "pyarrow"),
        ("hf", "datasets", "datasets"),
        ("tfds", "tensorflow_datasets", "tensorflow-data"),
    ],
)
def test_a_package_that_is_missing_is_named_with_what_to_type(monkeypatch, tmp_path, name, module, package, raises):
    monkeypatch.setitem(sys.modules, module, None)
    with raises(DataError):
        open_data(name, {"path": str(tmp_path)}, seed=0)


@pytest.mark.long
def test_parquet_files_have_columns_of_numbers_texts_and_lists(tmp_path):
    arrow = optional("pyarrow", "PARQUET")
    parquet = optional("pyarrow.parquet", "PARQUET")
    columns = {
        "number": arrow.array([1.0, None, 3.0]),
        "count": arrow.array([1, 2, 3], arrow.int32()),
        "town": arrow.array(["Bern", None, "Ufa"]).dictionary_encode(),
        "vector": arrow.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]),
        "ragged": arrow.array([[1], [1, 2], [3]]),
        "time": arrow.array([1, 2, 3], arrow.timestamp("s")),
        "y": arrow.array([0, 1, 0]),
    }
    path = str(tmp_path / "a.parquet")
    parquet.write_table(arrow.table(columns), path)

    def read(**options: Any) -> DataSet:
        return open_data("parquet", {"path": path, "evaluate": path, "label": "y", **options}, seed=0)

    data = read(columns=["number", "count", "town", "vector"], missing=9)
    assert (
        describe_nest(data.spec.features)
        == "{number: float32 [1], count: int32 [1], town: string [1], vector: float32 [2]}"
    )
    features = read_all(data).features
    assert features.pop("vector").tolist() == [[1, 2], [3, 4], [5, 6]]
    assert lists(features) == {"number": [1, 9, 3], "count": [1, 2, 3], "town": ["Bern", "", "Ufa"]}
    for column, message in {
        "ragged": "lists of 1 to 2 values",
        "time": "has type timestamp",
        "number": "no number",
    }.items():
        with pytest.raises(DataError, match=f"column {column}: .*{message}"):
            read(columns=[column])


@pytest.mark.long
def test_folders_of_the_library_datasets_are_read(tmp_path):
    library = optional("datasets", "FOLDER OF datasets")
    features = {"text": library.Value("string"), "y": library.ClassLabel(names=["no", "yes"])}
    rows = {"text": [f"t{number}" for number in range(10)], "y": [number % 2 for number in range(10)]}
    whole = library.Dataset.from_dict(rows, features=library.Features(features))
    whole.save_to_disk(tmp_path / "one")
    library.DatasetDict({"train": whole, "test": whole.select(range(3))}).save_to_disk(tmp_path / "two")
    data = open_data("hf", {"path": str(tmp_path / "two"), "label": "y", "columns": "text"}, seed=0)
    features, labels, _ = read_all(data)
    assert (lists(features), labels.tolist(), data.spec.classes) == (["t0", "t1", "t2"], [0, 1, 0], 2)
    with pytest.raises(DataError, match="no split 'test'.*evaluate=0.2"):
        open_data("hf", {"path": str(tmp_path / "one"), "label": "y"}, seed=0)
    part = open_data("hf", {"path": str(tmp_path / "one"), "label": "y", "evaluate": 0.2}, seed=0)
    assert (part.train.count, part.evaluate.count, describe_nest(part.spec.features)) == (8, 2, "{text: string []}")


@pytest.mark.parametrize("kind", ["tfrecord", "array_record"])
@pytest.mark.long
def test_folders_of_tensorflow_datasets_are_read(tmp_path, kind):
    library = optional("tensorflow_datasets", "FOLDER OF TensorFlow Datasets")
    types = library.features

    class Numbers(library.core.GeneratorBasedBuilder, skip_registration=True):
        VERSION = library.core.Version("1.0.0")

        def _info(self) -> Any:
            features = {"x": types.Tensor(shape=(2,), dtype=np.uint8), "y": types.ClassLabel(num_classes=3)}
            features |= {"name": types.Text()}
            return library.core.DatasetInfo(
                builder=self, features=types.FeaturesDict(features), supervised_keys=("x", "y")
            )

        def _split_generators(self, _: Any) -> dict[str, Any]:
            return {"train": self._generate_examples(20), "test": self._generate_examples(4)}

        def _generate_examples(self, count: int) -> Iterator[Any]:
            for number in range(count):
                yield number, {"x": [number, 200], "y": number % 3, "name": f"n{number}"}

    builder = Numbers(data_dir=str(tmp_path), file_format=kind)
    builder.download_and_prepare()
    data = open_data("tfds", {"path": str(builder.data_dir)}, seed=0)
    features, labels, _ = read_all(data)
    assert (data.train.count, data.spec.classes, describe_nest(data.spec.features)) == (20, 3, "uint8 [2]")
    assert (features[:, 0] % 3).tolist() == labels.tolist()
    given = {"label": "y", "columns": ["name"], "train": "train[:75%]", "evaluate": "train[75%:]"}
    part = open_data("tfds", {"path": str(builder.data_dir), **given}, seed=0)
    assert (part.train.count, part.evaluate.count, describe_nest(part.spec.features)) == (15, 5, "{name: string []}")
    with pytest.raises(DataError, match="no split 'none'"):
        open_data("tfds", {"path": str(builder.data_dir), "train": "none"}, seed=0)
