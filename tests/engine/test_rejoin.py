"""A worker dies at any moment, and another takes its place: nothing is lost, and nothing counts twice."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from runs import wait_until
from small_clusters import STEPS, Cluster, digest, make_local, plain, to_the_end, unbroken, with_everything, workload_of

from trainer.engine.sharded.resources import HOLD, JOIN, Link
from trainer.engine.sharded.worker import ShardedEngine
from trainer.engine.vectors.snapshot import Snapshot
from trainer.faults.exit_codes import IncompleteError

pytestmark = pytest.mark.cluster

DIES_AT = 3  # step
AT_STEPS = {  # what a worker still does of its last step, by the moment of its death
    "before its tokens": lambda engine: [],
    "with its tokens": lambda engine: engine._step[2],
    "after its push to the first shard": lambda engine: engine._step[4][0][0],
    "after its push to the second shard": lambda engine: engine._step[4][0][1],
    "after both pushes": lambda engine: engine._step[4][0],
}


@functools.cache
def undisturbed() -> tuple[dict[int, tuple[float, ...]], Snapshot]:
    """The loss and the sums of metrics of each update, by the step after it, and the last state of two workers."""

    def watch(engine: ShardedEngine) -> tuple[dict[int, tuple[float, ...]], Snapshot]:
        engine.start()
        seen = [engine.step() for _ in range(STEPS)] + [engine.peek()]
        last = engine.snapshot()
        engine.leave()
        return {result.step: (result.loss, *result.sums) for result in seen[1:]}, last

    return Cluster(workload_of(with_everything), ps=2, workers=2, rewrites=False).train([watch] * 2)[0]


def dying(
    cluster: Cluster,
    worker: int,
    last: Callable[[ShardedEngine], Any],
    results: dict[str, Any],
    *,
    moves: Sequence[int] = (),
) -> Any:
    """A worker that dies after some steps and a part of one, and then the engine of its successor.

    Args:
        moves: shards that make their next update before the successor comes.
    """

    def run(engine: ShardedEngine) -> Any:
        engine.start()
        assert not engine._rejoin.is_due
        for _ in range(DIES_AT):
            engine.step()
        engine.session.run(last(engine), engine._asking(False, 0))
        wait_until(lambda: all(cluster.hosts[shard].read_tag()[1] == DIES_AT + 1 for shard in moves))
        successor = cluster.successor(worker)
        results["generation"] = successor.held()
        outcome = to_the_end(successor, cluster.steps)
        results["missed"] = successor.missed
        return outcome

    return run


@pytest.mark.long(but=["0-after its push to the first shard"])
@pytest.mark.parametrize(
    ("worker", "moment"),
    [
        (0, "before its tokens"),
        (1, "with its tokens"),
        (0, "after its push to the first shard"),
        (1, "after its push to the first shard"),
        (0, "after its push to the second shard"),
        (1, "after both pushes"),
    ],
)
def test_a_successor_leaves_the_same_bits_whenever_a_worker_dies(moment: str, worker: int):
    updates, expected = undisturbed()
    cluster, successor = Cluster(workload_of(with_everything), ps=2, workers=2, rewrites=False), {}
    functions: list[Any] = [to_the_end, to_the_end]
    moves = {"after its push to the first shard": [0], "after its push to the second shard": [1]}.get(moment, [])
    functions[worker] = dying(cluster, worker, AT_STEPS[moment], successor, moves=moves)
    results = cluster.train(functions)
    assert successor["generation"] == 1
    assert {digest(last) for _, last in results} == {digest(expected)}
    assert results[1 - worker][0] == [loss for loss, *_ in updates.values()]
    # The previous chief may not have recorded the update that it started from, and the one before; but it had recorded
    # that one before it pushed to any shard. The first shard, which has the sums of metrics, may be a step ahead.
    steps = [result.step for result in successor["missed"]]
    assert steps == [DIES_AT] if moves == [0] else steps in ([DIES_AT - 1, DIES_AT], [DIES_AT, DIES_AT + 1])
    assert {one.step: (one.loss, *one.sums) for one in successor["missed"]} == {step: updates[step] for step in steps}
    assert all(any(updates[step][1:]) for step in steps)


@pytest.mark.long(but=["memory"])
@pytest.mark.parametrize("wire", ["memory", "float32"])
def test_a_successor_pushes_all_sums_of_its_replicas_again(wire: str):
    shares = [1, 3]  # replicas 1, and 2 to 3, are two sums
    cluster = Cluster(with_everything, ps=2, workers=2, shares=shares, wire=wire, rewrites=False)
    expected = to_the_end(make_local(workload_of(with_everything), cluster.optimizer, count=4))
    first_push = AT_STEPS["after its push to the first shard"]
    (losses, last), _ = cluster.train([to_the_end, dying(cluster, 1, first_push, {}, moves=[0])])
    assert (losses, digest(last)) == (expected[0], digest(expected[1]))


def stood_in_for(cluster: Cluster, worker: int, task: int) -> Any:
    """A worker that dies, for which another task, whose own engine trains on, stands in until a successor comes."""

    def run(engine: ShardedEngine) -> Any:
        engine.start()
        engine.step()
        engine.session.run(AT_STEPS["after its push to the first shard"](engine), engine._asking(False, 0))
        stand_in = cluster.successor(worker, task)
        stand_in.start()
        for _ in range(2):
            stand_in.step()
        return to_the_end(cluster.successor(worker), cluster.steps)

    return run


@pytest.mark.long(but=["float32"])
@pytest.mark.parametrize("wire", ["memory", "float32", "bfloat16"])
def test_another_worker_stands_in_until_a_successor_comes(wire: str):
    def make() -> Cluster:
        return Cluster(with_everything, ps=2, workers=3, shares=[1, 1, 2], wire=wire, rewrites=False)

    losses, last = make().train([to_the_end] * 3)[0]
    cluster = make()
    (others, with_stand_in), *_ = cluster.train([to_the_end, stood_in_for(cluster, 1, task=2), to_the_end])
    assert (others, digest(with_stand_in)) == (losses, digest(last))


@pytest.mark.long(but=["with its tokens-backup-memory"])
@pytest.mark.parametrize(
    ("moment", "strategy", "wire"),
    [
        ("before its tokens", "async", "memory"),
        ("before its tokens", "backup", "float32"),
        ("with its tokens", "async", "float32"),
        ("with its tokens", "backup", "memory"),
        ("with unannounced pushes", "async", "float32"),
        ("with unannounced pushes", "backup", "memory"),
        ("after its pushes", "async", "memory"),
        ("after its pushes", "backup", "float32"),
    ],
)
def test_under_async_and_backup_a_successor_gets_one_token(strategy: str, moment: str, wire: str):
    cluster = Cluster(plain, ps=2, workers=3, strategy=strategy, quorum=2, wire=wire, rewrites=False)
    parts = {
        "before its tokens": AT_STEPS["before its tokens"],
        "with its tokens": lambda engine: engine._step[2],
        "with unannounced pushes": lambda engine: [announcement.control_inputs for announcement in engine._step[4][0]],
        "after its pushes": lambda engine: engine._step[4][0],
    }
    results = cluster.train([to_the_end, dying(cluster, 1, parts[moment], {}), to_the_end])
    assert all(last.step >= STEPS for _, last in results)
    assert all(np.isfinite(value).all() for value in results[0][1].parameters.values())


DEATHS = 12  # in a row, more than a queue might have spare room for


def looping(die: Callable[[ShardedEngine], Any], deaths: int = DEATHS) -> Any:
    """A worker whose successors do no more than to take its place and what `die` does, until one trains to the end."""

    def run(engine: ShardedEngine) -> Any:
        engine.start()
        for _ in range(DIES_AT):
            engine.step()
        # Where a shard is a step behind, a successor has to begin with what `die` passes over.
        wait_until(lambda: all(state.now.step >= DIES_AT for state in engine._rejoin.read_states(engine.session)))
        for _ in range(deaths):
            engine.start()
            die(engine)
        return to_the_end(engine)

    return run


@pytest.mark.long(but=["1"])
@pytest.mark.parametrize("worker", [0, 1])
def test_a_worker_may_die_any_number_of_times_as_soon_as_it_starts(worker: int):
    _, expected = unbroken(plain)
    functions: list[Any] = [to_the_end, to_the_end]
    functions[worker] = looping(lambda engine: engine.peek())
    results = Cluster(plain, ps=2, workers=2).train(functions)
    assert {digest(last) for _, last in results} == {digest(expected)}


@pytest.mark.long
def test_pushes_of_the_first_bucket_that_dead_workers_left_do_not_keep_the_second_one_back():
    _, expected = unbroken(plain, clip_norm=0.5)  # the host of the first bucket waits for the second one's norm
    dies = looping(lambda engine: engine.session.run(engine._step[4][0][0], engine._asking(False, 0)), deaths=2)
    results = Cluster(plain, ps=1, workers=2, clip_norm=0.5, buckets=2).train([to_the_end, dies])
    assert {digest(last) for _, last in results} == {digest(expected)}


@pytest.mark.long
@pytest.mark.parametrize("strategy", ["async", "backup"])
def test_under_async_and_backup_hosts_answer_any_number_of_workers_that_died(strategy: str):
    def die(engine: ShardedEngine) -> None:
        with engine.graph.as_default():
            engine.session.run([ask(link, kind) for link in engine._built.links[:asked] for kind in (JOIN, HOLD)])

    def ask(link: Link, kind: int) -> Any:
        with tf.device(link.device):
            return link.shared.log.arrivals.enqueue(tf.stack([link.worker, 0, 1, kind]))

    asked = 2 if strategy == "async" else 1  # under backup the first shard's host asks the others
    results = Cluster(plain, ps=2, workers=3, strategy=strategy, quorum=2).train([looping(die), to_the_end, to_the_end])
    assert all(last.step >= STEPS for _, last in results)


def test_a_state_that_some_shards_have_and_others_lack_is_an_error():
    cluster = Cluster(plain, ps=2, workers=1)
    engine = cluster.engines[0]
    threading.Thread(target=cluster.serve, args=(cluster.hosts[0],), daemon=True).start()
    engine.session.run(engine._load.loads[0], dict(zip(engine._load.feeds[0], _first_values(cluster), strict=True)))
    while engine._rejoin.read_states(engine.session)[0].now.generation == 0:
        pass
    with pytest.raises(IncompleteError, match=r"different generations: \[0, 1\]"):
        engine.held()


def _first_values(cluster: Cluster) -> list[Any]:
    shard, first = cluster.shards[0], cluster.first()
    return [*first.to_flats(shard, cluster.engines[0]._spec.slots, generation=1), first.tables]
