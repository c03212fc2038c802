"""What a function of the user's file may return as data, and the batches that come of it."""

from __future__ import annotations

import contextlib
import functools
import itertools
import random
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import keras
import numpy as np
import pytest
import tensorflow as tf

from trainer.workload.data import DataError, DataSet, open_data
from trainer.workload.data.examples import ArraySpec, Stream, StreamContext
from trainer.workload.data.pipeline import evaluation_batches, training_batches, training_iterator
from trainer.workload.data.sources import open_parts
from trainer.workload.data.streams import training_arrays

pytestmark = pytest.mark.slow

COUNT = 50
X = np.arange(COUNT, dtype=np.float32)[:, None] * [1.0, 10.0]
Y = np.arange(COUNT) % 3


class Rows:
    """Random access, as of Grain, of TFDS data sources, and of Hugging Face data sets."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        return {"x": X[index], "name": f"n{index}"}, Y[index]


class Sequence(keras.utils.PyDataset):
    def __len__(self) -> int:
        return 7

    def __getitem__(self, index: int) -> Any:
        return X[index * 8 : index * 8 + 8], Y[index * 8 : index * 8 + 8]


class Loader:
    """An iterable of batches that can be read again, as of PyTorch."""

    def __iter__(self) -> Iterator[Any]:
        for first in range(0, COUNT, 8):
            yield X[first : first + 8], Y[first : first + 8]


def dataset() -> tf.data.Dataset:
    return tf.data.Dataset.from_tensor_slices((X, Y)).shuffle(COUNT, seed=3).batch(8)


def of_context(context: Any) -> Iterator[Any]:
    """Batches of the replica's own examples, in another order in each epoch."""
    own = np.random.default_rng([context.seed, context.epoch]).permutation(COUNT)[context.replica :: context.replicas]
    for first in range(0, len(own), context.batch):
        chosen = own[first : first + context.batch]
        yield X[chosen], Y[chosen]


SOURCES: dict[str, Callable[[], Any]] = {
    "random access": Rows,
    "tf.data": dataset,
    "PyDataset": lambda: Sequence(workers=1),
    "iterable": Loader,
    "function": lambda: of_context,
    "examples": lambda: open_source_of_arrays().train,
}


def open_source_of_arrays() -> DataSet:
    return opened((X, Y))


def opened(train: Any, evaluate: Any = None, **more: Any) -> DataSet:
    given = {"train": train, "evaluate": train if evaluate is None else evaluate, **more}
    return open_data("mine", {}, seed=5, user_function=lambda: given)


def first_numbers(batch: Any) -> list[int]:
    features = batch.features["x"] if isinstance(batch.features, dict) else batch.features
    return [int(value) for value in features[:, 0]]


def read(examples: Any, *, replica: int = 0, replicas: int = 1, start: int = 0, stop: int = 8) -> list[Any]:
    """The batches of a replica as a session reads them: (step, batch)."""
    with tf.Graph().as_default():
        batches = training_batches(
            examples, seed=5, start=start, stop=stop, batch_size=12, replica=replica, replicas=replicas
        )
        nothing = {name: () for name, nest in batches.batch._asdict().items() if nest is None}
        with tf.compat.v1.Session() as session:
            session.run(batches.initializer, batches.feed_from(start))
            found = []
            while True:
                try:
                    found.append(session.run((batches.step, batches.batch._replace(**nothing))))
                except tf.errors.OutOfRangeError:
                    return found


@pytest.mark.parametrize("kind", SOURCES)
def test_replicas_share_each_epoch_out(kind):
    epoch = COUNT // 12
    seen: list[int] = []
    for replica in range(2):
        data = opened(SOURCES[kind]())  # each worker opens its own
        batches = read(data.train, replica=replica, replicas=2, stop=epoch)
        assert [step for step, _ in batches] == list(range(epoch))
        for _, batch in batches:
            numbers = first_numbers(batch)
            assert len(numbers) == 6
            assert batch.labels.tolist() == [number % 3 for number in numbers]
            seen += numbers
    assert len(seen) == len(set(seen)) == 12 * epoch
    assert seen != sorted(seen) or kind == "iterable"


