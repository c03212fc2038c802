"""trainer selftest: a short training on this machine that leaves nothing behind."""

import copy
import tempfile

from trainer.commands import train
from trainer.commands.start import Start
from trainer.config.schema import Mode, RunConfig
from trainer.faults import exit_codes


def run(config: RunConfig, start: Start) -> int:
    """Trains in a temporary directory; returns the run's exit code."""
    config = copy.deepcopy(config)
    config.mode = Mode.train
    with tempfile.TemporaryDirectory(prefix="trainer-selftest-") as directory:
        config.run = f"{directory}/run"
        code = train.run(config, start)
    outcome = "passed" if code == exit_codes.OK else f"failed with {code}"
    print(f"selftest: {outcome}; its run directory is removed")
    return code
