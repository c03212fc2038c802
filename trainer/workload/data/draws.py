"""Seeds the generators of numpy and `random` while user code reads data, by the run's seed and position.

Otherwise its draws depend on what the process has read before: evaluations, other replicas, earlier steps.
"""

import contextlib
import itertools
import pickle
import random
import threading
from collections.abc import Iterable, Iterator, Sequence
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

GENERATORS = (np.random.Generator, np.random.RandomState, random.Random)
EMPTY = CellType()  # of a closure whose variable has no value yet
HEAP_TYPE = 1 << 9  # a flag of classes that Python code defines
DEPTH, MOST = 5, 5000  # objects in a row, and in all of one source, that are looked into
LIBRARIES = ("keras", "tensorflow", "numpy")  # their code uses no generator of a user's
_END = object()
_lock = threading.RLock()  # training and evaluation data are read in different threads


@contextlib.contextmanager
def drawn_from(*numbers: int, own: Sequence[Any] = ()) -> Iterator[None]:
    """Seeds the generators with these numbers (>= 0) inside the context, which one thread at a time may enter.

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
    """Fills the list if any thread draws from the global generators inside the context."""
    drawn: list[bool] = []
    with drawn_from(0):
        before = pickle.dumps((random.getstate(), np.random.get_state()))
        yield drawn
        if pickle.dumps((random.getstate(), np.random.get_state())) != before:
            drawn.append(True)


def generators_of(*sources: Any) -> list[Any]:
    """Finds the generators that objects and functions use, up to DEPTH objects further in.

    It searches attributes, classes and closures, and the names in the files of functions; not in the code of LIBRARIES.
    """
    found = {id(one): one for source in sources for one in _generators_in(source)}
    return list(found.values())


def _generators_in(source: Any) -> list[Any]:
    seen: dict[int, Any] = {}
    level = [source]
    for _ in range(DEPTH):
        new = {id(one): one for one in level if id(one) not in seen}
        new = dict(itertools.islice(new.items(), MOST - len(seen)))
        seen |= new
        level = [inner for one in new.values() if not isinstance(one, GENERATORS) for inner in _held_by(one)]
    return [one for one in seen.values() if isinstance(one, GENERATORS) and not isinstance(one, random.SystemRandom)]


def _held_by(one: Any) -> Iterator[Any]:
    if isinstance(one, ModuleType):
        yield from (inner for inner in vars(one).values() if isinstance(inner, GENERATORS))
        return
    yield from getattr(one, "__dict__", {}).values()
    yield from (kind for kind in type(one).__mro__ if kind.__flags__ & HEAP_TYPE and not _is_of_library(kind))
    yield from (getattr(one, name, None) for name in ("__self__", "__func__", "func"))  # of methods and partials
    if isinstance(one, FunctionType) and not _is_of_library(one):
        yield from (cell.cell_contents for cell in one.__closure__ or () if cell != EMPTY)
        yield from (one.__globals__[name] for name in _names_in(one.__code__) if name in one.__globals__)


def _is_of_library(one: Any) -> bool:
    return str(one.__module__).partition(".")[0] in LIBRARIES


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names_in(inner)


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
    """Yields from an iterable, whose draws for an element depend on the numbers and the element's position."""
    with drawn_from(*numbers, own=own):
        iterator = iter(given)
    for position in itertools.count():
        with drawn_from(*numbers, position, own=own):
            one = next(iterator, _END)
        if one is _END:
            return
        yield one