@pytest.mark.parametrize("kind", SOURCES)
def test_a_restart_continues_with_the_next_batch(kind):
    whole = read(opened(SOURCES[kind]()).train, stop=12)
    again = read(opened(SOURCES[kind]()).train, start=7, stop=12)
    assert [first_numbers(batch) for _, batch in again] == [first_numbers(batch) for _, batch in whole[7:]]
    data = opened(SOURCES[kind]())
    eager = training_iterator(data.train, seed=5, start=7, stop=12, batch_size=12, replica=0, replicas=1)
    assert [first_numbers(batch) for _, batch, _ in eager] == [first_numbers(batch) for _, batch in whole[7:]]


@pytest.mark.parametrize("kind", SOURCES)
def test_an_evaluation_reads_each_example_once(kind):
    data = opened(SOURCES[kind]())
    with tf.Graph().as_default():
        batches = evaluation_batches(data.evaluate, batch_size=16)
        with tf.compat.v1.Session() as session:
            for _ in range(2):
                seen: list[int] = []
                session.run(batches.initializer, batches.feed_dict)
                with contextlib.suppress(tf.errors.OutOfRangeError):
                    while True:
                        seen += first_numbers(session.run(batches.batch._replace(weights=())))
                assert sorted(seen) == list(range(COUNT))


def test_batches_padded_to_their_longest_example_are_evaluated_as_they_are():
    texts = [list(range(1, length + 1)) for length in (3, 1, 2, 5, 4, 2)]
    padded = tf.data.Dataset.from_generator(lambda: texts, output_signature=tf.TensorSpec([None], tf.int64))
    data = opened(padded.padded_batch(2), (np.zeros((2, 5), np.int64),))
    of_one = functools.partial(training_arrays, data.train, seed=0, replica=0, replicas=1, start=0)
    batches_of_two = of_one(batch=2)
    assert [next(batches_of_two)[0].shape for _ in range(3)] == [(2, 3), (2, 5), (2, 4)]
    with pytest.raises(DataError):  # of no length there are three
        next(of_one(batch=3))
    data = opened((np.zeros((2, 5), np.int64),), padded.padded_batch(2))
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        batches = evaluation_batches(data.evaluate, batch_size=500)
        session.run(batches.initializer, batches.feed_dict)
        shapes = [session.run(batches.batch.features).shape for _ in range(3)]
    assert shapes == [(2, 3), (2, 5), (2, 4)]


def test_examples_keep_their_types():
    spec = opened(Rows(), classes=3).spec
    assert spec.features == {"x": ArraySpec((2,), "float32"), "name": ArraySpec((), "string")}
    assert (spec.labels, spec.classes) == (ArraySpec((), "int64"), 3)
    (_, batch), *_ = read(opened(Rows()).train, stop=1)
    assert [name.decode() for name in batch.features["name"]] == [f"n{number}" for number in first_numbers(batch)]


def test_sizes_that_differ_between_batches_are_open():
    def pieces() -> Iterator[Any]:
        for number in range(9):
            yield np.full([2 + number % 3], number)

    padded = tf.data.Dataset.from_generator(pieces, output_signature=tf.TensorSpec([None], tf.int64)).padded_batch(3)
    data = opened(lambda context: padded, lambda context: padded)
    assert data.spec.features == ArraySpec((4,), "int64")  # a function tells nothing but its first batch
    assert opened(padded).spec.features == ArraySpec((None,), "int64")


def test_each_epoch_asks_for_its_own_batches():
    asked: list[tuple[int, int, int, int]] = []

    def function(context: Any) -> Any:
        asked.append((context.epoch, context.replica, context.batch, context.seed))
        return [(X[:6], Y[:6]), (X[6:9], Y[6:9])]  # the second is left out: it is smaller

    data = opened(function)
    asked.clear()
    found = read(data.train, replica=1, replicas=2, stop=3)
    assert [first_numbers(batch) for _, batch in found] == [list(range(6))] * 3
    assert asked[:3] == [(0, 1, 6, 5), (1, 1, 6, 5), (2, 1, 6, 5)]


