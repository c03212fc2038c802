"""Peers that fall silent or were started again, and steps that take too long; the clock is passed in."""

from __future__ import annotations

from pages import page

from trainer.observe.heartbeats import Heartbeats
from trainer.observe.stall import Stall, describe
from trainer.plan.plan import Task

PS = Task("ps", 0, "127.0.0.1:1", "127.0.0.1:2", (), None, 1, 2)


def heartbeats() -> Heartbeats:
    return Heartbeats("worker:1", [PS], timeout_secs=10.0, now=100.0)


def test_a_peer_that_answers_now_and_then_counts_as_up():
    beats = heartbeats()
    assert beats.hear("ps:0", None, 114.0) is None
    assert beats.hear("ps:0", page("ps:0", started_at=5.0), 115.0) is None
    assert beats.hear("ps:0", None, 129.0) is None


def test_a_peer_that_is_silent_for_longer_is_given_up_and_the_link_is_named(snapshot):
    beats = heartbeats()
    assert beats.hear("ps:0", page("ps:0", started_at=5.0), 101.0) is None
    assert beats.hear("ps:0", None, 117.0) == snapshot


def test_a_peer_that_was_started_again_has_lost_what_it_held(snapshot):
    beats = heartbeats()
    assert beats.hear("ps:0", page("ps:0", started_at=5.0), 101.0) is None
    assert beats.hear("ps:0", page("ps:0", started_at=9.0), 102.0) == snapshot


def test_where_no_state_was_loaded_none_is_lost():
    beats = heartbeats()
    assert beats.hear("ps:0", page("ps:0", started_at=5.0), 101.0, loses=False) is None
    assert beats.hear("ps:0", page("ps:0", started_at=9.0), 102.0, loses=False) is None
    assert beats.hear("ps:0", page("ps:0", started_at=9.0), 103.0) is None


def test_a_median_is_of_one_step_although_many_pass_between_two_looks():
    stall = Stall(limit_secs=6.0, now=0.0)
    for second in range(6):
        stall.poll(200 * second, float(second))
    assert not stall.is_stuck(11.0)
    assert stall.is_stuck(11.1)


def test_a_step_stalls_until_it_moves():
    stall = Stall(limit_secs=60.0, now=0.0)
    assert [stall.poll(3, now) for now in (0.0, 7.0, 9.0)] == [0.0, 7.0, 9.0]
    assert stall.poll(4, 10.0) == 0.0


def test_a_stuck_step_took_longer_than_the_limit_and_than_twenty_medians():
    stall = Stall(limit_secs=60.0, now=0.0)
    for step in range(6):
        stall.poll(step, 10.0 * step)  # 10 s each
    assert not stall.is_stuck(50.0 + 200.0)
    assert stall.is_stuck(50.0 + 201.0)


def test_a_stall_is_reported_every_thirty_seconds():
    stall = Stall(limit_secs=60.0, now=0.0)
    stall.poll(3, 0.0)
    assert [now for now in range(0, 100, 10) if stall.is_due(float(now))] == [30, 60, 90]


def test_a_stalled_step_names_who_has_pushed_and_who_is_missing(snapshot):
    workers = [f"worker:{index}" for index in range(4)]
    assert describe(1200, 30.2, workers, ["worker:2"], {"worker:2": (1199, 12.3)}) == (
        "step 1200 has waited 30 s for worker:2 (at step 1199 12 s ago); workers 0, 1, 3 have pushed"
    )
    assert describe(5, 31.0, workers[:2], workers[:2], {}) == snapshot
