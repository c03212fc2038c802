"""The fused updates against `keras.optimizers`, and against themselves on another number of shards."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_optimizers import keras_optimizer, keras_rate

from trainer.config.groups import ParameterSettings, settings_of
from trainer.config.schema import OptimizerConfig, OptimizerName, ScheduleConfig, ScheduleName
from trainer.engine import optimizers
from trainer.engine.stages import is_in_stages, make_apply
from trainer.engine.vectors import packing
from trainer.plan.layout import Shard, Slice

SEED = 20
STEPS = 100
SHAPES = ((3, 3, 2, 8), (8,), (37, 5), (5,), (), (16, 2))  # of the parameters, in path order
ONE_SHARD = ((0, 1, 2, 3, 4, 5),)  # parameters of each shard
THREE_SHARDS = ((4, 2), (5, 1), (3, 0))

Sgd, Adam, AdamW = OptimizerName.sgd, OptimizerName.adam, OptimizerName.adamw
Rmsprop, Adagrad, Lion = OptimizerName.rmsprop, OptimizerName.adagrad, OptimizerName.lion
Adafactor, Lamb, Ftrl = OptimizerName.adafactor, OptimizerName.lamb, OptimizerName.ftrl
EXPONENTIAL = ScheduleConfig(ScheduleName.exponential, decay_steps=30, decay_rate=0.5)
STAIRCASE = ScheduleConfig(ScheduleName.exponential, decay_steps=30, decay_rate=0.5, staircase=True)
COSINE = ScheduleConfig(ScheduleName.cosine, decay_steps=80, final_fraction=0.1)
WARMUP = ScheduleConfig(ScheduleName.cosine, decay_steps=60, warmup_steps=20)
CLIP = 22.4  # global norm; clips about half of the gradients below
EVERYTHING: dict[str, Any] = {"schedule": WARMUP, "weight_decay": 0.01, "clip_norm": CLIP, "ema": 0.9}
UNCLIPPED = {name: value for name, value in EVERYTHING.items() if name != "clip_norm"}
GROUPS = [
    {"match": ["parameter1", "parameter[34]"], "weight_decay": 0},
    {"match": "parameter[35]", "learning_rate": 0.002},
]

CONFIGS = {
    "sgd": OptimizerConfig(Sgd, 0.1),
    "sgd-momentum": OptimizerConfig(Sgd, 0.01, momentum=0.9),
    "sgd-nesterov": OptimizerConfig(Sgd, 0.01, momentum=0.9, nesterov=True),
    "sgd-decay": OptimizerConfig(Sgd, 0.1, weight_decay=0.01),
    "sgd-clip": OptimizerConfig(Sgd, 0.1, clip_norm=CLIP),
    "sgd-ema": OptimizerConfig(Sgd, 0.1, ema=0.99),
    "sgd-everything": OptimizerConfig(Sgd, 0.01, momentum=0.9, nesterov=True, **EVERYTHING),
    "adam": OptimizerConfig(Adam, 0.01),
    "adam-other-constants": OptimizerConfig(Adam, 0.01, beta_1=0.8, beta_2=0.95, epsilon=1e-3),
    "adam-exponential": OptimizerConfig(Adam, 0.01, EXPONENTIAL),
    "adam-staircase": OptimizerConfig(Adam, 0.01, STAIRCASE),
    "adam-cosine": OptimizerConfig(Adam, 0.01, COSINE),
    "adam-warmup": OptimizerConfig(Adam, 0.01, WARMUP),
    "adam-clip": OptimizerConfig(Adam, 0.01, clip_norm=CLIP),
    "adam-everything": OptimizerConfig(Adam, 0.01, **EVERYTHING),
    "adamw": OptimizerConfig(AdamW, 0.01, weight_decay=0.004),
    "adamw-everything": OptimizerConfig(AdamW, 0.01, **EVERYTHING),
    "rmsprop": OptimizerConfig(Rmsprop, 0.01),
    "rmsprop-momentum": OptimizerConfig(Rmsprop, 0.01, momentum=0.9, rho=0.95),
    "rmsprop-centered": OptimizerConfig(Rmsprop, 0.01, centered=True),
    "rmsprop-everything": OptimizerConfig(Rmsprop, 0.01, momentum=0.9, centered=True, **EVERYTHING),
    "adagrad": OptimizerConfig(Adagrad, 0.1),
    "adagrad-from-zero": OptimizerConfig(Adagrad, 0.1, initial_accumulator=0.0),
    "adagrad-everything": OptimizerConfig(Adagrad, 0.1, **EVERYTHING),
    "lion": OptimizerConfig(Lion, 0.01, beta_2=0.99),
    "lion-everything": OptimizerConfig(Lion, 0.01, beta_1=0.8, beta_2=0.95, **EVERYTHING),
    "adam-groups": OptimizerConfig(Adam, 0.01, **UNCLIPPED, groups=GROUPS),
    "sgd-groups": OptimizerConfig(Sgd, 0.01, momentum=0.9, groups=GROUPS),
    "lamb-groups": OptimizerConfig(Lamb, 0.01, **UNCLIPPED, groups=GROUPS),
    "adafactor-groups": OptimizerConfig(Adafactor, 0.05, **UNCLIPPED, groups=GROUPS),
    "adafactor": OptimizerConfig(Adafactor, 0.05),
    "adafactor-other-constants": OptimizerConfig(
        Adafactor, 0.5, beta_2_decay=-0.6, epsilon_1=1e-8, epsilon_2=0.01, clip_threshold=0.5
    ),
    "adafactor-everything": OptimizerConfig(Adafactor, 0.05, **EVERYTHING),
    "lamb": OptimizerConfig(Lamb, 0.01),
    "lamb-other-constants": OptimizerConfig(Lamb, 0.01, beta_1=0.8, beta_2=0.95, epsilon=1e-3),
    "lamb-everything": OptimizerConfig(Lamb, 0.01, **EVERYTHING),
    "ftrl": OptimizerConfig(Ftrl, 0.1),
    "ftrl-other-constants": OptimizerConfig(
        Ftrl, 0.1, learning_rate_power=-0.6, initial_accumulator=0.2, l1=0.01, l2=0.02, l2_shrinkage=0.03, beta=0.1
    ),
    "ftrl-everything": OptimizerConfig(Ftrl, 0.1, l1=0.01, **{**EVERYTHING, "schedule": EXPONENTIAL}),
}
SCHEDULES = {"exponential": EXPONENTIAL, "staircase": STAIRCASE, "cosine": COSINE, "cosine-warmup": WARMUP}
IN_OTHERS = (  # rules
    *("adafactor", "adafactor-other-constants", "adafactor-groups", "lamb", "lamb-other-constants", "lamb-groups"),
    *("sgd-groups", "sgd-clip", "sgd-ema", "sgd-momentum", "sgd-decay", "adam", "adam-warmup", "adam-clip", "adamw"),
    *("rmsprop", "rmsprop-momentum", "adagrad", "lion", "ftrl"),
)
every_config = pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, id=f"{name}-seed{SEED}", marks=[pytest.mark.long] if name in IN_OTHERS else [])
        for name in CONFIGS
    ],
)


@functools.cache
def start() -> list[np.ndarray]:
    rng = np.random.default_rng(SEED)
    return [rng.normal(size=shape).astype(np.float32) for shape in SHAPES]


@functools.cache
def gradients() -> list[list[np.ndarray]]:
    """Of every step and parameter: noise around a drift, each parameter on a scale of its own."""
    rng = np.random.default_rng(SEED + 1)
    scales = (0.3, 1.0, 1.5, 3.0, 1.0, 0.01)
    return [
        [np.float32(scale * rng.normal(0.2, size=shape)) for scale, shape in zip(scales, SHAPES, strict=True)]
        for _ in range(STEPS)
    ]


def keras_result(name: str, *, steps: int = STEPS, unreached: tuple[str, ...] = ()) -> dict[str, list[np.ndarray]]:
    """The parameters, and their averages if there are any, after the steps of Keras; each group has an optimizer."""
    tf.config.optimizer.set_experimental_options({"arithmetic_optimization": True})  # other tests switch it off
    config, values = CONFIGS[name], start()
    members: dict[ParameterSettings, list[int]] = {}
    for i in range(len(values)):
        members.setdefault(settings_of(config, f"parameter{i}"), []).append(i)
    result: dict[str, dict[int, np.ndarray]] = {}
    for settings, own in members.items():
        variables = [keras.Variable(values[i]) for i in own]
        rates = {"learning_rate": settings.learning_rate, "weight_decay": settings.weight_decay}
        optimizer = keras_optimizer(replace(config, **rates))
        optimizer.build(variables)
        update = tf.function(optimizer.apply)  # as in `fit` with jit_compile=False
        for gradient in gradients()[:steps]:
            update([None if f"parameter{i}" in unreached else tf.constant(gradient[i]) for i in own])
        kept = {"parameters": variables}
        if optimizer.use_ema:
            kept["ema"] = optimizer._model_variables_moving_average
        for what, kind in kept.items():
            result.setdefault(what, {}).update(zip(own, (variable.numpy() for variable in kind), strict=True))
    return {what: [of[i] for i in sorted(of)] for what, of in result.items()}


def padded(size: int) -> int:
    return -(-size // 16) * 16


def pack(values: list[np.ndarray], members: tuple[int, ...]) -> np.ndarray:
    """[n] The parameters of one shard, each padded with zeros to a multiple of 16 floats."""
    pieces = [np.pad(values[i].ravel(), (0, padded(values[i].size) - values[i].size)) for i in members]
    return np.concatenate([np.zeros(0, np.float32), *pieces])


def laid_out(members: tuple[int, ...], unreached: tuple[str, ...] = ()) -> Shard:
    """The shard that holds some of the parameters."""
    offsets = np.cumsum([0, *(padded(math.prod(SHAPES[i])) for i in members)]).tolist()
    pieces = [
        Slice(f"parameter{i}", SHAPES[i], offset, math.prod(SHAPES[i]), padded(math.prod(SHAPES[i])))
        for i, offset in zip(members, offsets, strict=False)
    ]
    return Shard(0, "ps:0", tuple(pieces), (), unreached=unreached)


@dataclass
class Trained:
    """Some of the parameters under training, with the compiled functions of a task that holds them."""

    config: OptimizerConfig
    members: tuple[int, ...]
    unreached: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.parameters = tf.constant(pack(start(), self.members))
        self.shard, begin = laid_out(self.members, self.unreached), self.config.slots()
        self.slots = {name: tf.fill([self.shard.slot_size(name)], value) for name, value in begin.items()}
        places = [(piece.offset, piece.size) for piece in self.shard.trainable]
        self.square_sums = tf.function(lambda g: optimizers.square_sums(g, places), jit_compile=True)
        self.apply = make_apply(self.config, self.shard)
        self.update = tf.function(self._update, jit_compile=not is_in_stages(self.config, self.shard), autograph=False)

    def _update(self, parameters, slots, gradient, sums, step):
        gradient *= optimizers.clip_scale(self.config, sums)
        return self.apply(parameters, slots, gradient, step, 0.0)

    def unpacked(self, vector: tf.Tensor, pieces: tuple[Slice, ...]) -> dict[str, np.ndarray]:
        return packing.from_flat(pieces, vector.numpy())


def trained(
    name: str, spread: tuple[tuple[int, ...], ...], *, steps: int = STEPS, unreached: tuple[str, ...] = ()
) -> tuple[Trained, ...]:
    """The shards after steps of our own."""
    config = CONFIGS[name]
    shards = tuple(Trained(config, members, unreached) for members in spread)
    for step, whole in enumerate(gradients()[:steps]):
        gradient = [value * (f"parameter{i}" not in unreached) for i, value in enumerate(whole)]
        flat = [tf.constant(pack(gradient, shard.members)) for shard in shards]
        sums = np.zeros(len(SHAPES), np.float32)  # by path, whichever shard they come from
        for shard, vector in zip(shards, flat, strict=True):
            if config.clip_norm is not None:
                sums[list(shard.members)] = shard.square_sums(vector)
        for shard, vector in zip(shards, flat, strict=True):
            shard.parameters, shard.slots = shard.update(
                shard.parameters, shard.slots, vector, tf.constant(sums), tf.constant(step, tf.int64)
            )
    return shards


def result(shards: tuple[Trained, ...]) -> dict[str, list[np.ndarray]]:
    """Parameters and every slot, in path order."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for one in shards:
        found.setdefault("parameters", {}).update(one.unpacked(one.parameters, one.shard.trainable))
        for name, slot in one.slots.items():
            found.setdefault(name, {}).update(one.unpacked(slot, one.shard.slot_pieces(name)))
    return {name: [values[path] for path in sorted(values)] for name, values in found.items()}


