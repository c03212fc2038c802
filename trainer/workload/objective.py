"""Computes the loss and the metrics of a model, as Keras does.

How losses are weighted and masked, how metrics are named, and what a metric's variables mean is Keras's. A metric is
counted by the sums of what each batch adds to its variables, so its value is that of one process over all examples.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from trainer.workload import eager, inputs
from trainer.workload.compiled_loss import Use, build_loss, checked
from trainer.workload.counts import Counting
from trainer.workload.data.examples import Batch, Nest
from trainer.workload.keras_internals import get_keras_mask, global_state, set_keras_mask
from trainer.workload.paths import is_seed
from trainer.workload.whole_loss import WholeLoss, losses_of

Known = Iterable[tuple[keras.Variable, tf.Tensor]]  # values of a model's variables


class Doubt(NamedTuple):
    """A warning for users about a model's training."""

    message: str
    remedy: str


@contextmanager
def no_values() -> Iterator[None]:
    """Makes variables without values inside the context; a step gets all values anyway."""
    with keras.StatelessScope(initialize_variables=False):
        yield
    global_state.set_global_attribute("uninitialized_variables", [])  # or Keras would do it at the end of a later scope


class Objective:
    """The loss and the metrics of a compiled model."""

    def __init__(
        self,
        model: keras.Model,
        *,
        whole_loss: WholeLoss | None = None,
        class_weights: Sequence[float] = (),
        size: int | None = None,
        text: str = "",
        is_given_compiled: bool = True,
        is_given_loss: bool = False,
        frozen: Collection[str] = (),
    ) -> None:
        """Begins.

        Args:
            model: compiled; its loss is used unless there is a `whole_loss`.
            whole_loss: a function of all labels and all outputs.
            class_weights: of examples in training, by class; None: all are equal.
            size: floats of the metrics' variables, if already known.
            text: describes the choice and its origin.
            is_given_compiled: whether the model's author compiled it.
            is_given_loss: whether its author chose the loss.
            frozen: paths of the weights that training never changes.
        """
        self.frozen, self._class_weights = frozen, class_weights
        self.model, self.text, self._whole_loss, self._size = model, text, whole_loss, size
        self._is_given_compiled, self.is_given_loss = is_given_compiled, is_given_loss
        self.doubts: list[Doubt] = []  # what is odd, and trained as Keras does
        self.mixing: tuple[str, ...] = ()  # what computes an example with others of its batch

    def model_to_save(self, optimizer: keras.optimizers.Optimizer) -> keras.Model:
        """Returns the model; Keras would save a loss with it, and only one that its author chose can be loaded again.

        Args:
            optimizer: that trained it, to be saved with the loss.
        """
        self.model.compiled = self._is_given_compiled
        self.model.optimizer = self.model._compile_config.config["optimizer"] = optimizer
        return self.model

    def inputs(self, features: Nest) -> Nest:
        """Returns the features that the model takes."""
        return inputs.chosen(self.model, features)

    @property
    def compiled_loss(self) -> Any:
        """Returns the compiled loss, if it is one of single outputs; None: a function of all outputs."""
        return self.model._compile_loss if self._whole_loss is None else None

    def in_graph(self) -> AbstractContextManager[None]:
        """Lets traced functions use tensors that the model's layers computed when they were made."""
        return eager.in_graph()

    @property
    def is_summed(self) -> bool:
        """Whether a loss that the model is compiled with is a sum over the examples of a batch."""
        compiled = self.compiled_loss
        losses = [] if compiled is None else keras.tree.flatten(compiled._user_loss)
        return any(getattr(loss, "reduction", None) == "sum" for loss in losses)

    @property
    def size(self) -> int:
        """Returns the floats of the metrics' variables, known once a batch was computed."""
        return sum(_size(v) for v in self._variables) if self._size is None else self._size

    def compute(
        self,
        known: Known,
        batch: Batch,
        outputs: Nest,
        own: Sequence[tf.Tensor],
        *,
        training: bool,
        before: tf.Tensor | None = None,
        check: Callable[[Use], None] | None = None,
        counting: Counting | None = None,
    ) -> tuple[tf.Tensor, tf.Tensor]:
        """Returns (loss [], what the batch adds to the metrics' variables [size] float32).

        Args:
            known: values of all variables of the model.
            outputs: of the model, for the batch.
            own: the losses that its layers added.
            before: sums [size] to which the batch is added; None: zeros.
            check: called before each loss of an output.
            counting: records the counts that losses are divided by.
        """
        model, (features, labels, weights), known = self.model, batch, list(known)
        outputs = tf.nest.map_structure(_in_float32, outputs)
        labels = _of_rank(labels, outputs)
        if training and self._class_weights:
            weights = _weighted_by_class(labels, outputs, weights, self._class_weights)
        self._build(labels, outputs)
        counted = [(v, tf.zeros(v.shape, v.dtype)) for v in model.metrics_variables]
        counted += [] if before is None else self._values(before)
        state = keras.StatelessScope(state_mapping=[*known, *counted])
        with checked(model._compile_loss, check), self._counted(counting, own), state as scope:
            before_loss = [(v, scope.get_current_value(v)) for v, _ in known]
            if self._whole_loss is None:
                model._losses_override.extend(own)  # as Keras's trainer for JAX does
                try:
                    value = model._compute_loss(features, labels, outputs, weights, training=training)
                finally:
                    model._losses_override.clear()
            else:
                losses = losses_of(self._whole_loss, labels, outputs, weights)
                if counting is not None and losses.shape.rank == 0:
                    counting.unknown.append("the loss of the user's file")
                value = tf.reduce_mean(losses)
                value = sum((tf.reduce_sum(tf.cast(one, tf.float32)) for one in own), start=value)
            if self._metrics:  # one may make its variables only now
                model.compute_metrics(features, labels, outputs, weights)
            _check_assigns_nothing(scope, before_loss)
            sums = [tf.reshape(tf.cast(scope.get_current_value(v), tf.float32), [-1]) for v in self._variables]
        return tf.cast(value, tf.float32), tf.concat(sums, 0) if sums else tf.zeros([0])

    def _counted(self, counting: Counting | None, own: Sequence[tf.Tensor]) -> AbstractContextManager[None]:
        """Lets `counting` record the losses of single outputs, and the other parts of the loss."""
        if counting is None:
            return nullcontext()
        model = self.model
        if len(own) > sum(v.regularizer is not None for v in model.trainable_variables):
            counting.unknown.append("what layers add to the loss in call()")
        if self._whole_loss is None and type(model).compute_loss is not keras.Model.compute_loss:
            counting.unknown.append(f"compute_loss of {type(model).__name__}")
            return nullcontext()
        return nullcontext() if self.compiled_loss is None else counting.during(self.compiled_loss)

    def results(self, sums: tf.Tensor) -> dict[str, tf.Tensor]:
        """Returns the metrics by name, from the sums [size] of what batches added to their variables."""
        values = [(v, tf.zeros(v.shape, v.dtype)) for v in self.model._loss_tracker.variables] + self._values(sums)
        with keras.StatelessScope(state_mapping=values):
            named = self.model.get_metrics_result() if values else {}
            flat = _flat({name: result for name, result in named.items() if name != "loss"})
        return {name: tf.cast(value, tf.float32) for name, value in flat.items()}

    def _values(self, sums: tf.Tensor) -> list[tuple[keras.Variable, tf.Tensor]]:
        """Converts sums [size] to values of the metrics' variables."""
        offset, values = 0, []
        for variable in self._variables:
            flat = sums[offset : offset + _size(variable)]
            flat = flat if variable.dtype.startswith("float") else tf.round(flat)
            values.append((variable, tf.cast(tf.reshape(flat, variable.shape), variable.dtype)))
            offset += _size(variable)
        return values

    def metric_names(self) -> tuple[str, ...]:
        """Returns the names of `results`, known once a loss was computed."""
        with tf.Graph().as_default(), self.in_graph():  # nothing is computed
            return tuple(self.results(tf.zeros([self.size])))

    @property
    def _variables(self) -> list[keras.Variable]:
        """Returns the variables of the metrics; the loss has none, because every step returns it."""
        return [variable for metric in self._metrics for variable in metric.variables]

    @property
    def _metrics(self) -> list[keras.metrics.Metric]:
        return [metric for metric in self.model.metrics if metric is not self.model._loss_tracker]

    def _build(self, labels: Nest, outputs: Nest) -> None:
        """Makes the variables of the metrics, and of each output's loss, which depends on what they measure."""
        loss, metrics = self.model._compile_loss, self.model._compile_metrics
        with no_values():
            if loss is not None and not loss.built:
                build_loss(loss, labels, outputs)
            if metrics is not None and not metrics.built:
                metrics.build(labels, outputs)


