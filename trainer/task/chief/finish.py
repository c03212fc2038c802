"""Ends a run: saves, evaluates and exports its last state, and writes the summary."""

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.engine.sharded import staleness
from trainer.engine.tables.memory import BlockMemory
from trainer.engine.vectors.snapshot import Snapshot
from trainer.observe.task_page import TaskState
from trainer.storage import checkpoint, evaluations
from trainer.storage.atomic import write_atomically
from trainer.task import model_card, table_files
from trainer.task.beside import AbandonedError
from trainer.task.chief.report import log_summary, summarize
from trainer.task.chief.wiring import Chief
from trainer.task.export import export_run, params_sha256
from trainer.task.pace import Pace
from trainer.task.spec import TaskSpec
from trainer.workload.data.errors import is_of_storage
from trainer.workload.error_text import first_line
from trainer.workload.serving import Written
from trainer.workload.workload import Workload

_log = logging.getLogger(__name__)


def finish(chief: Chief, pace: Pace, workload: Workload, *, stopped: bool, resumed_from: str | None) -> bool:
    """Saves, leaves the engine, and writes the summary; evaluates and exports too unless the run was stopped.

    Returns:
        Whether it was stopped, or is now.
    """
    spec, plan, directory = chief.spec, chief.spec.plan, chief.spec.directory
    snapshot, results, stopped = _save_and_evaluate(chief, pace, stopped=stopped)
    last_rows = chief.tables
    if plan.tables and (not last_rows or stopped):  # the step that stopped the run may have changed them
        path = directory.checkpoints / f"{snapshot.step:09d}"
        last_rows = table_files.loaded(path, plan.tables, seed=spec.config.seed)
    if not stopped:
        chief.status.state = TaskState.exporting
        keeps_best = chief.evaluation is not None and chief.evaluation.keeps_best
        best = evaluations.best_result(directory) if keeps_best else None
        if best:
            results["best"] = best
        state, rows = _load(spec, best) if best else (snapshot, last_rows)
        results["exported_step"] = state.step
        served, failures, skipped = _export(spec, workload, state, rows)
        if failures:
            results["not_exported"] = "; ".join(failures)
        if skipped:
            results["export_skipped"] = "; ".join(skipped)
        chief.hooks.call("on_end", snapshot.step, _logs(results))
    results["ended_early"] = None if stopped else chief.status.ended_early
    if grown := table_files.trained_rows(last_rows):
        results["rows"] = grown
    summary = results | {"resumed_from": resumed_from, "params_sha256": params_sha256(snapshot, last_rows)}
    write_atomically(directory.summary, json.dumps(summary, indent=1))
    if not stopped:
        facts = summary
        if best:
            scores = {f"eval_{name}": value for name, value in best.items() if name not in ("step", "path")}
            facts = summary | scores | {"steps": state.step, "params_sha256": params_sha256(state, rows)}
        model_card.write(directory.export, spec.config, facts, served, directory.event_log)
    if chief.report.logs_progress:
        log_summary(summary)
    return stopped


def _export(spec: TaskSpec, workload: Workload, state: Snapshot, rows: Sequence[BlockMemory]) -> Written:
    """Exports a state; an error in a model's code then does not fail the run, whose results are kept."""
    folder = spec.directory.export
    folder.mkdir(parents=True, exist_ok=True)
    model_card.remove_files(folder)  # of a run that had fewer steps
    try:
        written = export_run(spec.config, spec.plan, workload, state, folder, rows)
    except (Exception, SystemExit) as error:
        if is_of_storage(error):
            raise
        _log.exception("the export has failed")
        written = Written(failures=(first_line(error),))
    for failure in written.failures:
        _log.error("not exported: %s", failure)
    for reason in written.skipped:
        _log.warning("%s", reason)
    return written


def _load(spec: TaskSpec, best: Mapping[str, Any]) -> tuple[Snapshot, Sequence[BlockMemory]]:
    """Returns the state and the rows in the best checkpoint."""
    path = Path(best["path"])
    rows = table_files.loaded(path, spec.plan.tables, seed=spec.config.seed)
    return Snapshot.from_tensors(best["step"], checkpoint.load(checkpoint.read_manifest(path))), rows


def _logs(results: Mapping[str, Any]) -> dict[str, float]:
    """Returns the last loss and the scores."""
    scores = {name: value for name, value in results.items() if name.startswith("eval_")}
    return {"loss": results["final_loss"], **scores}


def _save_and_evaluate(chief: Chief, pace: Pace, *, stopped: bool) -> tuple[Snapshot, dict[str, Any], bool]:
    """Returns the last state, its values for the summary, and whether the run was stopped.

    Leaves the engine last, because other tasks wait for this one.
    """
    abandoned, table = chief.evaluation.abandoned if chief.evaluation else None, chief.engine.contributions()
    snapshot, stopped = abandoned or chief.engine.snapshot(), stopped or abandoned is not None
    try:
        if abandoned is None:
            chief.saver.save_last(snapshot)
        results = summarize(chief.spec, chief.status, snapshot.step, pace)
        if chief.evaluation and not stopped:
            results |= chief.evaluation.run(snapshot)
    except AbandonedError:
        stopped = True
    finally:
        chief.engine.leave()
    chief.saver.writer.close()
    chief.report.close()
    if chief.evaluation:
        chief.evaluation.lines.close()
    if table is not None:
        results["contributions"] = staleness.to_json(table)
    return snapshot, results, stopped