def test_the_gradients_of_these_tests_reach_the_clip_norm_in_some_steps_only():
    norms = [math.sqrt(sum(np.square(value).sum() for value in gradient)) for gradient in gradients()]
    assert 30 < sum(norm > CLIP for norm in norms) < 70


@pytest.mark.long(
    but=[
        *("adam-everything-seed20", "rmsprop-centered-seed20", "sgd-nesterov-seed20", "lamb-everything-seed20"),
        "ftrl-other-constants-seed20",
    ]
)
@pytest.mark.slow(but=["rmsprop-centered-seed20"])
@every_config
def test_hundred_updates_equal_keras_and_have_the_same_bits_on_three_shards(name):
    (shard,) = one = trained(name, ONE_SHARD)
    ours, spread = result(one), result(trained(name, THREE_SHARDS))
    for what, expected in keras_result(name).items():
        for value, wanted in zip(ours[what], expected, strict=True):
            np.testing.assert_allclose(value, wanted, rtol=1e-6, atol=1e-6 * np.abs(wanted).max(), err_msg=what)
    assert {what: [v.tobytes() for v in values] for what, values in spread.items()} == {
        what: [v.tobytes() for v in values] for what, values in ours.items()
    }
    assert set(shard.slots) == set(CONFIGS[name].slots())
    check_padding(shard)


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.long(but=["adam-groups", "ftrl", "sgd-everything"])
@pytest.mark.parametrize(
    "name",
    [
        *("sgd-everything", "adamw-everything", "rmsprop-everything", "adagrad-everything", "lion-everything"),
        *("adam-groups", "adafactor-everything", "lamb-everything", "ftrl", "ftrl-everything"),
    ],
)
def test_what_the_loss_does_not_reach_stays_as_it_is_as_in_keras(name):
    steps, unreached = 5, ("parameter1", "parameter2")
    (shard,) = one = trained(name, ONE_SHARD, steps=steps, unreached=unreached)
    ours, spread = result(one), result(trained(name, THREE_SHARDS, steps=steps, unreached=unreached))
    for what, expected in keras_result(name, steps=steps, unreached=unreached).items():
        for value, wanted in zip(ours[what], expected, strict=True):
            np.testing.assert_allclose(value, wanted, rtol=1e-6, atol=1e-6 * np.abs(wanted).max(), err_msg=what)
    for what, values in ours.items():
        assert [value.tobytes() for value in values] == [value.tobytes() for value in spread[what]]
    for what, first in {**CONFIGS[name].slots(), "parameters": None, "ema": None}.items():
        vector, pieces = shard.slots.get(what, shard.parameters), shard.shard.slot_pieces(what)
        held = {path: value for path, value in shard.unpacked(vector, pieces).items() if path in unreached}
        for path, value in held.items():
            assert (value == (start()[int(path[-1])] if first is None else first)).all(), (what, path)
    check_padding(shard)


