"""Measures how long a step has waited for its batch, which depends on the user's data only."""

import time
from collections.abc import Callable, Sequence

import tensorflow as tf

v1 = tf.compat.v1

LONG_SECS = 1.0  # shorter steps count as not waiting


class BatchCount:
    """Counts the batches that the steps of a graph have received."""

    def __init__(self, device: str, scope: str = "") -> None:
        """Adds the count to the default v1 graph, in memory of the device; graphs of a task share it by scope."""
        with tf.device(device):
            self._count = v1.get_variable(
                f"{scope}batches_taken", [], tf.int64, v1.zeros_initializer(), use_resource=True
            )
            self.read = self._count.read_value()
        self.initializer = self._count.initializer

    def count(self, tensors: Sequence[tf.Tensor]) -> tf.Operation:
        """Counts a batch as soon as all its tensors are available."""
        with tf.control_dependencies(list(tensors)):
            return self._count.assign_add(1, read_value=False)


class DataWait:
    """Tracks the steps of an engine; `secs` may be called from any thread."""

    def __init__(self, taken: Callable[[], int]) -> None:
        """Begins before the first step; `taken` returns how many batches the steps have received."""
        self._taken = taken
        self._steps = 0  # that have ended
        self._began_at: float | None = None  # of the current step, monotonic; None: no step runs

    def begin_step(self) -> None:
        self._began_at = time.monotonic()

    def end_step(self) -> None:
        self._began_at, self._steps = None, self._steps + 1

    def secs(self) -> float:
        """Returns how long the current step has been waiting for its batch; 0 if it is not."""
        began, steps = self._began_at, self._steps
        secs = 0.0 if began is None else time.monotonic() - began
        return secs if secs >= LONG_SECS and self._taken() == steps == self._steps else 0.0
