"""How vectors travel: the bits of messages, and training over a bfloat16 wire."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf
from small_clusters import STEPS, Cluster, digest, plain, to_the_end, unbroken, with_everything

from trainer.engine.vectors import packing
from trainer.engine.vectors.wire import BFLOAT16, FLOAT32
from trainer.plan.layout import LANES, WIRES, Parameter, Shard
from trainer.plan.placement import place

PARAMETERS = [Parameter("a", (5, 7), True), Parameter("b", (40,), True), Parameter("mean", (3,), False)]
BOTH = [FLOAT32, BFLOAT16]


def one_shard() -> Shard:
    return place(PARAMETERS, ["ps:0"], pins={})[0]


def a_vector(shard: Shard) -> np.ndarray:
    random = np.random.default_rng(3)
    values = {p.path: random.normal(size=p.shape).astype(np.float32) for p in PARAMETERS}
    flat = packing.to_flat(shard, values, generation=2**30 + 7, step=2**29 + 5)
    flat[shard.metrics_offset] = 0.123456789
    return flat


@pytest.mark.parametrize("wire", BOTH, ids=lambda wire: wire.name)
@pytest.mark.parametrize("jit", [False, True], ids=["plain", "compiled"])
def test_metrics_state_and_tags_keep_their_bits(wire, jit):
    shard = one_shard()
    flat = a_vector(shard)

    @tf.function(jit_compile=jit)
    def travel(vector):
        message = wire.pack_flat(vector, shard)
        tags, metrics = wire.tags_of(message, shard), wire.metrics_of(message, shard)
        return wire.unpack(message, shard).rest, tags, metrics

    rest, tags, metrics = travel(tf.constant(flat))
    assert rest.numpy().tobytes() == flat[shard.trainable_size :].tobytes()
    assert tags.numpy().tolist() == [2**30 + 7, 2**29 + 5]
    assert metrics.numpy()[0] == np.float32(0.123456789)


@pytest.mark.parametrize("jit", [False, True], ids=["plain", "compiled"])
def test_parameters_are_rounded_to_the_nearest_bfloat16_and_ties_to_even(jit):
    shard = one_shard()
    flat = a_vector(shard)
    lowest = np.array([0x3F800000, 0x3F808000, 0x3F818000, 0x3F80C000, 0x3F807FFF, 0x80000000], np.uint32)
    flat[: len(lowest)] = lowest.view(np.float32)

    @tf.function(jit_compile=jit)
    def travel(vector):
        return BFLOAT16.unpack(BFLOAT16.pack_flat(vector, shard), shard).trainable

    rounded = travel(tf.constant(flat)).numpy().view(np.uint32)
    # exact; a tie goes down to even, up to even; above and below half; the sign of zero
    assert [hex(bits) for bits in rounded[:6]] == [
        *("0x3f800000", "0x3f800000", "0x3f820000", "0x3f810000", "0x3f800000", "0x80000000")
    ]
    bits = flat[: shard.trainable_size].view(np.uint32).astype(np.uint64)
    expected = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).astype(np.uint32)
    np.testing.assert_array_equal(rounded, expected)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_stay_so(value):
    shard = one_shard()
    flat = a_vector(shard)
    flat[0] = value
    message = BFLOAT16.pack_flat(tf.constant(flat), shard)
    np.testing.assert_equal(BFLOAT16.unpack(message, shard).trainable[0].numpy(), np.float32(value))


def test_pieces_are_packed_as_their_vector_is():
    shard = one_shard()
    flat = tf.constant(a_vector(shard))
    for wire in BOTH:
        pieces = [flat[p.offset : p.offset + p.padded] for p in shard.trainable]
        packed = wire.pack(pieces, [flat[shard.trainable_size :]])
        assert packed.numpy().tobytes() == wire.pack_flat(flat, shard).numpy().tobytes()


def test_the_size_of_a_message():
    shard = one_shard()
    flat = tf.constant(a_vector(shard))
    sizes = {wire.name: wire.pack_flat(flat, shard).shape[0] for wire in BOTH}
    assert sizes == {wire.name: WIRES[wire.name].numbers(shard) for wire in BOTH}
    rest = 3 * LANES  # state, metrics, header
    assert WIRES["bfloat16"].nbytes(shard) == 2 * shard.trainable_size + 4 * rest
    assert WIRES["float32"].nbytes(shard) == shard.nbytes


def test_a_fetched_message_reads_as_its_trainable_region():
    shard = one_shard()
    flat = tf.constant(a_vector(shard))
    for wire in BOTH:
        message = wire.pack_flat(flat, shard)
        expected = wire.unpack(message, shard).trainable.numpy()
        np.testing.assert_array_equal(wire.trainable_in(message.numpy(), shard), expected)


# Training


@pytest.mark.long
@pytest.mark.cluster
def test_bfloat16_bits_do_not_depend_on_where_the_shards_are():
    digests = {
        where: digest(
            Cluster(with_everything, ps=where, workers=3, clip_norm=0.5, wire="bfloat16").train([to_the_end] * 3)[0][1]
        )
        for where in (0, 1, 3)
    }
    assert len(set(digests.values())) == 1, digests


@pytest.mark.long
@pytest.mark.cluster
def test_a_bfloat16_wire_trains_nearly_as_float32_does():
    exact, rounded = (unbroken(with_everything, wire=wire.name) for wire in BOTH)
    assert digest(exact[1]) != digest(rounded[1])
    np.testing.assert_allclose(rounded[0], exact[0], rtol=0.02)
    for path, value in exact[1].parameters.items():
        # Hosts hold float32 and only messages are rounded, so most values are not bfloat16.
        np.testing.assert_allclose(rounded[1].parameters[path], value, atol=0.02)
    kernel = rounded[1].parameters["dense/kernel"].view(np.uint32)
    assert np.mean(kernel & 0xFFFF != 0) > 0.9


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.parametrize("strategy", ["async", "backup"])
def test_async_and_backup_train_over_a_bfloat16_wire(strategy):
    def some_steps(engine):
        engine.start()
        step = 0
        while step < STEPS:
            step = engine.step().step + 1
        engine.peek()
        last = engine.snapshot()
        engine.leave()
        return last

    last = Cluster(plain, ps=2, workers=2, strategy=strategy, quorum=2, wire="bfloat16").train([some_steps] * 2)[0]
    assert all(np.isfinite(value).all() for value in last.parameters.values())
    assert last.step >= STEPS
