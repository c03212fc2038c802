"""A layer that counts examples, in a separate module because declaring it needs Keras."""

from typing import Any

import keras
import tensorflow as tf


@keras.saving.register_keras_serializable(package="trainer")
class Counts(keras.layers.Layer):  # type: ignore[misc]  # Keras has no types
    """Passes numbers of examples [N, 1] on, with a loss whose gradient is minus each example's share of the batch."""

    def __init__(self, examples: int, **options: Any) -> None:
        """Starts all counts at 0.

        Args:
            examples: of the data set; their numbers are 0..examples-1.
            options: of any Keras layer.
        """
        super().__init__(**options | {"dtype": "float32"})  # bfloat16 has no number between 256 and 258
        self._examples = examples

    def build(self, input_shape: tuple[int, ...]) -> None:
        self._counts = self.add_weight(shape=(self._examples,), initializer="zeros", name="counts")

    def call(self, numbers: tf.Tensor) -> tf.Tensor:
        rows = tf.cast(numbers[:, 0], tf.int32)
        message = f"model.options.examples={self._examples} is not data.options.examples"
        with tf.control_dependencies([tf.debugging.assert_less(rows, self._examples, message=message)]):
            rows = tf.identity(rows)  # so that the gradient, which needs no counts, waits for the check too
        self.add_loss(-tf.reduce_mean(tf.gather(self._counts, rows)))
        return numbers

    def get_config(self) -> dict[str, Any]:
        return super().get_config() | {"examples": self._examples}