def check_padding(trained: Trained) -> None:
    """It stays zero in the parameters, and finite in the slots."""
    lanes = np.ones(trained.parameters.shape, bool)
    for piece in trained.shard.trainable:
        lanes[piece.offset : piece.offset + piece.size] = False
    assert not trained.parameters.numpy()[lanes].any()
    assert all(np.isfinite(slot.numpy()).all() for slot in trained.slots.values())


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("sgd", {}),
        ("sgd-nesterov", {"momentum": 0.0}),
        ("adam", {"momentum": 0.0, "velocity": 0.0}),
        ("rmsprop", {"velocity": 0.0}),
        ("rmsprop-everything", {"velocity": 0.0, "momentum": 0.0, "average_gradient": 0.0, "ema": 0.0}),
        ("adagrad", {"accumulator": 0.1}),
        ("sgd-ema", {"ema": 0.0}),
    ],
)
def test_slots_are_those_the_rule_needs(name, expected):
    assert list(CONFIGS[name].slots().items()) == list(expected.items())


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_equals_keras_at_every_step(name):
    config = OptimizerConfig(Sgd, 0.1, SCHEDULES[name])
    rate = tf.function(lambda step: optimizers.learning_rate(config, step), jit_compile=True)
    steps = [*range(STEPS), 1000, 100_000]
    expected = [float(keras_rate(config)(step)) for step in steps]
    np.testing.assert_allclose([rate(tf.constant(step, tf.int64)) for step in steps], expected, rtol=1e-6, atol=1e-8)


