"""Packing named tensors into the flat vectors of shards, and unpacking them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from trainer.config.schema import OptimizerConfig, OptimizerName
from trainer.engine import optimizers
from trainer.engine.update import make_update, squares_order
from trainer.engine.vectors import packing
from trainer.engine.vectors.snapshot import Snapshot
from trainer.plan.layout import LANES, Parameter, Shard
from trainer.plan.placement import place

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


def shards(count: int, max_part_mib: float | None = None) -> tuple[Shard, ...]:
    return place(PARAMETERS, [f"ps:{i}" for i in range(count)], pins={}, max_part_mib=max_part_mib)


def shard() -> Shard:
    return shards(1)[0]


WHOLE, IN_PARTS = None, 4 * LANES / 2**20  # dense/kernel in parts of 16 and 5 floats


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


@pytest.mark.parametrize("max_part_mib", [WHOLE, IN_PARTS], ids=["whole", "in parts"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_named_arrays_survive_flattening(count, max_part_mib):
    layout = shards(count, max_part_mib)
    flats = [packing.to_flat(one, VALUES, generation=1, step=1) for one in layout]
    back = packing.join(([*one.trainable, *one.state], flat) for one, flat in zip(layout, flats, strict=True))
    assert {path: value.tolist() for path, value in back.items()} == {p: v.tolist() for p, v in VALUES.items()}


def test_a_slot_has_the_layout_of_the_trainable_parameters():
    slot = packing.to_slot(shard(), "momentum", VALUES, fill=9.0)
    assert {path: value.tolist() for path, value in packing.from_flat(shard().trainable, slot).items()} == {
        path: VALUES[path].tolist() for path in ("dense/kernel", "dense/bias", "scale")
    }


def test_a_slot_without_values_is_filled():
    assert packing.to_slot(shard(), "momentum", None, fill=0.5).tolist() == [0.5] * 64


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


def test_a_part_is_laid_out_as_a_parameter():
    first, second = shards(2, IN_PARTS)
    assert [(p.path, p.begin, p.size) for p in first.trainable] == [("dense/kernel", 0, 16), ("dense/bias", 0, 16)]
    assert [(p.path, p.begin, p.size) for p in second.trainable] == [("dense/kernel", 16, 5), ("scale", 0, 1)]
    flat = packing.to_flat(second, VALUES, generation=3, step=8)
    assert flat.tolist()[:32] == [16, 17, 18, 19, 20, *[0] * 11, -3, *[0] * 15]


def test_a_whole_array_is_a_view_of_its_vector():
    flat = packing.to_flat(shard(), VALUES, generation=1, step=1)
    assert np.shares_memory(packing.from_flat(shard().trainable, flat)["dense/kernel"], flat)


@pytest.mark.parametrize("max_part_mib", [WHOLE, IN_PARTS], ids=["whole", "in parts"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_snapshot_names_parameters_wherever_their_parts_are(count, max_part_mib):
    trained = {path: VALUES[path] for path in ("dense/kernel", "dense/bias", "scale")}
    slots = {"momentum": {path: -value for path, value in trained.items()}}
    before = Snapshot(8, trained, {"norm/mean": VALUES["norm/mean"]}, slots, stop=0.5, reductions=3)
    layout = shards(count, max_part_mib)
    loaded = [before.to_flats(one, {"momentum": 0.0}, generation=1) for one in layout]
    flats, of_shards = [flat for flat, _ in loaded], [{"momentum": momentum} for _, momentum in loaded]
    after = Snapshot.from_flats(8, layout, flats, of_shards)
    assert (after.stop, after.reductions) == (0.5, 3)
    assert {name: value.tolist() for name, value in after.to_tensors().items()} == {
        name: value.tolist() for name, value in before.to_tensors().items()
    }


@pytest.mark.parametrize("max_part_mib", [WHOLE, IN_PARTS], ids=["whole", "in parts"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_unpacking_inverts_packing(count, max_part_mib):
    with tf.Graph().as_default():
        values = {path: tf.constant(value) for path, value in VALUES.items()}
        metrics, header = tf.constant([0.5, 0.25, 1.0]), packing.header(tf.constant(2), tf.constant(9))
        layout = shards(count, max_part_mib)
        packed = [packing.pack(one, values, values, metrics, header) for one in layout]
        parameters, state = run(
            packing.unpack([packing.halves(*one) for one in zip(packed, layout, strict=True)], layout)
        )
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


@pytest.mark.parametrize("max_part_mib", [WHOLE, IN_PARTS], ids=["whole", "in parts"])
@pytest.mark.parametrize("count", [1, 2, 3])
def test_packing_equals_the_numpy_layout(count, max_part_mib):
    layout = shards(count, max_part_mib)
    with tf.Graph().as_default():
        values = {path: tf.constant(value) for path, value in VALUES.items()}
        header = packing.header(tf.constant(2), tf.constant(9))
        packed = run([packing.pack(one, values, values, tf.zeros([3]), header) for one in layout])
    flats = [packing.to_flat(one, VALUES, generation=2, step=9) for one in layout]
    assert [vector.tobytes() for vector in packed] == [flat.tobytes() for flat in flats]


def test_only_a_parameter_in_parts_costs_a_concat():
    def operations(max_part_mib: float | None) -> list[str]:
        with tf.Graph().as_default() as graph:
            layout = shards(2, max_part_mib)
            packing.unpack([packing.halves(v1.placeholder(tf.float32, [one.size]), one) for one in layout], layout)
            return [op.type for op in graph.get_operations() if op.type != "Const"]

    # A slice and a reshape each, and two slices a shard; what is padded, all but dense/bias, is cut off before.
    assert sorted(set(operations(WHOLE))) == ["Placeholder", "Reshape", "Slice", "StridedSlice"]
    assert (operations(WHOLE).count("Slice"), operations(WHOLE).count("StridedSlice")) == (4 + 4, 3)
    assert operations(IN_PARTS).count("ConcatV2") == 1


def test_squares_are_in_path_order_whatever_the_number_of_shards():
    def squares(count: int) -> list[tuple[str, int]]:
        layout = shards(count, IN_PARTS)
        laid_end_to_end = [(piece.path, piece.begin) for shard in layout for piece in shard.trainable]
        return [laid_end_to_end[index] for index in squares_order(layout)]

    assert squares(1) == squares(2) == squares(3)
    assert squares(1) == [("dense/bias", 0), ("dense/kernel", 0), ("dense/kernel", 16), ("scale", 0)]


@pytest.mark.long(but=["None"])
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_an_update_has_the_same_bits_wherever_the_parts_are(clip_norm):
    config = OptimizerConfig(name=OptimizerName.adam, clip_norm=clip_norm)
    tables = [Parameter("table", (1000, 7), True), Parameter("bias", (7,), True)]
    draw = np.random.default_rng(0).normal
    values, *gradients = ({p.path: draw(size=p.shape).astype(np.float32) for p in tables} for _ in range(3))

    def updated(count: int) -> dict[str, bytes]:
        """After the compiled update of every shard, with the squares exchanged by hand."""
        layout = place(tables, [f"ps:{i}" for i in range(count)], pins={}, max_part_mib=0.005)
        pushed = [[tf.constant(packing.to_flat(one, g, generation=1, step=0)) for g in gradients] for one in layout]
        squares = [
            optimizers.square_sums(sum(vectors) / 2, [(piece.offset, piece.padded) for piece in one.trainable])
            for one, vectors in zip(layout, pushed, strict=True)
        ]
        of_all = tf.gather(tf.concat(squares, 0), squares_order(layout))
        moved = []
        for one, vectors in zip(layout, pushed, strict=True):
            flat = tf.constant(packing.to_flat(one, values, generation=1, step=0))
            slots = {name: tf.zeros([one.trainable_size]) for name in config.slots()}
            update = make_update(one, config, lambda _: of_all)
            moved.append((one.trainable, update(flat, slots, vectors, tf.constant(1), tf.constant(0))[0].numpy()))
        return {path: value.tobytes() for path, value in packing.join(moved).items()}

    assert updated(1) == updated(2) == updated(3)


def test_padding_is_zero():
    with tf.Graph().as_default():
        values = {path: tf.ones_like(value) for path, value in VALUES.items()}
        packed = run(packing.pack(shard(), values, values, tf.ones([3]), tf.zeros([LANES])))
    assert packed.tolist() == [
        *[1] * 21, *[0] * 11, *[1] * 16, 1, *[0] * 15, *[1] * 5, *[0] * 11, *[1] * 3, *[0] * 13, *[0] * LANES
    ]  # fmt: skip
