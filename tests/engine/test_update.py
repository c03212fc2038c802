"""One update of a shard: means, chosen pushes, requests to stop, and updates that are left out."""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
import tensorflow as tf
from small_clusters import spans_of

from trainer.config.schema import OptimizerConfig, OptimizerName, PlateauConfig
from trainer.engine import optimizers
from trainer.engine.stages import make_apply
from trainer.engine.update import is_scaled, make_update, squares_order
from trainer.engine.vectors import packing
from trainer.plan.layout import METRICS, Parameter, Shard
from trainer.plan.placement import place
from trainer.plan.spans import Span
from trainer.workload import loss_scale

pytestmark = pytest.mark.slow

WEIGHT = Parameter("dense/kernel", (2, 3), True)
MEAN = Parameter("norm/moving_mean", (3,), False)
SCALE = loss_scale.PARAMETER.path
SGD = OptimizerConfig(name=OptimizerName.sgd, learning_rate=0.5)
ADAM = OptimizerConfig(name=OptimizerName.adam, learning_rate=0.01)
ONES, ZEROS = np.ones((2, 3), np.float32), np.zeros((2, 3), np.float32)
UNUSED = ("overflow", "bad", "reductions", "divisor")  # metrics of an update where nothing is wrong


def one_shard(*, scaled: bool = False) -> Shard:
    return place([WEIGHT, MEAN, *([loss_scale.PARAMETER] if scaled else [])], ["ps:0"], pins={})[0]


def vector(
    shard: Shard,
    weight: Any,
    *,
    mean: float = 0.0,
    scale: Sequence[float] = (8.0, 3.0),
    step: int = 4,
    **metrics: float,
) -> np.ndarray:
    """The flat vector of a shard, or what is pushed to one."""
    values = {WEIGHT.path: weight, MEAN.path: np.full(3, mean), SCALE: np.array(scale)}
    flat = packing.to_flat(shard, values, generation=2, step=step)
    for name, value in metrics.items():
        flat[shard.metrics_offset + METRICS.index(name)] = value
    return flat


class Update:
    """One update of a shard, on plain arrays."""

    _compiled: ClassVar[dict[str, Any]] = {}  # it keeps no state, so those of the same shard and config are one

    def __init__(self, shard: Shard, config: OptimizerConfig = SGD, **options: Any) -> None:
        self.shard, self.config = shard, config
        key = repr((shard, config, options))
        if key not in self._compiled:
            exchange = partial(tf.gather, indices=squares_order([shard]))
            self._compiled[key] = make_update(shard, config, exchange, **options)
        self.update = self._compiled[key]

    def __call__(
        self,
        flat: np.ndarray,
        pushed: Sequence[np.ndarray],
        *,
        slots: Mapping[str, np.ndarray] | None = None,
        chosen: Sequence[bool] | None = None,
        step: int = 4,
    ) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        names = self.config.slots()
        before = slots or {name: np.zeros(self.shard.trainable_size, np.float32) for name in names}
        after, moved = self.update(
            tf.constant(flat),
            {name: tf.constant(slot) for name, slot in before.items()},
            [tf.constant(one) for one in pushed],
            tf.constant(2, tf.int64),
            tf.constant(step, tf.int64),
            None if chosen is None else tf.constant(chosen),
        )
        return after.numpy(), {name: slot.numpy() for name, slot in moved.items()}

    def named(self, flat: np.ndarray) -> dict[str, Any]:
        return packing.from_flat((*self.shard.trainable, *self.shard.state), flat)

    def metrics(self, flat: np.ndarray) -> dict[str, float]:
        return dict(zip(METRICS, flat[self.shard.metrics_offset :].tolist(), strict=False))

    def tags(self, flat: np.ndarray) -> list[int]:
        return flat.view(np.int32)[self.shard.header_offset :][:2].tolist()


# The mean


def test_the_parameters_move_along_the_mean_of_what_was_pushed():
    update = Update(one_shard())
    after, _ = update(vector(update.shard, ONES), [vector(update.shard, n * ONES) for n in (1, 2, 6)])
    assert update.named(after)["dense/kernel"].tolist() == [[-0.5, -0.5, -0.5], [-0.5, -0.5, -0.5]]  # 1 - 0.5 * 3


