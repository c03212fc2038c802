"""Who waits for whom, from the pages of the workers."""

from __future__ import annotations

from typing import Any

import pages
import pytest

from trainer.observe.task_page import TaskPage
from trainer.observe.waits import MOST_AWAITED, OTHERS, UPDATE, Waits


def page(job: str = "worker", wait: float = 0.0, **told: Any) -> TaskPage:
    return pages.page(f"{job}:0", wait_fraction=wait, **{"state": "training", "steps": 9, **told})


def waited(*pages: dict[str, TaskPage], for_all: bool = True) -> dict[str, dict[str, float]]:
    """What was added up from pages that came one second after the other."""
    waits = Waits(for_all=for_all)
    waits.poll({}, 0.0)
    for second, one in enumerate(pages, 1):
        waits.poll(one, float(second))
    return waits.to_json()


def test_the_worker_that_waits_least_is_the_one_that_the_others_wait_for():
    pages = {
        "ps:0": page("ps", 0.9),
        "worker:0": page(wait=0.5),
        "worker:1": page(wait=0.1),
        "worker:2": page(wait=0.4),
    }
    assert waited(pages, pages) == {
        "worker:0": {UPDATE: 0.2, "worker:1": pytest.approx(0.8)},
        "worker:1": {UPDATE: 0.2},
        "worker:2": {UPDATE: 0.2, "worker:1": pytest.approx(0.6)},
    }


def test_where_workers_do_not_wait_for_each_other_they_wait_for_the_update():
    pages = {"worker:0": page(wait=0.5), "worker:1": page(wait=0.1)}
    assert waited(pages, for_all=False) == {"worker:0": {UPDATE: 0.5}, "worker:1": {UPDATE: 0.1}}


def test_while_a_step_stalls_those_that_have_pushed_wait_for_those_that_have_not():
    stalled = {"missing": ["worker:1", "worker:2"], "stalled_secs": 3.0}
    pages = {"ps:0": page("ps", **stalled), "worker:0": page(wait=0.2), "worker:1": page(wait=0.2, state="building")}
    assert waited(pages) == {"worker:0": {"worker:1": 0.5, "worker:2": 0.5}}


def test_a_worker_counts_from_its_first_step_on_while_it_trains():
    pages = {"worker:0": page(wait=0.5, steps=0), "worker:1": page(wait=0.5, state="saving")}
    assert waited(pages) == {}


def test_a_launcher_that_was_frozen_counts_five_seconds_of_that_time():
    waits = Waits(for_all=False)
    waits.poll({}, 0.0)
    waits.poll({"worker:0": page(wait=0.5)}, 3600.0)
    assert waits.to_json() == {"worker:0": {UPDATE: 2.5}}


def test_of_many_workers_those_that_are_waited_for_most_are_named():
    names = [f"worker:{index}" for index in range(100)]
    waits = Waits(for_all=True)
    waits.poll({}, 0.0)
    for second in range(100):
        slowest = names[second % 50 if second < 50 else second % 3]
        waits.poll({name: page(wait=0.25 if name == slowest else 0.75) for name in names}, second + 1.0)
    table = waits.to_json()
    assert {len(row) for row in table.values()} <= {MOST_AWAITED + 1, MOST_AWAITED + 2}
    assert {"worker:0", "worker:1", "worker:2", OTHERS, UPDATE} <= table["worker:99"].keys()
    assert sum(table["worker:99"].values()) == pytest.approx(75.0)
