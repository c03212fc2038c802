"""Between named tensors and the flat vectors of the shards."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from trainer.engine import packing
from trainer.placement import LANES, Parameter, Shard, place

v1 = tf.compat.v1

PARAMETERS = [
    Parameter("dense/kernel", (3, 7), True),  # 21 floats, padded to 32
    Parameter("dense/bias", (16,), True),  # needs no padding
    Parameter("scale", (), True),
    Parameter("norm/mean", (5,), False),
]
VALUES = {
    "dense/kernel": np.arange(21, dtype=np.float32).reshape(3, 7),
    "dense/bias": np.arange(100, 116, dtype=np.float32),
    "scale": np.float32(-3),
    "norm/mean": np.float32([5, 4, 3, 2, 1]),
}
TAGS = [
    pytest.param(0, 0, id="zeros"),
    pytest.param(1, 1, id="denormal floats"),
    pytest.param(7, 12_345_678, id="a long run"),
    pytest.param(0x7F800001, 0x7FC00001, id="bits of NaN"),
]


def shards(count: int) -> tuple[Shard, ...]:
    return place(PARAMETERS, [f"ps:{i}" for i in range(count)], pins={})


def shard() -> Shard:
    return shards(1)[0]


def run(tensors: Any, feeds: dict[Any, Any] | None = None) -> Any:
    """In a v1 session, on the graph of the tensors' scope."""
    with v1.Session() as session:
        return session.run(tensors, feeds)


def test_a_flat_vector_has_its_regions_in_order():
    flat = packing.to_flat(shard(), VALUES, generation=3, step=8)
    assert flat.tolist()[:64] == [
        *range(21), *[0] * 11,  # dense/kernel
        *range(100, 116),  # dense/bias
        -3, *[0] * 15,  # scale
    ]  # fmt: skip
    assert flat.tolist()[64:96] == [5, 4, 3, 2, 1, *[0] * 11, *[0] * LANES]  # norm/mean, metrics
    assert flat[96:].view(np.int32).tolist() == [3, 8, *[0] * 14]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_named_arrays_survive_being_made_flat(count):
    back: dict[str, np.ndarray] = {}
    for one in shards(count):
        flat = packing.to_flat(one, VALUES, generation=1, step=1)
        back |= packing.from_flat([*one.trainable, *one.state], flat)
    assert {path: value.tolist() for path, value in back.items()} == {p: v.tolist() for p, v in VALUES.items()}


def test_a_slot_has_the_layout_of_the_trainable_parameters():
    slot = packing.to_slot(shard(), VALUES, fill=9.0)
    assert {path: value.tolist() for path, value in packing.from_flat(shard().trainable, slot).items()} == {
        path: VALUES[path].tolist() for path in ("dense/kernel", "dense/bias", "scale")
    }


def test_a_slot_without_values_is_filled():
    assert packing.to_slot(shard(), None, fill=0.5).tolist() == [0.5] * 64


@pytest.mark.parametrize("jit", [False, True], ids=["plain", "jit_compile"])
@pytest.mark.parametrize(("generation", "step"), TAGS)
def test_tags_survive_as_integers_in_a_header(generation, step, jit):
    @tf.function(jit_compile=jit)
    def there_and_back(generation: tf.Tensor, step: tf.Tensor) -> tf.Tensor:
        before = tf.zeros([shard().header_offset])
        return packing.tags_of(tf.concat([before, packing.header(generation, step)], 0), shard())

    assert there_and_back(tf.constant(generation), tf.constant(step)).numpy().tolist() == [generation, step]


@pytest.mark.parametrize(("generation", "step"), TAGS)
def test_tags_survive_between_two_compiled_functions(generation, step):
    header = tf.function(packing.header, jit_compile=True)
    read = tf.function(lambda flat: packing.tags_of(flat, shard()), jit_compile=True)
    flat = tf.concat([tf.zeros([shard().header_offset]), header(tf.constant(generation), tf.constant(step))], 0)
    assert read(flat).numpy().tolist() == [generation, step]


@pytest.mark.parametrize(("generation", "step"), TAGS)
def test_tags_survive_from_numpy_to_a_session_and_back(generation, step):
    with tf.Graph().as_default():
        flat = v1.placeholder(tf.float32, [shard().size])
        tags = packing.tags_of(flat, shard())
        again = packing.header(*tf.unstack(tags))
        fed = packing.to_flat(shard(), VALUES, generation=generation, step=step)
        read, header = run([tags, again], {flat: fed})
    assert (read.tolist(), header.view(np.int32).tolist()) == ([generation, step], [generation, step, *[0] * 14])


@pytest.mark.parametrize("count", [1, 2])
def test_unpacking_takes_back_what_packing_laid_out(count):
    with tf.Graph().as_default():
        values = {path: tf.constant(value) for path, value in VALUES.items()}
        metrics, header = tf.constant([0.5, 0.25, 1.0]), packing.header(tf.constant(2), tf.constant(9))
        packed = [packing.pack(one, values, values, metrics, header) for one in shards(count)]
        parameters, state = run(packing.unpack(packed, shards(count)))
    assert {path: value.tolist() for path, value in parameters.items()} == {
        path: VALUES[path].tolist() for path in ("dense/kernel", "dense/bias", "scale")
    }
    assert {path: value.tolist() for path, value in state.items()} == {"norm/mean": [5, 4, 3, 2, 1]}


def test_a_packed_vector_carries_metrics_and_tags():
    with tf.Graph().as_default():
        values = {path: tf.constant(value) for path, value in VALUES.items()}
        header = packing.header(tf.constant(2), tf.constant(9))
        packed = packing.pack(shard(), values, values, tf.constant([0.5, 0.25, 1.0]), header)
        size, metrics, tags = run(
            [tf.size(packed), packing.metrics_of(packed, shard()), packing.tags_of(packed, shard())]
        )
    assert (size, metrics.tolist(), tags.tolist()) == (shard().size, [0.5, 0.25, 1.0, *[0.0] * 13], [2, 9])


def test_packing_equals_the_numpy_layout():
    with tf.Graph().as_default():
        values = {path: tf.constant(value) for path, value in VALUES.items()}
        header = packing.header(tf.constant(2), tf.constant(9))
        packed = run(packing.pack(shard(), values, values, tf.zeros([3]), header))
    assert packed.tobytes() == packing.to_flat(shard(), VALUES, generation=2, step=9).tobytes()


def test_padding_carries_nothing_of_its_neighbours():
    with tf.Graph().as_default():
        values = {path: tf.ones_like(value) for path, value in VALUES.items()}
        packed = run(packing.pack(shard(), values, values, tf.ones([3]), tf.zeros([LANES])))
    assert packed.tolist() == [
        *[1] * 21, *[0] * 11, *[1] * 16, 1, *[0] * 15, *[1] * 5, *[0] * 11, *[1] * 3, *[0] * 13, *[0] * LANES
    ]  # fmt: skip
