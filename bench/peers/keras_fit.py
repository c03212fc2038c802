"""One process with Keras's `fit`, over all cores.

As written, `compile` leaves the choice of XLA to Keras, which takes it on a GPU; `--jit` has it on the CPU too, in the
environment of the trainer's tasks.
"""

from __future__ import annotations

from typing import Any

from bench.contestants import CLICKS, CLICKS_TIMES, GLOBAL_BATCH, LEARNING_RATE
from bench.counter import Counter
from bench.peers.cluster import arguments, start

STEPS = 1_000_000_000


def main() -> None:
    parser = arguments("Keras fit")
    parser.add_argument("--jit", action="store_true")
    options = parser.parse_args()
    if options.jit and not options.task:
        start("bench.peers.keras_fit", ["worker:0"], is_tuned=True)
    import keras

    jit = True if options.jit else "auto"
    if options.workload == CLICKS:
        from bench.peers import clicks

        model, batches = clicks.keras_model(), clicks.keras_batches(batch=CLICKS_TIMES * GLOBAL_BATCH)
        loss: Any = keras.losses.BinaryCrossentropy(from_logits=True)
        model.compile(optimizer=keras.optimizers.Adagrad(clicks.RATE), loss=loss, jit_compile=jit)
    else:
        from bench.peers.workload import dataset, open_workload

        model, data = open_workload(options.workload)
        batches, loss = dataset(data, batch=GLOBAL_BATCH), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(optimizer=keras.optimizers.Adam(LEARNING_RATE), loss=loss, jit_compile=jit)
    counter = Counter(options.directory)

    class Count(keras.callbacks.Callback):  # type: ignore[misc]  # Keras has no types
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            counter.set(batch + 1)

    model.fit(batches, steps_per_epoch=STEPS, callbacks=[Count()], verbose=0)


if __name__ == "__main__":
    main()
