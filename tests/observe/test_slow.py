"""A worker that is much slower than the others; the clock is passed in."""

from __future__ import annotations

import pages
import pytest

from trainer.observe.slow import SlowWorkers, times_as_slow
from trainer.observe.task_page import TaskPage
from trainer.plan.strategy import STRATEGIES


def page(rate: float, waits: float = 0.0, state: str = "training") -> TaskPage:
    return pages.page(state=state, examples_per_second=rate, wait_fraction=waits)


SYNC = {"ps:0": page(0.0), "worker:0": page(100.0, 0.9), "worker:1": page(100.0, 0.1), "worker:2": page(100.0, 0.9)}
ASYNC = {"worker:0": page(500.0), "worker:1": page(50.0), "worker:2": page(500.0)}


@pytest.mark.parametrize("pages", [SYNC, ASYNC], ids=["the others wait", "the others go on"])
def test_how_slow_a_worker_is_does_not_depend_on_who_waits(pages):
    times = times_as_slow(pages)
    assert times["worker:1"] == pytest.approx(9 if pages is SYNC else 10)
    assert max(times["worker:0"], times["worker:2"]) < 1


@pytest.mark.parametrize(
    "pages",
    [{}, {"worker:0": page(100.0)}, {"worker:0": page(100.0), "worker:1": page(0.0)},
     {"worker:0": page(9.0, state="saving"), "worker:1": page(100.0)}],
    ids=["nobody", "alone", "before its first steps", "the chief saves"],
)  # fmt: skip
def test_who_does_not_train_beside_others_is_not_slow(pages):
    assert [factor for factor in times_as_slow(pages).values() if factor > 1] == []


def test_a_slow_worker_is_reported_once_when_it_has_been_slow_for_ten_seconds(snapshot):
    slow = SlowWorkers(STRATEGIES["sync"].when_slow)
    said = {now: slow.poll(SYNC, float(now)) for now in range(0, 30)}
    assert {now for now, sentences in said.items() if sentences} == {10}
    assert said[10] == snapshot


def test_a_worker_that_was_fast_in_between_is_reported_again():
    slow = SlowWorkers(STRATEGIES["async"].when_slow)
    even = {name: page(500.0) for name in ASYNC}
    looks = [(ASYNC, 0), (even, 5), (ASYNC, 6), (ASYNC, 15), (ASYNC, 16), (even, 20), (ASYNC, 21), (ASYNC, 31)]
    assert [now for pages, now in looks if slow.poll(pages, float(now))] == [16, 31]


def test_what_follows_is_said_for_a_run_that_does_not_wait(snapshot):
    slow = SlowWorkers(STRATEGIES["backup"].when_slow)
    slow.poll(ASYNC, 0.0)
    assert slow.poll(ASYNC, 10.0)[0] == snapshot
