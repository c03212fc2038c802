"""The replica step: one forward and backward pass as a pure function of parameters, state, seed and batch.

It knows nothing of clusters. The same function trains in one process and behind parameter servers, so a user's model is
an ordinary Keras model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import keras
import tensorflow as tf

from trainer.placement import Parameter

Tensors = Mapping[str, tf.Tensor]  # by parameter path
Loss = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]  # (labels, outputs) -> [N] losses


def parameters_of(model: keras.Model) -> list[Parameter]:
    """The trainable parameters and the state of a model, in creation order; seed generators are inputs, not state.

    Raises:
        ValueError: if two variables share a path, or one is not float32.
    """
    trainable = {id(v) for v in model.trainable_variables}
    found = [Parameter(v.path, tuple(v.shape), id(v) in trainable) for v in model.variables if not _is_seed(v)]
    paths = [p.path for p in found]
    for path in paths:
        if paths.count(path) > 1:
            raise ValueError(f"two variables of the model are named {path!r}; give its layers different names")
    for v in model.variables:
        if not _is_seed(v) and v.dtype != "float32":
            raise ValueError(f"variable {v.path!r} is {v.dtype}; a model's variables must be float32")
    return found


def layers_of(model: keras.Model) -> list[str]:
    """The paths of a model's layers, those inside other layers too, in creation order; inputs have none."""
    return [layer.path for layer in model._flatten_layers(include_self=False) if layer.path]


def initial_values(model: keras.Model) -> dict[str, object]:
    """The model's current values as numpy arrays, by path."""
    return {v.path: v.numpy() for v in model.variables if not _is_seed(v)}


def make_step(model: keras.Model, loss: str) -> Callable[..., tuple[Tensors, Tensors, tf.Tensor, tf.Tensor]]:
    """Builds step(parameters, state, seed, features, labels) -> (gradients, state', loss, accuracy).

    Args:
        model: a Keras model whose outputs are logits (or values, for mean_squared_error).
        loss: a LossName.

    The step takes parameters and state by path, a seed [2] of int64 that fixes every random draw (dropout), and a batch
    features [N, ...], labels [N, ...]; the loss is the mean over the batch plus the model's own (regularizers).
    """
    losses = LOSSES[loss]
    trainable = [v.path for v in model.trainable_variables]

    def step(
        parameters: Tensors, state: Tensors, seed: tf.Tensor, features: tf.Tensor, labels: tf.Tensor
    ) -> tuple[Tensors, Tensors, tf.Tensor, tf.Tensor]:
        weights = [parameters[path] for path in trainable]
        with tf.GradientTape() as tape, tf.name_scope("model"):  # layers may have names that no root scope may have
            tape.watch(weights)
            outputs, rest, own = model.stateless_call(
                weights, _non_trainable(model, state, seed), features, training=True, return_losses=True
            )
            value = tf.reduce_mean(losses(labels, outputs)) + tf.add_n([0.0, *own])
        gradients = tape.gradient(value, weights, unconnected_gradients=tf.UnconnectedGradients.ZERO)
        moved = {v.path: new for v, new in zip(model.non_trainable_variables, rest, strict=True) if not _is_seed(v)}
        dense = [tf.convert_to_tensor(gradient) for gradient in gradients]
        return dict(zip(trainable, dense, strict=True)), moved, value, accuracy(loss, labels, outputs)

    return step


def make_evaluation(model: keras.Model, loss: str) -> Callable[..., tuple[tf.Tensor, tf.Tensor]]:
    """Builds evaluate(parameters, state, features, labels) -> (loss, accuracy), both means over the batch."""
    losses = LOSSES[loss]

    def evaluate(
        parameters: Tensors, state: Tensors, features: tf.Tensor, labels: tf.Tensor
    ) -> tuple[tf.Tensor, tf.Tensor]:
        weights = [parameters[v.path] for v in model.trainable_variables]
        no_seed = tf.zeros([2], tf.int64)
        with tf.name_scope("model"):
            outputs, _ = model.stateless_call(weights, _non_trainable(model, state, no_seed), features, training=False)
        return tf.reduce_mean(losses(labels, outputs)), accuracy(loss, labels, outputs)

    return evaluate


def accuracy(loss: str, labels: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    """The share of a batch that is classified right; 0 for a loss that does not classify."""
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
    """Values for the model's non-trainable variables; each seed generator gets a state of its own drawn from `seed`."""
    values = []
    for number, variable in enumerate(model.non_trainable_variables):
        if _is_seed(variable):
            folded = tf.random.experimental.stateless_fold_in(seed, number)
            values.append(tf.cast(tf.bitwise.bitwise_and(folded, 0x7FFFFFFF), variable.dtype))
        else:
            values.append(state[variable.path])
    return values
