"""What counts evaluations needs some, and keys that fit each other."""

from __future__ import annotations

import pytest
from quick_config import load

from trainer.config.schema import RunConfig
from trainer.faults.problems import Problem
from trainer.plan.checks.strategy import check_patience
from trainer.plan.resolve import check_optimizer

COUNTED = "evaluate.every=10"
PLATEAU = "optimizer.plateau"


def problems_of(config: RunConfig) -> list[Problem]:
    return [*check_patience(config.evaluate, config.optimizer, config.cluster), *check_optimizer(config.optimizer)]


@pytest.mark.parametrize(
    ("overrides", "codes"),
    [
        (["evaluate.patience=3"], "evaluate.patience/no-effect"),
        ([f"{PLATEAU}.patience=3"], "optimizer.plateau.patience/no-effect"),
        ([COUNTED, f"{PLATEAU}.factor=0.5"], "optimizer.plateau.factor/no-effect"),
        ([COUNTED, f"{PLATEAU}.patience=3", f"{PLATEAU}.min_rate=0.1"], "optimizer.plateau.min_rate/out-of-range"),
        (["cluster=1ps2w1e", "evaluate.export_best=true"], "evaluate.export_best/conflict"),
    ],
)
def test_what_cannot_count_is_refused_with_what_to_type(refused, overrides, codes):
    refused(codes, problems_of, load(overrides))


@pytest.mark.parametrize(
    "overrides",
    [
        ["evaluate.export_best=true"],
        [COUNTED, "evaluate.patience=3", f"{PLATEAU}.patience=3", f"{PLATEAU}.min_rate=1e-5"],
        ["cluster=1ps2w1e", "evaluate.patience=3", f"{PLATEAU}.patience=3"],
    ],
)
def test_what_can_count_is_accepted(overrides):
    assert not problems_of(load(overrides))
