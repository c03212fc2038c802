"""Builds the update of a shard's parameters: in one pass over them, or in stages that are compiled one by one."""

from collections.abc import Callable, Sequence
from functools import partial

import tensorflow as tf

from trainer.config.groups import has_rates, settings_of
from trainer.config.schema import OptimizerConfig
from trainer.engine import optimizers
from trainer.engine.measuring import MEASURING_RULES, compiled, expand
from trainer.engine.optimizers import EMA, Change, Rates, Slots, Tensor
from trainer.plan.layout import Shard, Slice

# (parameters, slots, gradient, step, reductions of the rate), as optimizers.apply has them
Apply = Callable[[Tensor, Slots, Tensor, Tensor, Tensor | float], Change]
MakeRates = Callable[[Tensor, Tensor | float], Rates | None]  # of step and reductions; None: all have the same


def make_apply(config: OptimizerConfig, shard: Shard) -> Apply:
    """Builds the update of a shard's parameters and slots by their mean gradient.

    Call it once, because each result is compiled separately. Its gradient must be zero in the padding.
    """
    if not is_in_stages(config, shard):
        return partial(optimizers.apply, config)
    apply = _apply_in_stages(config, shard)
    return _leave_unreached(apply, shard) if shard.unreached else apply


def is_in_stages(config: OptimizerConfig, shard: Shard) -> bool:
    """Whether the update of every shard is compiled in stages; otherwise it is one pass, which the caller compiles."""
    return config.name in MEASURING_RULES or has_rates(config) or bool(shard.unreached)


def _leave_unreached(apply: Apply, shard: Shard) -> Apply:
    """Makes an update leave parameters without a gradient, and their slots, unchanged, as Keras's optimizers do.

    Kept out of the compiled code: a select there changes which sums XLA contracts, and so the bits.
    """

    def keep(before: Tensor, after: Tensor, pieces: Sequence[Slice]) -> Tensor:
        is_kept = [piece.path in shard.unreached for piece in pieces]
        return tf.where(expand(list(map(tf.constant, is_kept)), pieces), before, after) if any(is_kept) else after

    def apply_to_reached(
        parameters: Tensor, slots: Slots, gradient: Tensor, step: Tensor, reductions: Tensor | float
    ) -> Change:
        moved, updated = apply(parameters, slots, gradient, step, reductions)
        before = {**slots, EMA: parameters}  # the average of a constant is the constant
        kept = {name: keep(before[name], slot, shard.slot_pieces(name)) for name, slot in updated.items()}
        return keep(parameters, moved, shard.trainable), kept

    return apply_to_reached


def _apply_in_stages(config: OptimizerConfig, shard: Shard) -> Apply:
    make_rates = _make_rates(config, shard) if has_rates(config) else lambda step, reductions: None
    if config.name in MEASURING_RULES:
        return _apply_measuring(config, shard, make_rates)
    one_pass = compiled(partial(optimizers.apply, config))

    def apply(parameters: Tensor, slots: Slots, gradient: Tensor, step: Tensor, reductions: Tensor | float) -> Change:
        return one_pass(parameters, slots, gradient, step, reductions, make_rates(step, reductions))

    return apply


def _make_rates(config: OptimizerConfig, shard: Shard) -> MakeRates:
    """Returns the rates of all floats at a step; every shard has them, so that all compile the same update."""
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
