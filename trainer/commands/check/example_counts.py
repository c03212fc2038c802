"""Compares how often a run used each example, counted by model=oracle, with the order of the data."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trainer.config.command_line import typed

COUNTS = re.compile(r"(?:parameters/)?counts_\d+/counts")  # in params.npz, or in a checkpoint
TOLERANCE = 0.01  # of a count, which float32 sums up
NAMED_AT_MOST = 10  # examples in one message

Counts = NDArray[np.int64]


def expected_counts(seed: int, steps: int, batch_size: int, examples: int) -> Counts:
    """Returns how often the first `steps` steps use each example: [examples].

    Whole epochs use each example once. Those of a partial epoch come from trainer/workload/data/order.py, asked
    in another process because it needs TensorFlow.

    `batch_size` is that of all replicas together.
    """
    epochs, used = divmod(steps * batch_size, examples)
    counts = np.full(examples, epochs, np.int64)
    if used:
        counts[_order_of_epoch(seed, epochs, examples)[:used]] += 1
    return counts


def check_counts(found: Path | Mapping[str, NDArray[Any]], expected: Counts) -> list[str]:
    """Returns a sentence for each parameter and each difference: examples missed, or counted more than once.

    Args:
        found: the parameters of model=oracle by path, or the .npz file that holds them.
        expected: [examples].
    """
    if isinstance(found, Path):
        with np.load(found, allow_pickle=False) as archive:
            found = {name: archive[name] for name in archive.files}
    counted = {name: values for name, values in found.items() if COUNTS.fullmatch(name)}
    if not counted:
        return ["there are no counts: these are not the parameters of model=oracle"]
    return [problem for name, values in sorted(counted.items()) for problem in _check(name, values, expected)]


def _check(name: str, values: NDArray[Any], expected: Counts) -> list[str]:
    if values.shape != expected.shape:
        return [f"{name} counts {values.size} examples, but the data has {expected.size}"]
    near = np.round(values)
    odd = np.flatnonzero(~(np.isfinite(values) & np.isclose(values, near, rtol=0, atol=TOLERANCE)))
    if odd.size:
        first = f"{name} has {values[odd[0]]} for example {odd[0]}, not a whole number"
        more = f", and {odd.size - 1} more like it" if odd.size > 1 else ""
        return [f"{first}{more}; optimizer.learning_rate must be train.batch_size"]
    differences = near.astype(np.int64) - expected
    problems = []
    for difference in sorted({int(d) for d in differences} - {0}):
        which = _examples(np.flatnonzero(differences == difference))
        problems.append(
            f"{name}: {which} counted {_times(abs(difference))} {'more' if difference > 0 else 'fewer'} than expected"
        )
    return problems


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number:,} times"


def _examples(numbers: NDArray[Any]) -> str:
    """Formats numbers of examples: example 3, examples 3, 5 and 90 more."""
    named = ", ".join(map(str, numbers[:NAMED_AT_MOST]))
    more = f" and {len(numbers) - NAMED_AT_MOST} more" if len(numbers) > NAMED_AT_MOST else ""
    return f"example{'' if len(numbers) == 1 else 's'} {named}{more}"


def _order_of_epoch(seed: int, epoch: int, examples: int) -> list[int]:
    child = subprocess.run(
        [sys.executable, "-m", "trainer.commands.check.example_counts", str(seed), str(epoch), str(examples)],
        capture_output=True,
        text=True,
        env=os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "-1"},
        check=False,
    )
    if child.returncode != 0:
        raise RuntimeError(f"the order of the data could not be computed:\n{child.stderr[-2000:]}")
    return json.loads(child.stdout.splitlines()[-1])


def _main(seed: int, epoch: int, examples: int) -> None:
    from trainer.workload.data.order import batch_indices

    # A batch of all examples is an epoch.
    order = batch_indices(seed, epoch, batch_size=examples, replica=0, replicas=1, count=examples)
    print(json.dumps(order.numpy().tolist()))


if __name__ == "__main__":
    _main(*map(int, typed()))
