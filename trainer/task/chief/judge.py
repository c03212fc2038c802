"""Acts on evaluations: calls the user's hook, ends a run that no longer improves, and reduces the learning rate."""

import logging
from collections.abc import Collection, Sequence

from trainer.observe.task_page import TaskPage
from trainer.storage import evaluations
from trainer.storage.evaluations import Evaluation
from trainer.task.chief import decisions
from trainer.task.chief.ending import Hooks, end_early
from trainer.task.chief.initial_state import InitialState
from trainer.task.spec import TaskSpec

_log = logging.getLogger(__name__)


class Judge:
    """Reads evaluations.jsonl, so that a restarted chief continues to count; an evaluator task may write it.

    If the chief evaluates and all replicas wait for each other, its requests at a step depend only on the
    evaluations up to that step, not on when it was started.
    """

    def __init__(
        self, spec: TaskSpec, status: TaskPage, hooks: Hooks, start: InitialState, metrics: Collection[str]
    ) -> None:
        """Acts on the evaluations up to the step of the state that the chief starts from, without calling the hook.

        Args:
            metrics: names of the run's metrics; a run that it continues may have had others.
        """
        self._evaluate, self._optimizer = spec.config.evaluate, spec.config.optimizer
        self._path, self._status, self._hooks = spec.directory.evaluations, status, hooks
        self._metric = evaluations.metric_of(metrics, self._evaluate.best_metric)
        self._is_exact = spec.plan.effective_strategy.is_exact and spec.plan.trainers == spec.plan.tasks
        self._size = -1  # of the file, when it was read last
        scored = self._read(start.step)
        self._seen = len(scored)
        counted = self._count([one for one in scored if one.step < start.step] if self._is_exact else scored)
        # Reductions that the state has, and the run's evaluations do not explain: it continues another run.
        has = start.result.reductions if start.result else 0
        self._others = has - counted if self._is_exact else max(0, has - counted)
        self.reductions = has  # of the learning rate, as they should be
        self._decide(scored)

    @property
    def is_needed(self) -> bool:
        patiences = (self._evaluate.patience, self._optimizer.plateau.patience)
        return any(one is not None for one in patiences) or self._hooks.has("on_evaluation")

    def poll(self, step: int) -> None:
        """Acts on the evaluations written since the last call; `step` is the global step."""
        scored = self._read(step)
        for one in scored[self._seen :]:
            self._hooks.call("on_evaluation", one.step, one.scores)
        if len(scored) != self._seen:
            self._seen = len(scored)
            self._decide(scored)

    def _read(self, step: int) -> list[Evaluation]:
        """Returns the evaluations up to a step: an evaluator task may not yet have removed those of a lost state."""
        size = self._path.stat().st_size if self._path.exists() else 0
        if size != self._size:
            self._size, self._all = size, evaluations.read(self._path)
        return [one for one in self._all if one.step <= step]

    def _counted(self, scored: Sequence[Evaluation]) -> list[Evaluation]:
        """Returns the evaluations that can be compared.

        Without that at the end of a run that was made longer since: one that was long from the start has none.
        """
        every = self._evaluate.every if self._is_exact else 0
        return [one for one in scored if self._metric in one.scores and (not every or one.step % every == 0)]

    def _count(self, scored: Sequence[Evaluation]) -> int:
        return decisions.reductions(self._counted(scored), self._metric, self._evaluate, self._optimizer)

    def _decide(self, scored: Sequence[Evaluation]) -> None:
        reductions = self._others + self._count(scored)
        if reductions > self.reductions:
            self.reductions, optimizer = reductions, self._optimizer
            rate = max(optimizer.learning_rate * optimizer.plateau.factor**reductions, optimizer.plateau.min_rate)
            _log.info("step %d: the peak learning rate is reduced to %.6g", scored[-1].step, rate)
        counted, patience = self._counted(scored), self._evaluate.patience
        if not counted or patience is None:
            return
        place = decisions.best_of(counted, self._metric, self._evaluate)
        if len(counted) - 1 - place >= patience:
            best = counted[place]
            was = f"it was {best.scores[self._metric]:.4f} at step {best.step}"
            why = f"{self._metric} has not improved in {patience} evaluations; {was}"
            end_early(self._status, counted[-1].step, why)
