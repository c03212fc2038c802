"""What the engines that run a graph in a session share: its connection and its step."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import tensorflow as tf

from trainer.engine.instruments import run_traced
from trainer.engine.step_result import StepResult
from trainer.observe.placement.executed import Executed
from trainer.observe.profile.stamps import Stamps

v1 = tf.compat.v1


class SessionEngine:
    """Runs a step in one Session.run."""

    is_tracing = False  # the next step also leaves what ran where in `executed`
    executed: Executed | None = None
    variables: Mapping[str, str] = MappingProxyType({})  # those of a graph are among its operations
    generation: int
    missed: Sequence[StepResult] = ()  # a state of this process ends with it, so there is never one to find
    scopes: Mapping[str, str]
    graph: Any
    session: Any

    _stop: tf.Tensor  # [] float32; 0 unless it is fed
    _step: list[Any]  # [tags, metrics, time when vectors and batches were here, time when computed, [pushes, *stamps]]
    _gradients: Any  # packed

    def connect(self, target: str, session_config: Any) -> None:
        """Opens the session; the shard hosts, if any, must be up.

        Args:
            target: the task's own server; "" where there is none.
        """
        self.session = v1.Session(target, graph=self.graph, config=session_config)
        self._run_step = self.session.make_callable(self._step)  # without feeds, which cost time at each step

    def held(self) -> int:
        """The generation of the state that is there already; 0: none."""
        return 0

    def step(self, *, stop: bool = False, fetch_gradients: bool = False) -> StepResult:
        """Computes on the next batch and updates, or pushes; the metrics are those of the update before.

        Args:
            stop: asks all replicas to stop after the next step.
            fetch_gradients: also returns the mean gradient of this process's replicas.
        """
        began = time.time()
        fetches, feeds = [*self._step, *([self._gradients] if fetch_gradients else [])], {self._stop: float(stop)}
        if self.is_tracing:
            outputs, self.executed = run_traced(self.session, fetches, feeds)
            self.is_tracing = False
        elif stop or fetch_gradients:
            outputs = self.session.run(fetches, feeds if stop else None)
        else:
            outputs = self._run_step()
        return self._pulled(outputs, began, fetch_gradients=fetch_gradients)

    def _pulled(self, outputs: Sequence[Any], began: float, *, fetch_gradients: bool) -> StepResult:
        """From what a step fetched.

        Args:
            began: Unix time, seconds.
        """
        ended = time.time()
        tags, metrics, pulled_at, computed_at, (_, *stamps), *gradients = outputs
        pulled = StepResult.read(tags, metrics, wait_secs=pulled_at - began, compute_secs=computed_at - pulled_at)
        if stamps:
            pulled = pulled._replace(stamps=Stamps(began, ended, *stamps))
        return pulled._replace(gradients=self._name(gradients[0])) if fetch_gradients else pulled

    def _name(self, packed: Any) -> dict[str, np.ndarray]:
        """Gradients by path."""
        raise NotImplementedError
