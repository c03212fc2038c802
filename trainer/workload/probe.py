"""Looks at how a model trains: traces a training pass, computes nothing, and notes what the plan must know of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import tensorflow as tf

from trainer.workload import lookups, step
from trainer.workload.data.examples import Batch, Spec
from trainer.workload.eager import caller
from trainer.workload.objective import Objective
from trainer.workload.seeded_draws import seeded_draws

EXCHANGES = ("all_reduce", "all_gather", "merge_call")  # of a tf.distribute.ReplicaContext
BATCH = 7  # examples, where a model takes any number


class Probed(NamedTuple):
    """What a training pass does."""

    unreached: tuple[str, ...] = ()  # paths of trainable variables that the loss does not depend on
    exchanging: tuple[str, ...] = ()  # layers and losses that exchange values with other replicas


def probe(objective: Objective, spec: Spec, *, batch: int = 0) -> Probed:
    """Traces the loss of a batch and its gradients.

    Args:
        batch: the only number of examples that the model takes; 0: any.

    Raises:
        ValueError: if the loss depends on no trainable variable, or not on the rows of a table.
    """
    model = objective.model
    gradients: dict[str, list[Any]] = {}
    exchanging: list[str] = []

    def run(weights: list[tf.Tensor], state: step.Tensors, batch: Batch) -> None:
        rows: list[tf.Tensor] = []
        seed = tf.zeros([2], tf.int64)

        def watch(looked_up: tf.Tensor) -> None:
            tape.watch(looked_up)
            rows.append(looked_up)

        with objective.in_graph(), seeded_draws(seed), tf.GradientTape() as tape:
            tape.watch(weights)
            value: list[tf.Tensor] = []
            with _noting_exchanges(exchanging.append):  # not those of the gradients of such a layer
                found = lookups.recorded(
                    lambda: value.append(step.compute_loss(objective, weights, state, seed, batch)[0]), watch
                )
        paths = [*(v.path for v in model.trainable_variables), *(lookup.path for lookup in found)]
        for path, gradient in zip(paths, tape.gradient(value[0], [*weights, *rows]), strict=True):
            gradients.setdefault(path, []).append(gradient)

    weights = [tf.TensorSpec(v.shape, v.dtype) for v in model.trainable_variables]
    state = {v.path: tf.TensorSpec(v.shape, v.dtype) for v in model.non_trainable_variables}
    fed = Batch(spec.features, spec.labels, spec.weights).map(
        lambda one: tf.TensorSpec([batch or BATCH, *one.shape], one.dtype)
    )
    tf.function(run, autograph=False).get_concrete_function(weights, state, fed)
    unreached = tuple(path for path, of_path in gradients.items() if all(one is None for one in of_path))
    _check_reach(gradients, unreached, trainable={v.path for v in model.trainable_variables})
    return Probed(unreached, tuple(dict.fromkeys(exchanging)))


def _check_reach(paths: Any, unreached: tuple[str, ...], *, trainable: set[str]) -> None:
    if len(unreached) == len(paths):
        raise ValueError(
            "the loss does not depend on any trainable variable of the model, so there is nothing to train"
        )
    if tables := [path for path in unreached if path not in trainable]:
        raise ValueError(f"the loss does not depend on the table {tables[0]}; leave its layer out of placement.sparse")


@contextmanager
def _noting_exchanges(note: Callable[[str], None]) -> Iterator[None]:
    """Calls `note` with who exchanges values between the replicas of a tf.distribute strategy."""
    context = tf.distribute.ReplicaContext
    before = {name: getattr(context, name) for name in EXCHANGES}

    def noting(exchange: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            note(caller())
            return exchange(*arguments, **options)

        return call

    for name, exchange in before.items():
        setattr(context, name, noting(exchange))
    try:
        yield
    finally:
        for name, exchange in before.items():
            setattr(context, name, exchange)
