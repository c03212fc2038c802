"""Computes metrics from the sums of what batches added to their variables."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from trainer.workload.objective import Objective

v1 = tf.compat.v1


class MetricResults:
    """Computes metrics between steps, in a small separate graph and session, on one thread of the CPU."""

    def __init__(self, objective: Objective) -> None:
        """Builds nothing yet.

        Args:
            objective: one that has computed a batch.
        """
        self._objective = objective
        self._session: Any = None

    def __call__(self, sums: Sequence[float] | np.ndarray) -> dict[str, float]:
        """Returns the metrics by name, in their order.

        Args:
            sums: [size] of the objective, or more: what follows is not read.
        """
        size = self._objective.size
        if size == 0:
            return {}
        if self._session is None:
            self._build(size)
        results = self._session.run(self._results, {self._sums: np.asarray(sums)[:size]})
        return {name: float(value) for name, value in results.items()}

    def _build(self, size: int) -> None:
        with tf.Graph().as_default() as graph, tf.device("/cpu:0"):
            self._sums = v1.placeholder(tf.float32, [size])
            with self._objective.in_graph():
                self._results = tf.function(self._objective.results, autograph=False)(self._sums)
        config = v1.ConfigProto(device_count={"GPU": 0}, inter_op_parallelism_threads=1, intra_op_parallelism_threads=1)
        self._session = v1.Session(graph=graph, config=config)
