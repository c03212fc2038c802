"""Makes random draws without a seed generator a function of the step's seed.

A layer may draw numbers by `tf.random.normal(...)` or `keras.random.normal(...)` and own no `SeedGenerator`. TensorFlow
draws them from a state that starts again in each process, so neither two runs nor a resumed run would be equal.
"""

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from trainer.workload.keras_internals import random_seed_dtype, seed_generator
from trainer.workload.patches import patched
from trainer.workload.tensorflow_internals import gen_random_ops

NUMBER = 2**32  # folded into the seed; those of seed generators are smaller

Draw = Callable[..., tf.Tensor]  # with the arguments of a TensorFlow operation, the seed first


def _normal(seed: tf.Tensor, shape: Any, dtype: Any, **_: Any) -> tf.Tensor:
    return tf.random.stateless_normal(shape, seed, dtype=dtype)


def _truncated_normal(seed: tf.Tensor, shape: Any, dtype: Any, **_: Any) -> tf.Tensor:
    return tf.random.stateless_truncated_normal(shape, seed, dtype=dtype)


def _uniform(seed: tf.Tensor, shape: Any, dtype: Any, **_: Any) -> tf.Tensor:
    return tf.random.stateless_uniform(shape, seed, dtype=dtype)


def _uniform_int(seed: tf.Tensor, shape: Any, minval: Any, maxval: Any, **_: Any) -> tf.Tensor:
    minval = tf.convert_to_tensor(minval)
    return tf.random.stateless_uniform(shape, seed, minval, maxval, dtype=minval.dtype)


def _shuffle(seed: tf.Tensor, value: Any, **_: Any) -> tf.Tensor:
    value = tf.convert_to_tensor(value)
    return tf.gather(value, tf.argsort(tf.random.stateless_uniform(tf.shape(value)[:1], seed)))


def _categorical(seed: tf.Tensor, logits: Any, num_samples: Any, output_dtype: Any = tf.int64, **_: Any) -> tf.Tensor:
    return tf.random.stateless_categorical(logits, num_samples, seed, dtype=output_dtype)


def _gamma(seed: tf.Tensor, shape: Any, alpha: Any, **_: Any) -> tf.Tensor:
    alpha = tf.convert_to_tensor(alpha)
    return tf.random.stateless_gamma(tf.concat([shape, tf.shape(alpha)], 0), seed, alpha, dtype=alpha.dtype)


DRAWS: dict[str, Draw] = {
    "random_standard_normal": _normal,
    "truncated_normal": _truncated_normal,
    "random_uniform": _uniform,
    "random_uniform_int": _uniform_int,
    "random_shuffle": _shuffle,
    "multinomial": _categorical,
    "random_gamma": _gamma,
}


class _Generator:
    """Replaces the generator that Keras uses for draws without one."""

    def __init__(self, next_seed: Callable[[], tf.Tensor]) -> None:
        self._next_seed = next_seed

    def next(self, ordered: bool = True) -> tf.Tensor:
        return tf.cast(tf.bitwise.bitwise_and(self._next_seed(), 0x7FFFFFFF), random_seed_dtype())


@contextmanager
def seeded_draws(seed: tf.Tensor) -> Iterator[None]:
    """Makes code traced inside the context draw from a seed [2] of int64; each draw has its own numbers.

    Other threads, which may be reading data, draw as before.
    """
    numbers, thread = itertools.count(), threading.get_ident()

    def is_traced() -> bool:
        return threading.get_ident() == thread and not tf.executing_eagerly()

    def next_seed() -> tf.Tensor:
        fold_in = tf.random.experimental.stateless_fold_in
        return fold_in(fold_in(seed, NUMBER), next(numbers))

    def seeded(draw: Draw, otherwise: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
        def run(*args: Any, seed: Any = 0, seed2: Any = 0, name: str | None = None, **options: Any) -> tf.Tensor:
            if is_traced():
                return draw(next_seed(), *args, **options)
            return otherwise(*args, seed=seed, seed2=seed2, name=name, **options)

        return run

    generator = seed_generator.global_seed_generator
    draws = ((gen_random_ops, name, seeded(draw, getattr(gen_random_ops, name))) for name, draw in DRAWS.items())
    of_keras = (seed_generator, "global_seed_generator", lambda: _Generator(next_seed) if is_traced() else generator())
    with patched(*draws, of_keras):
        yield
