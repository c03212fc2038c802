"""Implements fused updates of a flat vector, equal to those of Keras.

A shard is one float32 vector [n] that holds its parameters one after the other, each padded with zeros to a multiple of
16 floats; its slots are vectors of the same size, but for those of adafactor. Every function here is pure, over
tensors, and may be called inside `tf.function(jit_compile=True)`, in a v1 graph too.

The formulas are those of keras/src/optimizers (Keras 3.15), in float32 and in its order of operations: Adam's
`1 - beta_2 ** step` is off by 5e-5 at the first step, so a more exact form would not equal Keras. An update gives the
same bits however the parameters are spread over shards, and padding stays zero. Most rules treat every float alone;
those of `measuring.py` measure whole parameters.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import tensorflow as tf

from trainer.config.schema import OptimizerConfig, OptimizerName, ScheduleConfig, ScheduleName

PAD = 16  # floats: 64 bytes, so that a parameter's slice of the vector is a view and fills whole vector registers
EMA = "ema"  # the slot with the moving average of the parameters
LANES = 8  # partial sums of a parameter's squares: three times as fast as a single sum, and 8 divides PAD

Tensor: TypeAlias = tf.Tensor
Slots = Mapping[str, Tensor]  # [n] each


class Rates(NamedTuple):
    """The learning rates and weight decays of groups of parameters."""

    rate: Tensor  # [n]
    decay: Tensor  # [n]


class Inputs(NamedTuple):
    """The inputs of an update rule."""

    parameters: Tensor  # [n], after weight decay
    slots: Slots
    gradient: Tensor  # [n]
    rate: Tensor  # [], or [n] with groups
    step: Tensor  # [] int64, updates applied so far


Change = tuple[Tensor, dict[str, Tensor]]  # the parameters [n] and the slots after the update
Rule = Callable[[OptimizerConfig, Inputs], Change]


def learning_rate(
    config: OptimizerConfig, step: Tensor, reductions: Tensor | float = 0.0, *, peak: float | None = None
) -> Tensor:
    """Returns the rate of the update that follows `step` updates.

    Args:
        step: [] int64, updates applied so far; 0 for the first.
        reductions: [] float32, how often `config.plateau` has reduced the rate; not read without a patience.
        peak: of a group that does not have `config.learning_rate`.

    Returns:
        [] float32.
    """
    rate, plateau = _scheduled(config.schedule, config.learning_rate if peak is None else peak, step), config.plateau
    if plateau.patience is None:
        return rate
    return rate * tf.maximum(tf.pow(plateau.factor, reductions), plateau.min_rate / config.learning_rate)


def _scheduled(schedule: ScheduleConfig, peak: float, step: Tensor) -> Tensor:
    """Returns [] the rate after so many updates, as `keras.optimizers.schedules` has it."""
    at = tf.cast(step, tf.float32)
    if schedule.name is ScheduleName.constant:
        return tf.constant(peak, tf.float32)
    if schedule.name is ScheduleName.exponential:
        intervals = at / schedule.decay_steps
        intervals = tf.floor(intervals) if schedule.staircase else intervals
        return peak * tf.pow(schedule.decay_rate, intervals)
    return peak * _cosine(schedule, at)


def apply(
    config: OptimizerConfig,
    parameters: Tensor,
    slots: Slots,
    gradient: Tensor,
    step: Tensor,
    reductions: Tensor | float = 0.0,
    rates: Rates | None = None,
) -> Change:
    """Updates a shard by a rule that treats every float alone.

    Args:
        parameters: [n] float32.
        slots: [n] float32 each, by the names of `config.slots()`.
        gradient: [n] float32, the mean over replicas; times `clip_scale` where gradients are clipped.
        step: [] int64, updates applied so far; 0 for the first.
        reductions: [] float32, of the learning rate.
        rates: if parameters differ in them.

    Returns:
        The parameters [n] and the slots [n] after the update.
    """
    rate = learning_rate(config, step, reductions) if rates is None else rates.rate
    inputs = Inputs(decay(config, parameters, rate, rates), slots, gradient, rate, step)
    parameters, updated = RULES[config.name](config, inputs)
    return parameters, updated | averages(config, slots, parameters, step)


def decay(config: OptimizerConfig, parameters: Tensor, rate: Tensor, rates: Rates | None) -> Tensor:
    """Returns [n] the parameters after weight decay."""
    if rates is not None:
        return parameters - parameters * rates.decay * rate
    return parameters - parameters * config.weight_decay * rate if config.weight_decay > 0 else parameters


def averages(config: OptimizerConfig, slots: Slots, parameters: Tensor, step: Tensor) -> dict[str, Tensor]:
    """Returns the moving average [n] of the parameters, as a slot; the first update starts it from the parameters."""
    if config.ema is None:
        return {}
    momentum = tf.where(step > 0, tf.constant(config.ema, tf.float32), 0.0)
    return {EMA: momentum * slots[EMA] + (1 - momentum) * parameters}


def square_sums(gradient: Tensor, offsets_and_sizes: Sequence[tuple[int, int]]) -> Tensor:
    """Returns each parameter's sum of squares: what shards exchange so that all of them clip by the same norm.

    The bits of a sum depend on the parameter's own floats and size only, never on where it stands or beside what.

    Args:
        gradient: [n] float32, zero in the padding.
        offsets_and_sizes: where each of the k parameters starts, a multiple of 16, and its floats, padded or not.

    Returns:
        [k] float32, in the order given.
    """
    assert all(offset % PAD == 0 for offset, _ in offsets_and_sizes), offsets_and_sizes
    sums = [_square_sum(gradient[offset : offset + -(-size // PAD) * PAD]) for offset, size in offsets_and_sizes]
    return tf.stack(sums) if sums else tf.zeros([0])


def clip_scale(config: OptimizerConfig, square_sums: Tensor) -> Tensor:
    """Returns the factor of all gradients that limits their global norm to `clip_norm`.

    Keras's `global_clipnorm`, but exactly 1 below the limit, where Keras's own formula may be off by one bit.

    Args:
        square_sums: [K] float32 for **all** parameters of the model, in path order: any other order rounds otherwise.

    Returns:
        [] float32; NaN if a gradient is not finite, as in Keras.
    """
    if config.clip_norm is None:
        return tf.constant(1.0)
    norm = tf.cast(tf.sqrt(tf.reduce_sum(tf.cast(square_sums, tf.float64))), tf.float32)
    return tf.where(tf.math.is_finite(norm), config.clip_norm / tf.maximum(norm, config.clip_norm), math.nan)


def _cosine(schedule: ScheduleConfig, at: Tensor) -> Tensor:
    """Returns the share of the full rate: linear over the warm-up, then half a cosine down to `final_fraction`."""
    past_warmup = tf.minimum(at - schedule.warmup_steps, float(schedule.decay_steps))
    wave = 0.5 * (1.0 + tf.cos(math.pi * (past_warmup / schedule.decay_steps)))
    decayed = (1 - schedule.final_fraction) * wave + schedule.final_fraction
    return tf.where(past_warmup < 0, at / max(schedule.warmup_steps, 1), decayed)


def _sgd(config: OptimizerConfig, inputs: Inputs) -> Change:
    gradient, rate = inputs.gradient, inputs.rate
    if config.momentum == 0:
        return inputs.parameters - gradient * rate, {}
    momentum = inputs.slots["momentum"] * config.momentum - gradient * rate
    increase = momentum * config.momentum - gradient * rate if config.nesterov else momentum
    return inputs.parameters - (-increase), {"momentum": momentum}


def moments(config: OptimizerConfig, slots: Slots, gradient: Tensor) -> tuple[Tensor, Tensor]:
    """Returns ([n], [n]) Adam's averages of the gradient and of its square."""
    momentum = slots["momentum"] + (gradient - slots["momentum"]) * (1 - config.beta_1)
    velocity = slots["velocity"] + (tf.square(gradient) - slots["velocity"]) * (1 - config.beta_2)
    return momentum, velocity


