"""Adds the frozen weights of a model to a graph, as variables that are loaded once."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

v1 = tf.compat.v1


class Copy:
    """The frozen weights as tensors of a graph."""

    def __init__(self, values: Mapping[str, np.ndarray]) -> None:
        self._values = values
        self._assign: list[tf.Operation] = []
        self._feeds: dict[tf.Tensor, np.ndarray] = {}

    def tensors(self, name: str) -> dict[str, tf.Tensor]:
        """Adds them to the default graph, by path, where its devices say; `load` gives them their values.

        They are variables, because a graph definition with its constants is limited to 2 GB. In eager mode they
        have their values at once.

        Args:
            name: different from that of other copies on the same server.
        """
        with tf.init_scope():
            if tf.executing_eagerly():
                return {path: tf.constant(value) for path, value in self._values.items()}
        found = {}
        for number, (path, value) in enumerate(self._values.items()):
            variable = v1.get_variable(
                f"{name}_{number}", value.shape, value.dtype, v1.zeros_initializer(), use_resource=True
            )
            feed = v1.placeholder(value.dtype, value.shape)
            self._assign.append(variable.assign(feed, read_value=False))
            self._feeds[feed] = value
            found[path] = variable.read_value()
        return found

    def load(self, session: Any) -> None:
        if self._assign:
            session.run(self._assign, self._feeds)
