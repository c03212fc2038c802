"""What Keras has for the optimizer of a config."""

from __future__ import annotations

from typing import Any

import keras

from trainer.config.schema import OptimizerConfig, OptimizerName, ScheduleName


def keras_rate(config: OptimizerConfig) -> Any:
    """A float, or the schedule of `keras.optimizers.schedules`."""
    schedules, schedule = keras.optimizers.schedules, config.schedule
    if schedule.name is ScheduleName.constant:
        return config.learning_rate
    if schedule.name is ScheduleName.exponential:
        return schedules.ExponentialDecay(
            config.learning_rate, schedule.decay_steps, schedule.decay_rate, schedule.staircase
        )
    if schedule.warmup_steps == 0:
        return schedules.CosineDecay(config.learning_rate, schedule.decay_steps, alpha=schedule.final_fraction)
    return schedules.CosineDecay(
        0.0,
        schedule.decay_steps,
        alpha=schedule.final_fraction,
        warmup_target=config.learning_rate,
        warmup_steps=schedule.warmup_steps,
    )


def keras_optimizer(config: OptimizerConfig) -> keras.Optimizer:
    """The optimizer of Keras that a config stands for."""
    adam = {"beta_1": config.beta_1, "beta_2": config.beta_2, "epsilon": config.epsilon}
    rmsprop = {"rho": config.rho, "momentum": config.momentum, "epsilon": config.epsilon, "centered": config.centered}
    adagrad = {"initial_accumulator_value": config.initial_accumulator, "epsilon": config.epsilon}
    adafactor = {name: getattr(config, name) for name in ("beta_2_decay", "epsilon_1", "epsilon_2", "clip_threshold")}
    ftrl = {
        "learning_rate_power": config.learning_rate_power,
        "initial_accumulator_value": config.initial_accumulator,
        "l1_regularization_strength": config.l1,
        "l2_regularization_strength": config.l2,
        "l2_shrinkage_regularization_strength": config.l2_shrinkage,
        "beta": config.beta,
    }
    kind, options = {
        OptimizerName.sgd: (keras.optimizers.SGD, {"momentum": config.momentum, "nesterov": config.nesterov}),
        OptimizerName.adam: (keras.optimizers.Adam, adam),
        OptimizerName.adamw: (keras.optimizers.AdamW, adam),
        OptimizerName.rmsprop: (keras.optimizers.RMSprop, rmsprop),
        OptimizerName.adagrad: (keras.optimizers.Adagrad, adagrad),
        OptimizerName.lion: (keras.optimizers.Lion, {"beta_1": config.beta_1, "beta_2": config.beta_2}),
        OptimizerName.adafactor: (keras.optimizers.Adafactor, adafactor),
        OptimizerName.lamb: (keras.optimizers.Lamb, adam),
        OptimizerName.ftrl: (keras.optimizers.Ftrl, ftrl),
    }[config.name]
    return kind(
        keras_rate(config),
        weight_decay=config.weight_decay or (0.0 if config.name is OptimizerName.adamw else None),
        global_clipnorm=config.clip_norm,
        use_ema=config.ema is not None,
        ema_momentum=config.ema or 0.99,
        **options,
    )
