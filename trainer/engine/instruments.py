"""Time stamps inside the graph of a step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf


class GraphClock:
    """Stamps of one step: Unix time, [] float64 seconds. Where no profile is wanted it adds nothing to the graph."""

    def __init__(self, *, is_wanted: bool) -> None:
        self._is_wanted = is_wanted
        self._ends: dict[str, Any] = {}
        self._arrived: dict[str, tf.Tensor] = {}

    @property
    def fetches(self) -> list[Any]:
        """What to fetch besides: the `ends` and `arrived` of `Stamps`; or nothing."""
        return [self._ends, self._arrived] if self._is_wanted else []

    def end(self, phase: str, after: Sequence[Any], *, on: str | None = None) -> list[tf.Tensor]:
        """Ends a phase when all that is given is there; returns what is to wait for the stamp, to come after it.

        Args:
            on: the task whose device is the current one, where that is another; once for each of its shards.
        """
        if not self._is_wanted:
            return []
        at = _now(after)
        if on is None:
            self._ends[phase] = at
        else:
            by_shard = self._ends.setdefault(phase, {})
            by_shard[f"{on}/{len(by_shard)}" if on in by_shard else on] = at
        return [at]

    def end_at(self, phase: str, at: tf.Tensor) -> None:
        """Ends a phase at a time that the graph measures anyway."""
        self._ends[phase] = at

    def arrive(self, worker: str, after: Sequence[Any]) -> list[tf.Tensor]:
        """Tells when the gradient of a worker is here; returns what is to wait for the stamp."""
        if not self._is_wanted:
            return []
        self._arrived[worker] = _now(after)
        return [self._arrived[worker]]


def _now(after: Sequence[Any]) -> tf.Tensor:
    with tf.control_dependencies(list(after)):
        return tf.timestamp()
