"""Sends rows in messages, if hosts and workers share no memory, or workers do not wait for each other.

    worker  pushes gradients of rows behind its vector, and the places that its next step needs (payloads.py)
    host    updates; takes copies of the rows at these places; gives them with the token

So rows need no separate messages. Only rows that no push has requested get their own: those of a worker's first
step, of evaluations, and all that changed since a checkpoint.

Under sync a host may be one update past the step that it is asked for, and then restores what that has changed.
Otherwise a worker gets each host's rows as of its token: the host copies them between two updates.
"""

import math
import secrets
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from trainer.engine.devices import device_of
from trainer.engine.queues import UNBOUNDED
from trainer.engine.tables.host import TableHost
from trainer.engine.tables.memory import NO_TAG, BlockMemory, Pushed, cuts_of
from trainer.engine.tables.payloads import PUSH, ROWS, Payloads, Places
from trainer.engine.tables.touches import Derived, Touches
from trainer.engine.tables.worker import ChangedQuery, RowQuery, Tables, by_block, tensors_of
from trainer.plan.layout import Shard
from trainer.plan.tables import slot_dtype, slot_width

v1 = tf.compat.v1

# What is asked for: the rows at places; all rows that changed after a step, as `TableHost.changed` has them; nothing,
# but that no more will be asked about the state that was held.
READ, CHANGED, RELEASE = range(3)


class RowServer:
    """Implements the host's side of the exchange of rows."""

    def __init__(self, tables: TableHost, shard: Shard, pushes: Sequence[range], payloads: Payloads) -> None:
        """Adds the answers to questions to the graph of the host.

        Args:
            pushes: by worker, the numbers of the vectors that it pushes at once.
        """
        self._tables, self._host, self._payloads, self._pushes = tables, shard.index, payloads, pushes
        self._pushed: dict[int, list[Pushed]] = {}  # by push, of each block: what the next update may take
        self._asked: dict[int, Places] = {}  # by worker: what it needs with its next token
        worker, what, tag, ticket, places = _asks(shard).dequeue()
        answer = tf.numpy_function(self._answer, [what, tag, places], tf.string)
        answer.set_shape([])

        def give(queue: Any) -> Any:
            return lambda: tf.group(queue.enqueue([ticket, answer]))

        queues = [_answers(shard, number) for number, _ in enumerate(pushes)]
        self._serve = tf.switch_case(tf.reshape(worker, []), [give(queue) for queue in queues])

    def serve(self, session: Any) -> None:
        """Answers questions until the session is closed."""
        answer_one = session.make_callable(self._serve)
        while True:
            answer_one()

    def take(self, worker: int, payload: tf.Tensor, *, counts: tf.Tensor | bool = True) -> tf.Operation:
        """Takes a worker's pushes behind its vectors; nothing unless they count, [] bool."""

        def take(payload: np.ndarray, counts: np.ndarray) -> None:
            if counts:
                received = self._payloads.receive(PUSH, worker, self._host, payload)
                pushed, self._asked[worker] = self._payloads.read_push(received)
                self._pushed |= zip(self._pushes[worker], pushed, strict=True)

        return tf.numpy_function(take, [payload, counts], [])

    def pushed(self, push: int) -> list[Pushed]:
        """Returns the last push with this number that `take` took, by block."""
        return self._pushed[push]

    def rows_for(self, worker: int) -> tf.Tensor:
        """Returns [n] the rows that a worker's last push requested, to send with a token; empty if none did."""

        def copied() -> np.ndarray:
            asked = self._asked.get(worker, ())
            rows = [block.values(places, NO_TAG) for block, places in self._by_block(asked)]
            return self._payloads.send(ROWS, worker, self._host, self._payloads.write_rows(asked, rows))

        return tf.ensure_shape(tf.numpy_function(copied, [], tf.as_dtype(self._payloads.numbers)), [None])

    def _answer(self, what: np.ndarray, tag: np.ndarray, question: bytes) -> bytes:
        if what == RELEASE:
            self._tables.release()
            return b""
        if what == CHANGED:
            parts: list[Any] = []
            for places, values, saved in self._tables.changed(int(tag)):
                parts += [np.int64(len(places)), places.astype(np.int64), values, *saved.values()]
            return b"".join(one.tobytes() for one in parts)
        exact = self._payloads.exact()
        _, asked = exact.read_push(np.frombuffer(_bytes(question), np.uint8))
        with self._tables.lock:  # so that no row is half of an update
            rows = [block.read(places, int(tag)) for block, places in self._by_block(asked)]
            return exact.write_rows(asked, rows).tobytes()

    def _by_block(self, asked: Places) -> Iterator[tuple[BlockMemory, np.ndarray]]:
        return ((block, own) for replica in asked for block, own in zip(self._tables.memory, replica, strict=True))


