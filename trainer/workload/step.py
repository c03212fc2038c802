"""Makes the replica step: one forward and backward pass as a pure function of parameters, state, seed and batch.

It does not know about clusters. The same function trains in one process and behind parameter servers, so a user's model
is an ordinary Keras model.
"""

from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from trainer.plan.layout import Parameter
from trainer.workload import lookups
from trainer.workload.batch_norm import fused
from trainer.workload.counts import LEAST, Counting
from trainer.workload.data.draws import drawn_from, generators_of
from trainer.workload.data.examples import Batch, Nest
from trainer.workload.keras_internals import CallContext, global_state
from trainer.workload.layer_devices import pinned
from trainer.workload.loss_scale import LOWEST
from trainer.workload.objective import Objective
from trainer.workload.ordered_sums import keep_written, ordered_sums
from trainer.workload.parts import PassInput, PassOutput, Rows, Tensors, in_parts
from trainer.workload.paths import Paths, is_seed
from trainer.workload.seeded_draws import seeded_draws

CURRENT = "current_call_ctx"  # Keras's name of the context in which layers find what outer layers were given


def parameters_of(model: keras.Model, frozen: Collection[str] = ()) -> list[Parameter]:
    """Returns the trainable parameters and the state of a model in creation order; seed generators are inputs.

    Args:
        frozen: paths of variables that are neither.

    Raises:
        ValueError: if a variable cannot be kept as float32, or has a constraint.
    """
    trainable = {id(v) for v in model.trainable_variables}
    variables = Paths(model).named(model.variables)
    for path, v in variables.items():
        if id(v) in trainable and v.dtype != "float32":
            raise ValueError(f"variable {path!r} is {v.dtype}; a model's trainable variables must be float32")
        if id(v) in trainable and v.constraint is not None:
            name = type(v.constraint).__name__
            raise ValueError(f"variable {path!r} has a constraint, {name}, which is not applied; leave it out")
    return [Parameter(path, tuple(v.shape), id(v) in trainable) for path, v in variables.items() if path not in frozen]


def batch_of(model: keras.Model) -> int:
    """Returns the batch size that a model's inputs were made with; 0: none."""
    return max((one.shape[0] or 0 for one in getattr(model, "inputs", None) or ()), default=0)


def layers_of(model: keras.Model) -> list[str]:
    """Returns the paths of a model's layers, nested ones included, in creation order; inputs have none."""
    paths = Paths(model)
    return [paths[layer] for layer in model._flatten_layers(include_self=False) if layer.path]


def initial_values(model: keras.Model, frozen: Collection[str] = ()) -> dict[str, np.ndarray]:
    """Returns the current values of `parameters_of`, by path: arrays of float32."""
    variables = Paths(model).named(model.variables)
    return {path: np.asarray(v.numpy(), np.float32) for path, v in variables.items() if path not in frozen}


class StepOutput(NamedTuple):
    """The result of one replica step."""

    gradients: Tensors
    state: Tensors  # after the step
    loss: tf.Tensor
    sums: tf.Tensor  # [K] what the batch adds to the metrics' variables
    overflow: tf.Tensor  # 1 if a gradient is not finite under a loss scale, otherwise 0
    bad: tf.Tensor  # 1 if the loss is not finite, or a gradient that no lower loss scale would save; otherwise 0
    finite: tf.Tensor  # [1 + gradients + rows] bool: whether the loss is finite, and then each gradient
    rows: Rows = ()  # the gradients of the rows
    divisor: tf.Tensor | float = 1.0  # factor by which loss and gradients were multiplied