def test_the_state_becomes_the_mean_of_what_was_pushed():
    update = Update(one_shard())
    pushed = [vector(update.shard, ZEROS, mean=mean) for mean in (1.0, 4.0)]
    after, _ = update(vector(update.shard, ONES, mean=9.0), pushed)
    assert update.named(after)["norm/moving_mean"].tolist() == [2.5, 2.5, 2.5]


def test_the_loss_becomes_the_mean_of_this_update_alone():
    update = Update(one_shard())
    pushed = [vector(update.shard, ZEROS, loss=loss) for loss in (1.0, 4.0)]
    after, _ = update(vector(update.shard, ONES, loss=100.0), pushed)
    assert update.metrics(after) == {"loss": 2.5, "stop": 0.0, **dict.fromkeys(UNUSED, 0.0)}


def with_sums(flat: np.ndarray, shard: Shard, *sums: float) -> np.ndarray:
    packing.sums_in(flat, shard)[:] = sums
    return flat


@pytest.mark.parametrize(("step", "expected"), [(9, [15.0, 26.0]), (10, [5.0, 6.0]), (11, [15.0, 26.0])])
def test_the_sums_of_metrics_add_up_and_begin_again_after_some_steps(step, expected):
    update = Update(replace(one_shard(), sums=2, sums_every=5))
    pushed = [with_sums(vector(update.shard, ZEROS), update.shard, n, n + 1) for n in (4, 6)]
    before = with_sums(vector(update.shard, ONES, step=step), update.shard, 10, 20)
    after, _ = update(before, pushed, step=step)
    assert packing.sums_in(after, update.shard).tolist() == expected


def test_an_update_that_is_left_out_adds_nothing_to_the_sums():
    update = Update(replace(one_shard(), sums=2, sums_every=5))
    pushed = [with_sums(vector(update.shard, ZEROS, bad=1.0), update.shard, 4, 5)]
    after, _ = update(with_sums(vector(update.shard, ONES), update.shard, 10, 20), pushed)
    assert packing.sums_in(after, update.shard).tolist() == [10.0, 20.0]


def test_the_header_has_the_next_step():
    update = Update(one_shard())
    after, _ = update(vector(update.shard, ONES), [vector(update.shard, ONES)])
    assert update.tags(after) == [2, 5]


def test_neighbours_are_summed_first():
    big, small = np.float32([2.0**24]), np.float32([1.0])
    apart = packing.mean_of([tf.constant(v) for v in (big, small, small, -big)])
    together = packing.mean_of([tf.constant(v) for v in (small, small, big, -big)])
    assert (apart.numpy().tolist(), together.numpy().tolist()) == ([0.25], [0.5])


@pytest.mark.parametrize("shares", [[7], [1] * 7, [3, 4], [4, 3], [2, 2, 3], [1, 5, 1]], ids=str)
def test_no_bit_of_a_mean_depends_on_who_summed_what(shares):
    random = np.random.default_rng(3)
    gradients = {Span(number, 1): tf.constant(random.standard_normal(99, np.float32)) for number in range(7)}
    spans = [span for of_worker in spans_of(shares) for span in of_worker]
    found = packing.mean_of([span.sum(gradients, operator.add) for span in spans], spans=spans)
    assert found.numpy().tobytes() == packing.mean_of(list(gradients.values())).numpy().tobytes()


def test_an_update_keeps_this_order():
    update = Update(one_shard())
    pushed = [vector(update.shard, n * ONES) for n in (2.0**24, 1.0, 1.0, -(2.0**24))]
    after, _ = update(vector(update.shard, ONES), pushed)
    turned, _ = update(vector(update.shard, ONES), [*pushed[1:3], pushed[0], pushed[3]])
    found = [update.named(flat)["dense/kernel"][0, 0] for flat in (after, turned)]
    assert found == [0.875, 0.75]


def test_the_pushed_headers_are_ignored():
    update = Update(one_shard())
    flat, pushed = vector(update.shard, ONES), vector(update.shard, ONES)
    other = pushed.copy()
    other[update.shard.header_offset :] = np.nan
    assert update(flat, [pushed])[0].tobytes() == update(flat, [other])[0].tobytes()


