"""Divides examples into those to train on and those to evaluate on."""

import numpy as np

from trainer.workload.data.errors import DataError

SHARE = 0.2  # of the examples, to evaluate on, where nothing else is said


def is_fraction(evaluate: object, option: str = "data.options.evaluate") -> bool:
    """Whether an option is a share of the examples, not a name.

    Raises:
        DataError: if it is a number but not a share.
    """
    if isinstance(evaluate, str):
        return False
    if not isinstance(evaluate, float | int) or isinstance(evaluate, bool) or not 0 < evaluate < 1:
        raise DataError(f"{option}={evaluate} is not a share between 0 and 1; e.g. {option}=0.2")
    return True


def divide(count: int, fraction: float, source: str) -> tuple[np.ndarray, np.ndarray]:
    """Divides examples into training and evaluation, in order: the same in every run and on every machine.

    Raises:
        DataError: if one part would be empty.
    """
    evaluated = round(count * fraction)
    if not 0 < evaluated < count:
        raise DataError(
            f"{source}: a share of {fraction:g} of {count} examples is {evaluated}; both parts need at least one: "
            "change data.options.evaluate"
        )
    order = np.argsort(_mixed(np.arange(count, dtype=np.uint64)), kind="stable")
    return np.sort(order[evaluated:]), np.sort(order[:evaluated])


def _mixed(numbers: np.ndarray) -> np.ndarray:
    """Scrambles numbers by the last steps of SplitMix64 (https://prng.di.unimi.it/splitmix64.c)."""
    mixed = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))
