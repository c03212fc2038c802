"""mode=selftest: a short training as processes of this machine, that leaves nothing."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable

from trainer.config.cluster_size import parse_size
from trainer.config.schema import ClusterConfig, Mode, RunConfig
from trainer.faults import exit_codes

CLUSTER, STEPS, BATCH = "1ps1w", 20, 64


def adapt(config: RunConfig) -> None:
    """Makes the config that of the selftest; model, data and devices stay as they are."""
    size = parse_size(CLUSTER)
    config.cluster = ClusterConfig(name=CLUSTER, ps=size.ps, worker=size.worker)
    config.train.steps, config.train.batch_size = STEPS, BATCH


def run(config: RunConfig, train: Callable[[RunConfig], int]) -> int:
    """Trains in a directory that is removed afterwards; returns the run's exit code."""
    config = copy.deepcopy(config)
    config.mode = Mode.train
    with tempfile.TemporaryDirectory(prefix="trainer-selftest-") as directory:
        config.run = f"{directory}/run"
        code = train(config)
    print("selftest: passed" if code == exit_codes.OK else f"selftest: failed with {code}")
    return code
