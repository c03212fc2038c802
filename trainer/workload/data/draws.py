"""Makes what user code draws from the global generators of numpy and `random` depend on the seed and its place alone.

Otherwise it depends on what else the process has read: evaluations, other replicas, the steps before a task was killed.
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
_lock = threading.RLock()  # data of training and of an evaluation are read in several threads


@contextlib.contextmanager
def drawn_from(*numbers: int) -> Iterator[None]:
    """Seeds the generators with these numbers, none negative, for a while; no other thread reads data meanwhile."""
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
    """Yields what an iterable has; what its code draws for each element depends on the numbers and its place."""
    with drawn_from(*numbers):
        iterator = iter(given)
    for place in itertools.count():
        with drawn_from(*numbers, place):
            one = next(iterator, _END)
        if one is _END:
            return
        yield one
