"""Builds the update of a shard's parameters: in one pass over them, or in stages that are compiled one by one."""

from collections.abc import Callable
from functools import partial

import tensorflow as tf

from trainer.config.groups import has_rates, settings_of
from trainer.config.schema import OptimizerConfig
from trainer.engine import optimizers
from trainer.engine.measuring import MEASURING_RULES, compiled, expand
from trainer.engine.optimizers import Change, Rates, Slots, Tensor
from trainer.plan.layout import Shard

# (parameters, slots, gradient, step, reductions of the rate), as optimizers.apply has them
Apply = Callable[[Tensor, Slots, Tensor, Tensor, Tensor | float], Change]
MakeRates = Callable[[Tensor, Tensor | float], Rates | None]  # of step and reductions; None: all have the same


def make_apply(config: OptimizerConfig, shard: Shard) -> Apply:
    """Builds the update of a shard's parameters and slots by their mean gradient.

    Make it once: what it compiles is compiled anew for another. Its gradient must be zero in the padding.
    """
    if not is_in_stages(config):
        return partial(optimizers.apply, config)
    make_rates = _make_rates(config, shard) if has_rates(config) else lambda step, reductions: None
    if config.name in MEASURING_RULES:
        return _apply_measuring(config, shard, make_rates)
    one_pass = compiled(partial(optimizers.apply, config))

    def apply(parameters: Tensor, slots: Slots, gradient: Tensor, step: Tensor, reductions: Tensor | float) -> Change:
        return one_pass(parameters, slots, gradient, step, reductions, make_rates(step, reductions))

    return apply


def is_in_stages(config: OptimizerConfig) -> bool:
    """Whether an update is compiled in stages; others are one pass, for their caller to compile."""
    return config.name in MEASURING_RULES or has_rates(config)


def _make_rates(config: OptimizerConfig, shard: Shard) -> MakeRates:
    """The rates of all floats at a step; in every shard, whatever its groups, so that all compile the same update."""
    settings = [settings_of(config, piece.path) for piece in shard.trainable]
    peaks = {one.learning_rate for one in settings}

    def make_rates(step: Tensor, reductions: Tensor | float) -> Rates:
        rates = {peak: optimizers.learning_rate(config, step, reductions, peak=peak) for peak in peaks}
        return Rates(
            expand([rates[one.learning_rate] for one in settings], shard.trainable),
            expand([tf.constant(one.weight_decay, tf.float32) for one in settings], shard.trainable),
        )

    return make_rates


def _apply_measuring(config: OptimizerConfig, shard: Shard, make_rates: MakeRates) -> Apply:
    rule = MEASURING_RULES[config.name](config, shard)
    decay, finish = compiled(partial(optimizers.decay, config)), compiled(partial(_finish, config))

    def apply(parameters: Tensor, slots: Slots, gradient: Tensor, step: Tensor, reductions: Tensor | float) -> Change:
        rates = make_rates(step, reductions)
        rate = optimizers.learning_rate(config, step, reductions) if rates is None else rates.rate
        parameters = decay(parameters, rate, rates)
        direction, updated = rule.direction(slots, gradient, step)
        parameters, averages = finish(parameters, slots, direction, rule.scale(parameters, direction, rate, step), step)
        return parameters, updated | averages

    return apply


def _finish(
    config: OptimizerConfig, parameters: Tensor, slots: Slots, direction: Tensor, scale: Tensor, step: Tensor
) -> Change:
    moved = parameters - scale * direction
    return moved, optimizers.averages(config, slots, moved, step)