def make_step(
    objective: Objective,
    *,
    accumulate: int = 1,
    counts: int = 0,
    is_counted: bool = False,
    layers: Mapping[str, str] | None = None,
    scopes: MutableMapping[str, str] | None = None,
    jit: bool = False,
    trace_seed: int = 0,
) -> Callable[..., StepOutput]:
    """Makes step(parameters, state, seed, batch, loss_scale=None, rows=()) -> StepOutput.

    Args:
        objective: a model, its loss and its metrics.
        accumulate: number of parts in which the batch is computed, one after another; the result is their mean.
        counts: how many different counts losses are divided by, if they may differ between parts of a batch.
        is_counted: whether loss and gradients are multiplied by the single count.
        layers: device by layer path; the backward pass of a layer runs where its forward pass does.
        scopes: receives the layer path of each name scope when a step is traced.
        jit: whether XLA compiles the step; BatchNorm is then Keras's own (see batch_norm.py).
        trace_seed: of what a model's code draws with numpy or `random`. These numbers are constants of the traced step,
            and have to be the same in each trace, whatever its process has drawn before.

    The step takes parameters by path, state and frozen weights by path, a seed [2] of int64 that fixes every random
    draw (dropout), and a batch; the loss is the mean over the batch plus the model's own (regularizers). A loss scale
    [] keeps small gradients in the range of float16: the loss is multiplied by it, the gradients are divided. `rows`
    are what the lookups of sparse layers are given, in their order.
    """
    model, paths = objective.model, Paths(objective.model)
    keep_written(fuses=not _has_bfloat16(model))
    trainable = [paths[v] for v in model.trainable_variables]
    generators = generators_of(*model._flatten_layers(), objective)

    def count(given: PassInput) -> tf.Tensor:
        weights, counting = [given.parameters[path] for path in trainable], Counting()
        with objective.in_graph(), ordered_sums(), seeded_draws(given.seed), tf.name_scope("count"):
            compute_loss(objective, weights, given.state, given.seed, given.batch, given.rows, counting=counting)
        return counting.counts

    def whole(given: PassInput) -> PassOutput:
        weights = [given.parameters[path] for path in trainable]
        state, seed, batch, rows, loss_scale = given.state, given.seed, given.batch, given.rows, given.loss_scale
        watched, counting = [*weights, *rows], Counting(given.share) if counts else None
        kernels = nullcontext() if jit else fused(model)
        with kernels, pinned(model, layers or {}, scopes), objective.in_graph(), ordered_sums(), seeded_draws(seed):
            # A layer's name may be one that is not allowed for a root scope.
            with tf.GradientTape() as tape, tf.name_scope("model"):
                tape.watch(watched)
                value, sums, rest = compute_loss(objective, weights, state, seed, batch, rows, counting=counting)
                scaled = value if loss_scale is None else value * loss_scale
            gradients = tape.gradient(scaled, watched, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        dense = [tf.convert_to_tensor(gradient) for gradient in gradients]
        if loss_scale is not None:
            dense = [gradient / loss_scale for gradient in dense]
        moved = {
            paths[v]: tf.cast(new, tf.float32)
            for v, new in zip(model.non_trainable_variables, rest, strict=True)
            if not is_seed(v) and paths[v] not in objective.frozen
        }
        of_weights, of_rows = dict(zip(trainable, dense, strict=False)), dense[len(trainable) :]
        return PassOutput(of_weights, moved, value, sums, of_rows, counting.counts if counting else tf.zeros([0]))

    def step(
        parameters: Tensors,
        state: Tensors,
        seed: tf.Tensor,
        batch: Batch,
        loss_scale: tf.Tensor | None = None,
        rows: Rows = (),
    ) -> StepOutput:
        frozen = {path: state[path] for path in objective.frozen}

        def with_frozen(function: Callable[..., Any]) -> Callable[..., Any]:
            return lambda given: function(given._replace(state={**given.state, **frozen}))

        run = with_frozen(whole)
        if accumulate > 1:
            run = in_parts(run, accumulate, objective.size, with_frozen(count), counts)
        own = {  # without a loss scale
            path: state[path] for path in paths.named(model.non_trainable_variables) if path not in frozen
        }
        with drawn_from(trace_seed, own=generators):
            output: PassOutput = run(PassInput(parameters, own, seed, batch, rows, loss_scale))
        checked = _check_finite([*output.gradients.values(), *output.rows], output.loss, loss_scale)
        weight = tf.maximum(output.counts[0], LEAST) if is_counted else 1.0
        output = output.times(weight) if is_counted else output
        return StepOutput(output.gradients, output.state, output.loss, output.sums, *checked, output.rows, weight)

    return step


def compute_loss(
    objective: Objective,
    weights: Sequence[tf.Tensor],
    state: Tensors,
    seed: tf.Tensor,
    batch: Batch,
    rows: Rows = (),
    *,
    counting: Counting | None = None,
) -> tuple[tf.Tensor, tf.Tensor, Sequence[tf.Tensor]]:
    """Returns the training loss of a batch, its additions to the metrics, and the other variables after it.

    Args:
        weights: values of the model's trainable variables, in their order.
        counting: as in `Objective.compute`.
    """
    model = objective.model
    features, others = objective.inputs(batch.features), non_trainable_values(model, state, seed)
    with lookups.given(rows):
        outputs, rest, own = call_model(model, weights, others, features, training=True)
    known = zip(variables_of(model), [*weights, *rest], strict=True)
    value, sums = objective.compute(known, batch, outputs, own, training=True, counting=counting)
    return value, sums, rest


def call_model(
    model: keras.Model, trainable: Sequence[tf.Tensor], others: Sequence[tf.Tensor], features: Any, *, training: bool
) -> Any:
    """Calls a model as its `__call__` does, with these values of its variables: (outputs, others after it, losses).

    `training` reaches layers inside of layers that do not pass it on; `stateless_call` alone gives it to the model's
    own `call` only. As in Keras, a model whose `call` does not take it leaves it to the layers.
    """
    options = {"training": training} if takes_training(model) else {}
    context = CallContext(entry_layer=model)
    context.training = options.get("training")
    model._clear_losses()
    global_state.set_global_attribute(CURRENT, context)
    try:
        return model.stateless_call(trainable, others, features, return_losses=True, **options)
    finally:
        global_state.set_global_attribute(CURRENT, None)


def _check_finite(
    gradients: Sequence[tf.Tensor], loss: tf.Tensor, loss_scale: tf.Tensor | None
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns (overflow, bad, finite) of a `StepOutput`."""
    finite = tf.stack([tf.reduce_all(tf.math.is_finite(values)) for values in (loss, *gradients)])
    if loss_scale is None:
        return tf.constant(0.0), 1.0 - tf.cast(tf.reduce_all(finite), tf.float32), finite
    overflows = tf.logical_not(tf.reduce_all(finite[1:]))
    is_bad = tf.logical_or(tf.logical_not(finite[0]), tf.logical_and(overflows, loss_scale <= LOWEST))
    return tf.cast(overflows, tf.float32), tf.cast(is_bad, tf.float32), finite


def _has_bfloat16(model: keras.Model) -> bool:
    return any(layer.compute_dtype == "bfloat16" for layer in model._flatten_layers())


def make_forward(objective: Objective) -> Callable[..., tuple[Nest, list[tf.Tensor], list[tf.Tensor]]]:
    """Makes forward(parameters, state, batch, rows=()) -> (outputs, values of all variables, losses of the layers)."""
    model, paths = objective.model, Paths(objective.model)
    keep_written(fuses=not _has_bfloat16(model))

    def forward(
        parameters: Tensors, state: Tensors, batch: Batch, rows: Rows = ()
    ) -> tuple[Nest, list[tf.Tensor], list[tf.Tensor]]:
        weights = [parameters[paths[v]] for v in model.trainable_variables]
        no_seed = tf.zeros([2], tf.int64)
        with tf.name_scope("model"), objective.in_graph(), ordered_sums(), seeded_draws(no_seed):
            features, others = objective.inputs(batch.features), non_trainable_values(model, state, no_seed)
            with lookups.given(rows):
                outputs, rest, own = call_model(model, weights, others, features, training=False)
        return outputs, [*weights, *rest], own

    return forward


def make_evaluation(objective: Objective) -> Callable[..., tuple[tf.Tensor, tf.Tensor]]:
    """Makes evaluate(parameters, state, batch, rows=()) -> (loss, the mean over the batch; sums of the metrics [K])."""
    forward = make_forward(objective)

    def evaluate(parameters: Tensors, state: Tensors, batch: Batch, rows: Rows = ()) -> tuple[tf.Tensor, tf.Tensor]:
        outputs, values, own = forward(parameters, state, batch, rows)
        with objective.in_graph(), ordered_sums(), seeded_draws(tf.zeros([2], tf.int64)):
            known = zip(variables_of(objective.model), values, strict=True)
            return objective.compute(known, batch, outputs, own, training=False)

    return evaluate


def takes_training(model: keras.Model) -> bool:
    """Whether a model's `call` has the argument `training`, which Keras passes on to its layers."""
    return bool(model._call_has_training_arg)


def variables_of(model: keras.Model) -> list[keras.Variable]:
    return [*model.trainable_variables, *model.non_trainable_variables]


def _as(value: tf.Tensor, dtype: str) -> tf.Tensor:
    """Converts state to its type, if that is not float32; the mean of the replicas' counters is rounded."""
    if value.dtype == dtype:
        return value
    return tf.cast(value if "float" in dtype else tf.round(value), dtype)


def non_trainable_values(model: keras.Model, state: Tensors, seed: tf.Tensor) -> list[tf.Tensor]:
    """Returns values of the model's non-trainable variables; each seed generator gets its own state from `seed`."""
    values, paths = [], Paths(model)
    for number, variable in enumerate(model.non_trainable_variables):
        if is_seed(variable):
            folded = tf.random.experimental.stateless_fold_in(seed, number)
            values.append(tf.cast(tf.bitwise.bitwise_and(folded, 0x7FFFFFFF), variable.dtype))
        else:
            values.append(_as(state[paths[variable]], variable.dtype))
    return values
