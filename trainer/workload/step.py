"""Makes the replica step: one forward and backward pass as a pure function of parameters, state, seed and batch.

It does not know about clusters. The same function trains in one process and behind parameter servers, so a user's model
is an ordinary Keras model.
"""

from collections.abc import Callable, Mapping, MutableMapping
from contextlib import nullcontext
from typing import NamedTuple

import keras
import tensorflow as tf

from trainer.plan.layout import Parameter
from trainer.workload.batch_norm import fused
from trainer.workload.layer_devices import pinned
from trainer.workload.loss_scale import LOWEST

Tensors = Mapping[str, tf.Tensor]  # by parameter path
Batch = tuple[tf.Tensor, tf.Tensor]  # features [N, ...], labels [N, ...]
# (parameters, state, seed, batch, loss scale) -> (gradients, state', loss, accuracy)
PassOutput = tuple[Tensors, Tensors, tf.Tensor, tf.Tensor]
Pass = Callable[[Tensors, Tensors, tf.Tensor, Batch, tf.Tensor | None], PassOutput]
Loss = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]  # (labels, outputs) -> [N] losses


def parameters_of(model: keras.Model) -> list[Parameter]:
    """The trainable parameters and the state of a model, in creation order; seed generators are inputs, not state.

    Raises:
        ValueError: if two variables share a path, or one is not float32.
    """
    trainable = {id(v) for v in model.trainable_variables}
    parameters = [Parameter(v.path, tuple(v.shape), id(v) in trainable) for v in model.variables if not _is_seed(v)]
    paths = [p.path for p in parameters]
    if twice := [path for path in paths if paths.count(path) > 1]:
        raise ValueError(f"two variables of the model are named {twice[0]!r}; give its layers different names")
    for v in model.variables:
        if not _is_seed(v) and v.dtype != "float32":
            raise ValueError(f"variable {v.path!r} is {v.dtype}; a model's variables must be float32")
    return parameters


def layers_of(model: keras.Model) -> list[str]:
    """The paths of a model's layers, nested ones included, in creation order; inputs have none."""
    return [layer.path for layer in model._flatten_layers(include_self=False) if layer.path]


def initial_values(model: keras.Model) -> dict[str, object]:
    """The model's current values as numpy arrays, by path."""
    return {v.path: v.numpy() for v in model.variables if not _is_seed(v)}


class StepOutput(NamedTuple):
    """What one replica step returns."""

    gradients: Tensors
    state: Tensors  # after the step
    loss: tf.Tensor
    accuracy: tf.Tensor
    overflow: tf.Tensor  # 1 if a gradient is not finite under a loss scale, otherwise 0
    bad: tf.Tensor  # 1 if the loss is not finite, or a gradient that no lower loss scale would save; otherwise 0
    finite: tf.Tensor  # [1 + gradients] bool: whether the loss is finite, and then each gradient


