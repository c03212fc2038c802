"""Saves the state of a run between two steps, and at its end."""

import contextlib
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trainer.config.schema import NotFinitePolicy, SaveErrorPolicy
from trainer.engine.vectors.snapshot import Snapshot
from trainer.faults.exit_codes import NotFiniteError
from trainer.observe.task_page import TaskPage, TaskState
from trainer.plan import spans
from trainer.plan.serialize import to_json
from trainer.storage import checkpoint, checkpoint_writer, evaluations, resume
from trainer.storage.checkpoint import Checkpoint, CheckpointError
from trainer.storage.evaluations import Evaluation
from trainer.storage.journal import Journal, Save
from trainer.storage.rollbacks import record_rollback
from trainer.storage.table_rows import ChangedRows
from trainer.task import table_files
from trainer.task.spec import TaskSpec

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Saver:
    """Saves snapshots as checkpoints, except states that are not sound."""

    spec: TaskSpec
    status: TaskPage
    journal: Journal
    writer: checkpoint_writer.Writer
    generation: int
    source: str | None = None  # the checkpoint that the state was loaded from
    changes: table_files.Changes | None = None  # gives the rows of tables that have changed

    def save_if_sound(self, snapshot: Snapshot) -> None:
        """Saves between two steps; a problem of the state ends the run later, in all replicas alike."""
        config, rows = self.spec.config, self._changed_rows(snapshot.step)
        if problem := _problem(snapshot, rows, skips_bad_updates=config.train.on_not_finite is NotFinitePolicy.skip):
            _log.warning("step %d was not saved: %s", snapshot.step, problem)
            return
        self._save(snapshot, rows, _log_and_continue if self._may_fail else None)

    @property
    def _may_fail(self) -> bool:
        return self.spec.config.checkpoint.on_error is SaveErrorPolicy("continue")

    def save_last(self, snapshot: Snapshot) -> None:
        """Saves the final state of a run; if this fails, so does the run.

        Raises:
            NotFiniteError: if a parameter is NaN or infinite.
        """
        rows = self._changed_rows(snapshot.step)
        if bad := _first_bad_parameter(snapshot, rows):
            raise NotFiniteError(f"parameter {bad} is not finite at step {snapshot.step}; it is not saved")
        self._save(snapshot, rows, None)

    def save_unless_saved(self, snapshot: Snapshot) -> None:
        """Does the same as `save_last`, unless there is a checkpoint of that step."""
        self.writer.wait()
        if not (self.spec.directory.checkpoints / f"{snapshot.step:09d}").is_dir():
            self.save_last(snapshot)

    def save_if_best(self, snapshot: Snapshot, evaluation: Evaluation) -> None:
        """Keeps a sound state whose evaluation is the best so far."""
        folder = self.spec.directory.best
        best = evaluations.best(folder)
        is_best = evaluations.is_better(evaluation, best[0] if best else None, self.spec.config.evaluate)
        if not is_best:
            return
        rows = self._changed_rows(snapshot.step)
        if _first_bad_parameter(snapshot, rows):
            return
        tensors = snapshot.to_tensors()
        try:
            evaluations.save_as_best(folder, self.generation, self._facts(snapshot), tensors, evaluation, rows)
        except OSError as error:
            if not self._may_fail:
                raise
            _log_and_continue(error)

    def _changed_rows(self, step: int) -> ChangedRows | None:
        """Copies the rows of tables that the newest checkpoint of this state lacks."""
        if self.changes is None:
            return None
        self.writer.wait()  # that one may still be on its way to the disk
        return self.changes(step, self._newest(step))

    def _newest(self, step: int) -> Checkpoint | None:
        """Returns the newest checkpoint of this history up to a step; None if none is known."""
        folder = self.spec.directory.checkpoints
        for path in [*reversed(checkpoint.finished(folder)), *([Path(self.source)] if self.source else [])]:
            with contextlib.suppress(CheckpointError):
                found = checkpoint.read_manifest(path)
                is_own = found.generation == self.generation or str(path) == self.source
                if is_own and found.step <= step:
                    return found
        return None

    def _save(self, snapshot: Snapshot, rows: ChangedRows | None, on_error: checkpoint_writer.OnError | None) -> None:
        """Starts a save, once the previous one is on disk."""
        status = self.status
        self.journal.write(Save(self.generation, snapshot.step))
        before, status.state = status.state, TaskState.saving  # on a slow disk the save before takes long
        tensors = snapshot.to_tensors()
        self.writer.save(snapshot.step, self.generation, self._facts(snapshot), tensors, on_error=on_error, rows=rows)
        status.state = before

    def _facts(self, snapshot: Snapshot) -> dict[str, Any]:
        config, plan, status = self.spec.config, self.spec.plan, self.status
        facts: dict[str, Any] = {
            "model": config.model.name,
            "optimizer": config.optimizer.name.value,
            "slots": list(snapshot.slots),
            "seed": config.seed,
            "replicas": plan.replicas,
            "order": spans.ORDER,
            "global_batch": plan.global_batch,
            "frozen": plan.frozen.sha256,
            "data": to_json(plan.fingerprint),
        }
        if snapshot.loss is not None:
            reductions = {"reductions": snapshot.reductions} if snapshot.reductions else {}
            facts["metrics"] = {"loss": snapshot.loss, "sums": list(snapshot.sums), **reductions}
        if status.ended_early and snapshot.stop:  # so that an attempt that starts from here ends at the same step
            facts |= {"ended": resume.what_may_end(config.evaluate, config.train.steps), "stop": snapshot.stop}
        return facts

    def roll_back(self, step: int) -> None:
        """Records that the run returns to its newest checkpoint, which may still be being written.

        Args:
            step: whose update was skipped.
        """
        directory = self.spec.directory
        self.writer.wait()
        saved = checkpoint.finished(directory.checkpoints)
        record_rollback(directory.rollbacks, step=step, checkpoint=int(saved[-1].name) if saved else None)


def _problem(snapshot: Snapshot, rows: ChangedRows | None, *, skips_bad_updates: bool) -> str | None:
    """Returns why a state must not be saved; it may be the first sign of a skipped update."""
    if snapshot.bad and not skips_bad_updates:
        return "an update was skipped"
    path = _first_bad_parameter(snapshot, rows)
    return None if path is None else f"parameter {path} is not finite"


def _first_bad_parameter(snapshot: Snapshot, rows: ChangedRows | None) -> str | None:
    bad = next((path for path, value in snapshot.parameters.items() if not np.isfinite(value).all()), None)
    return bad or (rows.first_bad() if rows else None)


def _log_and_continue(error: OSError) -> None:
    _log.warning("%s: %s; training continues until the next save is due", error.filename, error.strerror)


def make_writer(spec: TaskSpec, *, is_read: bool) -> checkpoint_writer.Writer:
    """Returns the writer of the run's checkpoints.

    Args:
        is_read: whether an evaluator task scores each of them, until which they are kept.
    """
    keep, directory = spec.config.checkpoint.keep, spec.directory
    shared = [directory.frozen] if spec.plan.frozen.sha256 and directory.frozen.exists() else []
    if not is_read:
        return checkpoint_writer.Writer(directory.checkpoints, keep=keep, shared=shared)
    # A launcher ends the run when the evaluator fails; without a launcher the disk could fill up.
    at_most = evaluations.WAITING_AT_MOST if spec.is_unsupervised else None
    release = evaluations.release_when_scored(directory.evaluations, waiting_at_most=at_most)
    return checkpoint_writer.Writer(directory.checkpoints, keep=keep, release=release, shared=shared)
