"""Queues shared by tasks: their capacity, and how to drop messages of processes that have died."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

# The capacity of a queue of small messages: any number of processes may die and leave a message behind, and `take`
# drops those.
UNBOUNDED = -1


def drain(queue: Any) -> tf.Operation:
    """Empties a queue that no other operation takes from."""

    def drop_one(left: tf.Tensor) -> tuple[tf.Tensor]:
        with tf.control_dependencies(tf.nest.flatten(queue.dequeue())):
            return (left - 1,)

    return tf.while_loop(lambda left: left > 0, drop_one, (queue.size(),), parallel_iterations=1)[0].op


def take(queue: Any, stale: Callable[[tf.Tensor], tf.Tensor]) -> tf.Tensor:
    """Takes the next message that is not stale from a queue, and drops the stale ones before it."""
    return tf.while_loop(stale, lambda _: (queue.dequeue(),), (queue.dequeue(),), parallel_iterations=1)[0]
