"""What a step costs in messages, bytes, sessions and calls, exactly: counted in what TensorFlow ran, never timed.

Every session of a small cluster is traced, so that each Session.run leaves the tensors that it moved between tasks,
with their bytes as they were sent. `plan/traffic.py`, for a step, and the functions below, for an update, must name
every one of them, and no other. Whoever adds a fetch, a message or a call to a step changes a number here.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import grpc
import keras
import numpy as np
import pytest
import tensorflow as tf
from runs import wait_until
from small_clusters import BATCH, STEPS, Cluster, make_local, plain, with_everything, workload_of

from trainer.config.schema import OptimizerConfig, OptimizerName
from trainer.engine.sharded import worker_graph
from trainer.engine.sharded.host import ShardHost
from trainer.engine.sharded.worker import ShardedEngine
from trainer.plan import traffic
from trainer.plan.layout import Shard
from trainer.plan.plan import Plan
from trainer.plan.tables import SparsePattern
from trainer.plan.traffic import Message
from trainer.workload import lookups, tracing
from trainer.workload.compiling import Wanted, make_objective
from trainer.workload.data.arrays import from_arrays
from trainer.workload.workload import Workload

v1 = tf.compat.v1
pytestmark = pytest.mark.cluster

SIZES = {"1w": (0, 1), "1ps2w": (1, 2), "2ps2w": (2, 2), "2w": (0, 2)}
# TensorFlow's LoggingRequest(enable_rpc_logging=True, clear=True), which has no module in Python. What is recorded and
# never asked for is else thrown away when there is much of it.
LOG_AND_CLEAR = b"\x08\x01\x10\x01"
STEP_FETCHES = 4  # tags, metrics, and the times when the parameters and the gradients were here
STEP_FEEDS = 0  # except at a step that asks to stop
UPDATE_FETCHES = 2  # the step, and the time when every gradient was here
# Session.run calls of a host from one update to the next, as (tensors fetched, tensors fed), with one worker awaited.
UPDATE_CALLS = {
    "sync": [(UPDATE_FETCHES, 0)],
    "async": [(1, 0), (0, 2)],  # the next arrival; its update, which is fed a place if vectors are in shared memory
    "backup": [(1, 0), (0, 3)],
}
TAG_NBYTES = 8  # generation and step
ARRIVAL_NBYTES = 16  # a line of the order in which gradients arrived
FLOAT_NBYTES = 4


def of_update(plan: Plan, shard: Shard, *, is_clipped: bool) -> Iterator[Message]:
    """Yields what a shard's host sends for one update; its tokens are in its own queues, and cost nothing."""
    if not plan.has_shard_hosts or not is_clipped or plan.effective_strategy.waits_for_one:
        return
    for other in plan.shards:
        if other.host != shard.host:  # the squared norms of all parameters, for the norm of the whole
            yield Message(shard.host, other.host, TAG_NBYTES)
            yield Message(shard.host, other.host, FLOAT_NBYTES * len(shard.trainable))
            yield Message(other.host, shard.host, 0)


def of_arrival(plan: Plan) -> Iterator[Message]:
    """Yields what one gradient that arrives makes the first host of a quorum tell the others."""
    if plan.effective_strategy.waits_for_quorum:
        first, *others = plan.shards
        for other in others:
            yield Message(first.host, other.host, ARRIVAL_NBYTES)
            yield Message(other.host, first.host, 0)


class Call(NamedTuple):
    """One Session.run."""

    graph: Any
    fetched: int  # tensors that the client gets
    fed: int
    messages: Counter[Message]  # from task to task
    tasks: frozenset[str]  # that took part
    clients: frozenset[str]  # tasks that sent what was fetched, or got what was fed
    thread: int  # that called


class TracingSession(v1.Session):
    """Records in `calls` what each call moved; a callable runs as an ordinary call."""

    calls: list[Call]
    made: list[Any]

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.made.append(self)

    def make_callable(self, fetches: Any, feed_list: Sequence[Any] | None = None, **_: Any) -> Callable[..., Any]:
        feeds = list(feed_list or [])
        return lambda *values: self.run(fetches, dict(zip(feeds, values, strict=True)))

    def run(self, fetches: Any, feed_dict: Any = None, **_: Any) -> Any:
        # In one process nothing is sent, and a trace would need the profiler, which can run only once at a time.
        level = v1.RunOptions.FULL_TRACE if self._target else v1.RunOptions.NO_TRACE
        options = v1.RunOptions(trace_level=level, output_partition_graphs=True)
        metadata = v1.RunMetadata()
        fetched = super().run(fetches, feed_dict, options=options, run_metadata=metadata)
        tensors = sum(isinstance(one, tf.Tensor) for one in tf.nest.flatten(fetches))
        nodes = [node for graph in metadata.partition_graphs for node in graph.node]
        ends = [node for node in nodes if node.op in ("_Send", "_Recv")]
        self.calls.append(
            Call(
                self.graph,
                tensors,
                len(feed_dict or {}),
                received(metadata),
                frozenset(task_of(node.device) for node in nodes),
                frozenset(task_of(node.device) for node in ends if node.attr["client_terminated"].b),
                threading.get_ident(),
            )
        )
        return fetched


