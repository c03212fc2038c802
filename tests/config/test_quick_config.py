"""The configs that tests make from copies are those that Hydra composes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import quick_config

from trainer.config import compose
from trainer.config.schema import RunConfig
from trainer.faults.problems import ConfigError

VALID = [
    [],
    ["cluster=2ps4w", "train.batch_size=64", "train.steps=7", "seed=1", "name=digits"],
    ["cluster=1ps2w", "cluster=local", "device.replicas=[/cpu:0,/cpu:1]", "+device.layers={dense:/cpu:1}"],
    ["cluster=1ps2w1e", "job=evaluator", "task=0", "checkpoint.every=2", "timeouts.heartbeat_secs=5"],
    ["cluster=1ps2w", "+cluster.addresses.ps=[10.0.0.1:2222]", "+cluster.addresses.worker=[10.0.0.2:1,10.0.0.3:1]"],
    ["cluster=1ps2w", "cluster.addresses={ps:['[::1]:2222'],worker:[a:1,b:2]}", "restart.max_of={ps:0,worker\\:1:9}"],
    ["+device.gpus={worker\\:0:[0],worker\\:1:[7]}", "+device.memory_fraction={worker\\:0:0.5}", "restart.max=0"],
    ["placement.pins={dense*:1}", "placement.max_part_mib=null", "placement.buckets=2", "device=cpu"],
    ["mode=chaos", 'chaos.schedule="kill worker:2 @40; stop ps:0 @80 for 15s"', "chaos.kinds=[kill-in-save]"],
    ["strategy=backup", "strategy.quorum=3", "optimizer=momentum", "optimizer.learning_rate=1e-3"],
    ["model=mlp", "model.options.depth=4", "data=npz", "data.options.path=x.npz", "optimizer.schedule.name=cosine"],
    ["checkpoint.every=${history.every}", "train.accumulate=2", "optimizer.clip_norm=0.5", "run=runs/mine"],
    [
        "evaluate.patience=4",
        "strategy=async",
        "++strategy.max_staleness=4",
        "model=resnet20",
        "train.precision=float32",
    ],
]
WRONG = [
    ["cluster=w4", "train.stepz=3"],
    ["strategy.quorum=[1,2]", "device.gpus={worker:[0]}"],
    ["train.batch_size=many", "+train.steps=3"],
    ["data=npz", "seed=???", "evaluate.min_delta=nan"],
    ["model=cnn,mlp", "optimizer.learning_rate=-1"],
    ["~train.steps", "+cluster.addresses.chief=[a:1]"],
]


def outcome(load: Callable[[list[str]], RunConfig], overrides: list[str]) -> RunConfig | str:
    try:
        return load(overrides)
    except ConfigError as error:
        return str(error)


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [*VALID, *WRONG], ids=" ".join)
def test_a_copy_equals_what_hydra_composes(overrides):
    assert repr(outcome(quick_config.load, overrides)) == repr(
        outcome(lambda words: compose.load(words).config, overrides)
    )


def test_two_configs_share_nothing():
    first = quick_config.load(["model=mlp"])
    first.model.options["width"] = -1
    first.device.gpus["worker"] = [5]
    assert repr(quick_config.load(["model=mlp"])) == repr(compose.load(["model=mlp"]).config)


@pytest.mark.parametrize("overrides", VALID, ids=" ".join)
def test_a_set_of_choices_is_composed_once(overrides, monkeypatch):
    quick_config.load(overrides)
    monkeypatch.setattr(quick_config, "compose_with_hydra", lambda *line: pytest.fail("composed again"))
    quick_config.load(overrides)
