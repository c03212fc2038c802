"""The push of a worker: sums over its replicas, or their mean, clipped by the worker under async."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from trainer.config.schema import OptimizerConfig
from trainer.engine.combine import mean_computed, mean_over_replicas, sums_over_replicas
from trainer.engine.compute import Computed, Replica, Requests, compute, in_step, pack_float32, run_step
from trainer.engine.update import divided
from trainer.engine.vectors import packing
from trainer.plan.layout import LANES, METRICS, Parameter, Shard
from trainer.plan.placement import place
from trainer.plan.spans import Span
from trainer.workload import loss_scale
from trainer.workload.data.examples import Batch
from trainer.workload.data.pipeline import Batches
from trainer.workload.step import StepOutput

v1 = tf.compat.v1

PARAMETERS = [Parameter("a", (3,), True), Parameter("b", (40,), True), Parameter("mean", (2,), False)]
PART_MIB = 32 * 4 / 2**20  # b is cut into two parts
CLIP = OptimizerConfig(clip_norm=1.0)


def two_shards() -> tuple[Shard, ...]:
    """One part of b on each."""
    return place(PARAMETERS, ["ps:0", "ps:1"], pins={"a": 0, "mean": 1}, max_part_mib=PART_MIB)


def values(factor: float) -> dict[str, np.ndarray]:
    return {
        "a": factor * np.float32([1, 2, 3]),
        "b": factor * np.arange(40, dtype=np.float32),
        "mean": factor * np.float32([5, 7]),
    }


def packed(factor: float, **metrics: float) -> list[tf.Tensor]:
    """The push of one replica to each of the two shards; with headers of another step."""
    vectors = []
    for shard in two_shards():
        flat = packing.to_flat(shard, values(factor), generation=9, step=9)
        for name, value in metrics.items():
            flat[shard.metrics_offset + METRICS.index(name)] = value
        vectors.append(tf.constant(flat))
    return vectors


HEADERS = np.int32([[3, 2**30 + 1, *[-1] * 14], [4, 0x7FC00001, *[0x7F800001] * 14]])  # NaNs, if read as floats


def headers() -> list[tf.Tensor]:
    return [tf.bitcast(tf.constant(header), tf.float32) for header in HEADERS]


def pushed(packed: Sequence[Sequence[tf.Tensor]], **options: Any) -> list[np.ndarray]:
    return [vector.numpy() for vector in mean_over_replicas(packed, headers(), two_shards(), **options)[0]]


def named(vectors: Sequence[np.ndarray]) -> dict[str, list[float]]:
    pieces = [((*shard.trainable, *shard.state), v) for shard, v in zip(two_shards(), vectors, strict=True)]
    return {path: value.tolist() for path, value in packing.join(pieces).items()}


def asking(stop: float) -> Requests:
    return Requests(tf.constant(stop), tf.constant(0.0))


def metrics(vector: np.ndarray, shard: Shard) -> list[float]:
    return vector[shard.metrics_offset :][: len(METRICS)].tolist()


def test_the_parts_of_b_are_on_two_shards():
    parts = [[(piece.path, piece.begin, piece.size) for piece in shard.trainable] for shard in two_shards()]
    assert parts == [[("a", 0, 3), ("b", 0, 32)], [("b", 32, 8)]]


def test_a_push_is_the_mean_over_the_replicas():
    assert named(pushed([packed(1.0), packed(3.0)])) == {path: v.tolist() for path, v in values(2.0).items()}


def test_the_metrics_are_means_on_every_shard():
    found = pushed([packed(1.0, loss=1.0, stop=1.0), packed(1.0, loss=4.0, overflow=1.0)])
    assert [metrics(vector, shard) for vector, shard in zip(found, two_shards(), strict=True)] == [
        [2.5, 0.5, 0.5, 0.0, 0.0, 0.0],
        [2.5, 0.5, 0.5, 0.0, 0.0, 0.0],
    ]


@pytest.mark.parametrize("options", [{}, {"clip": CLIP}], ids=["unclipped", "clipped"])
def test_the_headers_are_copied_bit_for_bit(options):
    found = pushed([packed(1.0), packed(3.0)], **options)
    tags = [vector.view(np.int32)[shard.header_offset :] for vector, shard in zip(found, two_shards(), strict=True)]
    assert np.array(tags).tolist() == HEADERS.tolist()


@pytest.mark.parametrize("options", [{}, {"clip": CLIP}], ids=["unclipped", "clipped"])
def test_the_headers_are_copied_bit_for_bit_in_a_v1_graph(options):
    with tf.Graph().as_default(), v1.Session() as session:
        given = [packed(1.0), packed(3.0)]
        tags = [v1.placeholder(tf.float32, [LANES]) for _ in HEADERS]
        step, _ = mean_over_replicas(given, tags, two_shards(), **options)
        found = session.run(step, dict(zip(tags, HEADERS.view(np.float32), strict=True)))
    assert [vector.view(np.int32)[-LANES:].tolist() for vector in found] == HEADERS.tolist()


def test_replicas_are_pushed_as_the_sums_of_their_spans():
    spans = [Span(1, 1), Span(2, 2)]
    numbers: list[int] = []

    def write(trainable: Any, rest: Any, shard: Shard, push: int) -> tf.Tensor:
        numbers.append(push)
        return pack_float32(trainable, rest, shard)

    sums = sums_over_replicas([packed(1.0), packed(3.0), packed(4.0)], headers(), two_shards(), spans, write)
    assert numbers == [0, 0, 1, 1]
    assert [named([vector.numpy() for vector in of_span]) for of_span in sums] == [
        {path: value.tolist() for path, value in values(factor).items()} for factor in (1.0, 7.0)
    ]
    tags = [vector.numpy().view(np.int32)[-LANES:].tolist() for of_span in sums for vector in of_span]
    assert tags == HEADERS.tolist() * 2


def test_the_push_of_one_replica_stays_as_it_is():
    given = packed(1.5, loss=2.0)
    assert [v.tobytes() for v in pushed([given])] == [vector.numpy().tobytes() for vector in given]


def test_the_norm_is_that_of_the_whole_gradient():
    found = named(pushed([packed(1.0), packed(3.0)], clip=CLIP))
    norm = np.sqrt(4 * (1 + 4 + 9) + 4 * sum(n * n for n in range(40)))
    np.testing.assert_allclose(found["a"], values(2.0)["a"] / norm, rtol=1e-6)
    np.testing.assert_allclose(found["b"], values(2.0)["b"] / norm, rtol=1e-6)


def test_a_single_replica_is_clipped_too():
    found = named(pushed([packed(2.0)], clip=CLIP))
    assert np.sqrt(np.sum(np.square([*found["a"], *found["b"]]))) == pytest.approx(1.0, rel=1e-6)


def test_the_norm_of_a_counted_gradient_is_that_after_the_division():
    counted = [replace(shard, is_counted=True) for shard in two_shards()]
    of_replicas = [packed(4.0, divisor=1.0), packed(12.0, divisor=3.0)]
    vectors, _ = mean_over_replicas(of_replicas, headers(), counted, clip=CLIP)
    gradients = [divided(packing.halves(v, one), one).trainable for v, one in zip(vectors, counted, strict=True)]
    plain = [
        packing.halves(tf.constant(v), one).trainable
        for v, one in zip(pushed([packed(4.0)], clip=CLIP), counted, strict=True)
    ]
    for found, expected in zip(gradients, plain, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_gradient_below_the_limit_keeps_its_bits():
    given = packed(1 / 1024)
    found = pushed([given], clip=CLIP)
    assert [v[:-LANES].tobytes() for v in found] == [vector.numpy()[:-LANES].tobytes() for vector in given]


def test_state_and_metrics_are_not_clipped():
    found = pushed([packed(2.0, loss=64.0)], clip=CLIP)
    assert named(found)["mean"] == [10.0, 14.0]
    assert metrics(found[0], two_shards()[0]) == [64.0, 0.0, 0.0, 0.0, 0.0, 0.0]


def test_a_shard_with_nothing_to_train_is_clipped_with_the_others():
    shards = place(PARAMETERS, ["ps:0", "ps:1"], pins={"a": 0, "b": 0, "mean": 1})
    given = [[tf.constant(packing.to_flat(shard, values(2.0), generation=1, step=1)) for shard in shards]]
    found = [v.numpy() for v in mean_over_replicas(given, headers(), shards, clip=CLIP)[0]]
    assert np.sqrt(np.sum(np.square(found[0][: shards[0].trainable_size]))) == pytest.approx(1.0, rel=1e-6)
    assert found[1][:2].tolist() == [10.0, 14.0]


def test_the_mean_over_replicas_is_taken_by_name():
    outputs = [
        Computed({"a": tf.constant([n])}, {"mean": tf.constant([n * 2])}, tf.constant([n, 0.0, 1.0, 0.0]))
        for n in (1.0, 4.0)
    ]
    mean = mean_computed(outputs)
    assert (mean.gradients["a"].numpy(), mean.state["mean"].numpy(), mean.metrics.numpy().tolist()) == (
        2.5,
        5.0,
        [2.5, 0.0, 1.0, 0.0],
    )


# One replica's step


def step_of_sums(parameters: Any, state: Any, seed: tf.Tensor, batch: Batch, scale: tf.Tensor | None) -> StepOutput:
    """The gradients are the inputs of the step."""
    inputs = tf.stack([tf.cast(seed[0], tf.float32), tf.cast(seed[1], tf.float32), tf.reduce_sum(batch.features)])
    moved = {path: value + 1.0 for path, value in state.items() if path != loss_scale.PARAMETER.path}
    overflow = tf.constant(0.0) if scale is None else scale
    bad, finite = tf.cast(batch.labels[0] > 0, tf.float32), tf.stack([True, batch.labels[0] <= 0])
    return StepOutput({"a": inputs}, moved, tf.constant(0.5), tf.constant([3.0, 12.0]), overflow, bad, finite)


def shards_of_one(*, scaled: bool) -> tuple[Shard, ...]:
    parameters = [PARAMETERS[0], PARAMETERS[2], *([loss_scale.PARAMETER] if scaled else [])]
    return place(parameters, ["ps:0"], pins={})


def computed(*, scaled: bool = False, label: float = 0.0, **options: Any) -> Any:
    """(gradients, state, metrics) of replica 2 of 4 on a batch of step 5; a bad step if the label is above 0."""
    shards = shards_of_one(scaled=scaled)
    of_step = values(1.0) | {loss_scale.PARAMETER.path: np.float32([64.0, 3.0])}
    flats = [tf.constant(packing.to_flat(shard, of_step, generation=1, step=5)) for shard in shards]
    vectors = [packing.halves(flat, shard) for flat, shard in zip(flats, shards, strict=True)]
    batches = SimpleNamespace(step=tf.constant(5, tf.int64), batch=Batch(tf.ones([2, 3]), tf.fill([2], label)))
    replica = Replica(step_of_sums, lambda: batches, seed=7, index=2, count=4, **options)
    output = run_step(vectors, shards, replica, batches, asking(1.0))
    return tf.nest.map_structure(lambda tensor: tensor.numpy().tolist(), tuple(output[:3]))


@pytest.mark.parametrize("options", [{}, {"jit": True}], ids=["plain", "compiled"])
def test_a_step_draws_from_the_seed_the_step_and_the_replica(options):
    gradients, _, _ = computed(**options)
    assert gradients["a"] == [7.0, 22.0, 6.0]  # 5 * 4 + 2; and the sum of the features


def test_the_metrics_have_their_order():
    _, _, metrics = computed()
    assert metrics == [0.5, 1.0, 0.0, 0.0, 0.0, 1.0, 3.0, 12.0]


def test_a_step_gets_the_loss_scale_and_reports_an_overflow():
    _, _, metrics = computed(scaled=True)
    assert metrics == [0.5, 1.0, 64.0, 0.0, 0.0, 1.0, 3.0, 12.0]


@pytest.mark.parametrize("options", [{}, {"jit": True}], ids=["plain", "compiled"])
def test_a_bad_step_names_its_replica_and_its_gradient(options, caplog, snapshot):
    _, _, metrics = computed(label=1.0, **options)
    assert metrics == [0.5, 1.0, 0.0, 1.0, 0.0, 1.0, 3.0, 12.0]
    # The update that step 5 leads to.
    assert caplog.messages[-1] == snapshot


def test_a_good_step_logs_nothing(caplog):
    computed()
    assert caplog.messages == []


def test_the_first_of_several_bad_values_is_named_and_the_others_counted(caplog, snapshot):
    def all_bad(parameters: Any, state: Any, *_: Any) -> StepOutput:
        nan = tf.constant(float("nan"))
        return StepOutput(
            parameters, {"mean": state["mean"]}, nan, tf.zeros([0]), nan, tf.constant(1.0), tf.fill([4], False)
        )

    shards = shards_of_one(scaled=False)
    flats = [tf.constant(packing.to_flat(shard, values(1.0), generation=1, step=40)) for shard in shards]
    vectors = [packing.halves(flat, shard) for flat, shard in zip(flats, shards, strict=True)]
    batches = SimpleNamespace(step=tf.constant(40, tf.int64), batch=Batch(tf.ones([2, 3]), tf.zeros([2])))
    run_step(vectors, shards, Replica(all_bad, lambda: batches, seed=7), batches, asking(0.0))
    assert caplog.messages[-1] == snapshot


def test_the_loss_scale_is_pushed_as_it_was_pulled():
    _, state, _ = computed(scaled=True)
    assert state == {"mean": [6.0, 8.0], loss_scale.PARAMETER.path: [64.0, 3.0]}


def test_a_packed_vector_has_the_computed_values_and_the_given_header():
    (shard,) = shards_of_one(scaled=True)
    of_step = values(1.0) | {loss_scale.PARAMETER.path: np.float32([64.0, 3.0])}
    pulled = packing.halves(tf.constant(packing.to_flat(shard, of_step, generation=1, step=5)), shard)
    batches = SimpleNamespace(step=tf.constant(5, tf.int64), batch=Batch(tf.ones([2, 3]), tf.zeros([2])))
    replica = Replica(step_of_sums, lambda: batches, seed=7)
    (vector,) = (v.numpy() for v in compute([pulled], headers()[:1], [shard], replica, batches, asking(0.0)).vectors)
    found = packing.from_flat((*shard.trainable, *shard.state), vector)
    assert {path: value.tolist() for path, value in found.items()} == {
        "a": [7.0, 5.0, 6.0],
        "mean": [6.0, 8.0],
        loss_scale.PARAMETER.path: [64.0, 3.0],
    }
    assert vector.view(np.int32)[-LANES:].tolist() == HEADERS[0].tolist()


# Batches


def batches_of(step: int) -> Batches:
    features, labels = tf.constant([[1.0]]), tf.constant([2.0])
    return Batches(tf.constant(step, tf.int64), Batch(features, labels), None, {}, None)


def test_batches_of_the_parameters_step_stay_as_they_are():
    same = in_step(batches_of(3), tf.constant(3, tf.int64))
    assert (same.step, same.batch.features.numpy().tolist(), same.batch.labels.numpy().tolist()) == (3, [[1.0]], [2.0])


def test_batches_of_another_step_fail():
    with tf.Graph().as_default(), v1.Session() as session:
        step = v1.placeholder(tf.int64, [])
        features = in_step(batches_of(3), step).batch.features
        with pytest.raises(tf.errors.InvalidArgumentError, match="to different steps"):
            session.run(features, {step: 4})
