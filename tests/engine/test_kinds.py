"""Every kind of model is trained to the same bits on any cluster, and after a resume too."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from kinds import KINDS, workload
from small_clusters import Cluster, digest, make_local, to_the_end

from trainer.config.schema import OptimizerConfig, OptimizerName

pytestmark = pytest.mark.cluster

STEPS, STOP = 25, 10
SGD = OptimizerConfig(name=OptimizerName.sgd, learning_rate=0.01)
PER_REPLICA = {  # kinds that compute a mean over what a replica has, so that one process needs as many replicas
    "frozen weights",  # BatchNorm
    "masked steps",  # of the steps that are not masked
}
train = functools.partial(to_the_end, steps=STEPS)


@pytest.mark.long(but=["dicts and texts", "a tensor used three times"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_model_gets_the_same_bits_on_any_cluster_and_is_trained_as_in_one_process(kind):
    one = workload(kind)
    results = [Cluster(one, ps=ps, workers=2, steps=STEPS, optimizer=SGD).train([train] * 2)[0] for ps in (1, 2, 0)]
    losses, last = results[0]
    assert np.isfinite(losses).all()
    assert len(set(losses)) > 1
    assert [(losses, digest(last))] * 3 == [(losses, digest(last)) for losses, last in results]
    replicas = 2 if kind in PER_REPLICA else 1
    expected_losses, expected = train(make_local(one, SGD, count=replicas, steps=STEPS))
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    for path, value in (expected.parameters | expected.state).items():
        np.testing.assert_allclose((last.parameters | last.state)[path], value, rtol=1e-5, atol=1e-5, err_msg=path)


@pytest.mark.long(but=["frozen weights"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_kind_of_model_goes_on_with_the_same_bits_on_another_cluster(kind):
    one = workload(kind)
    until = functools.partial(to_the_end, steps=STOP)
    _, unbroken = Cluster(one, ps=1, workers=2, steps=STEPS).train([train] * 2)[0]
    _, saved = Cluster(one, ps=2, workers=2, steps=STOP).train([until] * 2)[0]
    _, last = Cluster(one, ps=0, workers=2, steps=STEPS, start=saved).train([train] * 2)[0]
    assert digest(last) == digest(unbroken)
