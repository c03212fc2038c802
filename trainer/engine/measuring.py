"""Implements the update rules that measure whole parameters: lamb and adafactor.

An update has stages, each compiled separately. Within one compiled function, XLA chooses what to compute together by
what else the shard holds, and that changes bits: so what is measured is finished before, and each stage either treats
every float alone, or has no sum of products that could be contracted. Parts of parameters are put together by
TensorFlow, which only copies them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import tensorflow as tf

from trainer.config.schema import OptimizerConfig, OptimizerName
from trainer.engine.optimizers import Slots, Tensor, biases, moments, square_sums
from trainer.plan.layout import LANES, Shard, Slice


class MeasuringRule(Protocol):
    """A rule whose update is parameters - direction * scale."""

    def direction(self, slots: Slots, gradient: Tensor, step: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns ([n], slots): the direction of the parameters, and the slots after the update."""

    def scale(self, parameters: Tensor, direction: Tensor, rate: Tensor, step: Tensor) -> Tensor:
        """Returns the length [n] of steps; `rate` is [] or [n]."""


def compiled(function: Callable[..., tf.types.experimental.TensorLike]) -> Callable[..., tf.Tensor]:
    return tf.function(function, jit_compile=True, autograph=False)


def expand(values: Sequence[Tensor], pieces: Sequence[Slice]) -> Tensor:
    """Returns [n] a number for each parameter, for each of its floats."""
    fills = [tf.fill([piece.padded], value) for piece, value in zip(pieces, values, strict=True)]
    return tf.concat(fills, 0) if fills else tf.zeros([0])


def root_mean_squares(vector: Tensor, pieces: Sequence[Slice]) -> Tensor:
    """Returns the root mean square [k] of each parameter in a vector [n]."""
    sizes = tf.constant([piece.size for piece in pieces], tf.float32)
    return tf.sqrt(_squares(vector, pieces) / sizes)


def _squares(vector: Tensor, pieces: Sequence[Slice]) -> Tensor:
    return square_sums(vector, [(piece.offset, piece.padded) for piece in pieces])