@pytest.fixture(autouse=True)
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(v1, "Session", TracingSession)
    monkeypatch.setattr(TracingSession, "calls", [], raising=False)
    monkeypatch.setattr(TracingSession, "made", [], raising=False)


def task_of(device: str) -> str:
    match = re.search(r"/job:(\w+)/replica:0/task:(\d+)", device)
    assert match is not None, device
    return f"{match[1]}:{match[2]}"


def received(metadata: Any) -> Counter[Message]:
    """The messages between tasks, as TensorFlow's transport records them: bytes without those of the protocol."""
    messages: Counter[Message] = Counter()
    for device in metadata.step_stats.dev_stats:
        for node in device.node_stats:
            if node.node_name == "RecvTensor":
                sender, receiver = re.search(r" from (\S+) to (\S+)", node.timeline_label).groups()  # type: ignore[union-attr]
                nbytes = node.output[0].tensor_description.allocation_description.requested_bytes
                messages[Message(task_of(sender), task_of(receiver), nbytes)] += 1
    return messages


def record_messages(address: str) -> None:
    """Makes a task record the messages that it receives, until its process ends.

    TensorFlow keeps a count of who wants them recorded. A traced call adds one without waiting for the answer, and a
    new session takes one off: of so few, a call would now and then miss a message.
    """
    with grpc.insecure_channel(address) as channel:
        log = channel.unary_unary("/tensorflow.WorkerService/Logging")
        for _ in range(100):
            log(LOG_AND_CLEAR, timeout=60)


class Steps(NamedTuple):
    """The calls of a run: of each worker step by step, and of each shard's host from one update to the next."""

    plan: Plan
    workers: list[list[list[Call]]]
    hosts: list[list[list[Call]]]


@functools.cache
def train(size: str, build: Callable[[], Any] = plain, *, strategy: str = "sync", **options: Any) -> Steps:
    """Trains a small cluster to its end; several tests look at the same.

    Without what precedes a host's first update, and under sync without each worker's first step, which may be a rejoin.
    """
    ps, workers = SIZES[size]
    made = build() if build is workload_of_rows else build
    cluster = Cluster(made, ps=ps, workers=workers, strategy=strategy, **options)
    plan = Plan(size, strategy, STEPS, BATCH, cluster.tasks, cluster.shards, 96, (), options.get("quorum"))
    plan = dataclasses.replace(plan, wire=options.get("wire", "float32"))
    of_workers: list[list[list[Call]]] = [[] for _ in cluster.engines]
    of_hosts: list[list[list[Call]]] = [[] for _ in cluster.hosts]

    def calls_of(owner: Any) -> list[Call]:
        return [call for call in TracingSession.calls if call.graph is owner.graph]

    def serve(host: ShardHost) -> None:
        marks: list[int] = []  # calls at each update
        updates = of_hosts[host.shard.index]

        def on_update(step: int, waited: float) -> None:
            # Of this thread: another one waits for goodbyes, which may come before the last update has been traced.
            calls = [call for call in calls_of(host) if call.thread == threading.get_ident()]
            if marks:
                updates.append(calls[marks[-1] :])
            marks.append(len(calls))

        Cluster.serve(cluster, host, on_update)

    def work(engine: ShardedEngine) -> None:
        step, steps = engine.start(), of_workers[cluster.engines.index(engine)]
        while step < STEPS:
            before = len(calls_of(engine))
            step = engine.step().step + 1
            steps.append(calls_of(engine)[before:])
        engine.peek()
        engine.leave()
        if strategy == "sync":
            del steps[0]

    for task in cluster.tasks:
        record_messages(task.address)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cluster, "serve", serve)
        cluster.train([work] * workers)
        wait_until(lambda: all(len(updates) >= STEPS - 1 for updates in of_hosts))
    return Steps(plan, of_workers, of_hosts)


