"""A status page in Prometheus's text format.

Labels are role, index and run: `job` and `instance` are Prometheus's own, and it would rename ours.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
GAUGE, COUNTER = "gauge", "counter"


@dataclass(frozen=True)
class _Series:
    field: str  # of the status page
    name: str
    kind: str
    help: str


SERIES = (
    _Series("step", "step", GAUGE, "Global step: updates applied to the parameters, as this task knows them."),
    _Series("steps", "steps_total", COUNTER, "Steps that this process has made."),
    _Series("examples", "examples_total", COUNTER, "Examples that the replicas of this process have computed."),
    _Series("examples_per_second", "examples_per_second", GAUGE, "Examples per second over the last steps."),
    _Series("wait_fraction", "wait_ratio", GAUGE, "Share of the step time spent waiting for others."),
    _Series("loss", "loss", GAUGE, "Training loss of the last step."),
    _Series("learning_rate", "learning_rate", GAUGE, "Learning rate, as last reported by the chief, where it varies."),
    _Series("generation", "generation", GAUGE, "How often the state that this task works on has been loaded."),
    _Series("stalled_secs", "stalled_seconds", GAUGE, "Seconds since the step last changed, while it stalls."),
    _Series("is_listening", "listening", GAUGE, "Whether the TensorFlow server of this task accepts sessions."),
    _Series("is_ready", "ready", GAUGE, "Whether the shard of this task can be loaded."),
    _Series("is_stopping", "stopping", GAUGE, "Whether this task was asked to stop."),
    _Series("started_at", "start_time_seconds", GAUGE, "When this process started, in Unix time."),
    _Series("first_step_at", "first_step_time_seconds", GAUGE, "When this process made its first step, in Unix time."),
    _Series("memory_bytes", "resident_memory_bytes", GAUGE, "Memory of this process that is in RAM."),
)


def text(page: Mapping[str, Any]) -> str:
    """The numbers of a status page; those that are not known yet are left out."""
    labels = {"role": page["job"], "index": str(page["index"]), "run": page["run"]}
    lines = list(_series("state", GAUGE, "What this task is doing.", [(labels | {"state": page["state"]}, 1)]))
    for series in SERIES:
        if (value := page[series.field]) is not None:
            lines += _series(series.name, series.kind, series.help, [(labels, value)])
    if metrics := page["metrics"]:
        values = [(labels | {"metric": name}, value) for name, value in metrics.items()]
        lines += _series("metric", GAUGE, "Training metric, as last reported by the chief.", values)
    return "\n".join(lines) + "\n"


def _series(name: str, kind: str, meaning: str, values: list[tuple[dict[str, str], float]]) -> Iterator[str]:
    yield f"# HELP trainer_{name} {meaning}"
    yield f"# TYPE trainer_{name} {kind}"
    for labels, value in values:
        named = ",".join(f'{label}="{_escaped(text)}"' for label, text in labels.items())
        yield f"trainer_{name}{{{named}}} {_number(value)}"


def _escaped(label: str) -> str:
    return label.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if math.isnan(value) else f"{'+' if value > 0 else '-'}Inf"
