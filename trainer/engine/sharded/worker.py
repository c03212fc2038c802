"""Implements a worker's side of training with shard hosts: it loads them, steps, snapshots, and leaves.

The batches of a worker follow the global step under sync and backup. Under async they follow its own steps, because
it is unknown which global step a push will make.
"""

import contextlib
import logging
import secrets
import time
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import tensorflow as tf

from trainer.engine.session_engine import SessionEngine
from trainer.engine.sharded.prefetch import Prefetch
from trainer.engine.sharded.rejoin import ShardState
from trainer.engine.sharded.snapshot_graph import SnapshotGraph, build_snapshot
from trainer.engine.sharded.staleness import Table
from trainer.engine.sharded.worker_graph import LoadGraph, WorkerSpec, build_graph, build_load
from trainer.engine.step_result import StepResult
from trainer.engine.tables.memory import NO_TAG
from trainer.engine.tables.messages import SentTables
from trainer.engine.tables.worker import ChangedQuery
from trainer.engine.vectors import packing
from trainer.engine.vectors.snapshot import Snapshot
from trainer.faults.exit_codes import IncompleteError

_log = logging.getLogger(__name__)

LOADED_POLL_SECS = 0.02
REPORT_EVERY_SECS = 10.0


class ShardedEngine(SessionEngine):
    """Pulls parameters from the shard hosts, pushes packed gradients."""

    def __init__(self, spec: WorkerSpec) -> None:
        """Builds the worker's graph."""
        self._spec, self._built = spec, build_graph(spec)
        self._batch_count = self._built.batch_count
        self.graph, self.replicas, self.scopes = self._built.graph, spec.replicas, spec.replicas[0].scopes
        self._requests, self._averaged = self._built.requests, spec.averaged
        self._step, self._gradients = self._built.step.fetches, self._built.step.gradients
        self._rejoin = self._built.rejoin
        self._prefetch: Prefetch | None = None
        self._ticket = secrets.randbelow(2**30)  # unlike those of a predecessor
        self._needs_place = False  # before the next step
        self._next_places: Any = None  # that the first step needs rows of, where rows are sent
        if spec.worker == 0:  # the chief needs them; added now, because it takes longer once the graph runs
            _ = self._load, self._snapshot, self._changed

    def connect(self, target: str, session_config: Any) -> None:
        super().connect(target, session_config)
        if self._built.prefetch:
            self._prefetch = Prefetch.of(self._built.prefetch, self.session)

    def prepare(self) -> None:
        """Makes what the first step of a stand-in needs, so that it takes less time."""
        self._rejoin.prepare(self.session)

    def load(self, snapshot: Snapshot, *, generation: int) -> None:
        feeds: dict[Any, Any] = {}
        for shard, fed in zip(self._spec.shards, self._load.feeds, strict=True):
            values: list[Any] = snapshot.to_flats(shard, self._spec.slots, generation=generation)
            feeds |= zip(fed, [*values, snapshot.tables], strict=True)
        self.session.run(self._load.loads, feeds)

    def held(self) -> int:
        return _generation(self._rejoin.read_states(self.session))

    def has_ended(self, steps: int) -> bool:
        """Whether no step is left: every shard has made so many, or the first has seen all replicas stop."""
        now = [state.now for state in self._rejoin.read_states(self.session)]
        return now[0].is_last or all(one.step >= steps for one in now)

    def start(self) -> int:
        states = self._wait_until_loaded()
        self.generation = _generation(states)
        if self._spec.strategy.waits_for_all:
            step, self.missed = self._rejoin.start(self.session, states)
        else:
            self._take_place()
            step = self.peek().step
        self._first_tag = self.generation * packing.GENERATION_STRIDE + step
        first = step // self._spec.workers if self._spec.strategy.waits_for_one else step  # of this worker's own steps
        for batches in self._built.batches:
            self.session.run(batches.initializer, batches.feed_from(first))
        if self._built.query:
            self._next_places = self.session.run([batches.upcoming for batches in self._built.batches])
        return step

    def _take_step(self, *, stop: bool, reductions: int, fetch_gradients: bool) -> StepResult:
        if self._needs_place:
            self._take_place()
        if self._rejoin.is_due or self._next_places is not None:
            return self._first_step(self._asking(stop, reductions), fetch_gradients=fetch_gradients)
        if self._prefetch is None:
            return super()._take_step(stop=stop, reductions=reductions, fetch_gradients=fetch_gradients)
        self._prefetch.start()
        try:
            result = super()._take_step(stop=stop, reductions=reductions, fetch_gradients=fetch_gradients)
        except tf.errors.OutOfRangeError:
            self._prefetch.check()
            raise
        self._prefetch.use()
        return result

    def peek(self) -> StepResult:
        self._wait_for_prefetch()
        return StepResult.read(*self.session.run(self._built.peek))

    def snapshot(self) -> Snapshot:
        self._wait_for_prefetch()
        self._ticket += 1
        read = self.session.run(self._snapshot, {self._built.ticket: self._ticket})
        # A snapshot takes time, and so does its use: under async and backup others continue, and the vector that this
        # worker's token belongs to stays as it is if it is in shared memory.
        self._needs_place = self._spec.wire.is_per_worker
        return Snapshot.from_flats(min(int(step) for _, step in read.tags), self._spec.shards, read.flats, read.slots)

    def release(self) -> None:
        if self._changed is not None and not self._spec.strategy.waits_for_all:
            self.session.run(self._changed.release)

    def contributions(self) -> Table | None:
        """Returns the counts of the first shard."""
        table = self._built.contributions
        return None if table is None else np.asarray(self.session.run(table))

    def leave(self) -> None:
        """Says goodbye to every shard host in turn: the last goodbye ends a host, perhaps before it has answered."""
        for goodbye in self._built.goodbyes:
            with contextlib.suppress(tf.errors.UnavailableError):
                self.session.run(goodbye)

    def changed_rows(self, step: int) -> list[tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]]:
        """Returns (places, values, slots) of each block of tables: the rows changed after a step, from all hosts."""
        assert self._changed is not None
        assert isinstance(self._spec.tables, SentTables)
        answers = self.session.run(self._changed.answers, {self._changed.step: step})
        return self._spec.tables.read_changed(answers)

    @cached_property
    def _changed(self) -> ChangedQuery | None:
        """Asks for changed rows, if they are not in memory of this task."""
        with self.graph.as_default(), tf.device(self._spec.here):
            return self._spec.tables.changes()

    @cached_property
    def _load(self) -> LoadGraph:
        with self.graph.as_default():
            return build_load(self._built.links)

    @cached_property
    def _snapshot(self) -> SnapshotGraph:
        with self.graph.as_default():
            return build_snapshot(self._spec, self._built)

    def _wait_until_loaded(self) -> list[ShardState]:
        began = reported_at = time.monotonic()
        states = self._rejoin.read_states(self.session)
        while any(state.now.generation == 0 for state in states):
            if time.monotonic() - reported_at >= REPORT_EVERY_SECS:
                reported_at = time.monotonic()
                _log.info("has waited %.0f s for worker:0 to load the state", reported_at - began)
            time.sleep(LOADED_POLL_SECS)
            states = self._rejoin.read_states(self.session)
        return states

    def _first_step(self, asking: dict[Any, Any], *, fetch_gradients: bool) -> StepResult:
        """Makes the step with which a worker rejoins under sync, or any other whose rows were not requested ahead."""
        began = time.time()
        if self._rejoin.is_due:
            messages = self._spec.wire.feed(self._rejoin.pull(self.session), self._spec.shards)
        else:
            messages = self.session.run(self._built.step.messages)
        messages = [*messages] if self._next_places is None else self._with_rows(messages)
        *others, (pushes, *stamps) = self._step
        if stamps:
            ends, arrived = stamps
            stamps = [{phase: at for phase, at in ends.items() if phase != "wait"}, arrived]  # there is no token
        feeds = {**asking, **dict(zip(self._built.step.messages, messages, strict=True))}
        outputs = self._run([*others, [pushes, *stamps]], feeds, fetch_gradients=fetch_gradients)
        return self._result(outputs, began, fetch_gradients=fetch_gradients)

    def _with_rows(self, messages: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Returns messages with the rows of the first step behind their vectors."""
        spec, places, self._next_places = self._spec, self._next_places, None
        assert isinstance(spec.tables, SentTables)
        assert self._built.query is not None
        tag = self._first_tag if spec.strategy.waits_for_all else NO_TAG
        payloads = spec.tables.first_payloads(self.session, self._built.query, places, tag)
        sizes = [spec.wire.shape(shard)[0] for shard in spec.shards]
        return [
            np.concatenate([message[:size], rows])
            for message, size, rows in zip(messages, sizes, payloads, strict=True)
        ]

    def _take_place(self) -> None:
        """Rejoins an async or backup run: discards this worker's unannounced pushes and takes a new token."""
        self._needs_place = False
        self._ticket += 1
        self.session.run(self._built.join, {self._built.ticket: self._ticket})

    def _wait_for_prefetch(self) -> None:
        """Waits until the prefetched tokens of the next step have arrived: no shard changes after that."""
        if self._prefetch and self._prefetch.is_started:
            self._prefetch.wait()
        elif self._built.prefetch:
            self.session.run(self._built.prefetch.settled)

    def _name(self, packed: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
        shards, (*vectors, divisor) = self._spec.shards, packed
        gradients = []
        for index, shard in enumerate(shards):
            of_spans = [self._spec.wire.trainable_in(vector, shard) for vector in vectors[index :: len(shards)]]
            gradients.append(np.sum(of_spans, 0) / divisor if len(of_spans) > 1 else of_spans[0] / divisor)
        return packing.join(zip((shard.trainable for shard in shards), gradients, strict=True))


def _generation(states: Sequence[ShardState]) -> int:
    generations = {state.now.generation for state in states}
    if len(generations) > 1:
        raise IncompleteError(f"the shard hosts hold different generations: {sorted(generations)}")
    return generations.pop()