class SentTables(Tables):
    """Implements a worker's side, for tables that other tasks hold."""

    def __init__(
        self, payloads: Payloads, slots: Sequence[str], shards: Sequence[Shard], touches: Touches, *, worker: int
    ) -> None:
        """Takes the number of the worker; adds nothing to the graph yet."""
        self._payloads, self._slots, self._shards, self.touches = payloads, slots, shards, touches
        self._worker, self._each = worker, len(payloads.blocks)
        self.announce = touches.places

    def read(self, derived: Derived) -> list[tf.Tensor]:
        distinct = list(self.touches.places(derived))
        questions = tensors_of(lambda *places: self._questions([places]), distinct, [tf.string] * len(self._shards))
        answers = self._ask(READ, tf.constant(NO_TAG, tf.int64), questions)

        def rows(*inputs: Any) -> list[np.ndarray]:
            sent = [_bytes(one) for one in inputs[self._each :]]
            return self._exact_rows(sent, [inputs[: self._each]])

        return self._given([derived], tensors_of(rows, [*distinct, *answers], [tf.float32] * self._each))[0]

    def rows_of_step(
        self, derived: Sequence[Derived], tag: tf.Tensor, payloads: Sequence[tf.Tensor]
    ) -> list[list[tf.Tensor]]:
        distinct = [places for one in derived for places in self.touches.places(one)]

        def rows(*inputs: np.ndarray) -> list[np.ndarray]:
            sent = [
                self._payloads.receive(ROWS, self._worker, host, one)
                for host, one in enumerate(inputs[len(distinct) :])
            ]
            return self._payloads.read_rows(sent, self._by_replica(inputs[: len(distinct)]))

        return self._given(derived, tensors_of(rows, [*distinct, *payloads], [tf.float32] * len(distinct)))

    def leave(
        self, sums: Sequence[tf.Tensor], upcoming: Sequence[Any], scale: tf.Tensor | None = None
    ) -> list[tf.Tensor | tf.Operation]:
        next_places = [one for replica in upcoming for one in replica]

        def write(scale: np.ndarray, *flat: np.ndarray) -> list[np.ndarray]:
            pushed = list(zip(*by_block(flat[: len(sums)], self._each), strict=True))
            if scale != 1:
                pushed = [tuple((places, rows * scale) for places, rows in of_blocks) for of_blocks in pushed]
            written = self._payloads.write_push(pushed, self._by_replica(flat[len(sums) :]))
            return [self._payloads.send(PUSH, self._worker, host, one) for host, one in enumerate(written)]

        kinds = [tf.as_dtype(self._payloads.numbers)] * len(self._shards)
        written = tensors_of(write, [1.0 if scale is None else scale, *sums, *next_places], kinds)
        return [tf.ensure_shape(one, [None]) for one in written]

    def split(self, messages: Sequence[tf.Tensor], sizes: Sequence[int]) -> tuple[list[tf.Tensor], list[tf.Tensor]]:
        cut = [cut_message(message, size) for message, size in zip(messages, sizes, strict=True)]
        return [vector for vector, _ in cut], [rows for _, rows in cut]

    def join(self, messages: Sequence[tf.Tensor], left: Sequence[Any]) -> list[tf.Tensor]:
        return [tf.concat(parts, 0) for parts in zip(messages, left, strict=True)]

    def query(self) -> RowQuery:
        tag, questions = v1.placeholder(tf.int64, []), [v1.placeholder(tf.string, []) for _ in self._shards]
        return RowQuery(tag, questions, self._ask(READ, tag, questions))

    def first_payloads(self, session: Any, question: RowQuery, places: Places, tag: int) -> list[np.ndarray]:
        """Returns what each host would have sent with its token if a push had requested these places.

        Args:
            tag: of the step; NO_TAG: the current rows.
        """
        feeds = dict(zip(question.questions, self._questions(places), strict=True))
        rows = self._exact_rows(session.run(question.answers, {question.tag: tag, **feeds}), places)
        messages = []
        for host in range(len(self._shards)):
            own_places, own_rows = [], []
            for number, (one, at) in enumerate(zip(rows, [at for replica in places for at in replica], strict=True)):
                cut = slice(*cuts_of(at, self._payloads.blocks[number % self._each])[host : host + 2])
                own_places.append(at[cut])
                own_rows.append(one[cut])
            written = self._payloads.write_rows([own_places], own_rows)
            messages.append(self._payloads.send(ROWS, self._worker, host, written))
        return messages

    def changes(self) -> ChangedQuery:
        """Adds the requests for changed rows, whose answers `read_changed` reads, and their release by hosts."""
        step, nothing = v1.placeholder(tf.int64, []), [tf.constant("")] * len(self._shards)
        answers = self._ask(CHANGED, step, nothing)
        return ChangedQuery(step, answers, self._ask(RELEASE, tf.constant(NO_TAG, tf.int64), nothing))

    def read_changed(self, answers: Sequence[bytes]) -> list[tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]]:
        """Returns (places, values, what else is saved of them) of each block, of all hosts."""
        at, found = [0] * len(answers), []

        def take(host: int, dtype: Any, *shape: int) -> np.ndarray:
            array = np.frombuffer(answers[host], dtype, math.prod(shape), at[host]).reshape(shape)
            at[host] += array.nbytes
            return array

        for block in self._payloads.blocks:
            parts, names = [], block.saved(self._slots)
            kinds = [("float32", block.width), *((slot_dtype(name), slot_width(name, block.width)) for name in names)]
            for host in range(len(answers)):
                count = int(take(host, np.int64, 1)[0])
                parts.append([take(host, np.int64, count), *(take(host, kind, count, width) for kind, width in kinds)])
            places, values, *saved = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
            found.append((places, values, dict(zip(names, saved, strict=True))))
        return found

    def _ask(self, what: int, tag: tf.Tensor, questions: Sequence[tf.Tensor]) -> list[tf.Tensor]:
        """Returns the answers [] string of all hosts; those to other tickets are dropped."""
        ticket = tf.numpy_function(lambda: np.int64(secrets.randbelow(2**62)), [], tf.int64)
        ticket.set_shape([])
        answers = []
        for shard, question in zip(self._shards, questions, strict=True):
            queue = _answers(shard, self._worker)
            with tf.device(device_of(shard.host)):
                asked = _asks(shard).enqueue([self._worker, what, tag, ticket, question])
                with tf.control_dependencies([asked]):
                    first = queue.dequeue()
                answer = tf.while_loop(
                    lambda theirs, _: tf.not_equal(theirs, ticket), lambda *_, queue=queue: queue.dequeue(), first
                )
            answers.append(tf.identity(answer[1]))
        return answers

    def _questions(self, places: Places) -> list[bytes]:
        """Returns the question to each host: a push without gradients."""
        return [one.tobytes() for one in self._payloads.exact().write_push([], places)]

    def _exact_rows(self, sent: Sequence[bytes], places: Places) -> list[np.ndarray]:
        return self._payloads.exact().read_rows([np.frombuffer(one, np.uint8) for one in sent], places)

    def _by_replica(self, places: Sequence[np.ndarray]) -> list[Sequence[np.ndarray]]:
        return [places[at : at + self._each] for at in range(0, len(places), self._each)]

    def _given(self, derived: Sequence[Derived], rows: Sequence[tf.Tensor]) -> list[list[tf.Tensor]]:
        """Returns the rows for each lookup of each replica, from those of its distinct places by block."""
        given = []
        for number, one in enumerate(derived):
            own = zip(rows[number * self._each :], one.blocks, self._payloads.blocks, strict=False)
            found = [tf.gather(tf.ensure_shape(r, [None, block.width]), t.which) for r, t, block in own]
            given.append(self.touches.cut(one, found))
        return given


def cut_message(message: tf.Tensor, size: int) -> tuple[tf.Tensor, tf.Tensor]:
    """Returns the vector [size] in a message, and the rows of tables behind it."""
    return tf.ensure_shape(message[:size], [size]), message[size:]


def _asks(shard: Shard) -> Any:
    """Returns the questions to a host: worker, what, tag, ticket, places."""
    with tf.device(device_of(shard.host)):
        kinds = [tf.int32, tf.int32, tf.int64, tf.int64, tf.string]
        return v1.FIFOQueue(UNBOUNDED, kinds, shared_name=f"shard{shard.index}/asks")


def _answers(shard: Shard, worker: int) -> Any:
    """Returns the answers of a host to a worker: ticket, rows."""
    with tf.device(device_of(shard.host)):
        name = f"shard{shard.index}/answers{worker}"
        return v1.FIFOQueue(UNBOUNDED, [tf.int64, tf.string], [[], []], shared_name=name)


def _bytes(message: Any) -> bytes:
    """Returns the bytes of a string argument: numpy would cut off trailing zeros."""
    return message if isinstance(message, bytes) else bytes(message.item())