def check_steps(steps: Steps) -> None:
    """Every step of every worker moved what `traffic.of_step` says, in one call in which no other task takes part."""
    for index, calls in enumerate(steps.workers):
        me = f"worker:{index}"
        for call in one_each(calls):
            assert call.messages == Counter(traffic.of_step(steps.plan, me))
            assert (call.fetched, call.fed) == (STEP_FETCHES, STEP_FEEDS)
            assert call.tasks == {me, *(shard.host for shard in steps.plan.shards)}
            assert call.clients == {me}
    assert any(steps.workers)


def one_each(steps: Iterable[list[Call]]) -> list[Call]:
    for calls in steps:
        assert len(calls) == 1
    return [calls[0] for calls in steps]


def check_updates(steps: Steps, *, is_clipped: bool) -> None:
    """Every update of every shard moved what `traffic` says, in as many calls as its strategy needs."""
    for shard, updates in zip(steps.plan.shards, steps.hosts, strict=True):
        assert len(updates) == STEPS - 1
        joins = 0
        for calls in updates:
            moved = sum((call.messages for call in calls), Counter[Message]())
            expected = Counter(of_update(steps.plan, shard, is_clipped=is_clipped))
            if shard.index == 0:
                expected += Counter(of_arrival(steps.plan))
            assert moved == expected
            *others, (fetched, fed) = UPDATE_CALLS[steps.plan.strategy]
            fed += steps.plan.wire == "memory" and steps.plan.strategy != "sync"
            expected_calls = [*others, (fetched, fed)]
            assert [(call.fetched, call.fed) for call in calls[-len(expected_calls) :]] == expected_calls
            joins += (len(calls) - len(expected_calls)) / 2  # a worker that comes late: its arrival, and its token
            assert all(call.clients <= {shard.host} for call in calls)
        assert joins in ([0] if steps.plan.strategy == "sync" else [0, 1, 2])


@pytest.mark.long(but=["2ps2w-sync-None", "1ps2w-async-None"])
@pytest.mark.parametrize(
    ("size", "strategy", "clip_norm"),
    [
        ("1ps2w", "sync", None),
        ("2ps2w", "sync", None),
        ("2w", "sync", None),
        ("1ps2w", "sync", 1.0),
        ("2ps2w", "sync", 1.0),
        ("2w", "sync", 1.0),
        ("1ps2w", "async", None),
        ("2ps2w", "async", 1.0),
        ("2w", "async", None),
    ],
)
def test_every_message_of_a_step_and_of_an_update_is_known(size, strategy, clip_norm):
    options = {} if (strategy, clip_norm) == ("sync", None) else {"strategy": strategy, "clip_norm": clip_norm}
    steps = train(size, **options)
    check_steps(steps)
    check_updates(steps, is_clipped=clip_norm is not None)


@pytest.mark.long
@pytest.mark.parametrize(("size", "clip_norm"), [("2ps2w", None), ("2w", 1.0)])
def test_every_message_under_backup_is_known(size, clip_norm):
    steps = train(size, strategy="backup", quorum=1, clip_norm=clip_norm)
    check_steps(steps)
    # With a quorum of one, any gradient may be late: one that is dropped costs an arrival and a token.
    for updates in steps.hosts:
        for calls in updates:
            assert [(call.fetched, call.fed) for call in (calls[0], calls[-1])] == UPDATE_CALLS["backup"]
            assert (len(calls) - 2) % 3 == 0


@pytest.mark.long
@pytest.mark.parametrize(("size", "strategy"), [("1ps2w", "sync"), ("2w", "sync"), ("1ps2w", "async")])
def test_every_message_over_a_bfloat16_wire_is_known(size, strategy):
    steps = train(size, with_everything, strategy=strategy, wire="bfloat16")
    check_steps(steps)
    check_updates(steps, is_clipped=False)


@pytest.mark.long
@pytest.mark.parametrize(
    ("size", "strategy"), [("1ps2w", "sync"), ("2ps2w", "sync"), ("2w", "sync"), ("2ps2w", "async")]
)
def test_with_vectors_in_shared_memory_only_small_messages_are_sent(size, strategy):
    steps = train(size, with_everything, strategy=strategy, wire="memory")
    check_steps(steps)
    check_updates(steps, is_clipped=False)
    moved = [message for calls in steps.workers for step in calls for call in step for message in call.messages]
    assert {message.nbytes for message in moved} == {12}


