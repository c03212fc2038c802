"""Several shards on each host: how parameters are cut into buckets, and that no bit depends on it."""

from __future__ import annotations

import itertools
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
import tensorflow as tf
from runs import SMALL, Run, wait_until
from small_clusters import Cluster, digest, to_the_end, unbroken, with_everything

from trainer.engine.sharded.prefetch import Prefetch
from trainer.engine.sharded.worker import ShardedEngine
from trainer.plan.layout import Parameter
from trainer.plan.placement import place

PARAMETERS = [Parameter(name, (size,), True) for name, size in (("a", 160), ("b", 16), ("c", 16), ("d", 128))]


def buckets_of(count: int, **options: Any) -> list[list[str]]:
    shards = place(PARAMETERS, ["ps:0"], pins={}, buckets=count, **options)
    assert [shard.index for shard in shards] == list(range(len(shards)))
    return [[piece.path for piece in shard.trainable] for shard in shards]


def test_one_bucket_holds_all_in_the_models_order():
    assert buckets_of(1) == [["a", "b", "c", "d"]]


def test_buckets_begin_with_the_last_parameters_and_hold_about_as_much_each():
    assert buckets_of(2) == [["b", "c", "d"], ["a"]]


@pytest.mark.parametrize("count", [4, 9])
def test_no_bucket_is_empty(count: int):
    assert sorted(itertools.chain(*buckets_of(count))) == ["a", "b", "c", "d"]
    assert all(buckets_of(count))


def test_a_large_parameter_is_cut_into_parts_for_several_buckets():
    shards = place(PARAMETERS, ["ps:0"], pins={}, buckets=4, max_part_mib=64 / 2**20)
    sizes = [shard.trainable_size for shard in shards]
    assert len(sizes) == 4
    assert max(sizes) - min(sizes) <= 16


def test_every_host_has_its_own_buckets():
    shards = place(PARAMETERS, ["ps:0", "ps:1"], pins={}, buckets=2)
    assert [shard.host for shard in shards] == ["ps:0", "ps:1", "ps:1"]  # ps:0 holds the one large parameter


# Prefetch


def test_a_prefetched_result_is_waited_for_and_a_failure_raised():
    may_pull, failed = threading.Semaphore(0), threading.Event()

    def pull() -> None:
        may_pull.acquire()
        if must_fail.is_set():
            raise ConnectionError("gone")

    must_fail = threading.Event()
    prefetch = Prefetch(pull, fail=failed.set)
    prefetch.start()
    may_pull.release()
    prefetch.wait()
    prefetch.use()
    must_fail.set()
    may_pull.release()
    with pytest.raises(ConnectionError, match="gone"):
        prefetch.wait()
    assert failed.wait(10)


# Training


@pytest.mark.long(but=["1-0.5-float32"])
@pytest.mark.cluster
@pytest.mark.parametrize(
    ("ps", "clip_norm", "wire"),
    [(0, 0.5, "bfloat16"), (1, None, "float32"), (2, None, "bfloat16"), (1, 0.5, "float32"), (2, 0.5, "float32")],
)
def test_no_bit_depends_on_the_number_of_buckets(ps: int, clip_norm: float | None, wire: str):
    losses, last = unbroken(with_everything, clip_norm=clip_norm, wire=wire)
    cluster = Cluster(with_everything, ps=ps, workers=2, clip_norm=clip_norm, wire=wire, buckets=3)
    assert len(cluster.shards) > max(ps, 1) + (ps == 0)
    results = cluster.train([to_the_end] * 2)
    assert [digest(state) for _, state in results] == [digest(last)] * 2
    assert [its_losses for its_losses, _ in results] == [losses] * 2


def wait_until_it_pulls(engine: ShardedEngine) -> None:
    """Waits until a worker's request for the next step has reached a host, which takes a token that is too old for it.

    A session that is closed while it starts a request may leave it there for ever; a process that was killed does not.
    """
    links = engine._rejoin._links
    with engine.session.graph.as_default():
        put, sizes = (
            [link.tokens.enqueue(tf.constant(0, tf.int64)) for link in links],
            [link.tokens.size() for link in links],
        )
    engine.session.run(put)
    wait_until(lambda: min(engine.session.run(sizes)) == 0)


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.parametrize(("pushes", "worker"), [(0, 0), (1, 1), (2, 0), (2, 1), (3, 1)])
def test_a_successor_leaves_the_same_bits_between_whichever_pushes_a_worker_dies(pushes: int, worker: int):
    expected_losses, expected = unbroken(with_everything)
    cluster = Cluster(with_everything, ps=1, workers=2, buckets=3)

    def ended(engine: ShardedEngine) -> Any:
        """Ends as a killed process does: the host drops its requests, and its tokens may be taken."""
        engine.start()
        for _ in range(3):
            engine.step()
        some = engine._step[4][0][:pushes] if pushes else engine._step[2]
        engine.session.run(some, engine._asking(False, 0))
        engine._prefetch.use()
        if pushes == len(cluster.shards):  # then the next step's tokens come
            engine._prefetch.wait()
        wait_until_it_pulls(engine)
        engine.session.close()
        successor = cluster.successor(worker)
        return to_the_end(successor)

    functions: list[Any] = [to_the_end, to_the_end]
    functions[worker] = ended
    results = cluster.train(functions)
    assert {digest(last) for _, last in results} == {digest(expected)}
    assert results[1 - worker][0] == expected_losses


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.parametrize("cluster", ["1ps2w", "2w"])
def test_a_run_with_buckets_has_the_bits_of_one_without(finish: Callable[..., Run], cluster: str):
    options = [f"cluster={cluster}", "model=mlp", "placement.max_part_mib=0.05", *SMALL]
    digests = {
        json.loads(
            (
                finish(*options, f"run=run{buckets}", f"placement.buckets={buckets}").directory / "summary.json"
            ).read_text()
        )["params_sha256"]
        for buckets in (1, 3)
    }
    assert len(digests) == 1
