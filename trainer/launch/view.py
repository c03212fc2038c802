"""Describes the state of a run: its progress, what each task does, and which tasks need attention. Pure."""

import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

from trainer.config.words import some
from trainer.observe.task_page import TaskPage, TaskState

RATE_WINDOW_SECS = 30.0  # of the steps from which the time left is computed
SILENT_SECS = 3.0  # a page is read twice a second
BUSY_SECS = 10.0  # a task that starts answers late
LATE_SECS = 5.0  # a worker that a step has waited for so long
STEPPING = (TaskState.training, TaskState.stopping)  # phases in which the speed of a run is shown
MAX_METRICS = 3  # in a line
MAX_NAMED = 8  # tasks of a line, before they are counted by state
BROKEN, DELAYED, BUSY, WORKING, ENDED = "broken", "delayed", "busy", "working", "ended"  # what a state means
MEANINGS = {
    TaskState.restarting: DELAYED,
    TaskState.waiting_for_data: DELAYED,
    TaskState.done: ENDED,
    TaskState.stopped: ENDED,
    TaskState.training: WORKING,
    TaskState.serving: WORKING,
    TaskState.ended: BROKEN,
}


@dataclass(frozen=True)
class TaskView:
    """The state of one task, as the launcher knows it."""

    name: str
    state: TaskState
    page: TaskPage | None = None  # its last status page
    silent_secs: float = 0.0  # since then
    code: int | None = None  # of its process, if that has ended

    @property
    def state_text(self) -> str:
        return self.state.text(self.code)

    @property
    def job(self) -> str:
        return self.name.partition(":")[0]


@dataclass(frozen=True)
class Course:
    """The goal of a run: its steps and batches."""

    steps: int
    start: int = 0  # global step that it (re)starts at
    epoch_steps: float = 0.0  # steps in one epoch; 0: unknown
    epochs: int | None = None  # if the config sets epochs rather than steps

    def epoch(self, step: int) -> str:
        """Returns the epoch of a step, e.g. epoch 2/5; empty if the config sets steps."""
        if not self.epochs:
            return ""
        return f"epoch {min(math.ceil(max(step, 1) / self.epoch_steps), self.epochs)}/{self.epochs}"


@dataclass(frozen=True)
class Standing:
    """The current progress of a run."""

    step: int
    elapsed_secs: float
    left_secs: float | None = None  # None: not known yet
    loss: float | None = None
    metrics: Mapping[str, float] | None = None
    examples_per_second: float = 0.0
    learning_rate: float | None = None  # where it varies
    phase: TaskState = TaskState.training  # or starting, stopping, saving, evaluating, exporting, done

    def values(self) -> list[str]:
        """Formats loss, metrics and the learning rate."""
        named = dict(list((self.metrics or {}).items())[:MAX_METRICS])
        loss = {} if self.loss is None else {"loss": self.loss}
        rate = [] if self.learning_rate is None else [f"rate {self.learning_rate:.3g}"]
        return [f"{name} {value:.4f}" for name, value in (loss | named).items()] + rate


