"""Synchronous training by hand: tf.compat.v1's SyncReplicasOptimizer and MonitoredTrainingSession, 1 ps, 2 workers.

As written it has the defaults of a tutorial. Tuned, it has our threads, TensorFlow 1's own variables and control flow,
no spare tokens (with spare ones a worker runs ahead, and its gradients are stale), and a second worker that does not
sleep for 30 s if the first is not ready yet.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NoReturn

from bench.contestants import CLICKS, CLICKS_TIMES, LEARNING_RATE, REPLICA_BATCH, WORKERS
from bench.counter import Counter
from bench.peers.cluster import addresses, arguments, index_of, start, threads

POLL_SECS = 0.2
TASKS = ("ps:0", *(f"worker:{index}" for index in range(WORKERS)))
# (tf, options, index, global step) -> the iterator, the loss, what to run, and the optimizer
MakeStep = Callable[[Any, Any, int, Any], tuple[Any, Any, Any, Any]]


def main() -> NoReturn:
    parser = arguments("SyncReplicasOptimizer")
    parser.add_argument("--tuned", action="store_true")
    options = parser.parse_args()
    if options.task is None:
        start("bench.peers.sync_replicas", TASKS, is_tuned=options.tuned)
    play(options)


def play(options: Any) -> NoReturn:
    import tensorflow as tf

    make = _clicks_step if options.workload == CLICKS else _image_step(options)
    if options.tuned:
        tf.compat.v1.disable_v2_behavior()
    job, index = options.task.split(":")[0], index_of(options.task)
    cluster = tf.train.ClusterSpec(addresses(TASKS, options.ports))
    config = _config(tf, options, job)
    server = tf.distribute.Server(cluster, job_name=job, task_index=index, config=config)
    if job == "ps":
        server.join()
    with tf.Graph().as_default():
        _train(tf, options, index, make, cluster, server)
    raise SystemExit("training ended")


def _config(tf: Any, options: Any, job: str, *, peers: tuple[str, ...] = ()) -> Any:
    config = tf.compat.v1.ConfigProto(device_filters=list(peers))
    if options.tuned:
        given = threads(options.cores, WORKERS)
        config.intra_op_parallelism_threads = 1 if job == "ps" else given["intra"]
        config.inter_op_parallelism_threads = given["inter"]
        config.experimental.disable_thread_spinning = True
    return config


def _image_step(options: Any) -> MakeStep:
    from bench.peers.workload import dataset, open_workload

    model, data = open_workload(options.workload)  # Keras builds it eagerly; its layers are used in a graph below
    first = {variable.path: variable.numpy() for variable in model.variables}

    def make(tf: Any, options: Any, index: int, global_step: Any) -> tuple[Any, Any, Any, Any]:
        batches = dataset(data, batch=REPLICA_BATCH, index=index, workers=WORKERS, tuned=options.tuned)
        iterator = tf.compat.v1.data.make_initializable_iterator(batches)
        return iterator, *_step(tf, model, first, iterator.get_next(), global_step)

    return make


def _clicks_step(tf: Any, options: Any, index: int, global_step: Any) -> tuple[Any, Any, Any, Any]:
    from bench.peers import clicks

    v1, tuned = tf.compat.v1, options.tuned
    batches = clicks.batches(batch=CLICKS_TIMES * REPLICA_BATCH, index=index, workers=WORKERS, tuned=tuned)
    iterator = v1.data.make_initializable_iterator(batches)
    batch, uniform = clicks.Batch(*iterator.get_next()), v1.random_uniform_initializer(-0.05, 0.05)
    tables = [
        v1.get_variable(f"table{number}", shape, initializer=uniform)
        for number, shape in enumerate(clicks.tables(tuned=tuned))
    ]
    dense = [v1.get_variable(f"dense{number}", shape) for number, shape in enumerate(clicks.dense_shapes())]
    ids = clicks.ids_of(batch, tuned=tuned)
    rows = [tf.nn.embedding_lookup(table, own) for table, own in zip(tables, ids, strict=True)]
    loss = clicks.loss_of(dense, rows, batch, tuned=tuned)
    optimizer = v1.train.SyncReplicasOptimizer(
        v1.train.AdagradOptimizer(clicks.RATE, clicks.FIRST_ACCUMULATOR),
        replicas_to_aggregate=WORKERS,
        total_num_replicas=WORKERS,
    )
    gradients = optimizer.compute_gradients(loss, var_list=[*dense, *tables])
    return iterator, loss, optimizer.apply_gradients(gradients, global_step=global_step), optimizer


def _train(tf: Any, options: Any, index: int, make: MakeStep, cluster: Any, server: Any) -> None:
    v1, is_chief = tf.compat.v1, index == 0
    with v1.device(v1.train.replica_device_setter(cluster=cluster, worker_device=f"/job:worker/task:{index}")):
        global_step = v1.train.get_or_create_global_step()
        iterator, loss, train, optimizer = make(tf, options, index, global_step)
        uninitialized = v1.report_uninitialized_variables(v1.global_variables())
    hook = optimizer.make_session_run_hook(is_chief, **({"num_tokens": 0} if options.tuned else {}))
    scaffold = v1.train.Scaffold(local_init_op=v1.group(v1.local_variables_initializer(), iterator.initializer))
    config = _config(tf, options, "worker", peers=("/job:ps", f"/job:worker/task:{index}"))
    if options.tuned and not is_chief:
        with v1.Session(server.target, config=config) as session:
            while len(session.run(uninitialized)):
                time.sleep(POLL_SECS)
    counter = Counter(options.directory) if is_chief else None
    with v1.train.MonitoredTrainingSession(
        master=server.target, is_chief=is_chief, scaffold=scaffold, hooks=[hook], config=config
    ) as session:
        while True:
            _, step, _ = session.run([train, global_step, loss])
            if counter:
                counter.set(int(step))


def _step(tf: Any, model: Any, first: Any, batch: Any, global_step: Any) -> tuple[Any, Any, Any]:
    """Returns the graph of one step: the loss, what to run, and the optimizer.

    Args:
        first: values of the model's variables, by path.
        batch: (features [B, ...], labels [B]).
    """
    from bench.peers.workload import loss_of

    v1 = tf.compat.v1
    features, labels = batch
    trainable = [_variable(v1, variable, first) for variable in model.trainable_variables]
    rest = [_variable(v1, variable, first) for variable in model.non_trainable_variables]
    values = ([tf.convert_to_tensor(variable) for variable in variables] for variables in (trainable, rest))
    logits, moved, own = model.stateless_call(*values, features, training=True, return_losses=True)
    loss = tf.add_n([loss_of(labels, logits), *own])
    optimizer = v1.train.SyncReplicasOptimizer(
        v1.train.AdamOptimizer(LEARNING_RATE, epsilon=1e-7), replicas_to_aggregate=WORKERS, total_num_replicas=WORKERS
    )
    gradients = optimizer.compute_gradients(loss, var_list=trainable)
    train = optimizer.apply_gradients(gradients, global_step=global_step)
    statistics = [v1.assign(variable, new) for variable, new in zip(rest, moved, strict=True)]  # BatchNorm's
    return loss, v1.group(train, *statistics), optimizer


def _variable(v1: Any, variable: Any, first: Any) -> Any:
    """Makes a variable of the same shape, drawn with the same mean and spread, as constants would fill the graph."""
    value = first[variable.path]
    initializer = v1.random_normal_initializer(value.mean(), value.std(), seed=0)
    return v1.get_variable(
        variable.path.replace("/", "_"), value.shape, initializer=initializer, trainable=variable.trainable
    )


if __name__ == "__main__":
    main()
