"""Exports a state of a run: its parameters by name, and the model for Keras and other programs."""

import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config import user_file
from trainer.config.schema import RunConfig
from trainer.engine.tables.memory import BlockMemory
from trainer.engine.vectors.snapshot import Snapshot
from trainer.plan.plan import Plan
from trainer.plan.tables import Table
from trainer.storage import checkpoint, evaluations
from trainer.storage.checkpoint import Checkpoint
from trainer.storage.run_directory import RunDirectory
from trainer.task import model_card, table_files
from trainer.task.evaluator.score import evaluated
from trainer.workload import compiled_optimizer, keras_file, loss_scale, serving, trial, weights
from trainer.workload.data.errors import is_of_storage
from trainer.workload.error_text import one_paragraph
from trainer.workload.objective import Objective
from trainer.workload.paths import Paths
from trainer.workload.served_tables import TableValues
from trainer.workload.serving import Written
from trainer.workload.workload import Workload, open_dense, open_workload

DEFAULT_FORMATS = ("keras", "saved_model")
MODEL_NBYTES = 2**31  # of tables that a model.keras may have

_log = logging.getLogger(__name__)


def params_sha256(snapshot: Snapshot, rows: Sequence[BlockMemory] = ()) -> str:
    """Returns SHA-256 over the little-endian float32 bytes of all parameters, tables and state, ordered by path.

    For a growing table, it covers the ids that have rows, as int64, and then the rows.
    """
    digest, own, tables = hashlib.sha256(), _of_model(snapshot), table_files.tables_in(rows)
    for path in sorted(own.keys() | tables.keys()):
        ids, parts = table_files.rows_of(rows, tables[path]) if path in tables else (None, [own[path]])
        if ids is not None:
            digest.update(np.ascontiguousarray(ids, "<i8").tobytes())
        for values in parts:
            digest.update(np.ascontiguousarray(values, "<f4").tobytes())
    return digest.hexdigest()


def export_run(
    config: RunConfig,
    plan: Plan,
    workload: Workload,
    snapshot: Snapshot,
    folder: Path,
    rows: Sequence[BlockMemory] = (),
) -> Written:
    """Writes a state in the formats of `export.formats`, and as params.npz (each parameter and frozen weight).

    A default format that the model cannot be written in is skipped with a warning; one that was
    asked for is a failure.
    """
    formats: Sequence[str] = config.export.formats or DEFAULT_FORMATS
    grow = [table.path for table in plan.tables if table.growing]
    are_large = not grow and sum(4 * table.rows * table.width for table in plan.tables) > MODEL_NBYTES
    if are_large and not config.export.formats:
        _log.warning("the tables are over 2 GiB: export/tables has them; export.formats=[saved_model] writes the model")
        formats = ()
    if are_large and {"keras", "weights"} & set(formats):
        _log.warning("the tables are over 2 GiB: no model.keras and no model.weights.h5 is written")
    if grow and {"keras", "weights"} & set(config.export.formats):
        _log.warning("no model.keras and no model.weights.h5 is written: %s grows, which no Keras layer does", grow[0])
    model = None if are_large or grow else _whole_model(config, plan, workload.objective)
    objects = user_file.definitions(config.user) if config.user else {}
    files, not_whole = export(snapshot, model, folder, rows, formats=formats, objects=objects)
    _assign(workload.model, snapshot, {})
    tables = [_mapped(table, files[table.path], config.seed) for table in plan.tables]
    served, failures, _ = serving.write(workload.objective, workload.data, folder, formats, tables)
    if config.export.formats:
        return Written(served, failures, not_whole)
    return Written(served, skipped=(*not_whole, *failures))


def export_checkpoint(directory: RunDirectory, source: Checkpoint, folder: Path, formats: Sequence[str]) -> None:
    """Exports a checkpoint of a run, which may still be running, in this process.

    Args:
        formats: those of the run's config if there are none.

    Raises:
        CheckpointError: if the checkpoint is damaged.
        ExportError: if the model cannot be written in a served format.
    """
    config, plan = directory.read_config(), directory.read_plan()
    config = replace(config, export=replace(config.export, formats=list(formats or config.export.formats)))
    snapshot = Snapshot.from_tensors(source.step, checkpoint.load(source))
    rows = table_files.loaded(source.path, plan.tables, seed=config.seed)
    workload = open_workload(config, plan, directory.frozen, trains=False)
    trial.run(workload.objective, workload.data, has_values=True, batch=0)
    served, failures, skipped = export_run(config, plan, workload, snapshot, folder, rows)
    facts = {"steps": source.step, "cluster": plan.cluster, "strategy": plan.strategy}
    facts |= evaluations.results(directory, source.step) | {"params_sha256": params_sha256(snapshot, rows)}
    model_card.write(folder, config, facts, served, directory.event_log)
    for reason in skipped:
        _log.warning("%s", reason)
    if failures:
        raise serving.ExportError("; ".join(failures))


