"""Synchronous training between two workers with tf.distribute.MultiWorkerMirroredStrategy and a loop of one's own.

As written it has the defaults of TensorFlow's tutorial. Tuned, it has our threads, packs of gradients that leave while
the backward pass goes on, and no second sum between the workers for a loss that nobody reads.
"""

from __future__ import annotations

import json
import os
from typing import Any, NoReturn

from bench.contestants import FOR_EVER, GLOBAL_BATCH, LEARNING_RATE, REPLICA_BATCH, WORKERS
from bench.counter import Counter
from bench.peers.cluster import addresses, arguments, index_of, start, threads

TASKS = tuple(f"worker:{index}" for index in range(WORKERS))
TUNED_PACK_BYTES = 2**20


def main() -> NoReturn:
    parser = arguments("MultiWorkerMirroredStrategy")
    parser.add_argument("--tuned", action="store_true")
    parser.add_argument("--pack-bytes", type=int, default=TUNED_PACK_BYTES, help="of a tuned one")
    options = parser.parse_args()
    if options.task is None:
        start("bench.peers.multi_worker", TASKS, is_tuned=options.tuned)
    play(options)


def play(options: Any) -> NoReturn:
    index = index_of(options.task)
    os.environ["TF_CONFIG"] = json.dumps(
        {"cluster": addresses(TASKS, options.ports), "task": {"type": "worker", "index": index}}
    )
    import tensorflow as tf

    communication = tf.distribute.experimental.CommunicationOptions()
    if options.tuned:
        given = threads(options.cores, WORKERS)
        tf.config.threading.set_intra_op_parallelism_threads(given["intra"])
        tf.config.threading.set_inter_op_parallelism_threads(given["inter"])
        communication = tf.distribute.experimental.CommunicationOptions(bytes_per_pack=options.pack_bytes)
    _allow_pauses()
    strategy = tf.distribute.MultiWorkerMirroredStrategy(communication_options=communication)
    _train(tf, options, strategy, index)


def _allow_pauses() -> None:
    """Configures what the strategy would, with a heartbeat that outlasts the time that the bench freezes it."""
    from tensorflow.compiler.xla.tsl.protobuf.coordination_config_pb2 import CoordinatedJob
    from tensorflow.python.eager import context

    context.context().configure_coordination_service(
        service_type="standalone",
        service_leader="/job:worker/replica:0/task:0",
        coordinated_jobs=[CoordinatedJob(name="worker", num_tasks=WORKERS)],
        heartbeat_timeout_in_ms=1000 * FOR_EVER,
    )


def _train(tf: Any, options: Any, strategy: Any, index: int) -> NoReturn:
    import keras

    from bench.peers.workload import dataset, open_workload

    with strategy.scope():
        model, data = open_workload(options.workload)
        optimizer = keras.optimizers.Adam(LEARNING_RATE)
        optimizer.build(model.trainable_variables)
    batches = strategy.distribute_datasets_from_function(
        lambda context: dataset(
            data, batch=REPLICA_BATCH, index=context.input_pipeline_id, workers=WORKERS, tuned=options.tuned
        )
    )

    def on_worker(features: Any, labels: Any) -> Any:
        with tf.GradientTape() as tape:
            logits = model(features, training=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
            loss = tf.nn.compute_average_loss(losses, global_batch_size=GLOBAL_BATCH)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def step(iterator: Any) -> Any:
        loss = strategy.run(on_worker, args=next(iterator))
        return loss if options.tuned else strategy.reduce(tf.distribute.ReduceOp.SUM, loss, axis=None)

    iterator, steps = iter(batches), 0
    counter = Counter(options.directory) if index == 0 else None
    while True:
        step(iterator)
        steps += 1
        if counter:
            counter.set(steps)


if __name__ == "__main__":
    main()
