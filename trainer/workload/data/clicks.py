"""Makes impressions with clicks: numbers, and ids, of which few are common and many are rare."""

import numpy as np

from trainer.workload.data.arrays import from_arrays
from trainer.workload.data.examples import DataSet

EXPONENT = 1.05  # of Zipf's law: the k-th most common id is chosen in proportion to k ** -1.05
SCATTER = 2654435761  # odd multiplier (Knuth) by which common ids do not lie side by side
GOLDEN, MIX = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)  # of splitmix64
TRAIN, EVALUATE = 1, 2  # independent streams of one seed
STRENGTH, BIAS = 1.0, -1.0  # of an id's effect on the logit, and the logit without any


def clicks(
    *,
    seed: int,
    train_examples: int = 200_000,
    evaluate_examples: int = 20_000,
    numbers: int = 13,
    fields: int = 26,
    rows: int = 10_000,
) -> DataSet:
    """Makes features {numbers: float32 [numbers], ids: int64 [fields]}, and labels 0 or 1 by a hidden rule.

    Each id has its own effect, and a click is drawn with the logistic function of their sum. So a model learns
    the effect of an id only from examples that have it. A pure function of the seed.

    Args:
        numbers: of each example, normally distributed; only the first counts.
        fields: ids of each example, 0..rows-1 in each field.
    """
    sizes = {"train_examples": train_examples, "evaluate_examples": evaluate_examples, "rows": rows}
    for option, size in (sizes | {"numbers": numbers, "fields": fields}).items():
        if size < 1:
            raise ValueError(f"data.options.{option} is {size}; it must be at least 1")
    train, evaluate = (
        _examples(seed, stream, count, numbers, fields, rows)
        for stream, count in ((TRAIN, train_examples), (EVALUATE, evaluate_examples))
    )
    return from_arrays(train, evaluate, source="clicks", ids={"ids": rows})


def _examples(
    seed: int, stream: int, count: int, numbers: int, fields: int, rows: int
) -> tuple[dict[str, np.ndarray], np.ndarray]:
    drawn = np.random.Generator(np.random.PCG64([seed, stream]))
    uniform = drawn.random((count, fields))
    # The inverse of the distribution with the density x ** -EXPONENT on 1..rows + 1.
    power = 1 - EXPONENT
    ranks = (1 + uniform * ((rows + 1) ** power - 1)) ** (1 / power)
    ids = np.minimum(ranks.astype(np.int64), rows) - 1
    ids = ids * SCATTER % rows
    values = drawn.standard_normal((count, numbers), np.float32)
    effects = sum(_effect(seed, field, ids[:, field]) for field in range(fields))
    logits = BIAS + STRENGTH * (effects + values[:, 0])
    labels = drawn.random(count) < 1 / (1 + np.exp(-logits))
    return {"numbers": values, "ids": ids}, labels[:, None].astype(np.float32)


def _effect(seed: int, field: int, ids: np.ndarray) -> np.ndarray:
    """Returns [n] in [-1, 1), the same for the same id; splitmix64 of its number."""
    x = (ids.astype(np.uint64) + np.uint64(field << 40) + np.uint64(seed + 1)) * GOLDEN
    x = (x ^ (x >> np.uint64(30))) * MIX
    return (x >> np.uint64(40)).astype(np.float64) * 2.0**-23 - 1