@pytest.mark.parametrize(
    "clip_norm", [pytest.param(None, id="unclipped", marks=pytest.mark.long), pytest.param(1.0, id="clipped")]
)
@pytest.mark.parametrize("name", list(OptimizerName))
def test_an_update_is_the_optimizers_on_the_mean(name, clip_norm):
    config = OptimizerConfig(name=name, learning_rate=0.01, momentum=0.9, ema=0.99, clip_norm=clip_norm)
    update, random = Update(one_shard(), config), np.random.default_rng(5)
    flat, *pushed = (vector(update.shard, random.normal(size=(2, 3))) for _ in range(4))
    slots = {slot: np.full(update.shard.slot_size(slot), 0.5, np.float32) for slot in config.slots()}
    after, moved = update(flat, pushed, slots=slots)
    expected, expected_slots = applied(config, update.shard, flat, pushed, slots)
    assert sorted(moved) == sorted(expected_slots)
    for what, values in {"parameters": expected, **expected_slots}.items():
        found = after[: update.shard.trainable_size] if what == "parameters" else moved[what]
        atol = 1e-6 * np.abs(values).max() if name is OptimizerName.ftrl else 0.0  # it subtracts large numbers
        np.testing.assert_allclose(found, values, rtol=1e-6, atol=atol, err_msg=what)


def applied(
    config: OptimizerConfig,
    shard: Shard,
    flat: np.ndarray,
    pushed: Sequence[np.ndarray],
    slots: Mapping[str, np.ndarray],
) -> Any:
    """(parameters, slots) after an update by the optimizer alone."""
    size = shard.trainable_size
    gradient = tf.constant(np.mean([one[:size] for one in pushed], 0))
    gradient *= optimizers.clip_scale(config, optimizers.square_sums(gradient, [(0, size)]))
    before = {name: tf.constant(slot) for name, slot in slots.items()}
    after = make_apply(config, shard)(tf.constant(flat[:size]), before, gradient, tf.constant(4, tf.int64), 0.0)
    return tf.nest.map_structure(lambda tensor: tensor.numpy(), after)


def test_without_a_scale_an_update_has_these_bits():
    """Numbers that no order of operations rounds."""
    config = OptimizerConfig(name=OptimizerName.sgd, learning_rate=0.5, momentum=0.5)
    update = Update(one_shard(), config)
    slots = {"momentum": np.full(update.shard.trainable_size, 8.0, np.float32)}
    after, moved = update(vector(update.shard, ONES), [vector(update.shard, n * ONES) for n in (1, 3)], slots=slots)
    assert moved["momentum"][:6].tolist() == [3.0] * 6  # 0.5 * 8 - 0.5 * 2
    assert update.named(after)["dense/kernel"].tolist() == [[4.0, 4.0, 4.0], [4.0, 4.0, 4.0]]


def test_a_clipped_update_moves_by_the_norm():
    config = OptimizerConfig(name=OptimizerName.sgd, learning_rate=1.0, clip_norm=1.0)
    update = Update(one_shard(), config)
    gradient = np.float32([[3, 0, 0], [0, 4, 0]])
    after, _ = update(vector(update.shard, ZEROS), [vector(update.shard, gradient)])
    np.testing.assert_allclose(update.named(after)["dense/kernel"], [[-0.6, 0, 0], [0, -0.8, 0]], rtol=1e-6)


# Chosen pushes


@pytest.mark.parametrize("garbage", [np.nan, np.inf, 1e30])
@pytest.mark.parametrize("clip_norm", [None, 100.0], ids=["unclipped", "clipped"])
def test_pushes_that_are_not_chosen_do_not_matter(clip_norm, garbage):
    update = Update(one_shard(), OptimizerConfig(name=OptimizerName.sgd, learning_rate=0.5, clip_norm=clip_norm))
    flat = vector(update.shard, ONES)
    left_out = np.full(update.shard.size, garbage, np.float32)
    pushed = [left_out, vector(update.shard, 2 * ONES, loss=2.0, mean=1.0), vector(update.shard, 4 * ONES), left_out]
    after, _ = update(flat, pushed, chosen=[False, True, True, False])
    expected, _ = update(flat, pushed[1:3])
    assert after.tobytes() == expected.tobytes()


