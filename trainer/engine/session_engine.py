"""The base of engines that run a graph in a session: its connection and its step."""

import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import tensorflow as tf

from trainer.engine.compute import Replica, Requests
from trainer.engine.data_wait import BatchCount, DataWait
from trainer.engine.instruments import run_traced
from trainer.engine.step_result import StepResult
from trainer.observe.placement.executed import Executed
from trainer.observe.profile.stamps import Stamps

v1 = tf.compat.v1


class SessionEngine:
    """Runs a step in one Session.run; the methods are those of `engine.Engine`."""

    is_tracing = False
    executed: Executed | None = None
    variables: Mapping[str, str] = MappingProxyType({})  # a graph's variables are among its operations
    generation: int
    missed: Sequence[StepResult] = ()
    scopes: Mapping[str, str]
    graph: Any
    session: Any
    replicas: Sequence[Replica]

    _requests: Requests
    _averaged: float = 1  # what an update divides the requests of this process by
    _step: list[Any]  # [tags, metrics, time when vectors and batches were here, time when computed, [pushes, *stamps]]
    _gradients: Any  # packed
    _batch_count: BatchCount

    def connect(self, target: str, session_config: Any) -> None:
        self.session = v1.Session(target, graph=self.graph, config=session_config)
        self.session.run(self._batch_count.initializer)
        self._data_wait = DataWait(lambda: int(self.session.run(self._batch_count.read)))
        for replica in self.replicas:
            replica.frozen.load(self.session)
        self._run_step = self.session.make_callable(self._step)  # without feeds, which cost time at each step

    def held(self) -> int:
        """Returns 0: the state of this process ends with it."""
        return 0

    def release(self) -> None:
        """Does nothing: a snapshot is complete."""

    def step(self, *, stop: bool = False, reductions: int = 0, fetch_gradients: bool = False) -> StepResult:
        self._data_wait.begin_step()
        result = self._take_step(stop=stop, reductions=reductions, fetch_gradients=fetch_gradients)
        self._data_wait.end_step()
        return result

    def data_wait_secs(self) -> float:
        return self._data_wait.secs()

    def _take_step(self, *, stop: bool, reductions: int, fetch_gradients: bool) -> StepResult:
        began = time.time()
        if self.is_tracing or stop or reductions or fetch_gradients:
            outputs = self._run(self._step, self._asking(stop, reductions), fetch_gradients=fetch_gradients)
        else:
            outputs = self._run_step()
        return self._result(outputs, began, fetch_gradients=fetch_gradients)

    def _asking(self, stop: bool, reductions: int) -> dict[Any, Any]:
        """Returns the feeds of a step with requests to the shard hosts."""
        return {self._requests.stop: float(stop), self._requests.reductions: float(reductions * self._averaged)}

    def _run(self, step: list[Any], feeds: dict[Any, Any], *, fetch_gradients: bool) -> Sequence[Any]:
        fetches = [*step, *([self._gradients] if fetch_gradients else [])]
        if not self.is_tracing:
            return self.session.run(fetches, feeds)
        outputs, self.executed = run_traced(self.session, fetches, feeds)
        self.is_tracing = False
        return outputs

    def _result(self, outputs: Sequence[Any], began: float, *, fetch_gradients: bool) -> StepResult:
        """Reads the values that a step fetched; `began` is its Unix time."""
        ended = time.time()
        tags, metrics, pulled_at, computed_at, (_, *stamps), *gradients = outputs
        result = StepResult.read(tags, metrics, wait_secs=pulled_at - began, compute_secs=computed_at - pulled_at)
        if stamps:
            result = result._replace(stamps=Stamps(began, ended, *stamps))
        return result._replace(gradients=self._name(gradients[0])) if fetch_gradients else result

    def _name(self, packed: Any) -> dict[str, np.ndarray]:
        """Returns gradients by path."""
        raise NotImplementedError
