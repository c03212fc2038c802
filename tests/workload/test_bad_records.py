"""A bad record that is read while a cluster trains: the run ends before its batch is applied, and names it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf
from runs import SMALL, Run

from trainer.workload.data.order import batch_indices

pytestmark = pytest.mark.cluster

COUNT, BATCH, BAD_STEP = 480, 48, 6  # of SMALL
CLUSTERS = ("local", "1ps2w")


def example(**features: list[float] | list[int]) -> bytes:
    kinds = {
        name: tf.train.Feature(float_list=tf.train.FloatList(value=values))
        if name == "image"
        else tf.train.Feature(int64_list=tf.train.Int64List(value=values))
        for name, values in features.items()
    }
    return tf.train.Example(features=tf.train.Features(feature=kinds)).SerializeToString()


def write(path: Path, records: list[bytes]) -> list[int]:
    """Writes a file; returns at which byte each record's data begins."""
    with tf.io.TFRecordWriter(str(path)) as file:
        for record in records:
            file.write(record)
    sizes = [12 + len(record) + 4 for record in records]
    return [12 + sum(sizes[:number]) for number in range(len(records))]


def end(start: Callable[..., Run], folder: Path, cluster: str, bad: bytes) -> tuple[str, str]:
    """(output of a run that reads a bad record at step 6, where the record is); its batch is not applied."""
    options = {"batch_size": BATCH, "replica": 0, "replicas": 1, "count": COUNT}
    at = int(batch_indices(1, BAD_STEP, **options)[-1])  # in the half of the last replica
    random = np.random.default_rng(5)
    records = [example(image=random.random(4).tolist(), label=[number % 2]) for number in range(COUNT)]
    write(folder / "good.tfrecord", records[:BATCH])
    begins = write(folder / "train.tfrecord", [*records[:at], bad, *records[at + 1 :]])
    run = start(
        *(*SMALL, f"cluster={cluster}", "seed=1", "model=mlp", "model.options.depth=0", "checkpoint.every=1"),
        *("data=tfrecord", "data.options.train=train.tfrecord", "data.options.evaluate=good.tfrecord"),
        *("data.options.shape=[4]", "data.options.classes=2", "data.options.verify=false"),
    )
    assert run.wait() == 65, run.output
    saved = [int(path.name) for path in (run.directory / "checkpoints").glob("0*")]
    assert max(saved) <= BAD_STEP
    assert run.history()[-1]["step"] <= BAD_STEP
    return run.output, f"train.tfrecord, byte {begins[at]}"


@pytest.mark.long(but=["1ps2w-feature-missing", "local-shape"])
@pytest.mark.parametrize(
    ("bad", "what"),
    [(example(label=[1]), "Feature: image (data type: float)"), (example(image=[1.0, 2.0], label=[1]), "Key: image")],
    ids=["feature-missing", "shape"],
)
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_a_run_ends_before_the_batch_of_a_bad_record_is_applied(start, tmp_path: Path, cluster, bad, what):
    output, where = end(start, tmp_path, cluster, bad)
    assert where in output
    assert what in output


@pytest.mark.long(but=["1ps2w"])
@pytest.mark.parametrize("cluster", CLUSTERS)
def test_a_run_ends_before_the_batch_of_a_record_with_nan_is_applied(start, tmp_path: Path, cluster):
    output, _ = end(start, tmp_path, cluster, example(image=[1.0, float("nan"), 1.0, 1.0], label=[1]))
    assert "gradient of step 7" in output
