"""Sums tensors in the given order, two at a time.

TensorFlow's AddN starts with whichever of its inputs has a buffer that it may overwrite
(tensorflow/core/kernels/aggregate_ops.cc). That depends on what other threads have finished, so a sum of three or more
inputs has bits that differ between runs. A gradient is such a sum where a tensor is used more than twice.

TensorFlow's arithmetic optimizer turns sums of two inputs into an AddN again. The sessions of tasks leave it out, and
`keep_written` leaves it out of functions that a session does not inline, such as a step that writes its gradients into
shared memory: they have options of their own.
"""

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from trainer.workload.patches import patched
from trainer.workload.tensorflow_internals import gen_math_ops


def keep_written(*, fuses: bool) -> None:
    """Keeps TensorFlow from rewriting sums in functions that are called from now on.

    Args:
        fuses: whether it may make one operation of several, as sessions may (task/server.py): where those are of
            bfloat16, the one rounds less often than they.
    """
    unwanted = ["arithmetic_optimization", *([] if fuses else ["remapping"])]
    tf.config.optimizer.set_experimental_options(dict.fromkeys(unwanted, False))


@contextmanager
def ordered_sums() -> Iterator[None]:
    """Traces every sum inside the context as sums of two tensors, also in gradients."""
    add_n = gen_math_ops.add_n

    def add_in_order(inputs: Sequence[Any], name: str | None = None) -> tf.Tensor:
        if len(inputs) < 2 or any(getattr(one, "dtype", None) == tf.variant for one in inputs):
            return add_n(inputs, name=name)
        return functools.reduce(tf.add, inputs)

    with patched((gen_math_ops, "add_n", add_in_order)):
        yield