def test_the_mean_is_over_the_chosen():
    update = Update(one_shard())
    pushed = [vector(update.shard, n * ONES, loss=n) for n in (1.0, 2.0, 6.0)]
    after, _ = update(vector(update.shard, ONES), pushed, chosen=[True, False, True])
    assert update.named(after)["dense/kernel"][0].tolist() == [-0.75, -0.75, -0.75]  # 1 - 0.5 * 3.5
    assert update.metrics(after)["loss"] == 3.5


def test_all_chosen_is_the_mean_of_all():
    update, random = Update(one_shard()), np.random.default_rng(6)
    pushed = [vector(update.shard, random.normal(size=(2, 3))) for _ in range(3)]
    flat = vector(update.shard, ONES)
    np.testing.assert_allclose(update(flat, pushed, chosen=[True] * 3)[0], update(flat, pushed)[0], rtol=1e-6)


def test_a_request_to_stop_that_is_not_chosen_is_ignored():
    update = Update(one_shard())
    pushed = [vector(update.shard, ONES), vector(update.shard, ONES, stop=1.0)]
    after, _ = update(vector(update.shard, ONES), pushed, chosen=[True, False])
    assert update.metrics(after)["stop"] == 0.0


# Requests to stop


def test_a_request_to_stop_is_in_the_metrics():
    update = Update(one_shard())
    pushed = [vector(update.shard, ONES, stop=stop) for stop in (0.0, 1.0, 0.0)]
    after, _ = update(vector(update.shard, ONES), pushed)
    assert update.metrics(after)["stop"] == pytest.approx(1 / 3)


def test_a_request_to_stop_stays():
    update = Update(one_shard())
    asked, _ = update(vector(update.shard, ONES), [vector(update.shard, ONES, stop=1.0)])
    after, _ = update(asked, [vector(update.shard, ONES, loss=0.25)], step=5)
    assert update.metrics(after) == {"loss": 0.25, "stop": 2.0, **dict.fromkeys(UNUSED, 0.0)}


# Reductions of the learning rate

HALVED = replace(SGD, plateau=PlateauConfig(patience=1, factor=0.5, min_rate=0.1))


@pytest.mark.parametrize("workers", [1, 3, 7])
def test_the_chiefs_reductions_hold_from_the_update_on_that_it_pushes_them_with(workers):
    update = Update(one_shard(), HALVED)
    reductions = [2.0 * workers] + [0.0] * (workers - 1)  # as it asks, times the workers of an update
    after, _ = update(vector(update.shard, ONES), [vector(update.shard, ONES, reductions=n) for n in reductions])
    assert update.metrics(after)["reductions"] == 2.0
    np.testing.assert_allclose(update.named(after)["dense/kernel"], 1 - 0.125 * ONES, rtol=1e-6)


def test_reductions_stay_and_no_chief_takes_them_back():
    update = Update(one_shard(), HALVED)
    flat = vector(update.shard, ONES, reductions=1.0)
    for pushed in ([0.0, 0.0], [0.0, 2.0], [0.0, 1.0]):
        flat, _ = update(flat, [vector(update.shard, ZEROS, reductions=n) for n in pushed])
        assert update.metrics(flat)["reductions"] == 1.0


def test_the_rate_falls_no_further_than_its_minimum():
    update = Update(one_shard(), HALVED)
    after, _ = update(vector(update.shard, ONES, reductions=30.0), [vector(update.shard, ONES)])
    np.testing.assert_allclose(update.named(after)["dense/kernel"], 1 - 0.1 * ONES, rtol=1e-6)


def test_an_update_that_is_left_out_records_a_reduction():
    update = Update(one_shard(), HALVED)
    after, _ = update(vector(update.shard, ONES), [vector(update.shard, ONES, reductions=1.0, bad=1.0)])
    assert (update.metrics(after)["reductions"], update.named(after)["dense/kernel"].tolist()) == (1.0, ONES.tolist())


