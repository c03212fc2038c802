"""Evaluates a checkpoint of a run, or predicts with it, in a process that is not a task of the run."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from trainer.config.schema import DataConfig
from trainer.engine.vectors.snapshot import Snapshot
from trainer.storage import checkpoint
from trainer.storage.checkpoint import Checkpoint
from trainer.storage.run_directory import RunDirectory
from trainer.task.evaluator.score import Evaluator, FittingRows, ModelCopy
from trainer.task.server import can_fuse, session_config
from trainer.workload import labels, tracing
from trainer.workload.build import open_data_set
from trainer.workload.data.arrays import are_alike
from trainer.workload.data.errors import DataError, find_data_error
from trainer.workload.data.examples import DataSet, Nest, describe_nest, map_nest
from trainer.workload.data.ids import numberings_of
from trainer.workload.serving import make_prediction
from trainer.workload.workload import Workload, open_workload


class OtherData(NamedTuple):
    """Data to use instead of the run's."""

    data: DataConfig
    user: str | None  # the file that defines its function


class Selection(NamedTuple):
    """The examples to compute a model for."""

    other: OtherData | None = None  # None: of the run's data
    batch_size: int | None = None  # examples in a batch; None: as in the run
    steps: int | None = None  # batches after which it ends; None: as in the run, or all of other data


def evaluate(directory: RunDirectory, source: Checkpoint, examples: Selection) -> tuple[dict[str, float], int]:
    """Computes the loss and the metrics of a checkpoint; returns them and the number of examples.

    Raises:
        CheckpointError: if the checkpoint is damaged, or of another model.
        DataError: if the data cannot be evaluated on.
    """
    opened = _Opened(directory, source, examples, needs_labels=True)
    evaluator = Evaluator(opened.workload, **opened.options)
    opened.connect(evaluator)
    with _data_errors():
        return evaluator.score(opened.snapshot), evaluator.examples


def predict(directory: RunDirectory, source: Checkpoint, examples: Selection) -> Iterator[dict[str, np.ndarray]]:
    """Yields the outputs of a checkpoint's model by name, batch by batch in the order of the data; see `evaluate`."""
    opened = _Opened(directory, source, examples, needs_labels=False)
    tracing.trace(opened.workload.objective, opened.spec)  # builds the loss, which decides what the outputs are
    names = opened.class_names
    copy = ModelCopy(opened.workload, lambda objective: make_prediction(objective, names), **opened.options)
    opened.connect(copy)
    with _data_errors():
        for outputs, _ in copy.results(opened.snapshot):
            yield {name: _as_text(values, names) for name, values in outputs.items()}


@contextmanager
def _data_errors() -> Iterator[None]:
    """Turns errors that TensorFlow raises for bad examples into a DataError."""
    try:
        yield
    except (tf.errors.OpError, UnicodeDecodeError) as error:
        raise find_data_error(error) or error from error


class _Opened:
    """A run's model with the values of a checkpoint, and the data to compute it for."""

    def __init__(self, directory: RunDirectory, source: Checkpoint, examples: Selection, *, needs_labels: bool) -> None:
        config, plan = directory.read_config(), directory.read_plan()
        if config.device.deterministic:
            tf.config.experimental.enable_op_determinism()
        task = plan.evaluating_task
        self._session_config = session_config(task, peers=[], fuses=can_fuse(config.train))
        # The first session decides the size of this process's thread pools.
        self._devices = tf.compat.v1.Session(graph=tf.Graph(), config=self._session_config)
        workload = open_workload(config, plan, directory.frozen, trains=examples.other is None)
        rows = FittingRows(plan, workload, precision=config.train.precision.value, seed=config.seed)
        rows.load(source)
        self.class_names, self.spec = workload.data.class_names, workload.data.spec
        data = _opened_data(workload, examples, config.seed, needs_labels=needs_labels)
        self.workload = workload._replace(data=data)
        self.snapshot = Snapshot.from_tensors(source.step, checkpoint.load(source))
        has_gpu = bool(task.gpus and tf.config.list_physical_devices("GPU"))
        # Without those of the run its data may have no end.
        steps = examples.steps or (config.evaluate.steps if examples.other is None else None)
        self.options: dict[str, Any] = {
            "tables": rows.tables,
            "batch_size": examples.batch_size or config.evaluate.batch_size,
            "steps": steps,
            "device": "/gpu:0" if has_gpu else "/cpu:0",
        }

    def connect(self, copy: ModelCopy) -> None:
        """Gives a copy of the model its session."""
        copy.connect("", self._session_config)


def _opened_data(workload: Workload, examples: Selection, seed: int, *, needs_labels: bool) -> DataSet:
    """Returns the data to run the model on.

    Raises:
        DataError: if its examples differ in structure from the run's, or their ids or classes in meaning.
    """
    if (other := examples.other) is None:
        return workload.data
    source = f"data set {other.data.name}"
    try:
        data = open_data_set(
            other.data.name, other.data.options, seed=seed, user_file=other.user, evaluate_steps=examples.steps
        )
    except ValueError as error:
        raise DataError(f"{source}: {error}") from error
    for part in ("features", "labels") if needs_labels else ("features",):
        own, theirs = getattr(workload.data.spec, part), getattr(data.spec, part)
        if not are_alike(*((own, theirs) if part == "features" else map(_of_any_width, (own, theirs)))):
            raise DataError(
                f"{source}, {part}: an example is {describe_nest(theirs)}, but in the run it is {describe_nest(own)}; "
                "both must be the same"
            )
    remedy = "keep the data.options.path of the run, and pass the new files as data.options.evaluate"
    ours, names = numberings_of(workload.data), numberings_of(data)
    for name in ours:
        if ours[name] != names.get(name):
            raise DataError(f"{source}: the values of {name} have different ids than in the run; {remedy}")
    if workload.data.class_names != data.class_names and (needs_labels or data.class_names):
        run, now = (", ".join(one.class_names) or "numbers" for one in (workload.data, data))
        raise DataError(f"{source}: the classes are {now}; in the run they are {run}; {remedy}")
    if needs_labels:
        labels.check(workload.objective, data.faults)
    return labels.for_loss(workload.objective, data)


def _of_any_width(specs: Nest) -> Nest:
    """Returns specs of labels with one type for all integers: a class has the same number in each."""
    return map_nest(lambda one: one._replace(dtype="int64") if "int" in one.dtype else one, specs)


def _as_text(values: np.ndarray, names: tuple[str, ...]) -> np.ndarray:
    """Returns class names as text of one width, so that batches can be concatenated; other values unchanged."""
    if values.dtype != object:
        return values
    texts = np.array([one.decode() for one in values.ravel()]).reshape(values.shape)
    return texts.astype(f"<U{max(map(len, names))}") if names else texts