@pytest.mark.long
@pytest.mark.parametrize("size", ["1ps2w", "2w"])
def test_buckets_are_pulled_in_a_call_of_their_own(size):
    """Their pushes follow each other: one more message says that the one before has arrived."""
    steps = train(size, buckets=3)
    assert len(steps.plan.shards) > len(steps.plan.hosts)
    for index, made in enumerate(steps.workers):
        me = f"worker:{index}"
        expected = Counter(traffic.of_step(steps.plan, me))
        pulls = Counter({message: n for message, n in expected.items() if message.receiver == me and message.nbytes})
        for step in made[:-1]:
            pushed, *pulled = (call.messages for call in sorted(step, key=lambda call: -call.fetched))
            assert pushed == expected - pulls
            assert all(call == pulls for call in pulled)
        # One ahead of the steps, so at the end all but the last have been taken.
        ahead = [call for call in TracingSession.calls if not call.fetched and call.messages == pulls]
        assert len(ahead) >= STEPS - 1
    check_updates(steps, is_clipped=False)


@pytest.mark.long
@pytest.mark.parametrize("size", ["1ps2w", "2ps2w"])
def test_the_state_of_batch_norm_travels_with_the_gradients(size):
    steps = train(size, with_everything)
    assert any(shard.state for shard in steps.plan.shards)
    check_steps(steps)
    check_updates(steps, is_clipped=False)


@pytest.mark.long(but=["sync-bfloat16"])
@pytest.mark.parametrize(("strategy", "wire"), [("sync", "float32"), ("sync", "bfloat16"), ("async", "memory")])
def test_rows_of_tables_travel_in_the_messages_of_vectors(strategy, wire):
    """Each example looks up the rows 0..4 of one table and row 7 of another: three rows of one host, three of two."""
    steps = train("2ps2w", workload_of_rows, strategy=strategy, wire=wire)
    float_nbytes, widths, rows_of = 2 if wire == "bfloat16" else 4, (2, 8), {"ps:0": (3, 0), "ps:1": (2, 1)}
    for index, made in enumerate(steps.workers):
        me, expected = f"worker:{index}", Counter[Message]()
        for message in traffic.of_step(steps.plan, me):
            counts = rows_of[message.sender if message.receiver == me else message.receiver]
            rows = sum(float_nbytes * width * count for width, count in zip(widths, counts, strict=True))
            listed = sum(8 + 4 * count for count in counts)  # of each block how many there are, and where
            pulled, pushed = rows + 4 * len(widths), rows + 8 + 2 * listed  # checksums; how many replicas ask for which
            more = pulled if message.receiver == me else pushed
            more = 4 if wire == "memory" else more  # says how many there are in shared memory
            expected[message._replace(nbytes=message.nbytes + more)] += 1
        for call in one_each(made[1:-1]):  # of the first rows were asked for, and after the last none are
            assert call.messages == expected
    assert any(made[1:-1] for made in steps.workers)


def workload_of_rows() -> Workload:
    keras.utils.set_random_seed(7)
    ids = {"a": np.tile(np.arange(5), (96, 1)), "b": np.full((96, 1), 7)}
    data = from_arrays((ids, np.arange(96) % 3), (ids, np.arange(96) % 3), source="test")
    with lookups.building([SparsePattern("*")]):
        given = {name: keras.Input(one.shape[1:], dtype="int64", name=name) for name, one in ids.items()}
        found = [
            keras.layers.Flatten()(keras.layers.Embedding(20, 2, name="narrow")(given["a"])),
            keras.layers.Flatten()(keras.layers.Embedding(20, 8, name="wide")(given["b"])),
        ]
        model = keras.Model(given, keras.layers.Dense(3, name="logits")(keras.layers.Concatenate()(found)))
    objective = make_objective(model, data.spec, Wanted("sparse_categorical_crossentropy"))
    tracing.trace(objective, data.spec)
    return Workload(model, data, objective, {})


@pytest.mark.long
def test_replicas_of_one_worker_send_as_one():
    steps = train("1ps2w", devices=("/cpu:0", "/cpu:1"))
    check_steps(steps)


@pytest.mark.long
def test_parts_of_a_parameter_cost_no_message():
    whole, parts = train("2ps2w"), train("2ps2w", max_part_mib=0.002)
    assert any(piece.is_part for shard in parts.plan.shards for piece in shard.trainable)
    check_steps(parts)
    assert message_count(parts) == message_count(whole) == 8


def test_one_ps_and_two_workers_in_numbers():
    """Two vectors of 6,208 bytes for each worker: parameters one way, gradients the other."""
    steps = train("1ps2w")
    assert message_count(steps) == 4
    assert sum(m.nbytes for worker in steps.plan.workers for m in traffic.of_step(steps.plan, worker.name)) == 24832


def test_the_plan_knows_the_bytes_of_each_link():
    steps = train("2ps2w")
    moved: Counter[str] = Counter()
    for index, calls in enumerate(steps.workers):
        for message, count in one_each(calls)[0].messages.items():
            host = ({message.sender, message.receiver} - {f"worker:{index}"}).pop()
            moved[f"worker:{index} - {host}"] += count * message.nbytes
    assert dict(moved) == steps.plan.link_nbytes()


