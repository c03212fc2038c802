"""The engines on real TensorFlow servers: every task of a small cluster as threads of this process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from small_clusters import (
    BATCH,
    SEED,
    STEPS,
    Cluster,
    digest,
    make_local,
    plain,
    to_the_end,
    unbroken,
    with_everything,
    workload_of,
)

from trainer.config.schema import OptimizerConfig, OptimizerName
from trainer.engine.local import LocalEngine
from trainer.engine.sharded import staleness
from trainer.engine.sharded.resources import PUSH, share
from trainer.engine.sharded.worker import ShardedEngine
from trainer.engine.vectors import packing
from trainer.engine.vectors.snapshot import Snapshot
from trainer.plan.layout import Parameter, Shard
from trainer.workload import step as replica
from trainer.workload.data.pipeline import training_batches

pytestmark = pytest.mark.cluster

ADAM = OptimizerConfig(name=OptimizerName.adam)


@pytest.mark.long
@pytest.mark.parametrize(("workers", "clip_norm"), [(2, 0.5), (3, None)])
def test_the_bits_do_not_depend_on_where_the_shards_are(workers, clip_norm):
    results_by_ps = {
        ps: Cluster(with_everything, ps=ps, workers=workers, clip_norm=clip_norm).train([to_the_end] * workers)
        for ps in (1, 2, 3, 0)
    }
    assert len({digest(results[0][1]) for results in results_by_ps.values()}) == 1
    assert len({tuple(losses) for results in results_by_ps.values() for losses, _ in results}) == 1


def test_the_update_is_that_of_one_process_with_the_whole_batch():
    losses, last = unbroken(plain)
    expected_losses, expected = to_the_end(make_local(workload_of(plain), ADAM))
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)
    for path, value in expected.parameters.items():
        np.testing.assert_allclose(last.parameters[path], value, rtol=1e-5, atol=1e-6)


def test_one_process_trains_as_a_keras_loop_does():
    workload = workload_of(plain)
    losses, last = to_the_end(make_local(workload, ADAM))
    expected = _keras_losses(workload.model, workload.data)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    for variable in workload.model.trainable_variables:
        np.testing.assert_allclose(last.parameters[variable.path], variable.numpy(), rtol=1e-4, atol=1e-6)


def _keras_losses(model: keras.Model, data: Any) -> list[float]:
    with tf.Graph().as_default(), tf.compat.v1.Session() as session:
        batches = training_batches(data.train, seed=SEED, start=0, stop=STEPS, batch_size=BATCH, replica=0, replicas=1)
        session.run(batches.initializer, batches.feed_from(0))
        drawn = [session.run([batches.batch.features, batches.batch.labels]) for _ in range(STEPS)]
    optimizer, losses = keras.optimizers.Adam(0.001), []
    for features, labels in drawn:
        with tf.GradientTape() as tape:
            per_example = keras.losses.sparse_categorical_crossentropy(labels, model(features), from_logits=True)
            loss = tf.reduce_mean(per_example)
        optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
        losses.append(float(loss))
    return losses


def test_duplicates_and_messages_of_an_older_generation_are_ignored():
    expected = digest(unbroken(plain)[1])
    cluster = Cluster(plain, ps=2, workers=2)

    def with_ghosts(engine: ShardedEngine) -> Any:
        """Before each step, repeats pushes of a predecessor: with the tag of this step, and of an older generation."""
        step = engine.start()
        while step < STEPS:
            ghost(generation=0, step=step)
            ghost(generation=1, step=step - 1)
            step = engine.step().step + 1
        engine.peek()
        last = engine.snapshot()
        engine.leave()
        return last

    ghost = _ghost(cluster, replica_index=0)
    last, _ = cluster.train([with_ghosts, to_the_end])
    assert digest(last) == expected


@pytest.mark.long
def test_a_worker_that_pushes_twice_counts_once_in_a_quorum():
    """As the process of a lost host may, after its successor; what it pushes second is garbage here."""
    cluster, has_pushed_twice = Cluster(plain, ps=2, workers=2, strategy="backup", quorum=2), threading.Event()
    ghost = _ghost(cluster, replica_index=0)

    def with_ghost(engine: ShardedEngine) -> Any:
        step = engine.start()
        while step < STEPS:
            result = engine.step()
            if not has_pushed_twice.is_set():
                ghost(generation=1, step=step)
                has_pushed_twice.set()
            step = result.step + 1
        engine.peek()
        last = engine.snapshot()
        engine.leave()
        return last

    def second(engine: ShardedEngine) -> Any:
        assert has_pushed_twice.wait(60)
        return to_the_end(engine)

    last, _ = cluster.train([with_ghost, second])
    assert max(np.abs(one).max() for slot in last.slots.values() for one in slot.values()) < GARBAGE**0.5
    assert cluster.hosts[0].counts[:, 0].tolist() == [STEPS, STEPS]
    assert cluster.hosts[0].counts[0, staleness.DROPPED] > 0


def _ghost(cluster: Cluster, replica_index: int) -> Callable[..., None]:
    """Pushes garbage under a given tag to every shard, as a replica; announced, where pushes are."""
    has_log = not cluster.strategy.waits_for_all
    with tf.Graph().as_default() as graph:
        feeds, pushes, announced = [], [], []
        tags = tf.compat.v1.placeholder(tf.int32, [2])
        shares = [share(shard, ["momentum", "velocity"], cluster.workers, has_log=has_log) for shard in cluster.shards]
        for shard, shared in zip(cluster.shards, shares, strict=True):
            feeds.append(tf.compat.v1.placeholder(tf.float32, [shard.size]))
            pushes.append(shared.pushes[replica_index].enqueue(feeds[-1]))
        if has_log:
            with tf.control_dependencies(pushes):
                announced.append(shares[0].log.arrivals.enqueue(tf.concat([[replica_index], tags, [PUSH]], 0)))
    session = tf.compat.v1.Session(cluster.servers["worker:0"].target, graph=graph, config=cluster._config("worker:0"))

    def push(*, generation: int, step: int) -> None:
        values = {
            feed: _garbage(shard, generation=generation, step=step)
            for feed, shard in zip(feeds, cluster.shards, strict=True)
        }
        session.run([*pushes, *announced], {tags: [generation, step], **values})

    return push


GARBAGE = 1e9


def _garbage(shard: Shard, *, generation: int, step: int) -> np.ndarray:
    pieces = (*shard.trainable, *shard.state)
    values = {piece.path: np.full(piece.shape, GARBAGE, np.float32) for piece in pieces}
    return packing.to_flat(shard, values, generation=generation, step=step)


@pytest.mark.long
@pytest.mark.parametrize("buckets", [1, 2])
def test_one_replica_that_asks_to_stop_stops_all_at_the_same_step(buckets: int):
    cluster = Cluster(plain, ps=1, workers=3, buckets=buckets)

    def until_stopped(asks_at: int | None) -> Callable[[ShardedEngine], int]:
        def train(engine: ShardedEngine) -> int:
            step, stopped = engine.start(), False
            while not stopped:
                result = engine.step(stop=step == asks_at)
                step, stopped = result.step + 1, result.stop
            reached = engine.peek().step
            engine.leave()
            return reached

        return train

    reached = cluster.train([until_stopped(None), until_stopped(3), until_stopped(None)])
    assert reached == [5, 5, 5]  # asked with the gradient of step 3, seen by all at step 4, which they still finish


def test_a_snapshot_between_steps_is_the_state_of_that_step():
    def snapshot_at(wanted: int) -> Callable[[ShardedEngine | LocalEngine], Snapshot | None]:
        def train(engine: ShardedEngine | LocalEngine) -> Snapshot | None:
            step, taken = engine.start(), None
            while step < STEPS:
                if step == wanted:
                    assert engine.peek().step == wanted
                    taken = engine.snapshot()
                step = engine.step().step + 1
            engine.peek()
            engine.leave()
            return taken

        return train

    cluster = Cluster(with_everything, ps=2, workers=2, buckets=2)
    local = make_local(cluster.workload, cluster.optimizer, count=2)
    local.load(cluster.first(), generation=1)
    expected, found = snapshot_at(4)(local), cluster.train([snapshot_at(4), snapshot_at(-1)])[0]
    assert expected.step == found.step == 4
    assert digest(found) == digest(expected)


@pytest.mark.long
def test_an_optimizer_without_slots_works():
    one = Cluster(plain, ps=1, workers=2, optimizer=OptimizerName.sgd).train([to_the_end] * 2)[0][1]
    two = Cluster(plain, ps=2, workers=2, optimizer=OptimizerName.sgd).train([to_the_end] * 2)[0][1]
    assert one.slots == {}
    assert digest(one) == digest(two)


@pytest.mark.long
def test_more_shards_than_parameters_work():
    one = Cluster(plain, ps=1, workers=2, clip_norm=0.5).train([to_the_end] * 2)[0][1]
    many = Cluster(plain, ps=6, workers=2, clip_norm=0.5).train([to_the_end] * 2)[0][1]
    assert digest(one) == digest(many)


def received(cluster: Cluster) -> dict[str, int]:
    """Tensors that cross between tasks in one worker step, by receiving task, from the graphs that ran."""
    options = tf.compat.v1.RunOptions(output_partition_graphs=True)

    def one_traced_step(engine: ShardedEngine) -> Any:
        engine.start()
        engine.step()
        metadata = tf.compat.v1.RunMetadata()
        engine.session.run(engine._step, engine._asking(False, 0), options=options, run_metadata=metadata)
        for _ in range(STEPS - 2):
            engine.step()
        engine.peek()
        engine.leave()
        return metadata.partition_graphs

    counts: dict[str, int] = {}
    for node in (node for graph in cluster.train([one_traced_step])[0] for node in graph.node):
        sender, receiver = (node.attr[f"{end}_device"].s.decode().split("/device:")[0] for end in ("send", "recv"))
        if node.op in ("_Recv", "_HostRecv") and sender != receiver:
            counts[receiver] = counts.get(receiver, 0) + 1
    return counts


def deep() -> keras.Model:
    """82 tensors."""
    inputs = keras.Input((8, 8, 1))
    hidden = keras.layers.Flatten(name="flatten")(inputs)
    for number in range(40):
        hidden = keras.layers.Dense(8, activation="relu", name=f"dense{number}")(hidden)
    return keras.Model(inputs, keras.layers.Dense(10, name="logits")(hidden))


@pytest.mark.long(but=["deep-1"])
@pytest.mark.parametrize("ps", [1, 2])
@pytest.mark.parametrize("build", [plain, deep])
def test_a_worker_step_receives_one_tensor_from_each_ps_and_sends_it_one(build, ps):
    counts = received(Cluster(build, ps=ps, workers=1))
    expected = {f"/job:ps/replica:0/task:{index}": 1 for index in range(ps)}
    assert counts == expected | {"/job:worker/replica:0/task:0": ps}


def test_a_worker_makes_no_resource_of_another():
    operations = Cluster(plain, ps=2, workers=3).engines[1].graph.get_operations()
    shared = [o.get_attr("shared_name").decode() for o in operations if o.type in ("FIFOQueueV2", "VarHandleOp")]
    assert sorted(name for name in shared if name[-1].isdigit()) == [
        f"shard{shard}/{kind}1" for shard in range(2) for kind in ("intake", "seen", "tokens")
    ]


def test_shards_that_disagree_on_the_step_are_an_error():
    cluster = Cluster(plain, ps=2, workers=1, rewrites=False)
    engine = cluster.engines[0]
    feeds = {
        feed: first.to_flats(shard, {}, generation=1)[0]
        if position == 0
        else np.full(feed.shape, "" if feed.dtype == tf.string else 0.0)
        for shard, first, feeds in zip(
            cluster.shards, (cluster.first(), Snapshot(3, *_values(cluster), {})), engine._load.feeds, strict=True
        )
        for position, feed in enumerate(feeds)
    }
    for host in cluster.hosts:
        threading.Thread(target=host.load, daemon=True).start()
    engine.session.run(engine._load.loads, feeds)
    with pytest.raises(
        RuntimeError, match=r"the shards disagree: \(generation, step\) of each is \[\[1, 0\], \[1, 3\]\]"
    ):
        engine.peek()


def _values(cluster: Cluster) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    first = cluster.first()
    return first.parameters, first.state


def test_a_batch_of_another_step_is_an_error():
    cluster = Cluster(plain, ps=1, workers=1, rewrites=False)

    def shifted(engine: ShardedEngine) -> str:
        engine.start()
        engine.session.run(engine._built.batches[0].initializer, engine._built.batches[0].feed_from(2))
        with pytest.raises(tf.errors.InvalidArgumentError) as error:
            engine.step()
        return str(error.value)

    threading.Thread(target=cluster.serve, args=cluster.hosts, daemon=True).start()
    cluster.hosts = []  # its goodbye will not come
    assert "to different steps" in cluster.train([shifted])[0]


def test_parameters_are_distinguished_from_state():
    keras.utils.set_random_seed(SEED)
    parameters = replica.parameters_of(with_everything())
    assert [p.path for p in parameters if not p.trainable] == ["norm/moving_mean", "norm/moving_variance"]
    assert parameters[0] == Parameter("conv/kernel", (3, 3, 1, 4), True)


@pytest.mark.long(but=["OptimizerName.adam"])
@pytest.mark.parametrize("optimizer", [OptimizerName.adam, OptimizerName.sgd])
def test_replicas_inside_one_process_give_the_bits_of_as_many_workers(optimizer):
    cluster = Cluster(with_everything, ps=1, workers=3, optimizer=optimizer)
    first = cluster.first()
    (losses, last), *_ = cluster.train([to_the_end] * 3)
    local = make_local(cluster.workload, cluster.optimizer, count=3)
    local.load(first, generation=1)
    local_losses, local_last = to_the_end(local)
    assert local_losses == losses
    assert digest(local_last) == digest(last)


@pytest.mark.parametrize("shares", [[2, 2], [1, 3]], ids=str)
def test_no_bit_depends_on_who_computes_which_replica(shares):
    cluster = Cluster(with_everything, ps=1, workers=2, devices=["/cpu:0", "/cpu:1"], shares=shares)
    local = make_local(cluster.workload, cluster.optimizer, count=4)
    local.load(cluster.first(), generation=1)
    expected_losses, expected = to_the_end(local)
    (losses, last), _ = cluster.train([to_the_end] * 2)
    assert (losses, digest(last)) == (expected_losses, digest(expected))


def test_replicas_of_a_worker_are_summed_there_and_pushed_once():
    counts = received(Cluster(plain, ps=1, workers=1, devices=["/cpu:0", "/cpu:1"]))
    assert counts == {"/job:ps/replica:0/task:0": 1, "/job:worker/replica:0/task:0": 1}


@pytest.mark.long
def test_the_bits_do_not_depend_on_the_device_that_holds_the_parameters():
    here, there = (
        Cluster(plain, ps=1, workers=2, parameters_on=device).train([to_the_end] * 2)[0]
        for device in ("/cpu:0", "/cpu:1")
    )
    assert (here[0], digest(here[1])) == (there[0], digest(there[1]))


@pytest.mark.long
def test_the_bits_do_not_depend_on_where_the_parts_of_a_parameter_are():
    part = 1024 / 2**20  # MiB; the dense kernel has nine of them
    digests = {
        digest(
            Cluster(with_everything, ps=ps, workers=2, clip_norm=0.5, max_part_mib=part).train([to_the_end] * 2)[0][1]
        )
        for ps in (1, 2, 3)
    }
    assert len(digests) == 1


def test_parts_of_a_batch_give_the_update_of_the_whole():
    whole = unbroken(plain)
    parts = Cluster(plain, ps=1, workers=2, accumulate=3).train([to_the_end] * 2)[0]
    np.testing.assert_allclose(parts[0], whole[0], rtol=1e-5)
    for path, value in whole[1].parameters.items():
        np.testing.assert_allclose(parts[1].parameters[path], value, rtol=1e-4, atol=1e-6)


def test_a_compiled_replica_step_gives_the_update_of_a_plain_one():
    compiled = Cluster(plain, ps=1, workers=1, devices=["/cpu:0", "/cpu:1"], jit=True).train([to_the_end])[0]
    np.testing.assert_allclose(compiled[0], unbroken(plain)[0], rtol=1e-5)


def free_running(engine: ShardedEngine) -> tuple[int, Any, Snapshot]:
    """Trains as the loop does under async and backup; returns (own steps, contributions, last state)."""
    step, mine = engine.start(), 0
    while step < STEPS:
        step = engine.step().step + 1
        mine += 1
        if step >= STEPS:
            step = engine.peek().step
    last, table = engine.snapshot(), engine.contributions()
    engine.leave()
    return mine, table, last


@pytest.mark.long(but=["2-None"])
@pytest.mark.parametrize(("ps", "clip_norm"), [(2, None), (1, 0.5), (0, 0.5)])
def test_every_gradient_is_an_update_under_async(ps, clip_norm):
    cluster = Cluster(plain, ps=ps, workers=3, strategy="async", clip_norm=clip_norm, rewrites=False)
    results = cluster.train([free_running] * 3)
    assert [last.step for _, _, last in results] == [STEPS] * 3
    for _, table, _ in results:
        assert table[:, : staleness.BINS].sum() == STEPS
        assert table[:, staleness.DROPPED].sum() == 0
    assert {digest(last) for _, _, last in results} == {digest(results[0][2])}


@pytest.mark.long
@pytest.mark.parametrize("clip_norm", [None, 0.5], ids=["unclipped", "clipped"])
def test_one_worker_alone_trains_the_same_with_and_without_waiting(clip_norm):
    """Clipped by its worker, or by the hosts after they have exchanged their norms."""
    waiting, *_ = Cluster(plain, ps=2, workers=1, clip_norm=clip_norm).train([to_the_end])
    alone, *_ = Cluster(plain, ps=2, workers=1, strategy="async", clip_norm=clip_norm).train([free_running])
    if clip_norm is None:
        assert digest(alone[2]) == digest(waiting[1])
    for path, value in waiting[1].parameters.items():
        np.testing.assert_allclose(alone[2].parameters[path], value, rtol=1e-5, atol=1e-7)
    assert alone[1][0, 0] == STEPS  # all at staleness 0


def test_gradients_beyond_the_staleness_allowed_are_dropped_and_counted():
    cluster = Cluster(plain, ps=1, workers=2, strategy="async", max_staleness=0, rewrites=False)
    results = cluster.train([free_running] * 2)
    table = results[0][1]
    assert table[:, 0].sum() == table[:, : staleness.BINS].sum() == STEPS
    assert table[:, staleness.MAXIMUM].max() == 0
    pushed = sum(mine for mine, _, _ in results)
    assert STEPS + table[:, staleness.DROPPED].sum() <= pushed


@pytest.mark.long(but=["1-None"])
@pytest.mark.parametrize(("ps", "clip_norm"), [(1, None), (2, 0.5), (0, 0.5)])
def test_an_update_waits_for_a_quorum_only(ps, clip_norm):
    """One worker is late by whole steps; the others never wait for it, and it is in no update."""
    cluster = Cluster(plain, ps=ps, workers=3, strategy="backup", quorum=2, clip_norm=clip_norm, rewrites=False)

    def late(engine: ShardedEngine) -> Any:
        slow = engine.step

        def step() -> Any:
            while engine.contributions()[:2, 0].sum() < 2 * STEPS:  # until the others have finished without it
                time.sleep(0.01)
            return slow()

        engine.step = step  # type: ignore[method-assign]
        return free_running(engine)

    results = cluster.train([free_running, free_running, late])
    table = results[2][1]
    assert table[:2, 0].tolist() == [STEPS, STEPS]
    assert table[2, 0] == 0
    assert len({digest(last) for _, _, last in results}) == 1


@pytest.mark.long
def test_late_gradients_are_counted_for_their_worker():
    cluster = Cluster(plain, ps=2, workers=3, strategy="backup", quorum=1)
    results = cluster.train([free_running] * 3)
    table = results[0][1]
    assert table[:, 0].sum() == STEPS
    assert [last.step for _, _, last in results] == [STEPS] * 3
    assert len({digest(last) for _, _, last in results}) == 1


@pytest.mark.long(but=["backup-float32"])
@pytest.mark.parametrize("wire", ["float32", "memory"])
@pytest.mark.parametrize("strategy", ["async", "backup"])
def test_under_async_and_backup_all_workers_stop_soon_after_one_asks(strategy, wire):
    cluster = Cluster(plain, ps=2, workers=3, strategy=strategy, quorum=2, wire=wire, rewrites=False)

    def until_stopped(asks: bool) -> Callable[[ShardedEngine], int]:
        def train(engine: ShardedEngine) -> int:
            engine.start()
            while not engine.step(stop=asks).stop:
                pass
            reached = engine.peek().step
            engine.snapshot()
            engine.leave()
            return reached

        return train

    reached = cluster.train([until_stopped(False), until_stopped(True), until_stopped(False)])
    assert max(reached) < STEPS


@pytest.mark.long
def test_a_snapshot_under_backup_is_of_one_step():
    cluster = Cluster(plain, ps=3, workers=2, strategy="backup", quorum=1)
    steps_of_shards: list[Any] = []

    def snapshotting(engine: ShardedEngine) -> Any:
        engine.start()
        for _ in range(3):
            engine.step()
            engine._ticket += 1
            tags, *_ = engine.session.run(engine._snapshot, {engine._built.ticket: engine._ticket})
            steps_of_shards.append([int(step) for _, step in tags])
        return free_running(engine)

    cluster.train([snapshotting, free_running])
    assert all(len(set(steps)) == 1 for steps in steps_of_shards)
