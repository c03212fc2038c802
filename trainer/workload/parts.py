"""Computes a batch in equal parts, one after another, to use less memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from trainer.workload.counts import Share
from trainer.workload.data.examples import Batch

Tensors = Mapping[str, tf.Tensor]  # by parameter path
Rows = Sequence[tf.Tensor]  # of tables: the result of each lookup of the model, [*ids, width]


class PassInput(NamedTuple):
    """The inputs of a forward and backward pass."""

    parameters: Tensors
    state: Tensors
    seed: tf.Tensor
    batch: Batch
    rows: Rows
    loss_scale: tf.Tensor | None = None
    share: Share | None = None  # of the batch in a larger one


class PassOutput(NamedTuple):
    """The results of a forward and backward pass over a batch."""

    gradients: Tensors
    state: Tensors  # after the pass
    loss: tf.Tensor
    sums: tf.Tensor  # [K] what the batch adds to the metrics' variables
    rows: Rows  # gradients
    counts: tf.Tensor  # [counts] that the losses are divided by

    def times(self, weight: tf.Tensor) -> PassOutput:
        """Returns the output with loss and gradients multiplied by a weight []."""
        gradients = {path: gradient * weight for path, gradient in self.gradients.items()}
        rows = [gradient * weight for gradient in self.rows]
        return self._replace(gradients=gradients, rows=rows, loss=self.loss * weight)


Pass = Callable[[PassInput], PassOutput]
CountPass = Callable[[PassInput], tf.Tensor]  # -> [counts]


def in_parts(run: Pass, parts: int, size: int, count: CountPass, counts: int) -> Pass:
    """Passes over equal parts of the batch, one after another; returns mean results, and the state after the last.

    Args:
        size: of the sums of the metrics.
        count: returns the counts of a part, if parts may differ in them.
        counts: how many counts there are; 0: `count` is not called.
    """

    def run_in_parts(whole: PassInput) -> PassOutput:
        def cut_all(values: tf.Tensor) -> tf.Tensor:
            return tf.reshape(values, tf.concat([[parts, -1], tf.shape(values)[1:]], 0))

        batches, row_parts = whole.batch.map(cut_all), list(map(cut_all, whole.rows))

        def cut(part: tf.Tensor) -> PassInput:
            drawn = tf.random.experimental.stateless_fold_in(whole.seed, part)
            batch, rows = batches.map(lambda values: values[part]), [values[part] for values in row_parts]
            return whole._replace(seed=drawn, batch=batch, rows=rows)

        def loop(body: Callable[..., Any], *values: Any) -> Any:
            return tf.while_loop(
                lambda part, *_: part < parts,
                body,
                (tf.constant(0), *values),
                parallel_iterations=1,
                maximum_iterations=parts,
            )[1:]

        def add_counts(part: tf.Tensor, totals: tf.Tensor) -> Any:
            return part + 1, totals + count(cut(part))

        totals = loop(add_counts, tf.zeros([counts]))[0] if counts else tf.zeros([0])
        share = Share(parts, totals) if counts else None

        def add(
            part: tf.Tensor, gradients: Tensors, state: Tensors, loss: tf.Tensor, sums: tf.Tensor, of_rows: list[Any]
        ) -> Any:
            more = run(cut(part)._replace(state=state, share=share))
            total = {path: gradient + more.gradients[path] for path, gradient in gradients.items()}
            written = [array.write(part, values) for array, values in zip(of_rows, more.rows, strict=True)]
            return part + 1, total, more.state, loss + more.loss, sums + more.sums, written

        zeros = {path: tf.zeros_like(values) for path, values in whole.parameters.items()}
        arrays = [tf.TensorArray(tf.float32, parts, element_shape=one.shape[1:]) for one in row_parts]
        gradients, state, loss, sums, of_rows = loop(
            add, zeros, dict(whole.state), tf.constant(0.0), tf.zeros([size]), arrays
        )
        means = {path: total / parts for path, total in gradients.items()}
        whole_rows = [tf.reshape(a.stack() / parts, tf.shape(r)) for a, r in zip(of_rows, whole.rows, strict=True)]
        return PassOutput(means, state, loss / parts, sums, whole_rows, totals)

    return run_in_parts
