"""Pipelines of tf.data as users write them: batches of several shapes and sizes, and files that they keep."""

from __future__ import annotations

import gc
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from trainer.workload.data import DataError, dataset_steps
from trainer.workload.data.examples import StreamContext
from trainer.workload.data.pipeline_files import noted
from trainer.workload.data.sources import SPLIT, open_parts, open_source
from trainer.workload.data.streams import evaluation_arrays, training_arrays

BATCH = 4


def sentences(lengths: list[int]) -> tf.data.Dataset:
    """Sentences of these lengths; the words of each are its number, from 1."""

    def generate() -> Iterator[tuple[np.ndarray, np.int32]]:
        for number, length in enumerate(lengths, 1):
            yield np.full(length, number, np.int32), np.int32(number % 2)

    spec = (tf.TensorSpec([None], tf.int32), tf.TensorSpec([], tf.int32))
    return tf.data.Dataset.from_generator(generate, output_signature=spec)


def bucketed(sizes: list[int], **options: Any) -> Callable[[tf.data.Dataset], tf.data.Dataset]:
    return lambda one: one.bucket_by_sequence_length(lambda x, y: tf.shape(x)[0], [4, 8], sizes, **options)


def padded(batch: int, length: int | None = None) -> Callable[[tf.data.Dataset], tf.data.Dataset]:
    return lambda one: one.padded_batch(batch, padded_shapes=([length], []))


LENGTHS = [int(length) for length in np.random.default_rng(0).integers(1, 11, 60)]
# How batches are made, and how many examples of a pass are left out at most.
PIPELINES: dict[str, tuple[Callable[[tf.data.Dataset], tf.data.Dataset], int]] = {
    "buckets": (bucketed([4, 4, 4], pad_to_bucket_boundary=False), 60),
    "buckets of other sizes": (bucketed([8, 4, 2]), 60),
    "buckets of one length": (
        lambda one: bucketed([3, 5, 7], pad_to_bucket_boundary=True)(one.filter(lambda x, y: tf.shape(x)[0] < 8)),
        6,
    ),
    "padded to the longest": (padded(4), 12),
    "padded alike": (padded(7, 10), 3),
    "a remainder": (padded(16, 10), 3),
    "batches that grow": (lambda one: one.padded_batch(3, ([10], [])).unbatch().padded_batch(5, ([10], [])), 3),
}


def numbers_in(arrays: list[np.ndarray]) -> list[int]:
    return [int(row.max()) for row in arrays[0]]


@pytest.mark.parametrize("replicas", [1, 2])
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_every_batch_is_whole_and_only_leftovers_are_left_out(pipeline, replicas):
    make, at_most = PIPELINES[pipeline]
    examples = open_source(make(sentences(LENGTHS)), "mine", seed=0).examples
    seen: Counter[int] = Counter()
    for replica in range(replicas):
        passes = training_arrays(examples, seed=0, replica=replica, replicas=replicas, batch=BATCH, start=0)
        own: Counter[int] = Counter()
        for arrays in passes:
            numbers = numbers_in(arrays)
            assert len(numbers) == BATCH
            if any(own[number] for number in numbers):  # the next pass
                break
            own.update(numbers)
        seen.update(own)
    assert set(seen.values()) == {1}
    count = sum(length < 8 for length in LENGTHS) if "one length" in pipeline else len(LENGTHS)
    assert count - len(seen) <= at_most * replicas


@pytest.mark.parametrize("pipeline", PIPELINES)
def test_an_evaluation_leaves_nothing_out(pipeline):
    make, _ = PIPELINES[pipeline]
    examples = open_source(make(sentences(LENGTHS)), "mine", seed=0).examples
    numbers = [number for arrays in evaluation_arrays(examples, batch=BATCH) for number in numbers_in(arrays)]
    wanted = sum(length < 8 for length in LENGTHS) if "one length" in pipeline else len(LENGTHS)
    assert len(numbers) == len(set(numbers)) == wanted


