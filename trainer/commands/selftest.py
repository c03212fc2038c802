"""trainer selftest: a short training on this machine that leaves nothing behind."""

import tempfile
from dataclasses import replace

from trainer.commands import train
from trainer.commands.start import Start
from trainer.config.cluster_size import parse_size
from trainer.config.schema import ClusterConfig, RunConfig
from trainer.faults import exit_codes

CLUSTER, STEPS, BATCH_SIZE = "1ps1w", 20, 64


def adapted(config: RunConfig) -> RunConfig:
    """Returns the config of the training."""
    size = parse_size(CLUSTER)
    cluster = ClusterConfig(name=CLUSTER, ps=size.ps, worker=size.worker)
    return replace(
        config, cluster=cluster, train=replace(config.train, steps=STEPS, epochs=None, batch_size=BATCH_SIZE)
    )


def run(config: RunConfig, start: Start) -> int:
    """Trains in a temporary directory; returns the run's exit code."""
    with tempfile.TemporaryDirectory(prefix="trainer-selftest-") as directory:
        code = train.run(replace(config, run=f"{directory}/run"), start)
    outcome = "passed" if code == exit_codes.OK else f"failed with {code}"
    print(f"selftest: {outcome}; its run directory is removed")
    return code
