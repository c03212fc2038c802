"""The order of examples, and the batches that a v1 session gets from it."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from forks import Forks

from trainer.workload.data.arrays import from_arrays
from trainer.workload.data.errors import DataError
from trainer.workload.data.order import batch_indices
from trainer.workload.data.pipeline import evaluation_batches, training_batches


def indices(seed, step, *, batch_size, count, replica=0, replicas=1):
    found = batch_indices(seed, step, batch_size=batch_size, replica=replica, replicas=replicas, count=count)
    return found.numpy().tolist()


def numbered(count):
    """Examples whose feature and label are their own number."""
    numbers = np.arange(count)
    examples = numbers.astype("float32"), numbers
    return from_arrays(examples, examples, source="numbered", classes=count).train


def drain(batches, feed_dict=None):
    """All remaining batches, as (step, labels)."""
    found = []
    with tf.compat.v1.Session() as session:
        session.run(batches.initializer, feed_dict or batches.feed_dict)
        while True:
            try:
                step, labels = session.run([batches.step, batches.batch.labels])
            except tf.errors.OutOfRangeError:
                return found
            found.append((int(step), labels.tolist()))


def training(examples, **changed):
    given = {"seed": 5, "start": 0, "stop": 6, "batch_size": 8, "replica": 0, "replicas": 1} | changed
    with tf.Graph().as_default():
        return drain(training_batches(examples, **given))


@pytest.mark.parametrize("count", [1, 2, 3, 10, 257, 8000])
def test_an_epoch_holds_each_example_once(count):
    assert sorted(indices(3, 0, batch_size=count, count=count)) == list(range(count))


def test_the_order_never_changes():
    assert indices(0, 0, batch_size=10, count=10) == [3, 5, 0, 9, 7, 4, 2, 6, 8, 1]
    assert indices(0, 1, batch_size=10, count=10) == [4, 5, 0, 6, 1, 2, 8, 9, 3, 7]


def test_epochs_and_seeds_have_different_orders():
    orders = {tuple(indices(seed, epoch, batch_size=100, count=100)) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_successive_epochs_are_not_alike():
    epochs = np.array([indices(0, epoch, batch_size=8000, count=8000) for epoch in range(30)])
    alike = [np.corrcoef(one, next_one)[0, 1] for one, next_one in itertools.pairwise(epochs)]
    assert np.sqrt(np.mean(np.square(alike))) < 2 / np.sqrt(8000)  # by chance it is 1 / sqrt(count)


def test_a_batch_may_span_two_epochs():
    first, second = (indices(7, step, batch_size=5, count=5) for step in range(2))
    one_of_three, two_of_three = (indices(7, step, batch_size=3, count=5) for step in range(2))
    assert one_of_three + two_of_three == first + second[:1]


@pytest.mark.parametrize("replicas", [1, 2, 3, 4, 12])
def test_replicas_together_see_what_one_process_sees(replicas):
    parts = [indices(1, 9, batch_size=12, count=100, replica=replica, replicas=replicas) for replica in range(replicas)]
    assert list(itertools.chain(*parts)) == indices(1, 9, batch_size=12, count=100)


def test_a_batch_that_replicas_cannot_share_is_refused(raises):
    with raises(ValueError):
        batch_indices(0, 0, batch_size=10, replica=0, replicas=3, count=100)


def test_the_shape_of_indices_is_known_in_a_graph():
    with tf.Graph().as_default():
        step = tf.compat.v1.placeholder(tf.int64, [])
        assert batch_indices(0, step, batch_size=12, replica=1, replicas=3, count=100).shape == [4]


def test_distant_steps_cost_and_overflow_nothing():
    assert sorted(indices(0, 10**12, batch_size=10, count=10)) == list(range(10))


def test_batches_are_those_of_the_order():
    expected = [(step, indices(5, step, batch_size=8, count=20)) for step in range(6)]
    assert training(numbered(20)) == expected


def test_a_run_resumed_at_a_step_gets_the_same_batches():
    assert training(numbered(20), start=4) == training(numbered(20))[4:]


def test_an_initializer_can_be_fed_another_start():
    with tf.Graph().as_default():
        batches = training_batches(numbered(20), seed=5, start=0, stop=6, batch_size=8, replica=0, replicas=1)
        assert drain(batches, batches.feed_from(5)) == training(numbered(20))[5:]


def test_batches_of_replicas_are_together_those_of_one_process():
    parts = [training(numbered(20), replica=replica, replicas=2) for replica in range(2)]
    together = [(step, one + two) for (step, one), (_, two) in zip(*parts, strict=True)]
    assert together == training(numbered(20))


def test_evaluation_sees_each_example_once_and_in_order():
    with tf.Graph().as_default():
        found = drain(evaluation_batches(numbered(7), batch_size=3))
    assert found == [(0, [0, 1, 2]), (1, [3, 4, 5]), (2, [6])]


def test_several_iterators_share_a_graph_and_a_session():
    examples = numbered(20)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        both = [
            training_batches(examples, seed=s, start=0, stop=9, batch_size=4, replica=0, replicas=1) for s in (1, 2)
        ]
        for batches in both:
            session.run(batches.initializer, batches.feed_dict)
        found = session.run([batches.batch.labels for batches in both])
    assert [labels.tolist() for labels in found] == [indices(seed, 0, batch_size=4, count=20) for seed in (1, 2)]


def test_features_and_labels_come_from_the_same_examples():
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        batches = training_batches(numbered(20), seed=0, start=0, stop=1, batch_size=20, replica=0, replicas=1)
        session.run(batches.initializer, batches.feed_dict)
        features, labels = session.run([batches.batch.features, batches.batch.labels])
    assert features.tolist() == labels.tolist()


def test_a_training_batch_has_a_static_shape_and_no_array_in_the_graph():
    images = np.zeros([5000, 28, 28, 1], np.uint8)
    examples = from_arrays((images, np.zeros(5000)), (images, np.zeros(5000)), source="images").train
    with tf.Graph().as_default() as graph:
        batches = training_batches(examples, seed=0, start=0, stop=9, batch_size=64, replica=0, replicas=2)
    assert batches.batch.features.shape == [32, 28, 28, 1]
    assert graph.as_graph_def().ByteSize() < 20_000


def test_tensorflow_uses_the_arrays_without_a_copy():
    images = np.zeros([101, 3, 3, 1], np.uint8)[1:]
    examples = from_arrays((images, np.zeros(100, int)), (images, np.zeros(100, int)), source="images").train
    assert [array.ctypes.data % 64 for array in examples.arrays] == [0, 0]


def test_a_batch_larger_than_the_data_set_is_refused(raises):
    with tf.Graph().as_default(), raises(DataError):
        training_batches(numbered(7), seed=0, start=0, stop=9, batch_size=8, replica=0, replicas=2)


SERVER = """
import socket
import numpy as np, tensorflow as tf
from trainer.workload.data.arrays import from_arrays
from trainer.workload.data.order import batch_indices
from trainer.workload.data.pipeline import training_batches

