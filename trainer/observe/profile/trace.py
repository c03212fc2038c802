"""Writes a profile as a Chrome trace: a process per attempt of a task, threads for its replica and shard. Pure.

The format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
"""

from collections.abc import Iterator, Mapping, Sequence

from trainer.observe.profile.attempts import AttemptTrace, Step
from trainer.observe.profile.record import REPLICA, SHARD

THREADS = {REPLICA: 1, SHARD: 2}
WHOLE = {REPLICA: "step", SHARD: "update"}  # name of a step of each row


TraceEvent = dict[str, object]  # by the names of the format: ph is the kind (X: complete, M: a name), ts a time


def trace(attempts: Sequence[AttemptTrace]) -> dict[str, object]:
    """Returns the JSON object; its times are microseconds since the first step of the run."""
    start = min((steps[0].began for attempt in attempts for steps in attempt.rows.values()), default=0.0)
    events = [event for pid, attempt in enumerate(attempts, 1) for event in _process(pid, attempt, start)]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"first_step_at": start}}


def name_of(attempt: AttemptTrace) -> str:
    """Returns the task, and the attempt if it is not the first."""
    return f"{attempt.task}, attempt {attempt.number + 1}" if attempt.number else attempt.task


def _process(pid: int, attempt: AttemptTrace, start: float) -> Iterator[TraceEvent]:
    yield _named("process_name", pid, 0, name_of(attempt))
    yield {"name": "process_sort_index", "ph": "M", "pid": pid, "tid": 0, "ts": 0, "args": {"sort_index": pid}}
    for row, steps in sorted(attempt.rows.items()):
        tid = THREADS.get(row, 3)
        yield _named("thread_name", pid, tid, row)
        for step in steps:
            about = {"step": step.number}
            name = f"{WHOLE.get(row, row)} {step.number}"
            yield _complete(name, row, pid, tid, step.began - start, step.ended - start, about)
            for span in step.spans:
                if span.ended > span.began:
                    more = _waited_for(step) if span.name == "wait" else {}
                    began, ended = span.began - start, span.ended - start
                    yield _complete(span.name, row, pid, tid, began, ended, about | more)


def _waited_for(step: Step) -> dict[str, object]:
    """Returns whose gradient came last, and how long after the first each came."""
    if not step.arrived:
        return {}
    first = min(step.arrived.values())
    came = {worker: round(1000 * (at - first), 3) for worker, at in step.arrived.items()}
    return {"last": max(came, key=came.__getitem__), "came_ms": came}


def _complete(
    name: str, row: str, pid: int, tid: int, began: float, ended: float, about: Mapping[str, object]
) -> TraceEvent:
    """Returns an event between two times, in seconds. Rounds both, not the duration, so that events still nest."""
    ts, end = _microseconds(began), _microseconds(ended)
    return {"name": name, "cat": row, "ph": "X", "ts": ts, "dur": end - ts, "pid": pid, "tid": tid, "args": dict(about)}


def _microseconds(secs: float) -> int:
    return round(1e6 * secs)


def _named(what: str, pid: int, tid: int, name: str) -> TraceEvent:
    return {"name": what, "ph": "M", "pid": pid, "tid": tid, "ts": 0, "args": {"name": name}}
