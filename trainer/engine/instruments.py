"""Instruments a step's graph: time stamps of its phases, failpoints, and a record of what ran where."""

import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from trainer.faults import failpoints
from trainer.observe.placement.executed import Executed, executed
from trainer.workload.tensorflow_internals import is_op_determinism_enabled

v1 = tf.compat.v1


class GraphClock:
    """Stamps the phases of one step: Unix time, [] float64 seconds. Without profiling it adds nothing to the graph."""

    def __init__(self, *, is_wanted: bool) -> None:
        self._is_wanted = is_wanted
        self._ends: dict[str, Any] = {}
        self._arrived: dict[str, tf.Tensor] = {}

    @property
    def fetches(self) -> list[Any]:
        """Returns the additional fetches: the `ends` and `arrived` of `Stamps`; or nothing."""
        return [self._ends, self._arrived] if self._is_wanted else []

    def end(self, phase: str, after: Sequence[Any], *, on: str | None = None) -> list[tf.Tensor]:
        """Ends a phase after some operations; returns the stamp, for operations that must wait for it.

        Args:
            on: the task of the current device, if it is another one; once for each of its shards.
        """
        if not self._is_wanted:
            return []
        at = now(after)
        if on is None:
            self._ends[phase] = at
        else:
            by_shard = self._ends.setdefault(phase, {})
            by_shard[f"{on}/{len(by_shard)}" if on in by_shard else on] = at
        return [at]

    def end_at(self, phase: str, at: tf.Tensor) -> None:
        """Ends a phase at a time that the graph already measures."""
        self._ends[phase] = at

    def arrive(self, worker: str, after: Sequence[Any]) -> list[tf.Tensor]:
        """Stamps the arrival of a worker's gradient; returns the stamp, for operations that must wait for it."""
        if not self._is_wanted:
            return []
        self._arrived[worker] = now(after)
        return [self._arrived[worker]]


def now(after: Sequence[Any]) -> tf.Tensor:
    """Returns [] float64: the Unix time, in seconds, when some operations are done."""
    with tf.control_dependencies(list(after)):
        if not is_op_determinism_enabled():
            return tf.timestamp()
        return tf.ensure_shape(tf.numpy_function(_time, [], tf.float64), [])  # TensorFlow refuses tf.timestamp then


def _time() -> np.float64:
    return np.float64(time.time())


def failpoint(name: str, step: tf.Tensor, after: Sequence[Any] = ()) -> list[tf.Operation]:
    """Returns the operation of the default v1 graph that reaches a failpoint after some others; empty if it is not set.

    Args:
        step: [] of an integer type, the global step.
    """
    if not failpoints.is_set(name):
        return []
    with tf.control_dependencies(list(after)), tf.device("/cpu:0"):  # of the task that an enclosing scope names
        reach = v1.py_func(
            lambda at: failpoints.reach(name, int(at)), [step], [], stateful=True, name=f"failpoint/{name}"
        )
    return [reach]


def run_traced(session: Any, fetches: Any, feeds: dict[Any, Any]) -> tuple[Any, Executed]:
    """Returns the fetched values, and the graph that was executed for them."""
    options, metadata = v1.RunOptions(output_partition_graphs=True), v1.RunMetadata()
    fetched = session.run(fetches, feeds, options=options, run_metadata=metadata)
    return fetched, executed(metadata, session.graph.as_graph_def().library)