with socket.socket() as free:
    free.bind(("localhost", 0))
    port = free.getsockname()[1]
spec = {"worker": ["localhost:1", f"localhost:{port}"]}  # task 0 does not exist
config = tf.compat.v1.ConfigProto(device_filters=["/job:worker/task:1"])
server = tf.distribute.Server(spec, job_name="worker", task_index=1, config=config)
numbers = np.arange(20)
examples = from_arrays((numbers, numbers), (numbers, numbers), source="numbered").train
with tf.Graph().as_default(), tf.device("/job:worker/task:1"):
    with tf.device("/gpu:0"):
        batches = training_batches(examples, seed=5, start=3, stop=9, batch_size=8, replica=1, replicas=2)
    expected = batch_indices(5, 3, batch_size=8, replica=1, replicas=2, count=20)
    assert batches.batch.features.device == "/job:worker/task:1/device:CPU:0", batches.batch.features.device
    with tf.compat.v1.Session(server.target, config=config) as session:
        session.run(batches.initializer, batches.feed_dict)
        labels, expected = session.run([batches.batch.labels, expected])
assert labels.tolist() == expected.tolist(), labels
"""


@pytest.mark.slow
def test_batches_come_from_the_cpu_of_the_task_whose_device_scope_is_open(tmp_path: Path, tensorflow_python: Forks):
    ended = tensorflow_python.run("-c", SERVER, cwd=tmp_path)
    assert ended.returncode == 0, ended.stderr