def test_batches_that_are_empty_are_left_out():
    def function(context: Any) -> Any:
        return [(X[:0], Y[:0]), (X[:6], Y[:6]), (X[:0], Y[:0]), (X[6:12], Y[6:12])]

    found = read(opened(function).train, replicas=2, stop=2)
    assert [first_numbers(batch) for _, batch in found] == [list(range(6)), list(range(6, 12))]


class Point(NamedTuple):
    """Features that have names."""

    x: Any
    y: Any


def test_features_may_be_a_named_tuple():
    train = tf.data.Dataset.from_tensor_slices((Point(X[:, 0], X[:, 1]), Y)).batch(8)
    (_, batch), *_ = read(opened(train).train, stop=1)
    assert [one.tolist() for one in batch.features] == [X[:12, 0].tolist(), X[:12, 1].tolist()]


class Many(Rows):
    """As of Hugging Face and of TFDS: several examples at a time."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [{"x": X[index], "label": Y[index]} for index in indices]


def test_several_examples_are_read_at_once_where_an_object_can():
    """A dict alone is the features."""
    (_, batch), *_ = read(opened(Many()).train, stop=1)
    assert batch.features["label"].tolist() == [number % 3 for number in first_numbers(batch)]
    assert first_numbers(batch) == first_numbers(read(opened(Rows()).train, stop=1)[0][1])


class Shuffled(keras.utils.PyDataset):
    """Shuffles its examples after each epoch, and changes them, by the global generators."""

    def __init__(self) -> None:
        super().__init__(workers=2)
        self.order = np.arange(COUNT)

    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> Any:
        chosen = self.order[index * 10 : index * 10 + 10]
        return np.stack([chosen, np.random.random(10) + random.random()], 1), Y[chosen]

    def on_epoch_end(self) -> None:
        np.random.shuffle(self.order)


def test_a_dataset_that_is_cached_is_whole_after_its_first_batches_were_read():
    """As TensorFlow stops the threads of an iterator, a cache may take what has come so far for all."""
    rows, labels = np.arange(800, dtype=np.float32)[:, None], np.arange(800) % 3
    for _ in range(10):
        pipeline = tf.data.Dataset.from_tensor_slices((rows, labels)).prefetch(10).cache().batch(4).prefetch(2)
        data = opened(pipeline)  # with its training part, which has begun to read the same pipeline
        for count in (1, 9, 200):
            batches = data.evaluate.open(StreamContext(0, 1, 4, 0, 0, is_training=False))
            read = np.concatenate([batch.features for batch in itertools.islice(batches, count)])
            assert np.array_equal(read, rows[: count * 4])


def test_a_py_dataset_that_shuffles_itself_does_so_alike_in_every_task():
    def both_replicas() -> list[Any]:
        np.random.random()  # tasks differ in what they drew before
        return [batch for one in range(2) for _, batch in read(opened(Shuffled()).train, replica=one, replicas=2)]

    once, again = both_replicas(), both_replicas()
    assert [batch.features.tolist() for batch in once] == [batch.features.tolist() for batch in again]
    for epoch in range(2):
        numbers = [
            number
            for first in (0, 8)
            for batch in once[first:][4 * epoch : 4 * epoch + 4]
            for number in first_numbers(batch)
        ]
        assert len(set(numbers)) == len(numbers) == 48


def test_a_pass_of_a_py_dataset_depends_on_its_epoch_alone():
    """A restart reads the first epochs again, and an evaluation its only one, whatever was read before."""
    train = opened(Shuffled()).train
    again, of_another = read(train, stop=9), read(train, stop=9)
    for (_, one), (_, other) in zip(again, of_another, strict=True):
        assert one.features.tolist() == other.features.tolist()
    assert first_numbers(again[0][1]) != first_numbers(again[4][1])


def noisy_batches(size: int) -> Iterator[Any]:
    """Changed by what is drawn from the global generators."""
    order = np.random.permutation(COUNT)
    for first in range(0, COUNT, size):
        chosen = order[first : first + size]
        yield np.stack([chosen, np.random.random(len(chosen)) + random.random()], 1), Y[chosen]


class NoisyBatches:
    def __iter__(self) -> Iterator[Any]:
        return noisy_batches(10)


class NoisyExamples:
    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        return np.float32([index, np.random.random() + random.random()]), Y[index]


class OwnNoise:
    """Of generators that belong to an object, to another one inside it, and to its class."""

    numbers = random.Random(1)

    def __init__(self) -> None:
        self.generator = np.random.default_rng(2)
        self.inner = types.SimpleNamespace(state=np.random.RandomState(3))

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, index: int) -> Any:
        noise = self.generator.random() + self.inner.state.random() + self.numbers.random()
        return np.float32([index, noise]), Y[index]


def batches_of_file(context: StreamContext) -> Iterator[Any]:
    for _ in range(10):
        yield GENERATOR_OF_FILE.random((context.batch, 2)), Y[: context.batch]


GENERATOR_OF_FILE = np.random.default_rng(4)
NOISY = ["examples", "an iterable", "a function", "a function that returns a list"]
OWN = ["examples with generators", "a function with a generator", "a file with a generator"]


@pytest.mark.parametrize("kind", [*NOISY, *OWN])
def test_what_a_source_draws_depends_on_the_place_of_a_batch_alone(kind):
    """Whatever is read in between, such as an evaluation, and wherever a task begins."""
    generator = np.random.default_rng(5)
    sources: dict[str, Any] = {
        "examples": NoisyExamples(),
        "an iterable": NoisyBatches(),
        "a function": lambda context: noisy_batches(context.batch),
        "a function that returns a list": lambda context: list(noisy_batches(context.batch)),
        "examples with generators": OwnNoise(),
        "a function with a generator": lambda context: (
            (generator.random((context.batch, 2)), Y[: context.batch]) for _ in range(10)
        ),
        "a file with a generator": batches_of_file,
    }
    train = opened(sources[kind]).train
    whole = read(train, stop=8)
    np.random.random()
    random.random()
    other = read(train, stop=3)
    later = read(train, start=3, stop=8)
    for (_, one), (_, same) in zip(whole, [*other, *later], strict=True):
        assert one.features.tolist() == same.features.tolist()
    noise = [value for _, batch in whole for value in batch.features[:, 1].tolist()]
    assert len(set(noise)) > 0.9 * len(noise)


class Once:
    """Goes on where it has ended, as an open file does."""

    def __init__(self) -> None:
        self.batches = iter(Loader())

    def __iter__(self) -> Iterator[Any]:
        yield from self.batches


def test_nothing_is_lost_of_an_iterable_that_can_be_read_once():
    data = opened(Once(), Loader())
    batches = data.train.open(StreamContext(0, 1, 10, 0, 0))
    assert [row[0] for batch in batches for row in batch.features.tolist()] == X[:, 0].tolist()


class Huge(Sequence):
    """Its length stands for no end."""

    def __len__(self) -> int:
        return sys.maxsize


def test_a_py_dataset_of_a_huge_length_has_no_end():
    batches = opened(Huge(), Loader()).train.open(StreamContext(0, 1, 8, 0, 0))
    assert first_numbers(next(iter(batches))) == list(range(8))
    with pytest.raises(DataError, match="evaluate.steps"):
        opened(Loader(), Huge())


def test_batches_without_examples_that_never_end_are_refused():
    empty = itertools.repeat((X[:0], Y[:0]))
    assert opened(lambda context: itertools.chain(itertools.islice(empty, 5), Loader())).train.first is not None
    with pytest.raises(DataError):
        opened(lambda context: itertools.chain(empty, Loader()))


def test_a_function_that_returns_one_iterator_for_all_passes_is_refused():
    batches = iter(Loader())
    with pytest.raises(DataError):
        opened(lambda context: batches)


class InOrder(Shuffled):
    """What cannot be copied is shared, and large data too."""

    def __init__(self) -> None:
        super().__init__()
        self.lock, self.begun = threading.Lock(), 0

    def on_epoch_begin(self) -> None:
        self.begun += 1

    def __getitem__(self, index: int) -> Any:
        with self.lock:
            features, labels = super().__getitem__(index)
        return np.insert(features, 1, self.begun, axis=1), labels


def test_each_epoch_of_a_py_dataset_is_begun_once():
    source = InOrder()
    read_twice = [read(opened(source).train, stop=9) for _ in range(2)]
    for batches in read_twice:
        assert [int(batch.features[0, 1]) for _, batch in batches] == [1] * 4 + [2] * 4 + [3]
    assert source.begun == 0


WORDS = np.array(["red", "green", "blue", "none"] * 15)


def looked_up() -> tf.data.Dataset:
    """Layers that are made with the data prepare it."""
    lookup = keras.layers.StringLookup(vocabulary=["red", "green", "blue"])
    vectorize = keras.layers.TextVectorization(vocabulary=["a", "red"], output_sequence_length=3)
    hashing = keras.layers.Hashing(num_bins=1000)

    def prepare(word: tf.Tensor) -> Any:
        text = tf.strings.join(["A ", word, " b"])
        return {"word": lookup(word), "text": vectorize(text), "hash": hashing(word)}, lookup(word)

    return tf.data.Dataset.from_tensor_slices(WORDS).batch(6).map(prepare)


def test_preprocessing_layers_work_in_a_pipeline_and_give_the_same_every_time():
    (_, one), (_, two) = (read(opened(looked_up()).train, stop=1)[0] for _ in range(2))
    assert one.features["word"].tolist() == [1, 2, 3, 0] * 3
    assert one.features["text"][:3].tolist() == [[2, 3, 1], [2, 1, 1], [2, 1, 1]]
    assert one.labels.tolist() == one.features["word"].tolist()
    assert one.features["hash"].tolist() == two.features["hash"].tolist()
    assert len(set(one.features["hash"].tolist())) == 4


# What is refused


class NotFinite(Rows):
    def __getitem__(self, index: int) -> Any:
        return {"x": X[index] * np.nan}, Y[index]


class Csr:
    """A matrix, as of SciPy."""

    def toarray(self) -> Any:
        return X


def too_large(x: tf.Tensor, y: tf.Tensor) -> Any:
    tf.debugging.assert_less(x[:, 0], tf.cast(49, x.dtype), "x is large")
    return x, y


def ragged(x: tf.Tensor, y: tf.Tensor) -> Any:
    return tf.RaggedTensor.from_tensor(x), y


@pytest.mark.parametrize("endless", [lambda: dataset().repeat(), lambda: lambda context: dataset().repeat()])
def test_data_to_evaluate_on_must_end(endless, raises):
    assert opened(endless(), dataset())
    with raises(DataError):
        opened(dataset(), endless())
    assert open_parts({"train": dataset(), "evaluate": endless()}, "mine", seed=5, must_end=False)


class Forever(keras.utils.PyDataset):
    @property
    def num_batches(self) -> None:
        return None

    def __getitem__(self, index: int) -> Any:
        return np.full((4, 3), index, np.float32), np.zeros(4, np.int64)


def test_an_evaluation_ends_after_its_steps_whatever_the_data_is(raises):
    with raises(DataError):
        opened(dataset(), Forever())
    rows = np.arange(50, dtype=np.float32).reshape(25, 2), np.zeros(25, np.int64)
    for source, sizes in ((Forever(), [10, 10]), (rows, [10, 10]), (dataset().repeat(), [10, 10])):
        data = open_parts({"train": source, "evaluate": source}, "mine", seed=5, must_end=False)
        with tf.Graph().as_default(), tf.compat.v1.Session() as session:
            batches, seen = evaluation_batches(data.evaluate, batch_size=10, steps=2), []
            session.run(batches.initializer, batches.feed_dict)
            with contextlib.suppress(tf.errors.OutOfRangeError):
                while True:
                    seen.append(len(session.run(batches.batch.labels)))
        assert seen == sizes


class Ragged(Rows):
    def __getitem__(self, index: int) -> Any:
        return np.zeros(3 + index % 2), 0


@pytest.mark.parametrize(
    "source",
    [
        lambda: (one for one in Loader()),
        lambda: [],
        lambda: 3,
        lambda: lambda: [],
        lambda: lambda context: [],
        lambda: tf.data.Dataset.range(0).batch(2),
        lambda: tf.data.Dataset.from_tensor_slices((X, Y)),
        lambda: type("Empty", (Rows,), {"__len__": lambda self: 0})(),
        lambda: lambda context: ([][0] for _ in range(3)),
        lambda: lambda context: [(X[:4], Y[:3])],
        lambda: lambda context: None,
        lambda: lambda context: [None],
        lambda: type("Long", (Rows,), {"__len__": lambda self: [][0]})(),
        lambda: dataset().map(ragged),
        lambda: (tf.ragged.constant([[1.0], [1.0, 2.0]]), [0, 1]),
        lambda: (tf.sparse.from_dense(X), Y),
        lambda: (Csr(), Y),
        lambda: ([[1], [1, 2]], [0, 1]),
        lambda: (np.ma.masked_array(X, X > 5), Y),
        lambda: (np.array([["a"], [None]]), [0, 1]),
        lambda: (X.astype("complex64"), Y),
        lambda: (Y.astype("datetime64[D]"), Y),
        lambda: lambda context: dataset().map(ragged),
        lambda: NotFinite(),
    ],
)
def test_a_source_that_cannot_be_used_is_refused(source, raises):
    with raises(DataError):
        opened(source())


def from_generator() -> tf.data.Dataset:
    def examples() -> Iterator[Any]:
        yield from zip(X[:30], Y[:30], strict=True)
        raise ValueError("bad record 30")

    specs = tf.TensorSpec(X.shape[1:], X.dtype), tf.TensorSpec((), Y.dtype)
    return tf.data.Dataset.from_generator(examples, output_signature=specs).batch(10)


@pytest.mark.parametrize(
    "source",
    [
        Ragged,
        lambda: lambda context: [(X[:20], Y[:20])],
        lambda: lambda context: [(X[:3], Y[:3])],
        lambda: lambda context: [(X[:12], Y[:12]), (X[:12, 0], Y[:12])],
        lambda: lambda context: itertools.repeat((X[:8], Y[:8])),
        from_generator,
        lambda: dataset().map(too_large),
        lambda: lambda context: [(X[:12], Y[:12]), None],
        lambda: lambda context: [(X[:12], Y[:12]), (X[:12] * np.nan, Y[:12])],
    ],
)
def test_what_goes_wrong_later_is_said_in_a_sentence(source, raises):
    from trainer.workload.data import find_data_error

    data = opened(source())
    with pytest.raises(tf.errors.OpError) as raised:
        read(data.train)
    error = find_data_error(raised.value)
    assert error is not None, raised.value
    with raises(DataError):
        raise error


KINDS = [
    ("tf.data", True, True),
    ("iterable", True, True),
    ("function", True, False),
    ("PyDataset", True, False),
    ("random access", False, False),
]


@pytest.mark.parametrize(("kind", "is_stream", "is_divided"), KINDS)
def test_a_plan_knows_what_kind_of_data_it_is(kind, is_stream, is_divided):
    train = opened(SOURCES[kind]()).train
    assert isinstance(train, Stream) == is_stream
    assert (isinstance(train, Stream) and train.is_divided) == is_divided