def make_step(
    model: keras.Model,
    loss: str,
    *,
    accumulate: int = 1,
    layers: Mapping[str, str] | None = None,
    scopes: MutableMapping[str, str] | None = None,
    jit: bool = False,
) -> Callable[..., StepOutput]:
    """Makes step(parameters, state, seed, features, labels, loss_scale=None) -> StepOutput.

    Args:
        model: its outputs are logits, or values for mean_squared_error.
        loss: a LossName.
        accumulate: number of parts in which the batch is computed, one after another; the result is their mean.
        layers: device by layer path; the backward pass of a layer runs where its forward pass does.
        scopes: receives the layer path of each name scope when a step is traced.
        jit: whether XLA compiles the step; BatchNorm is then Keras's own (see batch_norm.py).

    The step takes parameters and state by path, a seed [2] of int64 that fixes every random draw (dropout), and a batch
    features [N, ...], labels [N, ...]; the loss is the mean over the batch plus the model's own (regularizers). A loss
    scale [] keeps small gradients in the range of float16: the loss is multiplied by it, the gradients are divided.
    """
    losses = LOSSES[loss]
    trainable = [v.path for v in model.trainable_variables]

    def whole(
        parameters: Tensors, state: Tensors, seed: tf.Tensor, batch: Batch, loss_scale: tf.Tensor | None
    ) -> PassOutput:
        features, labels = batch
        weights = [parameters[path] for path in trainable]
        with nullcontext() if jit else fused(model), pinned(model, layers or {}, scopes):
            # A layer's name may be one that is not allowed for a root scope.
            with tf.GradientTape() as tape, tf.name_scope("model"):
                tape.watch(weights)
                outputs, rest, own = model.stateless_call(
                    weights, _non_trainable(model, state, seed), features, training=True, return_losses=True
                )
                outputs = tf.cast(outputs, tf.float32)
                value = tf.add_n([tf.reduce_mean(losses(labels, outputs)), *(tf.cast(o, tf.float32) for o in own)])
                scaled = value if loss_scale is None else value * loss_scale
            gradients = tape.gradient(scaled, weights, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        dense = [tf.convert_to_tensor(gradient) for gradient in gradients]
        if loss_scale is not None:
            dense = [gradient / loss_scale for gradient in dense]
        moved = {
            v.path: tf.cast(new, tf.float32)
            for v, new in zip(model.non_trainable_variables, rest, strict=True)
            if not _is_seed(v)
        }
        return dict(zip(trainable, dense, strict=True)), moved, value, accuracy(loss, labels, outputs)

    def step(
        parameters: Tensors,
        state: Tensors,
        seed: tf.Tensor,
        features: tf.Tensor,
        labels: tf.Tensor,
        loss_scale: tf.Tensor | None = None,
    ) -> StepOutput:
        run = whole if accumulate == 1 else _in_parts(whole, accumulate)
        own = {v.path: state[v.path] for v in model.non_trainable_variables if not _is_seed(v)}  # without a loss scale
        gradients, moved, value, accuracy_of = run(parameters, own, seed, (features, labels), loss_scale)
        return StepOutput(gradients, moved, value, accuracy_of, *_check_finite(gradients, value, loss_scale))

    return step


def _check_finite(
    gradients: Tensors, loss: tf.Tensor, loss_scale: tf.Tensor | None
) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
    """Returns (overflow, bad, finite) of a `StepOutput`."""
    finite = tf.stack([tf.reduce_all(tf.math.is_finite(values)) for values in (loss, *gradients.values())])
    if loss_scale is None:
        return tf.constant(0.0), 1.0 - tf.cast(tf.reduce_all(finite), tf.float32), finite
    overflows = tf.logical_not(tf.reduce_all(finite[1:]))
    is_bad = tf.logical_or(tf.logical_not(finite[0]), tf.logical_and(overflows, loss_scale <= LOWEST))
    return tf.cast(overflows, tf.float32), tf.cast(is_bad, tf.float32), finite


def _in_parts(run: Pass, count: int) -> Pass:
    """A pass over equal parts of the batch, one after another: the mean of their results, the state after the last."""

    def in_parts(
        parameters: Tensors, state: Tensors, seed: tf.Tensor, batch: Batch, loss_scale: tf.Tensor | None
    ) -> PassOutput:
        parts = [tf.reshape(values, [count, -1, *values.shape[1:]]) for values in batch]

        def add(
            part: tf.Tensor, gradients: Tensors, state: Tensors, loss: tf.Tensor, accuracy: tf.Tensor
        ) -> tuple[tf.Tensor, Tensors, Tensors, tf.Tensor, tf.Tensor]:
            drawn = tf.random.experimental.stateless_fold_in(seed, part)
            rows = parts[0][part], parts[1][part]
            more, state, loss_of, accuracy_of = run(parameters, state, drawn, rows, loss_scale)
            total = {path: gradient + more[path] for path, gradient in gradients.items()}
            return part + 1, total, state, loss + loss_of, accuracy + accuracy_of

        zeros = {path: tf.zeros_like(values) for path, values in parameters.items()}
        _, gradients, state, loss, accuracy = tf.while_loop(
            lambda part, *_: part < count,
            add,
            (tf.constant(0), zeros, dict(state), tf.constant(0.0), tf.constant(0.0)),
            parallel_iterations=1,
            maximum_iterations=count,
        )
        return {path: total / count for path, total in gradients.items()}, state, loss / count, accuracy / count

    return in_parts


def make_evaluation(model: keras.Model, loss: str) -> Callable[..., tuple[tf.Tensor, tf.Tensor]]:
    """Makes evaluate(parameters, state, features, labels) -> (loss, accuracy), both means over the batch."""
    losses = LOSSES[loss]

    def evaluate(
        parameters: Tensors, state: Tensors, features: tf.Tensor, labels: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        weights = [parameters[v.path] for v in model.trainable_variables]
        no_seed = tf.zeros([2], tf.int64)
        with tf.name_scope("model"):
            outputs, _ = model.stateless_call(weights, _non_trainable(model, state, no_seed), features, training=False)
        outputs = tf.cast(outputs, tf.float32)
        return tf.reduce_mean(losses(labels, outputs)), accuracy(loss, labels, outputs)

    return evaluate


def accuracy(loss: str, labels: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    """The share of a batch that is classified correctly; 0 for a loss that does not classify."""
    if loss == "sparse_categorical_crossentropy":
        right = tf.equal(tf.argmax(outputs, -1), tf.cast(labels, tf.int64))
    elif loss == "binary_crossentropy":
        right = tf.equal(_one_column(outputs) > 0, _one_column(labels) > 0.5)
    else:
        return tf.constant(0.0)
    return tf.reduce_mean(tf.cast(right, tf.float32))


def _one_column(values: tf.Tensor) -> tf.Tensor:
    return tf.reshape(tf.cast(values, tf.float32), [-1])


def _binary_crossentropy(labels: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    return tf.nn.sigmoid_cross_entropy_with_logits(labels=_one_column(labels), logits=_one_column(outputs))


def _squared_error(labels: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    return tf.math.squared_difference(outputs, tf.reshape(tf.cast(labels, tf.float32), tf.shape(outputs)))


LOSSES: dict[str, Loss] = {
    "sparse_categorical_crossentropy": lambda labels, outputs: tf.nn.sparse_softmax_cross_entropy_with_logits(
        labels=tf.cast(labels, tf.int32), logits=outputs
    ),
    "binary_crossentropy": _binary_crossentropy,
    "mean_squared_error": _squared_error,
}


def _is_seed(variable: keras.Variable) -> bool:
    return variable.path.endswith("seed_generator_state")


def _non_trainable(model: keras.Model, state: Tensors, seed: tf.Tensor) -> list[tf.Tensor]:
    """Values for the model's non-trainable variables; each seed generator gets its own state, drawn from `seed`."""
    values = []
    for number, variable in enumerate(model.non_trainable_variables):
        if _is_seed(variable):
            folded = tf.random.experimental.stateless_fold_in(seed, number)
            values.append(tf.cast(tf.bitwise.bitwise_and(folded, 0x7FFFFFFF), variable.dtype))
        else:
            values.append(state[variable.path])
    return values