class StepRate:
    """Measures the rate of the global step, with monotonic times that are passed in."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def poll(self, step: int, now: float) -> None:
        """Records the current step; a lower step starts the measurement again."""
        if self._seen and step < self._seen[-1][1]:
            self._seen.clear()
        if step > 0 and (not self._seen or step > self._seen[-1][1]):
            self._seen.append((now, step))
        while len(self._seen) > 2 and now - self._seen[0][0] > RATE_WINDOW_SECS:
            self._seen.popleft()

    def left_secs(self, steps: int, now: float) -> float | None:
        """Returns the seconds until `steps` is reached; None if too few steps were measured."""
        if len(self._seen) < 2 or self._seen[-1][1] >= steps:
            return None
        (began, first), (_, last) = self._seen[0], self._seen[-1]
        return (steps - last) * (now - began) / (last - first)


def standing(tasks: Sequence[TaskView], course: Course, *, elapsed_secs: float, rate: StepRate, now: float) -> Standing:
    """Returns the current progress, recording the step."""
    workers = [task.page for task in tasks if task.job == "worker" and task.page]
    chief = next((task for task in tasks if task.name == "worker:0"), None)
    page = (chief.page if chief else None) or next(iter(workers), None)
    step = max((page.step for page in workers), default=0) if workers else 0
    if page is None or step <= course.start:
        return Standing(step, elapsed_secs, phase=TaskState.starting)
    rate.poll(page.step, now)
    phase = chief.state if chief and meaning(chief) in (BUSY, ENDED) else TaskState.training
    return Standing(
        step if phase is TaskState.done else page.step,
        elapsed_secs,
        rate.left_secs(course.steps, now) if phase is TaskState.training else None,
        page.loss,
        page.metrics,
        sum(page.examples_per_second for page in workers),
        page.learning_rate,
        TaskState.stopping if any(page.is_stopping for page in workers) else phase,
    )


def line(tasks: Sequence[TaskView], course: Course, stands: Standing) -> str:
    """Describes the run on one line."""
    if stands.phase is TaskState.starting:
        return f"starting: {_states(tasks)}"
    workers = [task for task in tasks if task.job == "worker" and task.page]
    steps = [f"step {stands.step}/{course.steps}", *filter(None, [course.epoch(stands.step)])]
    evaluators = [_evaluator(task, task.page) for task in tasks if task.job == "evaluator" and task.page]
    left = [] if stands.left_secs is None else [f"{duration(stands.left_secs)} left"]
    return ", ".join([*steps, *stands.values(), *_doing(workers, stands), *evaluators, *left])


def _doing(workers: Sequence[TaskView], stands: Standing) -> list[str]:
    """Describes the speed of a run and what it waits for, or what it does instead."""
    if stands.phase not in STEPPING:
        chief = next((task.page for task in workers if task.name == "worker:0"), None)
        return [_evaluating(chief) if chief and stands.phase is TaskState.evaluating else stands.phase.value]
    parts = [f"{stands.examples_per_second:,.0f} examples/s"]
    waiting = [task for task in workers if task.state is TaskState.waiting_for_data and task.page]
    slowest = slowest_of(workers)
    if waiting:
        secs = max(task.page.data_secs for task in waiting if task.page)
        parts.append(f"{some([task.name for task in waiting], MAX_METRICS)} waiting for data ({duration(secs)})")
    elif slowest and slowest.page:
        parts.append(f"slowest {slowest.name} (waits {slowest.page.wait_fraction:.0%})")
    return parts


def _evaluator(task: TaskView, page: TaskPage) -> str:
    doing = f", {_evaluating(page)}" if task.state is TaskState.evaluating else ""
    return f"{task.name} at step {page.step}{doing}"


def _evaluating(page: TaskPage) -> str:
    return f"evaluating ({page.evaluated:,} examples)"


def _states(tasks: Sequence[TaskView]) -> str:
    if len(tasks) <= MAX_NAMED:
        return ", ".join(f"{task.name} {task.state_text}" for task in tasks)
    jobs = dict.fromkeys(task.job for task in tasks)
    return "; ".join(f"{job} {summary([task for task in tasks if task.job == job])}" for job in jobs)


def summary(tasks: Sequence[TaskView]) -> str:
    """Summarises the tasks of a job: 15 training, 1 restarting."""
    return ", ".join(f"{count} {state}" for state, count in Counter(task.state_text for task in tasks).most_common())


def slowest_of(workers: Sequence[TaskView]) -> TaskView | None:
    """Returns the worker that waits least, for which the others wait; None for fewer than two workers."""
    stepping = [task for task in workers if task.page]
    return min(stepping, key=lambda task: task.page.wait_fraction if task.page else 0.0) if len(stepping) > 1 else None


def awaited(tasks: Sequence[TaskView]) -> str:
    """Describes what a starting run waits for: tasks that have not come up yet, or its first step."""
    behind = [task.name for task in tasks if task.state is TaskState.starting]
    if tasks and all(meaning(task) == WORKING for task in tasks if task.job != "evaluator"):
        return "first step"
    return f"waiting for {some(behind, MAX_METRICS)}" if 0 < len(behind) <= len(tasks) / 2 else ""


def meaning(task: TaskView) -> str:
    """Classifies a state: broken, delayed, busy, working or ended."""
    return MEANINGS.get(task.state, BUSY)


def attention(task: TaskView, tasks: Sequence[TaskView], *, is_starting: bool) -> str | None:
    """Returns why a task needs attention; None if it does not."""
    if meaning(task) in (BROKEN, DELAYED):
        return task.state_text
    if meaning(task) == ENDED:
        return None
    if task.page and task.silent_secs >= (BUSY_SECS if is_starting else SILENT_SECS):
        return f"silent {duration(task.silent_secs)}"
    late = [other.page.stalled_secs for other in tasks if other.page and task.name in other.page.missing]
    if max(late, default=0.0) >= LATE_SECS:
        return f"late {duration(max(late))}"
    is_late = not is_starting and task.state in (TaskState.starting, TaskState.building, TaskState.roll_call)
    return task.state_text if is_late else None


@dataclass(frozen=True)
class Row:
    """A row of the table: one task, or all tasks of a job."""

    name: str
    state: str
    meaning: str
    tasks: Sequence[TaskView] = ()  # whose numbers it shows

    def pages(self) -> list[TaskPage]:
        return [task.page for task in self.tasks if task.page]


def rows(tasks: Sequence[TaskView], room: int, *, is_starting: bool) -> list[Row]:
    """Returns a row per task; if they do not fit, or start alike, one per job and those that need attention."""
    if len(tasks) <= room and not is_starting:
        return [_row(task, tasks, is_starting=is_starting) for task in tasks]
    by_job: dict[str, list[TaskView]] = {}
    for task in tasks:
        by_job.setdefault(task.job, []).append(task)
    jobs = [_job_row(job, own, tasks, is_starting=is_starting) for job, own in by_job.items()][: max(room, 0)]
    named = [task for task in tasks if attention(task, tasks, is_starting=is_starting)]
    named.sort(key=lambda task: meaning(task) != BROKEN)
    slowest = slowest_of([task for task in tasks if task.job == "worker" and meaning(task) == WORKING])
    if not named and slowest and not is_starting and len(by_job["worker"]) > 1:
        named = [slowest]
    left = max(room - len(jobs), 0)
    if len(named) > left:
        more = len(named) - max(left - 1, 0)
        tail = [Row(f"{more} more", "need attention", DELAYED)][:left]
        return [*jobs, *(_row(task, tasks, is_starting=is_starting) for task in named[: max(left - 1, 0)]), *tail]
    return [*jobs, *(_row(task, tasks, is_starting=is_starting) for task in named if len(by_job[task.job]) > 1)]


def _row(task: TaskView, tasks: Sequence[TaskView], *, is_starting: bool) -> Row:
    why = attention(task, tasks, is_starting=is_starting)
    kind = meaning(task) if why is None or meaning(task) == BROKEN else DELAYED
    state = task.state_text if why in (None, task.state_text) else f"{task.state_text}, {why}"
    return Row(task.name, state, kind, [task])


def _job_row(job: str, own: Sequence[TaskView], tasks: Sequence[TaskView], *, is_starting: bool) -> Row:
    if len(own) == 1:
        return _row(own[0], tasks, is_starting=is_starting)
    kinds = {_row(task, tasks, is_starting=is_starting).meaning for task in own}
    worst = next(kind for kind in (BROKEN, DELAYED, BUSY, WORKING, ENDED) if kind in kinds)
    name = "ps" if job == "ps" else f"{job}s"
    return Row(f"{len(own)} {name}", summary(own), worst, own)


def cells(row: Row, furthest: int) -> dict[str, str]:
    """Returns the numbers of a row, by heading; the last page of an ended task may be older than its last step."""
    pages = row.pages()
    if not pages:
        return {}
    steps = sorted({furthest if row.state == TaskState.done.value else page.step for page in pages})
    jobs = {page.job for page in pages}
    waits = [page.wait_fraction for page in pages]
    return {
        "step": f"{steps[0]}" if len(steps) == 1 else f"{steps[0]}-{steps[-1]}",
        "examples/s": f"{sum(page.examples_per_second for page in pages):,.0f}" if jobs == {"worker"} else "",
        "wait": "" if jobs == {"evaluator"} else f"{mean(waits):.0%}",
        "memory": f"{sum(page.memory_bytes for page in pages) / 2**20:,.0f} MiB",
    }


def duration(secs: float) -> str:
    """Formats a duration: 0:07, 12:30, 3:05:00, 2 d 03:05."""
    minutes, seconds = divmod(int(secs), 60)
    hours, minutes = divmod(minutes, 60)
    if hours >= 24:
        return f"{hours // 24} d {hours % 24:02}:{minutes:02}"
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