def test_a_task_has_one_session_for_its_steps_and_one_for_its_shard():
    train.__wrapped__("1w")
    assert len(TracingSession.made) == 2


def test_one_process_takes_a_step_in_one_call():
    engine = make_local(workload_of(plain), OptimizerConfig(name=OptimizerName.adam, clip_norm=1.0))
    engine.start()
    before = len(TracingSession.calls)
    for _ in range(3):
        engine.step()
    calls = TracingSession.calls[before:]
    assert [(call.fetched, call.fed, call.messages) for call in calls] == [(STEP_FETCHES, STEP_FEEDS, Counter())] * 3


def test_an_additional_message_is_noticed(monkeypatch: pytest.MonkeyPatch):
    """The tests above notice a difference: here every step also sends a number to its shard's host."""
    original = worker_graph.push

    def push(*arguments: Any, tags: Any) -> Any:
        with tf.device("/job:ps/task:0/cpu:0"):
            more = tf.print(tags)
        return [*original(*arguments, tags=tags), more]

    monkeypatch.setattr(worker_graph, "push", push)
    steps = train.__wrapped__("1ps2w")
    with pytest.raises(AssertionError):
        check_steps(steps)
    assert message_count(steps) == 6


def message_count(steps: Steps) -> int:
    """Of one step of all workers."""
    return sum(calls[0][0].messages.total() for calls in steps.workers)


COUNTING = """
import os
import threading

from tensorflow.python.client import session

from trainer.workload.models.mlp import mlp

PATH = f"{os.environ['CALLS']}/{os.getpid()}"


def record(name, describe):
    original = getattr(session.tf_session, name)

    def call(*arguments):
        with open(PATH, "a") as file:
            print(threading.current_thread().name, describe(*arguments), sep=", ", file=file)
        return original(*arguments)

    setattr(session.tf_session, name, call)


def of_run(session, options, feeds, fetches, targets, metadata):
    return f"{len(fetches)} fetched, {'acts' if targets else 'asks'}"


if not hasattr(session.tf_session, "is_recorded"):  # a task reads this file for the data, and for the model
    session.tf_session.is_recorded = True
    record("TF_NewSessionRef", lambda *arguments: "session")
    record("TF_SessionRun_wrapper", of_run)
    record("TF_SessionRunCallable", lambda session, handle, *arguments: f"callable {handle}")


def tiny(input_shape, classes):
    return mlp(input_shape, classes, depth=0)
"""


@pytest.mark.long(but=["1ps2w"])
@pytest.mark.parametrize("size", ["1ps2w", "2w"])
def test_a_step_of_a_real_run_is_one_call_of_each_worker(start, tmp_path: Path, size):
    """From the second step to the last, nothing comes between: neither the chief's history nor its events."""
    (tmp_path / "counting.py").write_text(COUNTING)
    (tmp_path / "calls").mkdir()
    overrides = [f"cluster={size}", "user=counting.py", "model=tiny", "data=mnist_10k", "train.batch_size=48"]
    overrides += ["train.steps=32", "history.every=1", "checkpoint.every=0"]
    run = start(*overrides, environment={"CALLS": str(tmp_path / "calls")})
    assert run.wait() == 0, run.output
    a_step = f"MainThread, {STEP_FETCHES} fetched, acts"
    for task in ("worker:0", "worker:1"):
        lines = (tmp_path / "calls" / str(run.last_pid(task))).read_text().splitlines()
        of_steps, of_host = ([x for x in lines if x.startswith(thread)] for thread in ("MainThread, ", "shard host, "))
        # At first it polls until the state is loaded. Metrics are computed in this process, in a session of their own.
        begun = itertools.dropwhile(lambda line: line != a_step, of_steps)
        begun = (line for line in begun if line not in ("MainThread, session", "MainThread, 1 fetched, asks"))
        what, times = longest(begun)
        assert what == a_step
        assert times in (31, 32)  # a worker that is early may join instead of taking its first token
        # The chief's others evaluate, and compute metrics of the training and of the evaluation.
        assert of_steps.count("MainThread, session") == (4 if task == "worker:0" else 1)
        if size == "2w":
            assert longest(of_host) == (f"shard host, {UPDATE_FETCHES} fetched, asks", 32)


def longest(lines: Iterable[str]) -> tuple[str, int]:
    """The line that is repeated most often in a row, and how often."""
    return max(((what, len(list(row))) for what, row in itertools.groupby(lines)), key=lambda row: row[1])
