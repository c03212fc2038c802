"""Probes a model: traces a training pass, without computing it, and records the facts that the plan needs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import tensorflow as tf

from trainer.workload import lookups, step
from trainer.workload.counts import Counting
from trainer.workload.data.examples import Batch, Spec
from trainer.workload.eager import caller
from trainer.workload.objective import Objective
from trainer.workload.parts import Tensors
from trainer.workload.patches import patched
from trainer.workload.paths import Paths
from trainer.workload.seeded_draws import seeded_draws

EXCHANGES = ("all_reduce", "all_gather", "merge_call")  # of a tf.distribute.ReplicaContext
BATCH = 7  # examples, if a model takes any number


class Probed(NamedTuple):
    """The facts about a training pass."""

    unreached: tuple[str, ...] = ()  # paths of trainable variables that the loss does not depend on
    exchanging: tuple[str, ...] = ()  # layers and losses that exchange values with other replicas
    counts: int = 0  # different counts that losses are divided by, if they may differ between parts of a batch
    is_one_mean: bool = True  # whether all losses have the same count
    scalars: tuple[str, ...] = ()  # what returns one number for a batch, with an unknown count


def probe(objective: Objective, spec: Spec, *, batch: int = 0) -> Probed:
    """Traces the loss of a batch and its gradients.

    Args:
        batch: the number of examples that the model takes; 0: any.

    Raises:
        ValueError: if the loss depends on no trainable variable, or does not depend on the rows of a table.
    """
    model, paths = objective.model, Paths(objective.model)
    trainable = [paths[v] for v in model.trainable_variables]
    gradients: dict[str, list[Any]] = {}
    exchanging: list[str] = []
    counting = Counting()

    def run(weights: list[tf.Tensor], state: Tensors, batch: Batch) -> None:
        rows: list[tf.Tensor] = []
        seed = tf.zeros([2], tf.int64)

        def watch(looked_up: tf.Tensor) -> None:
            tape.watch(looked_up)
            rows.append(looked_up)

        with objective.in_graph(), seeded_draws(seed), tf.GradientTape() as tape, tf.name_scope("model"):
            tape.watch(weights)
            value: list[tf.Tensor] = []
            with _noting_exchanges(exchanging.append):  # exchanges in gradients do not count
                found = lookups.recorded(
                    lambda: value.append(
                        step.compute_loss(objective, weights, state, seed, batch, counting=counting)[0]
                    ),
                    watch,
                )
        of_rows = [lookup.path for lookup in found]
        for path, gradient in zip([*trainable, *of_rows], tape.gradient(value[0], [*weights, *rows]), strict=True):
            gradients.setdefault(path, []).append(gradient)

    weights = [tf.TensorSpec(v.shape, v.dtype) for v in model.trainable_variables]
    state = {paths[v]: tf.TensorSpec(v.shape, v.dtype) for v in model.non_trainable_variables}
    fed = Batch(spec.features, spec.labels, spec.weights).map(
        lambda one: tf.TensorSpec([batch or BATCH, *one.shape], one.dtype)
    )
    tf.function(run, autograph=False).get_concrete_function(weights, state, fed)
    unreached = tuple(path for path, of_path in gradients.items() if all(one is None for one in of_path))
    _check_reach(gradients, unreached, trainable=set(trainable))
    is_one_mean = counting.size == (0 if counting.has_others else 1)
    return Probed(unreached, tuple(dict.fromkeys(exchanging)), counting.size, is_one_mean, tuple(counting.unknown))


def _check_reach(paths: Any, unreached: tuple[str, ...], *, trainable: set[str]) -> None:
    if len(unreached) == len(paths):
        raise ValueError(
            "the loss does not depend on any trainable variable of the model, so there is nothing to train"
        )
    if tables := [path for path in unreached if path not in trainable]:
        raise ValueError(f"the loss does not depend on the table {tables[0]}; leave its layer out of placement.sparse")


@contextmanager
def _noting_exchanges(note: Callable[[str], None]) -> Iterator[None]:
    """Calls `note` with each exchange of values between the replicas of a tf.distribute strategy."""
    context = tf.distribute.ReplicaContext

    def noting(exchange: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            note(caller())
            return exchange(*arguments, **options)

        return call

    with patched(*((context, name, noting(getattr(context, name))) for name in EXCHANGES)):
        yield
