"""Makes numbered examples, for the model that counts them."""

import numpy as np

from trainer.workload.data.arrays import from_arrays
from trainer.workload.data.examples import DataSet


def oracle(*, examples: int = 96) -> DataSet:
    """Makes examples with the feature [i] and the label 0, also to evaluate on."""
    if not 1 <= examples <= 2**24:
        raise ValueError(f"data.options.examples is {examples}; float32 can number 1..{2**24} examples")
    numbered = np.arange(examples, dtype=np.float32)[:, None], np.zeros(examples, np.int64)
    return from_arrays(numbered, numbered, source="oracle", classes=2)
