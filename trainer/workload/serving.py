"""Exports a trained model for other programs: raw inputs in, probabilities out."""

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from trainer.faults import exit_codes
from trainer.faults.exit_codes import TrainerError
from trainer.plan.tables import Table
from trainer.workload import lookups
from trainer.workload.data.errors import is_of_storage
from trainer.workload.data.examples import DataSet, Nest, Preprocessing, leaves_of, map_nest
from trainer.workload.error_text import first_line
from trainer.workload.keras_internals import to_snake_case
from trainer.workload.keras_names import LOGITS
from trainer.workload.objective import Objective
from trainer.workload.output_checks import BINARY, function_of, option_of
from trainer.workload.paths import free_name
from trainer.workload.served_tables import ServedTable, TableValues
from trainer.workload.step import make_forward
from trainer.workload.tracing import tables_of

INPUT, OUTPUT = "input", "output"

SOFTMAX = (
    keras.losses.sparse_categorical_crossentropy,
    keras.losses.categorical_crossentropy,
    keras.losses.categorical_focal_crossentropy,
)
FORMATS = ("saved_model", "onnx", "litert")
VERSION = "1"  # folder of a SavedModel, as TensorFlow Serving expects
OPSET = 18  # of ONNX


class ExportError(TrainerError, ValueError):
    """The model cannot be written in a format."""

    exit_code = exit_codes.CONFIG


class Served(NamedTuple):
    """The inputs and outputs of an exported model."""

    inputs: Nest  # of `ArraySpec`
    names: dict[str, str]  # of inputs, by their place in the nest
    outputs: dict[str, str]  # what each is, by name
    classes: tuple[str, ...]  # names, where they are known


class Written(NamedTuple):
    """The result of an export in the served formats."""

    served: Served | None = None  # None if nothing was written
    failures: tuple[str, ...] = ()  # why formats were not written
    skipped: tuple[str, ...] = ()  # the same for formats that were not requested


def write(
    objective: Objective, data: DataSet, folder: Path, formats: Sequence[str], tables: Sequence[TableValues]
) -> Written:
    """Writes `saved_model/1`, `model.onnx` and `model.tflite`, as requested.

    Args:
        objective: of the model, with the values to export.
        tables: rows of its sparse layers.
    """
    if not set(formats) & set(FORMATS):
        return Written()
    with tempfile.TemporaryDirectory(dir=folder, prefix="saved_model-") as scratch, _temporary_files_in(scratch):
        new = Path(scratch, VERSION)
        try:
            served = _write_saved_model(objective, data, new, tables)
        except ExportError as error:
            return Written(failures=(str(error),))
        except (Exception, SystemExit) as error:  # the code of a model or of its data may raise anything
            if is_of_storage(error):
                raise
            return Written(failures=(f"TensorFlow cannot write a SavedModel: {first_line(error)}",))
        if "saved_model" in formats:
            target = folder / "saved_model"
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir()
            new = new.rename(target / VERSION)
        failures = []
        for name, convert, file in (("onnx", _write_onnx, "model.onnx"), ("litert", _write_litert, "model.tflite")):
            try:
                if name in formats:
                    convert(new, folder / file)
            except ExportError as error:
                failures.append(str(error))
    return Written(served, tuple(failures))


@contextmanager
def _temporary_files_in(folder: str) -> Iterator[None]:
    """Keeps AutoGraph's temporary files in a folder, because it removes them only when a process ends normally."""
    before, tempfile.tempdir = tempfile.tempdir, folder
    try:
        yield
    finally:
        tempfile.tempdir = before


def check(objective: Objective, data: DataSet, formats: Sequence[str]) -> None:
    """Writes these formats to a temporary folder, with the values that the model has.

    Raises:
        ExportError: if one cannot be written.
    """
    if not set(formats) & set(FORMATS):
        return
    first = [_one_row(table) for table in tables_of(objective, data.spec)]
    with tempfile.TemporaryDirectory() as folder:
        if failures := write(objective, data, Path(folder), formats, first).failures:
            raise ExportError("; ".join(failures))


def _one_row(table: Table) -> TableValues:
    return TableValues(table, np.zeros((1, table.width), np.float32), np.zeros(1, np.int64) if table.growing else None)


def make_prediction(objective: Objective, classes: Sequence[str]) -> Callable[..., dict[str, tf.Tensor]]:
    """Makes predict(parameters, state, batch, rows=()) -> what an exported model returns for the features, by name."""
    forward = make_forward(objective)

    def predict(*given: Any) -> dict[str, tf.Tensor]:
        named = {name: tensor for name, (tensor, _) in _named(forward(*given)[0], objective, classes).items()}
        # numpy has no bfloat16
        return {name: tf.cast(one, tf.float32) if one.dtype == tf.bfloat16 else one for name, one in named.items()}

    return predict


def _write_saved_model(objective: Objective, data: DataSet, folder: Path, tables: Sequence[TableValues]) -> Served:
    given = data.preprocessing() if data.preprocessing else Preprocessing(data.spec.features, lambda nest: nest)
    served = {one.table.path: ServedTable(one) for one in tables}
    outputs: dict[str, str] = {}

    def serve(inputs: Nest) -> dict[str, tf.Tensor]:
        features = objective.inputs(given.apply(inputs))
        looked_up = lookups.recorded(lambda: objective.model(features, training=False)) if tables else []
        with lookups.given([served[one.path].look_up(one.ids) for one in looked_up]):
            returned = objective.model(features, training=False)
        found = _named(returned, objective, data.class_names)
        outputs.update({name: what for name, (_, what) in found.items()})
        return {name: tensor for name, (tensor, _) in found.items()}

    names = input_names(objective.model, given.spec)
    rest = iter(names.values())
    signature = map_nest(lambda one: tf.TensorSpec([None, *one.shape], one.dtype, next(rest)), given.spec)
    archive = keras.export.ExportArchive()
    for one in (objective.model, *given.tables, *(piece for table in served.values() for piece in table.variables)):
        archive.track(one)
    function = tf.function(serve, input_signature=[signature], autograph=False)
    if _calls_python(function.get_concrete_function()):
        raise ExportError("a SavedModel cannot contain Python code (numpy_function, py_function)")
    archive.add_endpoint("serve", function)
    archive.write_out(str(folder), verbose=False)
    return Served(given.spec, names, outputs, data.class_names)


