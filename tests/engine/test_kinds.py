"""Every kind of model is trained to the same bits on any cluster, and after a resume too."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from kinds import KINDS, for_keras, workload
from small_clusters import BATCH, SEED, Cluster, digest, make_local, to_the_end

from trainer.config.schema import OptimizerConfig, OptimizerName
from trainer.engine.vectors.snapshot import Snapshot
from trainer.workload.data.examples import Batch, leaves_of
from trainer.workload.data.pipeline import training_batches
from trainer.workload.paths import Paths
from trainer.workload.workload import Workload

pytestmark = pytest.mark.cluster

STEPS, STOP = 25, 10
SGD = OptimizerConfig(name=OptimizerName.sgd, learning_rate=0.01)
PER_REPLICA = {  # kinds that compute a mean over what a replica has, so that one process needs as many replicas
    *("frozen weights", "layers without training", "a call that keeps training", "names used twice")  # BatchNorm
}
COUNTED: Mapping[str, Any] = {"masked steps": {"counts": 1, "is_counted": True}}  # the loss is a mean over these steps
train = functools.partial(to_the_end, steps=STEPS)


@pytest.mark.long(but=["masked steps"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_model_gets_the_same_bits_on_any_cluster_and_is_trained_as_in_one_process(kind):
    """Also if it is saved on one cluster and goes on on another."""
    one = workload(kind)

    def trained(ps: int, steps: int, start: Snapshot | None = None) -> tuple[list[float], Snapshot]:
        cluster = Cluster(one, ps=ps, workers=2, steps=steps, optimizer=SGD, start=start, **COUNTED.get(kind, {}))
        return cluster.train([functools.partial(to_the_end, steps=steps)] * 2)[0]

    losses, last = trained(0, STEPS)
    assert np.isfinite(losses).all()
    assert len(set(losses)) > 1
    first_losses, saved = trained(1, STOP)
    other_losses, other = trained(0, STEPS, saved)
    assert (first_losses + other_losses, digest(other)) == (losses, digest(last))
    replicas = 2 if kind in PER_REPLICA else 1
    expected_losses, expected = train(make_local(one, SGD, count=replicas, steps=STEPS))
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    for path, value in (expected.parameters | expected.state).items():
        np.testing.assert_allclose((last.parameters | last.state)[path], value, rtol=1e-5, atol=1e-5, err_msg=path)


@pytest.mark.long(but=["labels by name, outputs in a list"])
@pytest.mark.parametrize("kind", KINDS)
def test_one_process_trains_a_kind_of_model_as_fit_does(kind):
    one = workload(kind)
    losses, last = train(make_local(one, SGD, steps=STEPS))
    model = for_keras(kind, one)
    model.optimizer = keras.optimizers.SGD(SGD.learning_rate)
    found = [fit(model, batch) for batch in drawn(one)]
    np.testing.assert_allclose(losses, found, rtol=1e-6 * STEPS)
    np.testing.assert_allclose(losses[0], found[0], rtol=1e-6)
    paths, values = Paths(one.model), last.parameters | last.state
    for variable, its_copy in zip(one.model.variables, model.variables, strict=True):
        if (path := paths[variable]) in values:
            np.testing.assert_allclose(values[path], np.asarray(its_copy), rtol=1e-5, atol=1e-5, err_msg=path)


def fit(model: keras.Model, batch: Batch) -> float:
    features, labels, weights = batch
    return model.fit(features, labels, sample_weight=weights, batch_size=BATCH, verbose=0).history["loss"][0]


def drawn(one: Workload) -> list[Batch]:
    """The batches that one process trains on."""
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        batches = training_batches(
            one.data.train, seed=SEED, start=0, stop=STEPS, batch_size=BATCH, replica=0, replicas=1
        )
        session.run(batches.initializer, batches.feed_from(0))
        tensors = [tensor for _, tensor in leaves_of(batches.batch)]
        read = [iter(session.run(tensors)) for _ in range(STEPS)]
    return [batches.batch.map(lambda _, arrays=arrays: tf.constant(next(arrays))) for arrays in read]
