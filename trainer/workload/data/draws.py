"""Seeds the generators of numpy and `random` while user code reads data, by the run's seed and position.

Otherwise what it draws depends on what the process has read before: evaluations, other replicas, earlier steps.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
import threading
from collections.abc import Iterable, Iterator, Sequence
from types import CellType, ModuleType
from typing import Any

import numpy as np

GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)
EMPTY = CellType()  # of a closure whose variable has no value yet
_END = object()
_lock = threading.RLock()  # training and evaluation data are read in different threads


@contextlib.contextmanager
def drawn_from(*numbers: int, own: Sequence[Any] = ()) -> Iterator[None]:
    """Seeds the generators with these numbers (>= 0) inside the context, in which one thread at a time may be.

    Args:
        own: other generators to seed, as `generators_of` finds them.
    """
    seed, *seeds = map(int, np.random.SeedSequence(numbers).generate_state(1 + len(own)))
    with _lock:
        states = random.getstate(), np.random.get_state(), [_state(one) for one in own]
        random.seed(seed)
        np.random.seed(seed)
        for one, its_seed in zip(own, seeds, strict=True):
            _seed(one, its_seed)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
            for one, state in zip(own, states[2], strict=True):
                _restore(one, state)


@contextlib.contextmanager
def noticed_draws() -> Iterator[list[bool]]:
    """Fills the list if something, in whatever thread, draws from the global generators inside the context."""
    drawn: list[bool] = []
    with drawn_from(0):
        before = random.getstate(), _plain(np.random.get_state())
        yield drawn
        if (random.getstate(), _plain(np.random.get_state())) != before:
            drawn.append(True)


def _plain(state: Any) -> str:
    return f"{state[1].tobytes().hex()} {state[2:]}"


def generators_of(source: Any) -> list[Any]:
    """Finds the generators that an object, a class, a closure or the file that defines one of them holds."""
    code = source if hasattr(source, "__closure__") else type(source)
    held = [source, code, getattr(source, "__self__", None), sys.modules.get(code.__module__)]
    held += [inner for one in held[:3] for inner in _held_by(one) if not isinstance(inner, ModuleType)]
    found = {id(one): one for outer in held for one in _held_by(outer) if isinstance(one, GENERATORS)}
    return [one for one in found.values() if not isinstance(one, random.SystemRandom)]


def _held_by(one: Any) -> list[Any]:
    cells = getattr(one, "__closure__", None) or ()
    inner = [cell.cell_contents for cell in cells if cell != EMPTY]
    return [*getattr(one, "__dict__", {}).values(), *inner]


def _state(one: Any) -> Any:
    if isinstance(one, np.random.Generator):
        return one.bit_generator.state
    return one.getstate() if isinstance(one, random.Random) else one.get_state()


def _restore(one: Any, state: Any) -> None:
    if isinstance(one, np.random.Generator):
        one.bit_generator.state = state
    elif isinstance(one, random.Random):
        one.setstate(state)
    else:
        one.set_state(state)


def _seed(one: Any, seed: int) -> None:
    if isinstance(one, np.random.Generator):
        one.bit_generator.state = type(one.bit_generator)(seed).state
    else:
        one.seed(seed)


def seeded(given: Iterable[Any], *numbers: int, own: Sequence[Any] = ()) -> Iterator[Any]:
    """Yields from an iterable; what its code draws for an element depends on the numbers and the element's position."""
    with drawn_from(*numbers, own=own):
        iterator = iter(given)
    for position in itertools.count():
        with drawn_from(*numbers, position, own=own):
            one = next(iterator, _END)
        if one is _END:
            return
        yield one