def _calls_python(function: Any) -> bool:
    graph = function.graph.as_graph_def()
    nodes = [*graph.node, *(node for one in graph.library.function for node in one.node_def)]
    return any(node.op in ("PyFunc", "PyFuncStateless", "EagerPyFunc") for node in nodes)


def _named(returned: Nest, objective: Objective, classes: Sequence[str]) -> dict[str, tuple[tf.Tensor, str]]:
    """Returns each output by name, with its description; outputs whose loss takes logits become probabilities."""
    found: dict[str, tuple[tf.Tensor, str]] = {}
    names = output_names(objective.model, returned)
    for place, logits in leaves_of(returned):
        name = names[place]
        activation = _activation(_loss_of(objective, place, name))
        key = name or ("probabilities" if activation else "outputs")
        if activation is None:
            found[key] = (logits, "as the model returns it")
            continue
        probabilities = activation(tf.cast(logits, tf.float32))
        found[key] = (probabilities, "probabilities")
        if not name and (chosen := _likeliest(logits, len(classes))) is not None:
            found["label"] = (tf.gather(tf.constant(list(classes)), chosen), "name of the most likely class")
    return found


def _likeliest(logits: tf.Tensor, classes: int) -> tf.Tensor | None:
    """Returns [N] of int64; None if these are not logits [N, classes], or [N, 1] of two classes."""
    if logits.shape.rank != 2 or classes == 0:
        return None
    if logits.shape[1] == classes:
        return tf.argmax(logits, 1)
    return tf.cast(logits[:, 0] > 0, tf.int64) if (logits.shape[1], classes) == (1, 2) else None


def _loss_of(objective: Objective, place: str, name: str) -> keras.losses.Loss | None:
    """Returns the loss of an output of the model, by its path in the nest or, in a mapping of losses, by its name.

    None if there is none, or one loss for all outputs together.
    """
    compiled = objective.compiled_loss
    for path, loss, _, _ in compiled._flat_losses or () if compiled is not None else ():
        if "/".join(map(str, path)) in (place, name):
            return loss
    return None


def _activation(loss: keras.losses.Loss | None) -> Callable[[tf.Tensor], tf.Tensor] | None:
    """Returns the activation that turns logits of a loss into probabilities; None if it takes no logits."""
    if loss is None or not option_of(loss, LOGITS):
        return None
    function = function_of(loss)
    return tf.nn.softmax if function in SOFTMAX else tf.nn.sigmoid if function in BINARY else None


def _write_onnx(saved_model: Path, file: Path) -> None:
    command = [sys.executable, "-m", "tf2onnx.convert", "--saved-model", str(saved_model), "--output", str(file)]
    ended = subprocess.run([*command, "--opset", str(OPSET)], capture_output=True, text=True, check=False)
    if ended.returncode:
        lines = ended.stderr.strip().splitlines() or ["it said nothing"]
        raise ExportError(f"tf2onnx cannot write model.onnx: {lines[-1]}")


def _write_litert(saved_model: Path, file: Path) -> None:
    try:
        file.write_bytes(tf.lite.TFLiteConverter.from_saved_model(str(saved_model)).convert())
    except OSError:
        raise
    except Exception as error:  # of many types
        unknown = sorted(set(re.findall(r"'tf\.(\w+)' op is neither", str(error))))
        why = f"LiteRT has no operation {', '.join(unknown)}" if unknown else first_line(error)
        raise ExportError(f"TensorFlow cannot write model.tflite: {why}") from error


def input_names(model: keras.Model, nest: Nest) -> dict[str, str]:
    """Returns names for the inputs of an exported model, by path in the nest; a single array is called inputs."""
    return _names(nest, _listed(model, "inputs"), INPUT)


def output_names(model: keras.Model, nest: Nest) -> dict[str, str]:
    """Returns names for the outputs of a model, by path in the nest; a single tensor has an empty name."""
    return {place: name if place else "" for place, name in _names(nest, _listed(model, "outputs"), OUTPUT).items()}


def _names(nest: Nest, listed: Sequence[str], kind: str) -> dict[str, str]:
    """Names the items of a mapping by its keys, and those of a list as the model does, or by number."""
    places = [place for place, _ in leaves_of(nest)]
    if not isinstance(nest, list | tuple) or hasattr(nest, "_fields"):
        chosen = places
    elif len(listed) == len(places):
        chosen = [name or f"{kind}_{place}" for name, place in zip(listed, places, strict=True)]
    else:
        chosen = [f"{kind}_{place}" for place in places]
    names: dict[str, str] = {}
    for place, name in zip(places, chosen, strict=True):
        names[place] = free_name(re.sub(r"\W", "_", name) or f"{kind}s", set(names.values()))
    return names


def _listed(model: keras.Model, which: str) -> list[str]:
    """Returns the names of a functional model's inputs or outputs in order; empty for those named by Keras."""
    layers = [tensor._keras_history.operation for tensor in getattr(model, which, None) or ()]
    return [
        "" if re.fullmatch(rf"{to_snake_case(type(one).__name__)}(_\d+)?", one.name) else one.name for one in layers
    ]