class Lamb:
    """Lamb: Adam's direction, scaled to the norm of the parameter."""

    def __init__(self, config: OptimizerConfig, shard: Shard) -> None:
        self._config, self._pieces = config, shard.trainable
        self.direction = compiled(self._direction)
        self._ratios = compiled(self._make_ratios)

    def scale(self, parameters: Tensor, direction: Tensor, rate: Tensor, step: Tensor) -> Tensor:
        return expand(tf.unstack(self._ratios(parameters, direction)), self._pieces) * rate

    def _direction(self, slots: Slots, gradient: Tensor, step: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        momentum, velocity = moments(self._config, slots, gradient)
        bias_1, bias_2 = biases(self._config, step)
        direction = (momentum / bias_1) / (tf.sqrt(velocity / bias_2) + self._config.epsilon)
        return direction, {"momentum": momentum, "velocity": velocity}

    def _make_ratios(self, parameters: Tensor, direction: Tensor) -> Tensor:
        """Returns [k] 1 where either norm is zero."""
        sizes, steps = (tf.sqrt(_squares(vector, self._pieces)) for vector in (parameters, direction))
        return tf.where((sizes > 0) & (steps > 0), tf.math.divide_no_nan(sizes, steps), 1.0)


class Adafactor:
    """Adafactor: gradients over the root of their mean square, kept for a matrix as means over rows and columns."""

    def __init__(self, config: OptimizerConfig, shard: Shard) -> None:
        self._config, self._pieces = config, shard.trainable
        self._slot_pieces = {slot: shard.slot_pieces(slot) for slot in ("row", "column", "unfactored")}
        self._means, self._move = compiled(self._make_means), compiled(self._moved)
        self._mean_squares, self._divide = compiled(self._make_mean_squares), compiled(lambda a, b: a / tf.sqrt(b))
        self._steps = compiled(self._make_steps)

    def direction(self, slots: Slots, gradient: Tensor, step: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        means = {slot: _join(parts) for slot, parts in self._means(gradient).items()}
        updated = self._move(slots, means, step)
        return self._divide(gradient, _join(self._mean_squares(updated))), updated

    def scale(self, parameters: Tensor, direction: Tensor, rate: Tensor, step: Tensor) -> Tensor:
        most = 1 / tf.sqrt(tf.cast(step + 1, tf.float32))
        return expand(tf.unstack(self._steps(parameters, direction)), self._pieces) * tf.minimum(rate, most)

    def _make_means(self, gradient: Tensor) -> dict[str, list[Tensor]]:
        """Returns what this gradient adds to each slot, by parameter; sums of squares are exact in float64, nearly."""
        means: dict[str, list[Tensor]] = {"row": [], "column": [], "unfactored": []}
        for piece in self._pieces:
            values = tf.cast(gradient[piece.offset : piece.offset + piece.size], tf.float64)
            squares = tf.reshape(tf.square(values), piece.shape)
            if len(piece.shape) < 2:
                means["unfactored"].append(self._padded(squares))
            else:
                means["row"].append(self._padded(tf.reduce_mean(squares, -1)))
                means["column"].append(self._padded(tf.reduce_mean(squares, -2)))
        return means

    def _padded(self, squares: Tensor) -> Tensor:
        """Returns [multiple of LANES] float32, padded with the smallest square, so that nothing is divided by zero."""
        flat = tf.reshape(tf.cast(squares, tf.float32), [-1])
        return tf.pad(flat, [[0, -flat.shape[0] % LANES]]) + self._config.epsilon_1

    def _moved(self, slots: Slots, means: Mapping[str, Tensor], step: Tensor) -> dict[str, Tensor]:
        share = 1 - tf.pow(tf.cast(step + 1, tf.float32), self._config.beta_2_decay)
        return {slot: share * slots[slot] + (1 - share) * mean for slot, mean in means.items()}

    def _make_mean_squares(self, slots: Slots) -> list[Tensor]:
        """Returns the averages of the gradient's squares, for every float of each parameter."""
        by_path = {
            slot: {piece.path: slots[slot][piece.offset : piece.offset + piece.padded] for piece in pieces}
            for slot, pieces in self._slot_pieces.items()
        }
        return [
            by_path["unfactored"][piece.path]
            if len(piece.shape) < 2
            else _product(piece, by_path["row"][piece.path], by_path["column"][piece.path])
            for piece in self._pieces
        ]

    def _make_steps(self, parameters: Tensor, direction: Tensor) -> Tensor:
        """Returns the sizes of steps [k], by parameter."""
        sizes, steps = (root_mean_squares(vector, self._pieces) for vector in (parameters, direction))
        return tf.maximum(self._config.epsilon_2, sizes) / tf.maximum(1.0, steps / self._config.clip_threshold)


def _product(piece: Slice, row: Tensor, column: Tensor) -> Tensor:
    """Returns [padded] a matrix from its means over rows and columns; 1 in the padding."""
    *outer, height, width = piece.shape
    rows = tf.reshape(row[: math.prod((*outer, height))], (*outer, height))
    columns = tf.reshape(column[: math.prod((*outer, width))], (*outer, 1, width))
    mean = tf.reduce_mean(tf.cast(rows, tf.float64), -1, keepdims=True)
    product = (rows / tf.cast(mean, tf.float32))[..., tf.newaxis] * columns
    return tf.pad(tf.reshape(product, [-1]), [[0, piece.padded - piece.size]], constant_values=1.0)


def _join(parts: Sequence[Tensor]) -> Tensor:
    return tf.concat(parts, 0) if parts else tf.zeros([0])


MEASURING_RULES: Mapping[OptimizerName, Callable[[OptimizerConfig, Shard], MeasuringRule]] = {
    OptimizerName.lamb: Lamb,
    OptimizerName.adafactor: Adafactor,
}
