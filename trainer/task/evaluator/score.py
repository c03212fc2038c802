"""Scores parameters on the examples that were kept from training."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from trainer.engine.vectors.snapshot import Snapshot
from trainer.workload import step
from trainer.workload.data import Examples
from trainer.workload.data.pipeline import evaluation_batches

v1 = tf.compat.v1


class Evaluator:
    """A graph of its own that holds one copy of the parameters."""

    def __init__(self, model: Any, loss: str, examples: Examples, *, batch_size: int, device: str) -> None:
        with tf.Graph().as_default() as self._graph, tf.device(device):
            self._variables = {  # by number, because a path may hold what the name of a variable may not
                p.path: v1.get_variable(
                    f"parameter_{number}", p.shape, initializer=v1.zeros_initializer(), use_resource=True
                )
                for number, p in enumerate(step.parameters_of(model))
            }
            self._feeds = {path: v1.placeholder(tf.float32, v.shape) for path, v in self._variables.items()}
            self._assign = [v.assign(self._feeds[path], read_value=False) for path, v in self._variables.items()]
            self._batches = evaluation_batches(examples, batch_size=batch_size)
            values = {path: v.read_value() for path, v in self._variables.items()}
            evaluate = tf.function(step.make_evaluation(model, loss), autograph=False)
            batch_loss, batch_accuracy = evaluate(values, values, self._batches.features, self._batches.labels)
            self._score = [batch_loss, batch_accuracy, tf.shape(self._batches.labels)[0]]

    def connect(self, target: str, session_config: Any) -> None:
        """Opens the session on the task's own devices."""
        self._session = v1.Session(target, graph=self._graph, config=session_config)

    def score(self, snapshot: Snapshot) -> tuple[float, float]:
        """(loss, accuracy), means over all examples; of the averaged parameters where the optimizer keeps them."""
        values = evaluated(snapshot) | snapshot.state
        self._session.run(self._assign, {feed: values[path] for path, feed in self._feeds.items()})
        self._session.run(self._batches.initializer, self._batches.feed_dict)
        losses = accuracies = count = 0.0
        while True:
            try:
                loss, accuracy, size = self._session.run(self._score)
            except tf.errors.OutOfRangeError:
                return losses / count, accuracies / count
            losses, accuracies, count = losses + loss * size, accuracies + accuracy * size, count + size


def evaluated(snapshot: Snapshot) -> dict[str, Any]:
    """The parameters to score and to export: the moving average, where there is one."""
    return snapshot.slots.get("ema") or snapshot.parameters