def _check_assigns_nothing(scope: keras.StatelessScope, known: Known) -> None:
    """Refuses losses that assign variables; only assignments of layers in the model's call are kept.

    Raises:
        ValueError: if a loss assigns a variable of the model, itself or by calling the model once more.
    """
    for variable, given in known:
        if not is_seed(variable) and scope.get_current_value(variable) is not given:
            raise ValueError(
                f"the loss assigns {variable.path}, but that value is lost: assign it in a layer's call instead"
            )


def _flat(results: Mapping[str, Any]) -> dict[str, Any]:
    """Returns values by name; a user's metric may return several with its own names, as in Keras, or its variable."""
    flat: dict[str, Any] = {}
    for name, result in results.items():
        value = result.value if isinstance(result, keras.Variable) else result
        flat |= _flat(value) if isinstance(value, Mapping) else {name: value}
    return flat


def _size(variable: keras.Variable) -> int:
    return int(np.prod(variable.shape, dtype=np.int64))


def _in_float32(output: tf.Tensor) -> tf.Tensor:
    """Casts to float32, in which losses are computed; a mask stays with its output."""
    if not output.dtype.is_floating or output.dtype == tf.float32:
        return output
    converted = tf.cast(output, tf.float32)
    if (mask := get_keras_mask(output)) is not None:
        set_keras_mask(converted, mask)
    return converted