def test_without_a_patience_reductions_change_no_bit():
    update, same = Update(one_shard()), Update(one_shard(), replace(HALVED, plateau=PlateauConfig(patience=1)))
    flat, pushed = vector(update.shard, ONES), [vector(update.shard, ONES)]
    asked = [vector(update.shard, ONES, reductions=1.0)]
    parameters = slice(update.shard.trainable_size)
    assert update(flat, asked)[0][parameters].tobytes() == update(flat, pushed)[0][parameters].tobytes()
    assert same(flat, pushed)[0].tobytes() == update(flat, pushed)[0].tobytes()


# Updates that are left out

SLOTS = {
    "momentum": np.full(16, 0.25, np.float32),
    "velocity": np.full(16, 0.5, np.float32),
    "ema": np.full(16, 2.0, np.float32),
}
WITH_EMA = OptimizerConfig(name=OptimizerName.adam, learning_rate=0.01, ema=0.99)


def bad_update(number: float, *, clip_norm: float | None = None) -> tuple[Update, np.ndarray, dict[str, np.ndarray]]:
    """(the update, its results) where one of two replicas pushed a number instead of all its values."""
    update = Update(one_shard(), dataclasses.replace(WITH_EMA, clip_norm=clip_norm))
    bad = vector(update.shard, np.full((2, 3), number), mean=number, loss=number, bad=1.0)
    return update, *update(vector(update.shard, ONES, mean=7.0), [vector(update.shard, ONES), bad], slots=SLOTS)


