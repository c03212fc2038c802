"""Refuses a model that is larger than this machine's memory before its variables are made."""

import math
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import keras

from trainer.config.words import size
from trainer.workload.patches import patched

FLOAT_BYTES = 4


def memory_bytes() -> int:
    """Returns the size of this machine's memory."""
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


@contextmanager
def within_memory() -> Iterator[None]:
    """Refuses layers built in this context whose variables do not fit into memory.

    Raises:
        ValueError: where the layer is built whose variable does not fit.
    """
    add_weight, limit, total = keras.layers.Layer.add_weight, memory_bytes(), 0

    def add_if_it_fits(layer: keras.layers.Layer, shape: Any = None, *arguments: Any, **options: Any) -> Any:
        nonlocal total
        axes = [int(axis or 1) for axis in shape] if isinstance(shape, Iterable) else []  # of any type that Keras takes
        nbytes = FLOAT_BYTES * math.prod(axes)
        total += nbytes
        if total > limit:
            raise ValueError(
                f"layer {layer.path}: a variable {axes} takes {size(nbytes)}, and with it the model takes "
                f"{size(total)}; this machine's memory is {size(limit)}"
            )
        return add_weight(layer, shape, *arguments, **options)

    with patched((keras.layers.Layer, "add_weight", add_if_it_fits)):
        yield
