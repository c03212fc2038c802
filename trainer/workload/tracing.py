"""Traces a model without computing it, to find out what it does with examples."""

from collections.abc import Callable
from functools import partial

import keras
import tensorflow as tf

from trainer.plan.tables import Table
from trainer.workload import lookups
from trainer.workload.data.examples import Batch, Nest, Spec, map_nest
from trainer.workload.objective import Objective
from trainer.workload.parts import Tensors
from trainer.workload.paths import Paths
from trainer.workload.seeded_draws import seeded_draws
from trainer.workload.step import call_model, make_evaluation, non_trainable_values, variables_of


def lookups_of(objective: Objective, features: Nest) -> list[lookups.Lookup]:
    """Returns the lookups of a model's sparse layers for features, in the order of calls; to be traced."""
    if not lookups.has_tables(objective.model):
        return []
    return lookups.recorded(partial(_call_with_zeros, objective, features))


def tables_of(objective: Objective, spec: Spec) -> tuple[Table, ...]:
    """Returns the tables of a model's sparse layers, for examples that look like `spec`.

    Raises:
        ValueError: if the number of ids that an example looks up is not fixed.
    """
    found: list[lookups.Lookup] = []
    _trace(lambda features: found.extend(lookups_of(objective, features)), spec)
    return lookups.tables_of(objective.model, found)


def lookup_counts(objective: Objective, spec: Spec) -> dict[str, int]:
    """Returns how many ids an example looks up, by path of Embedding layer; 0: unknown."""
    model, counts = objective.model, {}

    def count(features: Nest) -> None:
        counts.update(lookups.counted(model, partial(_call_with_zeros, objective, features)))

    if any(isinstance(layer, keras.layers.Embedding) for layer in model._flatten_layers(include_self=False)):
        _trace(count, spec)
    return counts


def _call_with_zeros(objective: Objective, features: Nest) -> None:
    """Calls a model with zeros as weights, to observe what its layers do with the features."""
    model, no_seed = objective.model, tf.zeros([2], tf.int64)
    state = {path: tf.zeros(v.shape) for path, v in Paths(model).named(model.non_trainable_variables).items()}
    weights = [tf.zeros(v.shape) for v in model.trainable_variables]
    with objective.in_graph(), seeded_draws(no_seed), tf.name_scope("model"):
        call_model(
            model, weights, non_trainable_values(model, state, no_seed), objective.inputs(features), training=True
        )


def _trace(function: Callable[[Nest], None], spec: Spec) -> None:
    """Traces a function of the features of examples that look like `spec`."""
    fed = map_nest(lambda one: tf.TensorSpec([None, *one.shape], one.dtype), spec.features)
    tf.function(function, autograph=False).get_concrete_function(fed)


def trace(objective: Objective, spec: Spec) -> None:
    """Traces an evaluation of examples that look like `spec`, without computing it: the objective's size follows."""
    model, batch = objective.model, Batch(spec.features, spec.labels, spec.weights)
    values = {path: tf.TensorSpec(v.shape, v.dtype) for path, v in Paths(model).named(variables_of(model)).items()}
    fed = batch.map(lambda one: tf.TensorSpec([None, *one.shape], one.dtype))
    tf.function(make_evaluation(objective), autograph=False).get_concrete_function(values, values, fed)


def adds_losses(objective: Objective, spec: Spec) -> bool:
    """Whether layers add losses when the model is called, besides those of their weights."""
    model, paths, seed, counts = objective.model, Paths(objective.model), tf.zeros([2], tf.int64), []

    def call(values: Tensors, features: Nest) -> None:
        weights = [values[paths[v]] for v in model.trainable_variables]
        with objective.in_graph(), seeded_draws(seed), tf.name_scope("model"):
            rest = non_trainable_values(model, values, seed)
            *_, losses = call_model(model, weights, rest, objective.inputs(features), training=True)
        counts.append(len(losses) - len(model._get_regularization_losses()))

    values = {path: tf.TensorSpec(v.shape, v.dtype) for path, v in Paths(model).named(variables_of(model)).items()}
    fed = map_nest(lambda one: tf.TensorSpec([None, *one.shape], one.dtype), spec.features)
    tf.function(call, autograph=False).get_concrete_function(values, fed)
    return counts[0] > 0
