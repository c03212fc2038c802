"""Asynchronous training with tf.distribute's ParameterServerStrategy: a coordinator, 1 ps, 2 workers.

Keras 3 does not support the strategy, so the variables are TensorFlow's own and the model is called as a function of
them. Adam is TensorFlow's fused kernel, which runs on the ps. Threads are as in our runs.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

from bench.contestants import CLICKS, CLICKS_TIMES, LEARNING_RATE, REPLICA_BATCH, WORKERS
from bench.counter import Counter
from bench.peers.cluster import addresses, arguments, start, threads

COORDINATOR = "chief:0"
TASKS = (COORDINATOR, "ps:0", *(f"worker:{index}" for index in range(WORKERS)))
BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-7
Make = Callable[[Any], tuple[Any, Any]]  # step -> what trains on a batch, and what makes the data set
AHEAD = 32  # closures that are scheduled and not done
LOOK_EVERY_SECS = 0.02


def main() -> NoReturn:
    parser = arguments("ParameterServerStrategy")
    parser.add_argument("--steps-per-closure", type=int, default=1)
    parser.add_argument("--tuned", action="store_true", help="of clicks: one variable, whole batches, distinct ids")
    options = parser.parse_args()
    if options.task is None:
        start("bench.peers.parameter_server", TASKS, is_tuned=True)
    play(options)


def play(options: Any) -> NoReturn:
    job, _, index = options.task.partition(":")
    os.environ["TF_CONFIG"] = json.dumps(
        {"cluster": addresses(TASKS, options.ports), "task": {"type": job, "index": int(index)}}
    )
    import tensorflow as tf

    resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver(rpc_layer="grpc")
    if options.task == COORDINATOR:
        _coordinate(tf, options, resolver)
    given = threads(options.cores, WORKERS)
    config = tf.compat.v1.ConfigProto(
        intra_op_parallelism_threads=1 if job == "ps" else given["intra"], inter_op_parallelism_threads=given["inter"]
    )
    config.experimental.disable_thread_spinning = True
    server = tf.distribute.Server(
        resolver.cluster_spec(), job_name=job, task_index=int(index), protocol="grpc", config=config
    )
    server.join()
    raise SystemExit("the server ended")


def _coordinate(tf: Any, options: Any, resolver: Any) -> NoReturn:
    make = _clicks(tf, options) if options.workload == CLICKS else _images(tf, options)
    strategy = tf.distribute.ParameterServerStrategy(resolver)
    coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
    with strategy.scope():
        step = tf.Variable(0, dtype=tf.int64, trainable=False)
        train, make_dataset = make(step)

    @tf.function
    def closure(iterator: Any) -> None:
        if options.steps_per_closure == 1:
            train(*next(iterator))
        else:
            for _ in tf.range(options.steps_per_closure):
                train(*next(iterator))

    batches = coordinator.create_per_worker_dataset(make_dataset)
    iterator = iter(batches)
    counter, scheduled = Counter(options.directory), 0
    while True:
        done = int(step.numpy())
        counter.set(done)
        while scheduled - done // options.steps_per_closure < AHEAD:
            coordinator.schedule(closure, args=(iterator,))
            scheduled += 1
        time.sleep(LOOK_EVERY_SECS)


def _images(tf: Any, options: Any) -> Make:
    import numpy as np

    from bench.peers.workload import dataset, open_workload

    model, data = open_workload(options.workload)
    first, first_rest = (  # now: the strategy's cluster replaces this process's devices, and what they hold
        [variable.numpy() for variable in variables]
        for variables in (model.trainable_variables, model.non_trainable_variables)
    )

    def make(step: Any) -> tuple[Any, Any]:
        trainable = [tf.Variable(value) for value in first]
        rest = [tf.Variable(value, trainable=False) for value in first_rest]
        slots = [[tf.Variable(np.zeros_like(value), trainable=False) for value in first] for _ in range(2)]
        batches = partial(dataset, data, batch=REPLICA_BATCH, tuned=True)
        return _make_step(tf, model, trainable, rest, slots, step), batches

    return make


def _clicks(tf: Any, options: Any) -> Make:
    from bench.peers import clicks

    tuned = options.tuned

    def variable(shape: tuple[int, ...]) -> tuple[Any, Any]:
        """Makes a variable and its accumulator on the ps, because the coordinator has no memory for several copies."""
        first = tf.Variable(lambda: tf.random.uniform(shape, -0.05, 0.05))
        return first, tf.Variable(lambda: tf.fill(shape, clicks.FIRST_ACCUMULATOR), trainable=False)

    def make(step: Any) -> tuple[Any, Any]:
        tables = [variable(shape) for shape in clicks.tables(tuned=tuned)]
        dense = [variable(shape) for shape in clicks.dense_shapes()]

        def train(*batch: Any) -> None:
            given = clicks.Batch(*batch)
            ids = clicks.ids_of(given, tuned=tuned)
            rows = [tf.nn.embedding_lookup(table, own) for (table, _), own in zip(tables, ids, strict=True)]
            weights = [tf.convert_to_tensor(one) for one, _ in dense]
            with tf.GradientTape() as tape:
                tape.watch([*weights, *rows])
                loss = clicks.loss_of(weights, rows, given, tuned=tuned)
            of_dense, of_rows = tape.gradient(loss, [weights, rows])
            common = {"lr": clicks.RATE, "epsilon": clicks.EPSILON}
            with tf.device(step.device):
                step.assign_add(1)
            for (one, accumulator), gradient in zip(dense, of_dense, strict=True):
                with tf.device(one.device):
                    tf.raw_ops.ResourceApplyAdagradV2(var=one.handle, accum=accumulator.handle, grad=gradient, **common)
            for (one, accumulator), own, gradient in zip(tables, ids, of_rows, strict=True):
                gradient = tf.convert_to_tensor(gradient)
                if not tuned:  # as TensorFlow's optimizers do
                    own, which = tf.unique(own)
                    gradient = tf.math.unsorted_segment_sum(gradient, which, tf.size(own))
                with tf.device(one.device):
                    tf.raw_ops.ResourceSparseApplyAdagradV2(
                        var=one.handle, accum=accumulator.handle, grad=gradient, indices=own, **common
                    )

        return train, partial(clicks.batches, batch=CLICKS_TIMES * REPLICA_BATCH, tuned=tuned)

    return make


def _make_step(
    tf: Any, model: Any, trainable: Sequence[Any], rest: Sequence[Any], slots: Sequence[Sequence[Any]], step: Any
) -> Callable[[Any, Any], None]:
    """Makes one worker's step: pull the variables, compute, make the ps update them."""
    from bench.peers.workload import loss_of

    def train(features: Any, labels: Any) -> None:
        weights, statistics = ([tf.convert_to_tensor(v) for v in variables] for variables in (trainable, rest))
        with tf.GradientTape() as tape:
            tape.watch(weights)
            logits, moved, own = model.stateless_call(weights, statistics, features, training=True, return_losses=True)
            loss = tf.add_n([loss_of(labels, logits), *own])
        gradients = tape.gradient(loss, weights)
        with tf.device(step.device):
            made = tf.cast(step.assign_add(1), tf.float32)
        for variable, gradient, m, v in zip(trainable, gradients, *slots, strict=True):
            with tf.device(variable.device):
                tf.raw_ops.ResourceApplyAdam(
                    var=variable.handle,
                    m=m.handle,
                    v=v.handle,
                    beta1_power=BETA_1**made,
                    beta2_power=BETA_2**made,
                    lr=LEARNING_RATE,
                    beta1=BETA_1,
                    beta2=BETA_2,
                    epsilon=EPSILON,
                    grad=gradient,
                )
        for variable, value in zip(rest, moved, strict=True):
            variable.assign(value)

    return train


if __name__ == "__main__":
    main()
