"""Reads a `keras.utils.PyDataset`: its batches depend only on (seed, epoch), not on the order of reads."""

import contextlib
import copy
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from trainer.workload.data.arrays import SMALL_NBYTES, is_mapped
from trainer.workload.data.draws import drawn_from, generators_of
from trainer.workload.data.examples import Batch, StreamContext
from trainer.workload.data.stream_sources import shared_out

BATCHES_AT_MOST = 10**8  # in an epoch whose order is shuffled, which takes 8 bytes each and more


def is_py_dataset(source: Any) -> bool:
    import keras

    return isinstance(source, keras.utils.PyDataset)


def has_end(source: Any) -> bool:
    """Whether the number of batches is known, and not a huge number that stands for infinity."""
    return source.num_batches is not None and source.num_batches <= BATCHES_AT_MOST


def batches_of_py_dataset(source: Any, name: str, seed: int) -> Callable[[StreamContext], Iterable[Batch]]:
    """Returns the batches of each epoch, shuffled and shared among the replicas."""
    epochs = _Epochs(source, seed)

    def batches(epoch: int) -> Iterator[Any]:
        of_epoch = epochs.at(epoch)
        own = generators_of(of_epoch)
        order: Iterable[int] = itertools.count()
        if has_end(of_epoch):
            order = np.random.default_rng([seed, epoch]).permutation(of_epoch.num_batches).tolist()
        for index in order:
            with drawn_from(seed, epoch, index, own=own):
                batch = of_epoch[index]
            yield batch

    return shared_out(batches, name)


class _Epochs:
    """Copies of a data set for each epoch, changed by `on_epoch_end` and `on_epoch_begin`.

    They may shuffle in place, while another pass reads an epoch before: each epoch is a copy of the one before it.
    """

    def __init__(self, source: Any, seed: int) -> None:
        import keras

        base, own = keras.utils.PyDataset, type(source)
        self._changes = (own.on_epoch_begin, own.on_epoch_end) != (base.on_epoch_begin, base.on_epoch_end)
        self._source, self._seed = source, seed
        self._latest, self._epoch = source, -1
        self._lock = threading.Lock()

    def at(self, epoch: int) -> Any:
        """Returns the data set of an epoch, which no longer changes."""
        if not self._changes:
            return self._source
        with self._lock:
            if epoch < self._epoch:
                self._latest, self._epoch = self._source, -1
            while self._epoch < epoch:
                self._begin_next()
            return self._latest

    def _begin_next(self) -> None:
        one, epoch = _copied(self._latest), self._epoch + 1
        with drawn_from(self._seed, epoch, own=generators_of(one)):
            if epoch > 0:
                one.on_epoch_end()
            one.on_epoch_begin()
        self._latest, self._epoch = one, epoch


def _copied(source: Any) -> Any:
    """Copies a data set and its attributes, except large data and uncopyable objects such as open files."""
    one, memo = copy.copy(source), _large_arrays(source)
    for name, value in vars(source).items():
        with contextlib.suppress(Exception):  # of many types
            vars(one)[name] = copy.deepcopy(value, memo)
    return one


def _large_arrays(source: Any) -> dict[int, Any]:
    """Returns arrays that are not copied, by id: mapped files, and data; an order, which is shuffled, has one axis."""
    arrays = [one for one in vars(source).values() if isinstance(one, np.ndarray)]
    return {id(one): one for one in arrays if is_mapped(one) or (one.ndim > 1 and one.nbytes > SMALL_NBYTES)}