def _of_rank(labels: Nest, outputs: Nest) -> Nest:
    """Returns numbers [N, 1] as [N] if the model returns [N]: a function of both would combine all pairs."""
    if not isinstance(labels, tf.Tensor) or not isinstance(outputs, tf.Tensor):
        return labels
    is_column = labels.shape.rank == 2 and labels.shape[1] == 1
    return tf.squeeze(labels, 1) if is_column and outputs.shape.rank == 1 else labels


def _weighted_by_class(
    labels: tf.Tensor, outputs: Nest, weights: tf.Tensor | None, by_class: Sequence[float]
) -> tf.Tensor:
    """Returns weights of examples, or of their parts, by class; `labels` are classes, or one-hot like the outputs."""
    classes, last = labels, labels.shape[-1] if labels.shape.rank > 1 else None
    is_like_outputs = isinstance(outputs, tf.Tensor) and outputs.shape.rank == labels.shape.rank
    if last == 1:
        classes = tf.squeeze(labels, -1)
    elif last is not None and (labels.dtype.is_floating or (is_like_outputs and outputs.shape[-1] == last)):
        classes = tf.argmax(labels, -1)
    named, numbers = [*by_class, 1.0], tf.cast(classes, tf.int64)  # the last is for classes that are not named
    is_named = (numbers >= 0) & (numbers < len(by_class))
    of_class = tf.gather(tf.constant(named, tf.float32), tf.where(is_named, numbers, len(by_class)))
    return of_class if weights is None else of_class * tf.cast(weights, tf.float32)
