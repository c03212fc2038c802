"""Formats status pages as Prometheus metrics: of one task, or of a whole run.

Labels are run, role and index: `job` and `instance` are Prometheus's own, and it would rename ours.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)

from trainer.observe.task_page import STEP_BUCKETS, TaskPage

LABELS = ("run", "role", "index")


@dataclass(frozen=True)
class _Series:
    field: str  # of the status page
    name: str
    help: str
    is_counter: bool = False


SERIES = (
    _Series("step", "trainer_global_step", "Updates applied to the parameters, as this task knows them."),
    _Series("steps", "trainer_steps", "Steps that this process has made.", True),
    _Series("examples", "trainer_examples", "Examples that the replicas of this process have computed.", True),
    _Series("examples_per_second", "trainer_examples_per_second", "Examples per second over the last steps."),
    _Series("wait_fraction", "trainer_wait_ratio", "Share of the last steps spent waiting for others."),
    _Series("loss", "trainer_loss", "Training loss of the last step."),
    _Series("learning_rate", "trainer_learning_rate", "Learning rate of the last report, where it varies."),
    _Series("generation", "trainer_generation", "How often the state that this task works on has been loaded."),
    _Series("stalled_secs", "trainer_stalled_seconds", "Seconds since the step last changed, while it stalls."),
    _Series("is_listening", "trainer_listening", "Whether the TensorFlow server of this task accepts sessions."),
    _Series("is_ready", "trainer_ready", "Whether the shard of this task can be loaded."),
    _Series("is_stopping", "trainer_stopping", "Whether this task was asked to stop."),
    _Series("first_step_at", "trainer_first_step_time_seconds", "Unix time of the first step of this process."),
    _Series("started_at", "process_start_time_seconds", "Unix time at which this process started."),
    _Series("memory_bytes", "process_resident_memory_bytes", "Resident memory of this process."),
    _Series("cpu_secs", "process_cpu_seconds", "CPU time of this process.", True),
)


@dataclass(frozen=True)
class RunMetrics:
    """The metrics that only the launcher knows."""

    run: str  # path of the run directory
    facts: Mapping[str, str]  # cluster, strategy, model, ...
    restarts: Mapping[tuple[str, str], int]  # by task and reason
    last_checkpoint: int | None  # its step


def text(pages: Iterable[TaskPage], of_run: RunMetrics | None = None) -> bytes:
    """Returns the metrics of tasks; numbers that are not known yet are left out."""
    registry = CollectorRegistry()
    registry.register(_Collector(list(pages), of_run))
    return generate_latest(registry)


class _Collector:
    def __init__(self, pages: list[TaskPage], of_run: RunMetrics | None) -> None:
        self._pages, self._of_run = pages, of_run

    def collect(self) -> Iterator[Metric]:
        yield from (metric for metric in self._all() if metric.samples)

    def _all(self) -> Iterator[Metric]:
        yield self._states()
        for series in SERIES:
            kind = CounterMetricFamily if series.is_counter else GaugeMetricFamily
            family = kind(series.name, series.help, labels=LABELS)
            for page in self._pages:
                if (value := getattr(page, series.field)) is not None:
                    family.add_metric(_labels(page), float(value))
            yield family
        yield self._metrics()
        yield self._phases()
        yield self._durations()
        yield from self._contributions()
        if self._of_run:
            yield from _of_run(self._of_run)

    def _states(self) -> Metric:
        family = GaugeMetricFamily("trainer_state", "What this task is doing.", labels=[*LABELS, "state"])
        for page in self._pages:
            family.add_metric([*_labels(page), page.state.value], 1)
        return family

    def _metrics(self) -> Metric:
        family = GaugeMetricFamily(
            "trainer_metric", "Training metric, as last reported by the chief.", labels=[*LABELS, "metric"]
        )
        for page in self._pages:
            for name, value in page.metrics.items():
                family.add_metric([*_labels(page), name], value)
        return family

    def _phases(self) -> Metric:
        family = CounterMetricFamily(
            "trainer_phase_seconds", "Seconds of this worker's steps, by phase.", labels=[*LABELS, "phase"]
        )
        for page in self._stepping():
            for phase in ("wait", "compute"):
                family.add_metric([*_labels(page), phase], getattr(page, f"{phase}_secs"))
            rest = page.step_secs - page.wait_secs - page.compute_secs
            family.add_metric([*_labels(page), "other"], max(0.0, rest))
        return family

    def _durations(self) -> Metric:
        family = HistogramMetricFamily("trainer_step_duration_seconds", "How long steps took.", labels=LABELS)
        for page in self._stepping():
            counts = zip([*map(str, STEP_BUCKETS), "+Inf"], accumulate(page.step_buckets), strict=True)
            family.add_metric(_labels(page), list(counts), page.step_secs)
        return family

    def _stepping(self) -> list[TaskPage]:
        return [page for page in self._pages if page.job == "worker" and page.steps]

    def _contributions(self) -> Iterator[Metric]:
        stale = HistogramMetricFamily(
            "trainer_gradient_staleness_steps",
            "Updates applied while an applied gradient of this worker was computed.",
            labels=LABELS,
        )
        dropped = CounterMetricFamily(
            "trainer_gradients_dropped", "Gradients of this worker that were dropped.", labels=[*LABELS, "reason"]
        )
        for page in self._pages:
            for worker, row in page.contributions.items():
                role, _, index = worker.partition(":")
                labels, counts = [page.run, role, index], row["staleness_histogram"]
                edges = [*map(str, range(len(counts))), "+Inf"]
                buckets = list(zip(edges, [*accumulate(counts), sum(counts)], strict=True))
                total = round((row["staleness_mean"] or 0.0) * row["applied"])
                stale.add_metric(labels, buckets, total)
                dropped.add_metric([*labels, page.dropped_as], row["dropped"])
        yield stale
        yield dropped


def _of_run(of: RunMetrics) -> Iterator[Metric]:
    info = InfoMetricFamily("trainer_run", "What is trained, and how.", labels=["run"])
    info.add_metric([of.run], dict(of.facts))
    yield info
    restarts = CounterMetricFamily(
        "trainer_restarts", "Restarts that were needed for this task.", labels=[*LABELS, "reason"]
    )
    for (task, reason), number in of.restarts.items():
        role, _, index = task.partition(":")
        restarts.add_metric([of.run, role, index, reason], number)
    yield restarts
    saved = GaugeMetricFamily("trainer_checkpoint_last_step", "Step of the newest checkpoint.", labels=["run"])
    if of.last_checkpoint is not None:
        saved.add_metric([of.run], of.last_checkpoint)
    yield saved


def _labels(page: TaskPage) -> list[str]:
    return [page.run, page.job, str(page.index)]