def test_batches_of_which_each_has_a_shape_of_its_own_are_refused():
    examples = open_source(padded(3)(sentences([*range(1, 400)])), "mine", seed=0).examples
    with pytest.raises(DataError):
        next(training_arrays(examples, seed=0, replica=0, replicas=1, batch=BATCH, start=0))


def test_ragged_batches_are_refused():
    with pytest.raises(DataError):
        open_source(sentences(LENGTHS).ragged_batch(4), "mine", seed=0)


# Files


def unordered(options: tf.data.Options) -> tf.data.Options:
    options.deterministic = False
    return options


# Steps that do not keep the order of their elements, or do.
PARALLEL: dict[str, tuple[Callable[[tf.data.Dataset], tf.data.Dataset], bool]] = {
    "map": (lambda one: one.map(lambda x, y: (x, y), num_parallel_calls=2, deterministic=False).batch(4), False),
    "batch": (lambda one: one.batch(4, num_parallel_calls=2, deterministic=False).prefetch(1), False),
    "interleave": (
        lambda one: one.interleave(
            lambda x, y: tf.data.Dataset.from_tensors((x, y)), num_parallel_calls=2, deterministic=False
        ).batch(4),
        False,
    ),
    "inside of flat_map": (
        lambda one: one.flat_map(
            lambda x, y: tf.data.Dataset.from_tensors((x, y)).map(
                lambda x, y: (x, y), num_parallel_calls=2, deterministic=False
            )
        ).batch(4),
        False,
    ),
    "in one of two": (
        lambda one: one.concatenate(one.map(lambda x, y: (x, y), num_parallel_calls=2, deterministic=False)).batch(4),
        False,
    ),
    "options": (lambda one: one.batch(4).with_options(unordered(tf.data.Options())), False),
    "in order": (
        lambda one: (
            one.interleave(lambda x, y: tf.data.Dataset.from_tensors((x, y)), num_parallel_calls=2)
            .map(lambda x, y: (x, y), num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
            .batch(4, num_parallel_calls=2)
        ),
        True,
    ),
}


@pytest.mark.parametrize("name", PARALLEL)
def test_a_pipeline_whose_order_threads_decide_is_refused(name):
    make, is_ordered = PARALLEL[name]
    source = make(tf.data.Dataset.from_tensor_slices((np.zeros((16, 3), np.float32), np.zeros(16, np.int64))))
    if is_ordered:
        assert open_source(source, "mine", seed=0).fault is None
        return
    with pytest.raises(DataError, match="deterministic=False"):
        open_source(source, "mine", seed=0)


def test_large_tensors_of_a_pipeline_are_not_copied_to_look_at_its_order(monkeypatch):
    monkeypatch.setattr(dataset_steps, "SMALL_NBYTES", 100)
    rows = tf.data.Dataset.from_tensor_slices((np.zeros((16, 3), np.float32), np.zeros(16, np.int64)))
    monkeypatch.setattr(tf.raw_ops, "DatasetToGraphV2", lambda **options: pytest.fail("copied"))
    in_order = rows.interleave(lambda x, y: tf.data.Dataset.from_tensors((x, y)), num_parallel_calls=2)
    open_source(in_order.batch(4), "mine", seed=0)
    with pytest.raises(DataError, match="deterministic=False"):
        open_source(PARALLEL["inside of flat_map"][0](rows), "mine", seed=0)


def jittered(calls: int | None) -> tf.data.Dataset:
    tf.random.set_seed(1)
    rows = tf.data.Dataset.from_tensor_slices((np.zeros((3000, 2), np.float32), np.zeros(3000, np.int64)))
    return rows.map(lambda x, y: (x + tf.random.normal([2]), y), num_parallel_calls=calls).batch(4)


@pytest.mark.parametrize("kind", ["a dataset", "a function that returns one"])
def test_threads_do_not_decide_which_element_draws_which_number(kind):
    def drawn(calls: int | None) -> list[float]:
        source = jittered(calls)
        train = open_source(source if kind == "a dataset" else lambda _: source, "mine", seed=0).examples
        batches = itertools.islice(train.open(StreamContext(0, 1, BATCH, 0, 0)), 3000 // BATCH)
        return [float(x) for batch in batches for x in batch.features[:, 0]]

    assert drawn(8) == drawn(None)


def shuffled_by_numpy() -> tf.data.Dataset:
    def generate() -> Iterator[tuple[np.float32, np.int64]]:
        for number in np.random.permutation(40):
            yield np.float32(number), np.int64(0)

    spec = (tf.TensorSpec([], tf.float32), tf.TensorSpec([], tf.int64))
    return tf.data.Dataset.from_generator(generate, output_signature=spec).batch(BATCH).prefetch(2)


def noisy_by_numpy() -> tf.data.Dataset:
    def noisy(x: np.ndarray) -> np.ndarray:
        return x + np.float32(np.random.random() + random.random())

    rows = tf.data.Dataset.from_tensor_slices((np.zeros(40, np.float32), np.zeros(40, np.int64)))
    noise = rows.map(lambda x, y: (tf.numpy_function(noisy, [x], tf.float32), y), num_parallel_calls=4)
    return noise.map(lambda x, y: (tf.ensure_shape(x, []), y)).batch(BATCH).prefetch(2)


OF_THE_FILE = np.random.default_rng(5)


def shuffled_by_its_own() -> tf.data.Dataset:
    def generate() -> Iterator[tuple[np.float32, np.int64]]:
        yield from ((np.float32(number), np.int64(0)) for number in OF_THE_FILE.permutation(40))

    spec = (tf.TensorSpec([], tf.float32), tf.TensorSpec([], tf.int64))
    return tf.data.Dataset.from_generator(generate, output_signature=spec).batch(BATCH).prefetch(2)


@pytest.mark.parametrize("make", [shuffled_by_numpy, shuffled_by_its_own, noisy_by_numpy])
def test_what_python_draws_in_a_pipeline_depends_on_the_place_of_a_batch_alone(make):
    """Whatever is drawn and evaluated in between."""

    def drawn(*, evaluates: bool) -> list[list[float]]:
        data = open_parts({"train": make(), "evaluate": make()}, "", seed=1)
        passes = []
        for epoch in range(2):
            batches = data.train.open(StreamContext(0, 1, BATCH, 1, epoch))
            passes.append([float(x) for batch in batches for x in batch.features])
            if evaluates:
                np.random.random(), random.random()
                list(data.evaluate.open(StreamContext(0, 1, BATCH, 0, 0, is_training=False)))
        return passes

    first, second = drawn(evaluates=True)
    assert drawn(evaluates=False) == [first, second]
    assert first != second


def numbers() -> tf.data.Dataset:
    return tf.data.Dataset.range(10).batch(2)


WRITTEN: dict[str, tuple[Callable[[str], Any], int]] = {
    "cache": (lambda file: numbers().cache(file), 1),
    "cache by name": (lambda file: numbers().map(lambda x: x).cache(filename=file).shuffle(3), 1),
    "cache of a path": (lambda file: numbers().cache(Path(file)), 1),
    "snapshot": (lambda file: numbers().snapshot(file), 1),
    "save": (lambda file: numbers().save(file), 1),
    "cache in memory": (lambda file: numbers().cache(), 0),
    "cache in memory, by name": (lambda file: numbers().cache(filename=""), 0),
    "load": (lambda file: numbers().prefetch(1), 0),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_files_that_a_pipeline_writes_are_noted(name, tmp_path: Path):
    make, count = WRITTEN[name]
    with noted() as files:
        made = make(str(tmp_path / "kept"))
        if "cache" in name:
            assert next(iter(made)).shape == (2,)
    assert len(files) == count
    assert "cache" not in name or not any(tmp_path.iterdir())  # nothing is left for others to stumble over


def test_a_cache_that_was_written_whole_may_be_read_by_all(tmp_path: Path):
    file = str(tmp_path / "kept")
    for _ in numbers().cache(file):
        pass
    with noted() as files:
        assert len(list(numbers().cache(file))) == 5
    assert files == []


def test_a_cache_that_a_killed_process_left_half_written_is_refused(tmp_path: Path):
    (tmp_path / "kept_0.lockfile").touch()
    with noted(), pytest.raises(DataError):
        numbers().cache(str(tmp_path / "kept"))


def test_evaluations_of_some_batches_leave_no_iterators_behind():
    data = open_parts(
        {"train": numbers().batch(1), "evaluate": numbers().repeat().batch(1)}, "", seed=1, must_end=False
    )
    before = iterators()
    for _ in range(5):
        for _ in itertools.islice(evaluation_arrays(data.evaluate, batch=1), 20):
            pass
    assert iterators() <= before + 1  # the one that only looked at the beginning may go on


def iterators() -> int:
    gc.collect()
    return sum(type(one).__name__ == "OwnedIterator" for one in gc.get_objects())


def shuffled(**options: Any) -> tf.data.Dataset:
    numbers = np.arange(40, dtype=np.float32)
    return tf.data.Dataset.from_tensor_slices((numbers, numbers)).shuffle(40, seed=1, **options)


def halves(one: tf.data.Dataset) -> dict[str, tf.data.Dataset]:
    return {"train": one.skip(8).batch(BATCH), "evaluate": one.take(8).batch(BATCH)}


def drawn(generator: Any = None, **options: Any) -> tf.data.Dataset:
    """Batches that a generator of TensorFlow makes; without one, a dataset of random numbers does."""
    if generator is None:
        rows = tf.data.Dataset.random(seed=1, **options).take(40).map(lambda one: tf.cast(one % 1000, tf.float32))
    else:
        rows = tf.data.Dataset.range(40).map(lambda _: generator.uniform([]), num_parallel_calls=2)
    return rows.map(lambda one: (one, one)).batch(BATCH)


def of_one_generator() -> dict[str, tf.data.Dataset]:
    generator = tf.random.Generator.from_seed(1)
    return {"train": drawn(generator), "evaluate": drawn(generator)}


def counted() -> tf.data.Dataset:
    count = tf.Variable(0.0)
    return tf.data.Dataset.range(40).map(lambda _: (count.assign_add(1.0), count)).batch(BATCH)


# Data, whether evaluations change the order of what is trained on, and whether that is a split of it.
ORDERS: dict[str, tuple[Callable[[], Any], bool, bool]] = {
    "split behind a shuffle": (lambda: halves(shuffled()), True, True),
    "alone": (lambda: shuffled().batch(BATCH), True, False),
    "split behind a fixed order": (lambda: halves(shuffled(reshuffle_each_iteration=False)), False, False),
    "split behind a cache": (lambda: halves(shuffled().cache()), False, False),
    "one generator": (of_one_generator, True, False),
    "a generator each": (
        lambda: {part: drawn(tf.random.Generator.from_seed(1)) for part in ("train", "evaluate")},
        False,
        False,
    ),
    "random numbers": (lambda: drawn(rerandomize_each_iteration=True), True, False),
    "the same random numbers": (drawn, False, False),
    "a variable": (counted, True, False),
    "each shuffled": (lambda: {"train": shuffled().batch(4), "evaluate": shuffled().batch(4)}, False, False),
}


@pytest.mark.parametrize("name", ORDERS)
def test_it_is_known_whether_evaluations_change_the_order_of_what_is_trained_on(name):
    make, shares_order, is_split = ORDERS[name]

    def third_pass(*, evaluates: bool) -> list[float]:
        data = open_parts(make(), name, seed=1)
        assert (data.shares_order, SPLIT in data.doubts) == (shares_order, is_split)
        for epoch in range(2):
            list(data.train.open(StreamContext(0, 1, BATCH, 1, epoch)))
            if evaluates:
                list(data.evaluate.open(StreamContext(0, 1, BATCH, 0, 0, is_training=False)))
        return [float(x) for one in data.train.open(StreamContext(0, 1, BATCH, 1, 2)) for x in one.features]

    assert (third_pass(evaluates=True) != third_pass(evaluates=False)) == shares_order
