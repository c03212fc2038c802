"""Rows as messages, where hosts and workers share no memory.

    worker  asks each host for the rows of its batch, by places; computes; pushes places and gradients with its tags
    host    answers, beside its updates; takes the rows of all workers with their vectors, and updates as in memory

An answer is for a ticket, and pushed rows are of a tag; others, which a process that died has left behind, are dropped.
Everything else is as in memory (memory.py): a host that is one update past the step that it is asked for
puts back what that update has changed.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from trainer.engine.devices import device_of
from trainer.engine.tables.memory import BlockMemory, Pushed, sum_pushed
from trainer.engine.tables.touches import Derived, Touches
from trainer.engine.tables.worker import NO_TAG
from trainer.plan.layout import Shard
from trainer.plan.tables import Block, slot_width

v1 = tf.compat.v1

READ, CHANGED = range(2)  # what is asked for: the rows at places; all rows that changed after a step
SPARE = 8  # messages that a queue has room for: of processes that died


class Queues:
    """The queues of a host for rows; the same ones in every process."""

    def __init__(self, shard: Shard, workers: int) -> None:
        with tf.device(device_of(shard.host)):
            ask = [tf.int32, tf.int32, tf.int64, tf.int64, tf.string]  # worker, what, tag, ticket, places
            self.asks = v1.FIFOQueue(4 * workers + SPARE, ask, shared_name=f"shard{shard.index}/asks")
            kinds = [tf.int64, tf.string]
            self.answers, self.pushes = (
                [
                    v1.FIFOQueue(SPARE, kinds, [[], []], shared_name=f"shard{shard.index}/{name}{w}")
                    for w in range(workers)
                ]
                for name in ("answers", "rows")
            )


class RowServer:
    """Answers what workers ask of a host, and takes what they push."""

    def __init__(self, memory: Sequence[BlockMemory], shard: Shard, workers: int) -> None:
        """Adds itself to the graph of the host."""
        self._memory, self._host, self._queues = memory, shard.index, Queues(shard, workers)
        worker, what, tag, ticket, places = self._queues.asks.dequeue()
        answer = tf.numpy_function(self._answer, [what, tag, places], tf.string)
        answer.set_shape([])

        def give(queue: Any) -> Any:
            return lambda: tf.group(queue.enqueue([ticket, answer]))

        self._serve = tf.switch_case(tf.reshape(worker, []), [give(queue) for queue in self._queues.answers])

    def serve(self, session: Any) -> None:
        """Answers until the session is closed."""
        answer_one = session.make_callable(self._serve)
        while True:
            answer_one()

    def take(self, tag: tf.Tensor) -> tf.Operation:
        """Takes the rows that every worker has pushed for the step with this tag [] int64."""
        taken = []
        for queue in self._queues.pushes:
            of_step = tf.while_loop(
                lambda theirs, _: tf.not_equal(theirs, tag), lambda *_, q=queue: q.dequeue(), queue.dequeue()
            )
            taken.append(of_step[1])
        return tf.numpy_function(self._write, taken, [])

    def _write(self, *messages: bytes) -> None:
        for worker, message in enumerate(messages):
            for block, (places, rows) in zip(self._memory, _pushed(message, self._memory), strict=True):
                block.write_push(worker, places, rows)

    def _answer(self, what: np.ndarray, tag: np.ndarray, message: bytes) -> bytes:
        if what == CHANGED:
            return b"".join(self._changed(block, int(tag)) for block in self._memory)
        reader = _Reader(message)
        return b"".join(block.read(reader.places(), int(tag)).tobytes() for block in self._memory)

    def _changed(self, block: BlockMemory, step: int) -> bytes:
        first = self._host * block.block.held
        places = first + np.flatnonzero(block.updated[first : first + block.block.held] > step)
        arrays = [block.rows, *block.slots.values()]
        return _listed(places) + b"".join(np.take(one, places, axis=0).tobytes() for one in arrays)


class SentTables:
    """Adds to a worker's graph what a step does with tables of other tasks; the methods are those of `TableWorker`."""

    def __init__(
        self,
        blocks: Sequence[Block],
        slots: Sequence[str],
        shards: Sequence[Shard],
        touches: Touches,
        *,
        worker: int,
        workers: int,
    ) -> None:
        self._blocks, self._slots, self._shards, self.touches = blocks, slots, shards, touches
        self._worker, self._workers = worker, workers

    def read(self, derived: Derived, tag: tf.Tensor) -> list[tf.Tensor]:
        """What each lookup is given, of the step with this tag [] int64."""
        distinct = [touched.distinct for touched in derived.blocks]
        tag = tf.convert_to_tensor(tag, tf.int64)
        ticket = tf.cond(tf.equal(tag, NO_TAG), self._new_ticket, lambda: tag)
        messages = tf.numpy_function(self._by_host, distinct, [tf.string] * len(self._shards))
        messages = messages if isinstance(messages, list) else [messages]
        answers = self._ask(READ, tag, ticket, [tf.reshape(one, []) for one in messages])
        found = tf.numpy_function(self._rows, [*distinct, *answers], [tf.float32] * len(self._blocks))
        found = found if isinstance(found, list) else [found]
        rows = []
        for block, touched, values in zip(self._blocks, derived.blocks, found, strict=True):
            rows.append(tf.gather(tf.ensure_shape(values, [None, block.width]), touched.which))
        return self.touches.cut(derived, rows)

    def leave(
        self, derived: Sequence[Derived], gradients: Sequence[Sequence[tf.Tensor]], tag: tf.Tensor
    ) -> list[tf.Operation]:
        """Pushes the mean over this worker's replicas to the hosts; arguments as of `TableWorker.leave`."""
        flat = []
        for one, of_lookups in zip(derived, gradients, strict=True):
            sums = self.touches.sum_gradients(one, of_lookups)
            for touched, total in zip(one.blocks, sums, strict=True):
                flat += [touched.distinct, total]

        def write(*flat: np.ndarray) -> list[bytes]:
            pairs = list(zip(flat[::2], flat[1::2], strict=True))
            of_hosts = [b""] * len(self._shards)
            for number, block in enumerate(self._blocks):
                places, rows = sum_pushed(pairs[number :: len(self._blocks)])
                rows = rows / np.float32(len(derived)) if len(derived) > 1 else rows
                cuts = np.searchsorted(places, np.arange(block.hosts + 1) * block.held)
                for host in range(block.hosts):
                    own = slice(cuts[host], cuts[host + 1])
                    of_hosts[host] += _listed(places[own]) + rows[own].tobytes()
            return of_hosts

        messages = tf.numpy_function(write, flat, [tf.string] * len(self._shards))
        messages = messages if isinstance(messages, list) else [messages]
        pushed = []
        for shard, message in zip(self._shards, messages, strict=True):
            queue = Queues(shard, self._workers).pushes[self._worker]
            with tf.device(device_of(shard.host)):
                pushed.append(queue.enqueue([tag, tf.reshape(message, [])]))
        return pushed

    def changed(self, step: tf.Tensor) -> list[tf.Tensor]:
        """What each host answers about all rows that changed after a step [] int64; `read_changed` reads it."""
        return self._ask(CHANGED, step, self._new_ticket(), [tf.constant("")] * len(self._shards))

    def read_changed(self, answers: Sequence[bytes]) -> list[tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]]:
        """(places, values, slots) of each block, of all hosts."""
        readers, found = [_Reader(one) for one in answers], []
        for block in self._blocks:
            parts = []
            for reader in readers:
                places = reader.places()
                widths = [block.width, *(slot_width(slot, block.width) for slot in self._slots)]
                parts.append([places, *(reader.floats(len(places), width) for width in widths)])
            places, values, *slots = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
            found.append((places, values, dict(zip(self._slots, slots, strict=True))))
        return found

    def _ask(self, what: int, tag: tf.Tensor, ticket: tf.Tensor, messages: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        answers = []
        for shard, message in zip(self._shards, messages, strict=True):
            queues = Queues(shard, self._workers)
            with tf.device(device_of(shard.host)):
                asked = queues.asks.enqueue([self._worker, what, tag, ticket, message])
                queue = queues.answers[self._worker]
                with tf.control_dependencies([asked]):
                    first = queue.dequeue()
                answer = tf.while_loop(
                    lambda theirs, _: tf.not_equal(theirs, ticket), lambda *_, q=queue: q.dequeue(), first
                )
            answers.append(tf.identity(answer[1]))
        return answers

    def _new_ticket(self) -> tf.Tensor:
        """One that no step has."""
        ticket = tf.numpy_function(lambda: np.int64(-10 - secrets.randbelow(2**62)), [], tf.int64)
        return tf.ensure_shape(ticket, [])

    def _by_host(self, *distinct: np.ndarray) -> list[bytes]:
        of_hosts = [b""] * len(self._shards)
        for block, places in zip(self._blocks, distinct, strict=True):
            cuts = np.searchsorted(places, np.arange(block.hosts + 1) * block.held)
            for host in range(block.hosts):
                of_hosts[host] += _listed(places[cuts[host] : cuts[host + 1]])
        return of_hosts

    def _rows(self, *inputs: Any) -> list[np.ndarray]:
        distinct, readers = inputs[: len(self._blocks)], [_Reader(one) for one in inputs[len(self._blocks) :]]
        found = []
        for block, places in zip(self._blocks, distinct, strict=True):
            cuts = np.searchsorted(places, np.arange(block.hosts + 1) * block.held)
            parts = [
                reader.floats(int(end - begin), block.width)
                for reader, begin, end in zip(readers, cuts, cuts[1:], strict=False)
            ]
            found.append(np.concatenate(parts))
        return found


class _Reader:
    """Reads the arrays of a message, one after the other."""

    def __init__(self, message: Any) -> None:
        self._bytes = message if isinstance(message, bytes) else np.asarray(message).item()
        self._at = 0

    def places(self) -> np.ndarray:
        (count,) = self._next("<i8", 1)
        return self._next("<i8", int(count))

    def floats(self, count: int, width: int) -> np.ndarray:
        return self._next("<f4", count * width).reshape(count, width)

    def _next(self, dtype: str, count: int) -> np.ndarray:
        array = np.frombuffer(self._bytes, dtype, count, self._at)
        self._at += array.nbytes
        return array


def _listed(places: np.ndarray) -> bytes:
    return np.int64(len(places)).tobytes() + np.ascontiguousarray(places, "<i8").tobytes()


def _pushed(message: bytes, memory: Sequence[BlockMemory]) -> list[Pushed]:
    reader, found = _Reader(message), []
    for block in memory:
        places = reader.places()
        found.append((places, reader.floats(len(places), block.block.width)))
    return found
