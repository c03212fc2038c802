"""Who computes for each worker: never two at once, and others only while it is away."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trainer.observe.task_page import TaskPage, TaskState
from trainer.task.chief.places import STOPPING_SECS, Places, Seen

GONE, SILENT = Seen(is_gone=True), Seen()
CHIEF, FIRST, SECOND = "worker:0", "worker:1", "worker:2"


def process(index: int, started_at: float = 1.0, **fields: object) -> Seen:
    """A worker's process; by default one that trains."""
    fields = {"computes_for": [f"worker:{index}"], "state": TaskState.training} | fields
    return Seen(TaskPage("worker", index, "run", "hash", started_at=started_at, pid=index, **fields))


def successor(index: int, *, is_built: bool) -> Seen:
    """A worker's next process, which waits for its place once it is built."""
    state = TaskState.roll_call if is_built else TaskState.building
    return process(index, started_at=2.0, computes_for=[], state=state, waits_for_place=is_built)


ALL = {CHIEF: process(0), FIRST: process(1, can_stand_in_for=[SECOND]), SECOND: process(2)}
STANDS_IN = process(1, can_stand_in_for=[SECOND], computes_for=[FIRST, SECOND])


def training() -> Places:
    places = Places()
    assert places.adopt(ALL)
    places.update(ALL, 0.0)
    assert places.holders == {FIRST: FIRST, SECOND: SECOND}
    return places


def holder_after(*seen: Seen, secs: float = 1.0, before: Places | None = None) -> str | None:
    """Who has the place of the second worker after looks that have shown it like this, or both workers."""
    places = before or training()
    for number, one in enumerate(seen):
        places.update(ALL | {SECOND: one}, number * secs)
    return places.holders.get(SECOND)


def test_a_worker_gets_its_place_when_it_could_train():
    places, built = Places(), {name: successor(index, is_built=True) for index, name in enumerate(ALL)}
    assert places.adopt(built | {SECOND: GONE})
    places.update(built | {SECOND: GONE}, 0.0)
    assert places.holders == {FIRST: FIRST}
    places.update(built | {FIRST: process(1, started_at=2.0)}, 1.0)
    assert places.holders == {FIRST: FIRST, SECOND: SECOND}


@pytest.mark.parametrize(
    ("seen", "holder"),
    [
        ([GONE], FIRST),
        ([successor(2, is_built=False)], FIRST),
        ([successor(2, is_built=True)], SECOND),
        ([SILENT], SECOND),
        ([SILENT, GONE], FIRST),
        ([replace(ALL[SECOND], page=replace(ALL[SECOND].page, is_stopping=True))], SECOND),
    ],
    ids=["gone", "a new process builds", "a new process waits", "silent", "silent, then gone", "asked to stop"],
)
def test_another_worker_stands_in_for_one_whose_process_has_ended(seen: list[Seen], holder: str):
    assert holder_after(*seen) == holder


def test_one_that_is_evicted_gives_its_place_up_before_another_has_it():
    places, evicted = training(), process(2, is_stopping=True)
    assert holder_after(evicted, evicted, secs=STOPPING_SECS, before=places) is None
    places.update(ALL | {SECOND: process(2, is_stopping=True, computes_for=[])}, 2 * STOPPING_SECS)
    assert places.holders[SECOND] == FIRST


def test_nobody_gives_a_place_up_that_nobody_would_take():
    evicted, unprepared = process(2, is_stopping=True), ALL | {FIRST: process(1)}
    places = training()
    for now in range(5):
        places.update(unprepared | {SECOND: evicted}, now * STOPPING_SECS)
    assert places.holders[SECOND] == SECOND
    places.update(unprepared | {SECOND: GONE}, 100.0)
    assert SECOND not in places.holders


def test_a_successor_gets_its_place_once_the_stand_in_has_given_it_up():
    places = training()
    assert holder_after(GONE, before=places) == FIRST
    back = ALL | {SECOND: successor(2, is_built=True)}
    places.update(back | {FIRST: STANDS_IN}, 2.0)
    assert SECOND not in places.holders
    places.update(back | {FIRST: STANDS_IN}, 3.0)
    assert SECOND not in places.holders
    places.update(back, 4.0)
    assert places.holders[SECOND] == SECOND


def test_a_place_whose_stand_in_has_ended_too_waits_for_its_worker():
    places = training()
    assert holder_after(GONE, before=places) == FIRST
    places.update(ALL | {FIRST: GONE, SECOND: GONE}, 2.0)
    assert places.holders == {}
    places.update(ALL | {FIRST: GONE, SECOND: successor(2, is_built=True)}, 3.0)
    assert places.holders == {SECOND: SECOND}


def test_no_place_is_given_while_a_process_that_may_have_it_is_silent():
    places = training()
    assert holder_after(GONE, before=places) == FIRST
    places.update(ALL | {FIRST: SILENT, SECOND: successor(2, is_built=True)}, 2.0)
    assert places.holders[SECOND] == FIRST
    assert not Places().adopt(ALL | {FIRST: SILENT})


def test_the_next_chief_continues_with_what_the_last_one_decided():
    places = Places()
    assert places.adopt(ALL | {FIRST: STANDS_IN, SECOND: GONE})
    assert places.holders == {FIRST: FIRST, SECOND: FIRST}
    places.update(ALL | {FIRST: STANDS_IN, SECOND: successor(2, is_built=True)}, 0.0)
    assert places.holders == {FIRST: FIRST}


def test_the_next_chief_learns_late_of_a_place_that_the_last_one_gave_away():
    places, built = Places(), ALL | {SECOND: successor(2, is_built=False)}
    assert places.adopt(built)
    places.update(built, 0.0)
    assert places.holders == {FIRST: FIRST}
    places.update(ALL | {SECOND: process(2, started_at=2.0)}, 1.0)
    assert places.holders == {FIRST: FIRST, SECOND: SECOND}
