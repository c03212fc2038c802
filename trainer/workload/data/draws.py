"""Seeds the global generators of numpy and `random` while user code reads data, by the run's seed and position.

Otherwise what it draws depends on what the process has read before: evaluations, other replicas, earlier steps.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

_END = object()
_lock = threading.RLock()  # training and evaluation data are read in different threads


@contextlib.contextmanager
def drawn_from(*numbers: int) -> Iterator[None]:
    """Seeds the generators with these numbers (>= 0) inside the context, in which one thread at a time may be."""
    seed = int(np.random.SeedSequence(numbers).generate_state(1)[0])
    with _lock:
        states = random.getstate(), np.random.get_state()
        random.seed(seed)
        np.random.seed(seed)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])


def seeded(given: Iterable[Any], *numbers: int) -> Iterator[Any]:
    """Yields from an iterable; what its code draws for an element depends on the numbers and the element's position."""
    with drawn_from(*numbers):
        iterator = iter(given)
    for position in itertools.count():
        with drawn_from(*numbers, position):
            one = next(iterator, _END)
        if one is _END:
            return
        yield one
