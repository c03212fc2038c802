"""Which tasks are killed because a step waits too long for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from signal import SIGKILL
from types import SimpleNamespace
from typing import Any

import pytest
from pages import page
from quick_config import load

from trainer.launch import silence
from trainer.launch.attempts import Attempts
from trainer.launch.silence import SilenceWatch
from trainer.plan.layout import Shard
from trainer.plan.plan import Plan, Task
from trainer.storage.run_directory import RunDirectory

LIMIT_SECS, DATA_SECS = 5.0, 30.0


def killed(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    strategy: str,
    *options: str,
    stuck: Sequence[str] = ("worker:0", "worker:1"),
    for_both: int | None = None,
    **data_secs: Any,
) -> set[str]:
    """The workers that are killed within 20 s of a step that no worker makes.

    Args:
        stuck: workers that the step waits for.
        for_both: the worker that computes for both.
        data_secs: of workers that wait for their data, for how long.
    """
    clock, sent = SimpleNamespace(now=100.0), set()
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(silence, "time", clock)
    starter: Any = SimpleNamespace(signal=lambda pid, number: sent.add(pid) if number == SIGKILL else None)
    tasks = tuple(Task("worker", index, "", "", (), None, 1, 2) for index in range(2))
    attempts = Attempts(tasks, RunDirectory(path), starter)
    plan = Plan("2w", strategy, 10, 8, tasks, (Shard(0, "worker:0", (), ()),), 96, ())
    watch = SilenceWatch(attempts, plan, load([f"timeouts.step_secs={LIMIT_SECS}", *options]).timeouts)
    for second in range(20):
        clock.now += 1.0
        for index, attempt in enumerate(attempts):
            waits = data_secs.get(f"w{index}", 0.0) and data_secs[f"w{index}"] + second
            shown = page(f"worker:{index}", "training", stuck=list(stuck), first_step_at=1.0)
            computes_for = ["worker:0", "worker:1"] if index == for_both else []
            attempt.page = replace(shown, data_secs=waits, computes_for=computes_for).as_of_now()
            attempt.pid, attempt.heard_at, attempt.began_at = index, clock.now, 0.0
        watch.poll()
    return {f"w{pid}" for pid in sent}


@pytest.mark.parametrize(
    ("strategy", "options", "data_secs", "expected"),
    [
        ("sync", [], {}, {"w0", "w1"}),
        ("sync", [], {"w0": 100.0}, {"w1"}),
        ("sync", [], {"w0": 100.0, "w1": 100.0}, set()),
        ("all_reduce", [], {"w0": 100.0}, set()),  # the other one waits for it
        ("all_reduce", [], {}, {"w0", "w1"}),
        ("sync", [f"timeouts.data_secs={DATA_SECS}"], {"w0": 1.0, "w1": DATA_SECS}, {"w1"}),
    ],
)
def test_a_task_that_waits_for_its_data_is_killed_by_a_limit_of_its_own_alone(
    tmp_path, monkeypatch, strategy, options, data_secs, expected
):
    assert killed(tmp_path, monkeypatch, strategy, *options, **data_secs) == expected


def test_the_task_that_computes_for_a_worker_is_killed_in_its_place(tmp_path, monkeypatch):
    assert killed(tmp_path, monkeypatch, "sync", stuck=["worker:1"], for_both=0) == {"w0"}