def _whole_model(config: RunConfig, plan: Plan, objective: Objective) -> Any:
    """Returns the model, with its tables as variables."""
    objective = open_dense(config, plan) if plan.tables else objective
    return objective.model_to_save(compiled_optimizer.make(config.optimizer))


def export(
    snapshot: Snapshot,
    model: Any,
    folder: Path,
    rows: Sequence[BlockMemory] = (),
    *,
    formats: Sequence[str] = DEFAULT_FORMATS,
    objects: Mapping[str, Any] | None = None,
) -> tuple[dict[str, Path], tuple[str, ...]]:
    """Writes params.npz, and model.keras or model.weights.h5 (averaged parameters, where there are any).

    A model that Keras cannot save and load as a whole, because it has no `get_config` or a Lambda layer uses names
    from outside, is written as model.weights.h5. Each table is a file in tables/; for a table that grows, its ids are
    a second file.

    Args:
        model: to be saved, with its tables as variables; None: they are too large, or grow.
        rows: of tables.
        objects: what the user's file defines, by name.

    Returns:
        The files of tables by path; why there is no model.keras, if one was requested.
    """
    folder.mkdir(parents=True, exist_ok=True)
    own = _of_model(snapshot)
    tables = _export_tables(rows, folder / "tables")
    if model is None:
        np.savez(folder / "params.npz", **dict(sorted(own.items())))
        return tables, ()
    known = own.keys() | tables.keys()
    variables = Paths(model).named(model.variables)
    frozen = {path: np.asarray(v.numpy()) for path, v in variables.items() if path not in known}
    named: dict[str, Any] = dict(sorted((own | frozen).items()))
    np.savez(folder / "params.npz", **named)
    _assign(model, snapshot, {path: np.load(file) for path, file in tables.items()})
    why_not = _save_keras(model, folder / "model.keras", objects or {}) if "keras" in formats else None
    if "weights" in formats or why_not:
        model.save_weights(folder / "model.weights.h5")
    return tables, (why_not,) if why_not else ()


def _assign(model: Any, snapshot: Snapshot, tables: Mapping[str, np.ndarray]) -> None:
    """Assigns all values of a snapshot to a model.

    Raises:
        ValueError: if a value belongs to none of the model's variables.
    """
    values = _of_model(snapshot) | evaluated(snapshot) | dict(tables)
    if strangers := values.keys() - Paths(model).named(model.variables):
        raise ValueError(f"the model has no variable {min(strangers)}: its function makes different layers each time")
    weights.assign(model, values)


def _save_keras(model: Any, file: Path, objects: Mapping[str, Any]) -> str | None:
    """Saves a model if Keras can load it again; otherwise returns why it cannot."""
    try:
        model.save(file)
        if warning := keras_file.check_loads(file, model, objects):
            _log.warning(warning)
    except (Exception, SystemExit) as error:  # a layer's get_config may raise anything, and training is done
        if is_of_storage(error):
            raise
        file.unlink(missing_ok=True)
        return f"no model.keras: Keras could not load it ({one_paragraph(error)}); see model.weights.h5"
    return None


def _export_tables(rows: Sequence[BlockMemory], folder: Path) -> dict[str, Path]:
    """Writes each table as an array, some rows at a time; returns the files by path."""
    written: dict[str, Path] = {}
    for path, table in table_files.tables_in(rows).items():
        folder.mkdir(exist_ok=True)
        written[path] = folder / f"{path.replace('/', '.')}.npy"
        ids, parts = table_files.rows_of(rows, table)
        if ids is not None:
            np.save(_ids_beside(written[path]), ids)
        with written[path].open("wb") as file:
            count = table.rows if ids is None else len(ids)
            header = {"descr": "<f4", "fortran_order": False, "shape": (count, table.width)}
            np.lib.format.write_array_header_1_0(file, header)
            for values in parts:
                file.write(np.ascontiguousarray(values, "<f4").tobytes())
    return written


def _mapped(table: Table, file: Path, seed: int) -> TableValues:
    """Returns what `_export_tables` wrote."""
    ids = np.load(_ids_beside(file)) if table.growing else None
    return TableValues(table, np.load(file, mmap_mode="r"), ids, seed)


def _ids_beside(file: Path) -> Path:
    return file.with_suffix(".ids.npy")


def _of_model(snapshot: Snapshot) -> dict[str, Any]:
    """Returns parameters and state, without training state that is not part of the model."""
    return {
        path: value
        for path, value in (snapshot.parameters | snapshot.state).items()
        if path != loss_scale.PARAMETER.path
    }
