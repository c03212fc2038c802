"""Which vectors an optimizer keeps beside the parameters. Pure: no TensorFlow."""

from __future__ import annotations

from trainer.config.schema import OptimizerConfig, OptimizerName


def slots(config: OptimizerConfig) -> dict[str, float]:
    """The slot vectors an optimizer keeps beside the parameters, in a fixed order, with the value each starts from."""
    kept = {
        OptimizerName.sgd: {"momentum": config.momentum > 0},
        OptimizerName.adam: {"momentum": True, "velocity": True},
        OptimizerName.adamw: {"momentum": True, "velocity": True},
        OptimizerName.rmsprop: {
            "velocity": True,
            "momentum": config.momentum > 0,
            "average_gradient": config.centered,
        },
        OptimizerName.adagrad: {"accumulator": True},
    }[config.name]
    names = [name for name, is_kept in kept.items() if is_kept] + (["ema"] if config.ema is not None else [])
    return {name: config.initial_accumulator if name == "accumulator" else 0.0 for name in names}