@pytest.mark.parametrize("number", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("clip_norm", [None, 1.0], ids=["unclipped", "clipped"])
def test_a_bad_replica_leaves_everything_unchanged(clip_norm, number):
    update, after, moved = bad_update(number, clip_norm=clip_norm)
    named = update.named(after)
    assert (named["dense/kernel"].tolist(), named["norm/moving_mean"].tolist()) == (ONES.tolist(), [7.0, 7.0, 7.0])
    assert {name: slot.tolist() for name, slot in moved.items()} == {n: slot.tolist() for n, slot in SLOTS.items()}


def test_a_bad_update_counts_the_step():
    update, after, _ = bad_update(np.nan)
    assert update.tags(after) == [2, 5]


def test_a_bad_update_records_its_step():
    update, after, _ = bad_update(np.nan)
    assert update.metrics(after)["bad"] == 5.0


def test_the_newest_bad_step_stays_in_the_metrics():
    update, after, _ = bad_update(np.inf)
    good, bad = vector(update.shard, ONES, loss=0.25), vector(update.shard, ONES, bad=1.0)
    bad_steps = []
    for step, pushed in enumerate([good, bad, bad, good], start=5):
        after, _ = update(after, [pushed], slots=SLOTS, step=step)
        bad_steps.append(update.metrics(after)["bad"])
    assert bad_steps == [5.0, 7.0, 8.0, 8.0]


@pytest.mark.parametrize(("loss", "reported"), [(np.nan, 0.25), (np.inf, 0.25), (2.0, 2.0)])
def test_a_bad_update_reports_its_loss_if_finite_and_otherwise_the_last_finite_one(loss, reported):
    update = Update(one_shard())
    after, _ = update(vector(update.shard, ONES, loss=0.25), [vector(update.shard, ONES, loss=loss, bad=1.0)])
    assert update.metrics(after)["loss"] == reported


def test_a_bad_update_does_not_spoil_the_next():
    update, after, moved = bad_update(np.nan)
    good = [vector(update.shard, ONES)]
    after, moved = update(after, good, slots=moved, step=5)
    expected, slots = update(vector(update.shard, ONES, mean=7.0), good, slots=SLOTS, step=5)
    without_metrics = slice(update.shard.metrics_offset)
    assert after[without_metrics].tobytes() == expected[without_metrics].tobytes()
    assert {name: slot.tobytes() for name, slot in moved.items()} == {n: slot.tobytes() for n, slot in slots.items()}


def test_a_bad_push_that_is_not_chosen_does_not_matter():
    update = Update(one_shard())
    pushed = [vector(update.shard, ONES), vector(update.shard, np.full((2, 3), np.nan), bad=1.0)]
    after, _ = update(vector(update.shard, ONES), pushed, chosen=[True, False])
    assert (update.named(after)["dense/kernel"][0].tolist(), update.metrics(after)["bad"]) == ([0.5, 0.5, 0.5], 0.0)


def test_a_bad_update_keeps_a_request_to_stop():
    update = Update(one_shard())
    after, _ = update(vector(update.shard, ONES), [vector(update.shard, ONES, bad=1.0, stop=1.0)])
    assert update.metrics(after)["stop"] == 1.0


@pytest.mark.parametrize("overflow", [0.0, 1.0])
def test_a_bad_update_halves_a_loss_scale(overflow):
    update = Update(one_shard(scaled=True), scaled=True)
    bad = vector(update.shard, ONES, mean=np.nan, overflow=overflow, bad=1.0)
    after, _ = update(vector(update.shard, ONES, mean=7.0), [bad])
    named = update.named(after)
    assert (named[SCALE].tolist(), named["norm/moving_mean"].tolist()) == ([4.0, 0.0], [7.0, 7.0, 7.0])


def test_an_update_is_left_out_in_a_v1_graph_too():
    shard = one_shard()
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        update = make_update(shard, SGD, lambda squares: squares)
        pushed = tf.compat.v1.placeholder(tf.float32, [shard.size])
        step, flat = tf.constant(4, tf.int64), tf.constant(vector(shard, ONES))
        after, _ = update(flat, {}, [pushed], step, step, None)
        found = [
            session.run(after, {pushed: vector(shard, 2 * ONES, bad=bad)})[: shard.trainable_size].tolist()[0]
            for bad in (0.0, 1.0)
        ]
    assert found == [0.0, 1.0]  # 1 - 0.5 * 2, and what it was


# The loss scale


def overflowed(*, clip_norm: float | None = None) -> tuple[Update, np.ndarray, dict[str, np.ndarray]]:
    """(the update, its results) where one of two replicas had an overflow."""
    config = OptimizerConfig(name=OptimizerName.adam, learning_rate=0.01, ema=0.99, clip_norm=clip_norm)
    update = Update(one_shard(scaled=True), config, scaled=True)
    bad = vector(update.shard, np.full((2, 3), np.inf), mean=np.nan, loss=0.5, overflow=1.0)
    return update, *update(vector(update.shard, ONES, mean=7.0), [vector(update.shard, ONES), bad], slots=SLOTS)


@pytest.mark.parametrize("clip_norm", [None, 1.0], ids=["unclipped", "clipped"])
def test_an_overflow_of_one_replica_leaves_the_parameters_as_they_were(clip_norm):
    update, after, _ = overflowed(clip_norm=clip_norm)
    assert update.named(after)["dense/kernel"].tolist() == ONES.tolist()


@pytest.mark.parametrize("clip_norm", [None, 1.0], ids=["unclipped", "clipped"])
def test_an_overflow_leaves_the_slots_as_they_were(clip_norm):
    _, _, moved = overflowed(clip_norm=clip_norm)
    assert {name: slot.tolist() for name, slot in moved.items()} == {n: slot.tolist() for n, slot in SLOTS.items()}


def test_an_overflow_leaves_the_state_as_it_was():
    update, after, _ = overflowed()
    assert update.named(after)["norm/moving_mean"].tolist() == [7.0, 7.0, 7.0]


def test_an_overflow_counts_the_step():
    update, after, _ = overflowed()
    assert update.tags(after) == [2, 5]


def test_an_overflow_is_reported():
    update, after, _ = overflowed()
    assert update.metrics(after)["overflow"] == 0.5


def test_an_overflow_is_in_the_metrics_of_its_update_only():
    update, after, _ = overflowed()
    after, _ = update(after, [vector(update.shard, ONES)], slots=SLOTS, step=5)
    assert update.metrics(after)["overflow"] == 0.0


def test_an_overflow_halves_the_scale_whatever_scale_the_replicas_pushed():
    update, after, _ = overflowed()
    assert update.named(after)[SCALE].tolist() == [4.0, 0.0]


def test_the_scale_counts_updates_without_overflow():
    update = Update(one_shard(scaled=True), scaled=True)
    after, _ = update(vector(update.shard, ONES), [vector(update.shard, ONES, scale=(64.0, 9.0))])
    assert update.named(after)[SCALE].tolist() == [8.0, 4.0]


def test_an_update_without_overflow_is_made():
    update = Update(one_shard(scaled=True), scaled=True)
    after, _ = update(vector(update.shard, ONES), [vector(update.shard, ONES, mean=3.0)])
    named = update.named(after)
    assert (named["dense/kernel"][0].tolist(), named["norm/moving_mean"].tolist()) == ([0.5, 0.5, 0.5], [3.0, 3.0, 3.0])


def test_an_overflow_that_is_not_chosen_does_not_matter():
    update = Update(one_shard(scaled=True), scaled=True)
    pushed = [vector(update.shard, ONES), vector(update.shard, np.full((2, 3), np.nan), overflow=1.0)]
    after, _ = update(vector(update.shard, ONES), pushed, chosen=[True, False])
    assert update.named(after)["dense/kernel"][0].tolist() == [0.5, 0.5, 0.5]


def test_an_update_that_is_left_out_keeps_a_request_to_stop():
    update = Update(one_shard(scaled=True), scaled=True)
    bad = vector(update.shard, np.full((2, 3), np.nan), overflow=1.0, stop=1.0)
    after, _ = update(vector(update.shard, ONES), [bad])
    assert update.metrics(after)["stop"] == 1.0


def test_an_average_of_the_parameters_starts_from_them_when_the_first_update_is_left_out():
    config = OptimizerConfig(name=OptimizerName.sgd, learning_rate=0.5, ema=0.75)
    update = Update(one_shard(scaled=True), config, scaled=True)
    bad = vector(update.shard, np.full((2, 3), np.nan), overflow=1.0)
    flat, slots = update(vector(update.shard, ONES, step=0), [bad], step=0)
    _, slots = update(flat, [vector(update.shard, 8 * ONES)], slots=slots, step=1)
    assert slots["ema"][:6].tolist() == [0.0] * 6  # 0.75 * 1 + 0.25 * (1 - 0.5 * 8)


def two_shards() -> tuple[Shard, ...]:
    pins = {"dense/*": 0, "norm/*": 0, SCALE: 1}
    return place([WEIGHT, MEAN, loss_scale.PARAMETER], ["ps:0", "ps:1"], pins=pins)


@pytest.mark.parametrize("overflow", [0.0, 1.0])
def test_a_scale_without_parameters_on_its_shard_moves_in_the_same_way(overflow):
    apart, together = (Update(shard, scaled=True) for shard in (two_shards()[1], one_shard(scaled=True)))
    expected = {0.0: [8.0, 4.0], 1.0: [4.0, 0.0]}[overflow]
    for update in (apart, together):
        after, _ = update(vector(update.shard, ONES), [vector(update.shard, ONES, overflow=overflow)])
        assert update.named(after)[SCALE].tolist() == expected


@pytest.mark.parametrize("overflow", [0.0, 1.0])
def test_a_shard_without_the_scale_has_the_bits_of_one_with_it(overflow):
    apart, together = (Update(shard, WITH_EMA, scaled=True) for shard in (two_shards()[0], one_shard(scaled=True)))
    named = []
    for update in (apart, together):
        pushed = vector(update.shard, 3 * ONES, mean=3.0, overflow=overflow)
        after, slots = update(vector(update.shard, ONES, mean=7.0), [pushed], slots=SLOTS)
        values = {path: value.tobytes() for path, value in update.named(after).items() if path != SCALE}
        named.append(values | {name: slot.tobytes() for name, slot in slots.items()})
    assert named[0] == named[1]


def test_a_run_is_scaled_when_any_of_its_shards_holds_a_scale():
    assert [is_scaled(shards) for shards in (two_shards(), [one_shard()])] == [True, False]


def test_squares_are_in_path_order_part_by_part():
    parameters = [Parameter("b", (64,), True), Parameter("a", (16,), True)]
    shards = place(parameters, ["ps:0", "ps:1"], pins={}, max_part_mib=32 * 4 / 2**20)
    parts = [(piece.path, piece.begin) for shard in shards for piece in shard.trainable]
    assert [parts[i] for i in squares_order(shards)] == [("a", 0), ("b", 0), ("b", 32)]