def biases(config: OptimizerConfig, step: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the divisors that correct both averages for starting from zero."""
    count = tf.cast(step + 1, tf.float32)
    return 1 - tf.pow(config.beta_1, count), 1 - tf.pow(config.beta_2, count)


def _adam(config: OptimizerConfig, inputs: Inputs) -> Change:
    bias_1, bias_2 = biases(config, inputs.step)
    momentum, velocity = moments(config, inputs.slots, inputs.gradient)
    decrease = momentum * (inputs.rate * tf.sqrt(bias_2) / bias_1) / (tf.sqrt(velocity) + config.epsilon)
    return inputs.parameters - decrease, {"momentum": momentum, "velocity": velocity}


def _rmsprop(config: OptimizerConfig, inputs: Inputs) -> Change:
    slots, gradient = inputs.slots, inputs.gradient
    updated = {"velocity": config.rho * slots["velocity"] + (1 - config.rho) * tf.square(gradient)}
    variance = updated["velocity"]
    if config.centered:
        updated["average_gradient"] = config.rho * slots["average_gradient"] + (1 - config.rho) * gradient
        variance -= tf.square(updated["average_gradient"])
    decrease = inputs.rate * gradient / tf.sqrt(variance + config.epsilon)
    if config.momentum > 0:
        decrease = updated["momentum"] = config.momentum * slots["momentum"] + decrease
    return inputs.parameters - decrease, updated


def _adagrad(config: OptimizerConfig, inputs: Inputs) -> Change:
    accumulator = inputs.slots["accumulator"] + tf.square(inputs.gradient)
    decrease = inputs.rate * inputs.gradient / tf.sqrt(accumulator + config.epsilon)
    return inputs.parameters - decrease, {"accumulator": accumulator}


def _lion(config: OptimizerConfig, inputs: Inputs) -> Change:
    before, gradient = inputs.slots["momentum"], inputs.gradient
    momentum = before * config.beta_2 + gradient * (1 - config.beta_2)
    decrease = inputs.rate * tf.sign(before * config.beta_1 + gradient * (1 - config.beta_1))
    return inputs.parameters - decrease, {"momentum": momentum}


def _ftrl(config: OptimizerConfig, inputs: Inputs) -> Change:
    """Changes nothing where the rate, by which it divides, is zero.

    Where nothing has been accumulated, as in padding, the parameters are zero.
    """
    parameters, gradient, power = inputs.parameters, inputs.gradient, -config.learning_rate_power
    before = {name: inputs.slots[name] for name in ("accumulator", "linear")}
    is_made = inputs.rate > 0
    rate = tf.where(is_made, inputs.rate, 1.0)
    accumulator = before["accumulator"] + tf.square(gradient)
    shrunk = gradient + 2 * config.l2_shrinkage * parameters
    sigma = (tf.pow(accumulator, power) - tf.pow(before["accumulator"], power)) / rate
    linear = before["linear"] + (shrunk - sigma * parameters)
    quadratic = tf.pow(accumulator, power) / rate + 2 * (config.l2 + config.beta / (2.0 * rate))
    clipped = tf.clip_by_value(linear, -config.l1, config.l1)
    moved = tf.where(is_made, tf.math.divide_no_nan(clipped - linear, quadratic), parameters)
    after = {"accumulator": accumulator, "linear": linear}
    return moved, {name: tf.where(is_made, after[name], slot) for name, slot in before.items()}


RULES: dict[OptimizerName, Rule] = {  # that treat every float alone
    OptimizerName.sgd: _sgd,
    OptimizerName.adam: _adam,
    OptimizerName.adamw: _adam,
    OptimizerName.rmsprop: _rmsprop,
    OptimizerName.adagrad: _adagrad,
    OptimizerName.lion: _lion,
    OptimizerName.ftrl: _ftrl,
}


def _square_sum(values: Tensor) -> Tensor:
    """Returns [] float32 sum of the squares of values [multiple of 16].

    In float64 a float32's square is exact, so a compiler that fuses multiply and add changes nothing.
    """
    lanes = tf.unstack(tf.square(tf.cast(tf.reshape(values, [LANES, -1]), tf.float64)))
    return tf.cast(tf.reduce_sum(tf.add_n(lanes)), tf.float32)
