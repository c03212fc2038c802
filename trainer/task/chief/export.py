"""Exports a finished run: its parameters by name, and the model as plain Keras loads it."""

import hashlib
import logging
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trainer.engine.tables.memory import BlockMemory
from trainer.engine.vectors.snapshot import Snapshot
from trainer.task import table_files
from trainer.task.evaluator.score import evaluated
from trainer.workload import loss_scale, weights
from trainer.workload.error_text import first_line
from trainer.workload.step import is_seed

_log = logging.getLogger(__name__)


def params_sha256(snapshot: Snapshot, rows: Sequence[BlockMemory] = ()) -> str:
    """SHA-256 over the little-endian float32 bytes of all parameters, tables and state, in the order of their paths."""
    digest, own, tables = hashlib.sha256(), _of_model(snapshot), table_files.tables_in(rows)
    for path in sorted(own.keys() | tables.keys()):
        for values in table_files.values_of(rows, tables[path]) if path in tables else (own[path],):
            digest.update(np.ascontiguousarray(values, "<f4").tobytes())
    return digest.hexdigest()


def export(snapshot: Snapshot, model: Any, folder: Path, rows: Sequence[BlockMemory] = ()) -> None:
    """Writes params.npz (each parameter and frozen weight) and model.keras (averaged parameters, where there are any).

    A model that Keras cannot save and load again as a whole, for want of a `get_config`, is written as model.weights.h5
    and as a SavedModel, which needs no code of the model. Each table is a file in tables/.

    Args:
        model: to be saved, with its tables as variables; None: they are too large.
        rows: of tables.
    """
    folder.mkdir(parents=True, exist_ok=True)
    own = _of_model(snapshot)
    tables = _export_tables(rows, folder / "tables")
    if model is None:
        np.savez(folder / "params.npz", **dict(sorted(own.items())))
        return
    known = own.keys() | tables.keys()
    frozen = {v.path: np.asarray(v.numpy()) for v in model.variables if v.path not in known and not is_seed(v)}
    named: dict[str, Any] = dict(sorted((own | frozen).items()))
    np.savez(folder / "params.npz", **named)
    weights.assign(model, evaluated(snapshot) | snapshot.state | {path: np.load(file) for path, file in tables.items()})
    try:
        model.save(folder / "model.keras")
        if warning := weights.check_loads(folder / "model.keras", model):
            _log.warning(warning)
    except OSError:
        raise
    except Exception as error:  # whatever a layer's get_config does: training is done
        (folder / "model.keras").unlink(missing_ok=True)
        _log.warning("Keras cannot load this model from a model.keras (%s); see model.weights.h5", first_line(error))
        model.save_weights(folder / "model.weights.h5")
        _export_saved_model(model, folder / "saved_model")


def _export_tables(rows: Sequence[BlockMemory], folder: Path) -> dict[str, Path]:
    """Writes each table as an array, some rows at a time; returns the files by path."""
    written: dict[str, Path] = {}
    for path, table in table_files.tables_in(rows).items():
        folder.mkdir(exist_ok=True)
        written[path] = folder / f"{path.replace('/', '.')}.npy"
        with written[path].open("wb") as file:
            header = {"descr": "<f4", "fortran_order": False, "shape": (table.rows, table.width)}
            np.lib.format.write_array_header_1_0(file, header)
            for values in table_files.values_of(rows, table):
                file.write(np.ascontiguousarray(values, "<f4").tobytes())
    return written


def _export_saved_model(model: Any, folder: Path) -> None:
    try:
        model.export(folder, verbose=False)
    except Exception as error:  # whatever a model's code does: the weights are safe
        shutil.rmtree(folder, ignore_errors=True)
        _log.warning("nor can TensorFlow as a SavedModel (%s)", first_line(error))


def _of_model(snapshot: Snapshot) -> dict[str, Any]:
    """Parameters and state, without those of training that are not the model's."""
    return {
        path: value
        for path, value in (snapshot.parameters | snapshot.state).items()
        if path != loss_scale.PARAMETER.path
    }
