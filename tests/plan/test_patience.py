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
    ("overrides", "key", "answer"),
    [
        (["evaluate.patience=3"], "evaluate.patience", "type evaluate.every=100 too"),
        ([f"{PLATEAU}.patience=3"], f"{PLATEAU}.patience", "type evaluate.every=100 too"),
        ([COUNTED, f"{PLATEAU}.factor=0.5"], f"{PLATEAU}.factor", f"type {PLATEAU}.patience=10 too"),
        (
            [COUNTED, f"{PLATEAU}.patience=3", f"{PLATEAU}.min_rate=0.1"],
            f"{PLATEAU}.min_rate",
            f"0.1 is not below optimizer.learning_rate=0.001; type {PLATEAU}.min_rate=1e-05",
        ),
        (["cluster=1ps2w1e", "evaluate.export_best=true"], "evaluate.export_best", "resume=RUN/best"),
    ],
)
def test_what_cannot_count_is_refused_with_what_to_type(overrides, key, answer):
    (problem,) = problems_of(load(overrides))
    assert problem.key == key
    assert answer in f"{problem.message}; {problem.remedy}"


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
