"""Runs an evaluator task: it scores every checkpoint of a run, keeps the best, and exits after the last one.

It is not part of the training cluster, and no task waits for it. It reads the checkpoints where the chief writes
them, so both need the same run directory: under a scheduler `run=PATH` names one that all pods share. There it writes
`evaluations.jsonl`, `best/` and `events/evaluator`. The chief's status page says whether more checkpoints will come.
"""

import contextlib
import json
import time
from pathlib import Path

import tensorflow as tf

from trainer.observe.peers import PeerError
from trainer.observe.task_page import TaskPage, TaskState
from trainer.storage import checkpoint, checkpoint_writer
from trainer.storage.run_directory import RunDirectory
from trainer.task.beside import AbandonedError
from trainer.task.evaluator.score import CheckpointScorer, FittingRows, Identity, identity_of, make_evaluator
from trainer.task.other_tasks import ChiefStatus, roll_call
from trainer.task.runtime import TaskRuntime, collect_garbage_from_now_on
from trainer.task.spec import TaskSpec
from trainer.workload.workload import open_workload

POLL_SECS = 0.2
GONE_SECS = 60.0  # without an answer: more than a busy chief needs, or one that a scheduler restarts


def run(spec: TaskSpec, runtime: TaskRuntime) -> bool:
    """Scores checkpoints until the last one has its score, or this task is asked to stop; returns whether it was.

    Raises:
        PeerError: if the chief does not come up, or disappears before its last checkpoint.
        CheckpointError: if a checkpoint is of another model.
        OSError: if the run directory is missing, or cannot be written.
    """
    collect_garbage_from_now_on()
    config, directory, steps = spec.config, spec.directory, spec.plan.steps
    status, stop = runtime.status, runtime.stop
    starts_elsewhere = config.resume != "auto" and not directory.has_loaded()
    finder = Finder(directory.checkpoints, may_be_moved=starts_elsewhere)  # before the chief saves any
    # The first session decides the size of this process's thread pools.
    devices = tf.compat.v1.Session(graph=tf.Graph(), config=spec.session_config())
    status.is_listening = True
    scorer = _make_scorer(spec, status)
    chief = ChiefStatus(spec.chief)
    if starts_elsewhere or not (_has(directory.checkpoints, steps) or _has_ended_early(directory)):
        _meet(spec, status)
    stop.let_step_finish()
    while not stop.requested:
        for path in scorer.unscored(finder.find(chief_has_begun=chief.has_begun)):
            if stop.requested:
                break
            with contextlib.suppress(AbandonedError):
                scorer.score(path)
        if scorer.last_step >= steps or stop.requested:
            break
        status.state = TaskState.waiting
        if _has_ended_early(directory) and not scorer.unscored(finder.find(chief_has_begun=True)):
            break
        if chief.poll() > GONE_SECS:
            raise PeerError(_describe_gone(chief, directory, steps))
        time.sleep(POLL_SECS)
    scorer.close()
    if not stop.requested:  # the chief saves no more, and left the checkpoints that had no score
        checkpoint_writer.prune(directory.checkpoints, scorer.last_step, config.checkpoint.keep)
    devices.close()
    return stop.requested


def _make_scorer(spec: TaskSpec, status: TaskPage) -> CheckpointScorer:
    config, plan, directory = spec.config, spec.plan, spec.directory
    workload = open_workload(config, plan, directory.frozen)
    directory.discard_described()
    device = "/gpu:0" if spec.task.gpus else "/cpu:0"
    rows = FittingRows(plan, workload, precision=config.train.precision.value, seed=config.seed)
    evaluator = make_evaluator(config.evaluate, workload, device, rows.tables)
    evaluator.connect("", spec.session_config())
    return CheckpointScorer(config.evaluate, directory, evaluator, status, rows)


def _meet(spec: TaskSpec, status: TaskPage) -> None:
    """Returns when the chief of this run is up, and its directory is visible here."""
    path, deadline_secs, began = spec.directory.path, spec.config.timeouts.roll_call_secs, time.monotonic()
    roll_call(spec, status, [spec.chief.name], until="is_listening")
    while not path.is_dir():
        if time.monotonic() - began > deadline_secs:
            raise FileNotFoundError(
                f"{path} has not appeared after {deadline_secs:g} s, although {spec.chief.name} is up; "
                f"{spec.task.name} reads the checkpoints where the chief writes them: mount the directory of "
                "run=PATH in both"
            )
        time.sleep(POLL_SECS)


def _has(folder: Path, step: int) -> bool:
    return any(int(path.name) >= step for path in checkpoint.finished(folder))


def _has_ended_early(directory: RunDirectory) -> bool:
    """Whether the chief has saved its last checkpoint, and will make no more steps."""
    try:
        return json.loads(directory.summary.read_text()).get("ended_early") is not None
    except (OSError, ValueError):
        return False


def _describe_gone(chief: ChiefStatus, directory: RunDirectory, steps: int) -> str:
    last = directory.checkpoints / f"{steps:09d}"
    return (
        f"{chief.task.name} at {chief.task.control} has not answered for {GONE_SECS:.0f} s; it last reported step "
        f"{chief.step} of {steps}, and {last} does not exist. The same command continues; if training has ended, mount "
        f"the directory that {chief.task.name} wrote"
    )


class Finder:
    """Finds the checkpoints of this run, ignoring those of an earlier run that the chief may still move aside."""

    def __init__(self, folder: Path, *, may_be_moved: bool) -> None:
        self._folder = folder
        self._earlier: set[Identity | None] | None = None
        if may_be_moved:
            self._earlier = {identity_of(path) for path in checkpoint.finished(folder)}

    def find(self, *, chief_has_begun: bool) -> list[Path]:
        """Returns checkpoints by rising step; none before the chief has started, which a new checkpoint also shows."""
        paths = checkpoint.finished(self._folder)
        if self._earlier is not None and not chief_has_begun and self._earlier.issuperset(map(identity_of, paths)):
            return []
        self._earlier = None
        return paths