def test_warmup_starts_from_zero_and_reaches_the_full_rate():
    config = OptimizerConfig(Sgd, 0.1, WARMUP)
    rates = [float(optimizers.learning_rate(config, tf.constant(step, tf.int64))) for step in (0, 10, 20)]
    assert rates == pytest.approx([0.0, 0.05, 0.1])


def test_clip_scale_equals_the_global_norm_of_tensorflow():
    values = [tf.constant(value) for value in start()]
    sums = [float(tf.reduce_sum(tf.square(value))) for value in values]
    clipped, _ = tf.clip_by_global_norm(values, 3.0)
    scale = optimizers.clip_scale(OptimizerConfig(Sgd, clip_norm=3.0), tf.constant(sums))
    np.testing.assert_allclose(values[0] * scale, clipped[0], rtol=1e-6)


@pytest.mark.parametrize("clip_norm", [None, 5.0, 5.1, 7.3])
def test_gradients_within_the_norm_keep_their_bits(clip_norm):
    scale = optimizers.clip_scale(OptimizerConfig(Sgd, clip_norm=clip_norm), tf.constant([9.0, 16.0]))
    assert float(scale) == 1.0


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_gradient_that_is_not_finite_makes_the_scale_nan(bad):
    scale = tf.function(lambda s: optimizers.clip_scale(OptimizerConfig(Sgd, clip_norm=1.0), s), jit_compile=True)
    assert math.isnan(scale(tf.constant([1.0, bad])))


