"""Evaluates a run between two steps, if no evaluator task does."""

import logging
import time
from dataclasses import dataclass

from trainer.engine.vectors.snapshot import Snapshot
from trainer.observe.task_page import TaskPage, TaskState
from trainer.storage import evaluations
from trainer.storage.evaluations import Evaluation
from trainer.storage.history import History
from trainer.task.beside import AbandonedError
from trainer.task.chief.initial_state import InitialState
from trainer.task.chief.saver import Saver
from trainer.task.evaluator.score import Evaluator
from trainer.task.spec import TaskSpec
from trainer.task.tensorboard import Events

_log = logging.getLogger(__name__)


@dataclass
class ChiefEvaluation:
    """Scores snapshots, if no evaluator task does."""

    evaluator: Evaluator
    events: Events
    lines: History
    status: TaskPage
    saver: Saver
    keeps_best: bool
    abandoned: Snapshot | None = None  # not evaluated, because the run must stop

    def run(self, snapshot: Snapshot) -> dict[str, float]:
        """Returns eval_loss and a score for each metric, and writes them for TensorBoard.

        Raises:
            AbandonedError: if the run has to stop before that; it will continue from this state.
        """
        before, self.status.state, self.status.evaluated = self.status.state, TaskState.evaluating, 0
        began = time.monotonic()
        try:
            scores = self.evaluator.score(snapshot, self._goes_on)
        except AbandonedError:
            self.abandoned = snapshot
            _log.info("step %d: not evaluated; the run evaluates it when it continues", snapshot.step)
            raise
        self.events.scalars(snapshot.step, {f"evaluation/{name}": value for name, value in scores.items()})
        self.events.flush()
        if snapshot.step > self.lines.last_step:  # else it was evaluated before
            evaluation = Evaluation(snapshot.step, scores, round(time.monotonic() - began, 3))
            if self.keeps_best:
                self.saver.save_if_best(snapshot, evaluation)
            self.lines.write(snapshot.step, {**scores, "seconds": evaluation.seconds})  # last: it is not made again
        self.status.state = before
        return {f"eval_{name}": value for name, value in scores.items()}

    def is_missing(self, step: int, every: int) -> bool:
        """Whether the state that a chief starts from lacks an evaluation, because its predecessor died before it."""
        return every > 0 and self.lines.last_step // every < step // every

    def _goes_on(self, examples: int) -> bool:
        self.status.evaluated = examples
        return not self.status.is_stopping

    def run_and_log(self, snapshot: Snapshot) -> None:
        """Evaluates between two steps; if abandoned, keeps the state, from which the run continues."""
        try:
            scores = self.run(snapshot)
        except AbandonedError:
            self.saver.save_unless_saved(snapshot)
            return
        _log.info("step %d: %s", snapshot.step, ", ".join(f"{name} {value:.4f}" for name, value in scores.items()))


def make_evaluation(
    spec: TaskSpec, status: TaskPage, saver: Saver, evaluator: Evaluator, events: Events, start: InitialState
) -> ChiefEvaluation:
    directory = spec.directory
    lines = History(directory.evaluations, start=start.step)
    keeps_best = spec.config.evaluate.keeps_best
    if keeps_best:
        evaluations.remove_best_after(directory.best, start.step)
    return ChiefEvaluation(evaluator, events, lines, status, saver, keeps_best)
