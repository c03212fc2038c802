"""Finds the counts that losses are divided by, which may differ between the parts of a batch.

A loss with a mask is divided by the number of unmasked steps, and one with the reduction `mean_with_sample_weight` by
the sum of the weights. The mean over a batch is then not the plain mean of the means over its parts, but their mean
weighted by the counts.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import keras
import tensorflow as tf

from trainer.workload.keras_internals import losses as keras_loss
from trainer.workload.patches import patched

MEANS = ("sum_over_batch_size", "mean", "mean_with_sample_weight")  # reductions
OF_PAIRS = (keras.losses.Circle,)  # losses that compare each example with the others of its batch
LEAST = 1e-20  # replaces a count of zero: negligible beside other counts, and a mean over it alone is still defined


class Share(NamedTuple):
    """The share of a part in a batch."""

    parts: int  # number of parts, of equal size
    totals: tf.Tensor  # [counts] sums over all parts


class _Mean(NamedTuple):
    """The reduction of a loss."""

    amount: tf.Tensor | None  # [] the count; None: the same for all batches of that size
    key: Hashable = None  # equal if two losses have the same count


class Counting:
    """Records the counts that the losses of a batch are divided by."""

    def __init__(self, share: Share | None = None) -> None:
        """Starts without counts.

        Args:
            share: of this batch in a larger one; losses are scaled so that their mean over the parts is that over all.
        """
        self._share = share
        self._counts: dict[Hashable, tf.Tensor] = {}
        self._last: _Mean | None = None
        self.has_others = False  # whether a loss has no such count
        self.unknown: list[str] = []  # losses with an unknown count

    @property
    def size(self) -> int:
        """Returns the number of different counts."""
        return len(self._counts)

    @property
    def counts(self) -> tf.Tensor:
        """Returns the counts, [size] float32."""
        return tf.stack(list(self._counts.values())) if self._counts else tf.zeros([0])

    @contextmanager
    def during(self, compiled: Any) -> Iterator[None]:
        """Records the losses of a built `CompileLoss` that are called in this context."""
        losses = [flat._replace(loss=self._shared(flat.loss)) for flat in compiled._flat_losses]
        noting = self._noting(keras_loss.reduce_weighted_values)
        with patched((keras_loss, "reduce_weighted_values", noting), (compiled, "_flat_losses", losses)):
            yield

    def _noting(self, reduce: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
        def call(values: Any, sample_weight: Any = None, mask: Any = None, **options: Any) -> tf.Tensor:
            self._last = _mean(tf.convert_to_tensor(values), sample_weight, mask, options.get("reduction"))
            return reduce(values, sample_weight=sample_weight, mask=mask, **options)

        return call

    def _shared(self, loss: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
        def call(*arguments: Any) -> tf.Tensor:
            self._last = None
            value = loss(*arguments)  # a loss may call other losses; its own reduction is the last
            mean = None if isinstance(loss, OF_PAIRS) else self._last
            if mean is None:
                self.unknown.append(f"the loss {getattr(loss, 'name', type(loss).__name__)}")
            if mean is None or mean.amount is None:
                self.has_others = True
                return value
            self._counts.setdefault(mean.key, mean.amount)
            if self._share is None:
                return value
            total = self._share.totals[list(self._counts).index(mean.key)]
            return value * tf.cast(tf.math.divide_no_nan(self._share.parts * mean.amount, total), value.dtype)

        return call


def _mean(values: tf.Tensor, weights: Any, mask: Any, reduction: str | None) -> _Mean | None:
    """Returns the divisor of `keras.src.losses.loss.reduce_weighted_values`; None for a single number."""
    if values.shape.rank == 0:
        return None
    is_weighted = reduction == "mean_with_sample_weight" and weights is not None
    if reduction not in MEANS or (mask is None and not is_weighted):
        return _Mean(None)
    merged = keras_loss.apply_mask(weights if is_weighted else None, mask, "float32", "sum")
    count = tf.stop_gradient(tf.reduce_sum(tf.cast(merged, tf.float32)))
    return _Mean(count, (id(mask), id(weights) if is_weighted else None))