@pytest.mark.slow(but=["100"])
@pytest.mark.parametrize("size", [1, 16, 100, 4099, 70_001])
def test_a_sum_of_squares_has_the_same_bits_wherever_the_parameter_is(size):
    rng = np.random.default_rng(SEED + size)
    parameter = np.pad(rng.normal(size=size).astype(np.float32), (0, padded(size) - size))
    bits = set()
    for before, after in [(0, 0), (16, 0), (48, 16), (112, 2000), (5040, 32)]:
        vector = np.concatenate([rng.normal(size=before), parameter, rng.normal(size=after)]).astype(np.float32)
        places = [(before, size)] if before == 0 else [(0, before), (before, size)]
        sums = tf.function(functools.partial(optimizers.square_sums, offsets_and_sizes=places), jit_compile=True)
        bits.add(sums(tf.constant(vector)).numpy()[-1].tobytes())
    assert len(bits) == 1


def test_a_sum_of_squares_is_right_to_the_last_bit():
    values = np.random.default_rng(SEED).normal(size=100_000).astype(np.float32)
    exact = np.float32(np.square(values, dtype=np.float64).sum())
    assert optimizers.square_sums(tf.constant(values), [(0, values.size)]).numpy() == [exact]


def test_ftrl_changes_nothing_where_the_rate_is_zero():
    """Keras divides by it."""
    shard = Trained(OptimizerConfig(Ftrl, 0.1, WARMUP), ONE_SHARD[0])
    gradient = pack(gradients()[0], ONE_SHARD[0])
    before = shard.parameters, shard.slots
    after = shard.update(*before, gradient, np.ones(len(SHAPES), np.float32), np.int64(0))
    for value, wanted in zip(tf.nest.flatten(after), tf.nest.flatten(before), strict=True):
        assert value.numpy().tobytes() == wanted.numpy().tobytes()


@pytest.mark.parametrize("name", ["adam-everything", "lamb-everything", "adafactor-everything"])
def test_a_shard_without_parameters_updates_nothing(name):
    shard = Trained(CONFIGS[name], members=())
    assert shard.square_sums(shard.parameters).shape == [0]
    shard.update(shard.parameters, shard.slots, shard.parameters, tf.ones([3]), tf.constant(0, tf.int64))


def test_an_update_in_a_v1_graph_gives_the_bits_of_eager_mode():
    shard = Trained(CONFIGS["adam-everything"], ONE_SHARD[0])
    arguments = (pack(gradients()[0], ONE_SHARD[0]), np.full(len(SHAPES), 300.0, np.float32), np.int64(0))
    eager, _ = shard.update(shard.parameters, shard.slots, *arguments)
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        fresh = Trained(CONFIGS["adam-everything"], ONE_SHARD[0])
        graph = session.run(fresh.update(fresh.parameters, fresh.slots, *arguments)[0])
    assert graph.tobytes() == eager.numpy().tobytes()
