"""The training loop, on an engine that follows a script."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from trainer import checkpoint, loop
from trainer.chief import Chief
from trainer.compose import load
from trainer.describe import Description
from trainer.engine.pulled import Pulled
from trainer.engine.snapshot import Snapshot
from trainer.exit_codes import NotFiniteError
from trainer.loop import Every, Pace, train
from trainer.monitor.status import Status
from trainer.placement import Parameter
from trainer.plan import Machine, make_plan
from trainer.run_directory import RunDirectory


class Script:
    """An engine of one replica: the loss of an update is 1 / its step, unless `losses` says otherwise."""

    def __init__(
        self, *, start: int = 0, losses: dict[int, float] | None = None, asked: set[int] | None = None
    ) -> None:
        self.at, self.losses = start, losses or {}
        self.asked = set() if asked is None else asked  # steps at which a replica asked to stop; shared by all
        self.fetched: list[int] = []
        self.graph, self.session = tf.Graph(), None

    def connect(self, target: str, session_config: Any) -> None: ...

    def load(self, snapshot: Snapshot, *, generation: int) -> None: ...

    def start(self) -> int:
        return self.at

    def step(self, *, stop: bool = False, fetch_gradients: bool = False) -> Pulled:
        pulled = self.peek()
        if stop:
            self.asked.add(self.at)
        if fetch_gradients:
            self.fetched.append(self.at)
            pulled = pulled._replace(gradients={"dense/kernel": np.ones(2, np.float32)})
        self.at += 1
        return pulled

    def peek(self) -> Pulled:
        loss = self.losses.get(self.at, 1 / max(self.at, 1))
        return Pulled(1, self.at, loss, 0.5, stop=self.at - 1 in self.asked)

    def snapshot(self) -> Snapshot:
        loss = self.losses.get(self.at, 1.0)
        return Snapshot(self.at, {"dense/kernel": np.full(2, loss, np.float32)}, {}, {})

    def leave(self) -> None: ...


def never() -> bool:
    return False


def test_training_ends_at_the_last_step_with_the_metrics_of_the_last_update():
    last, stopped = train(Script(), start=0, until=4, stop_requested=never)
    assert (last.step, last.loss, stopped) == (4, 0.25, False)


def test_actions_run_before_each_step_but_the_first():
    between: list[int] = []
    train(Script(), start=0, until=5, stop_requested=never, between=[between.append])
    assert between == [1, 2, 3, 4]


def test_a_restarted_run_does_not_act_on_the_step_it_starts_from():
    between: list[int] = []
    train(Script(start=3), start=3, until=6, stop_requested=never, between=[between.append])
    assert between == [4, 5]


def test_actions_see_what_each_step_pulled_and_the_end():
    seen: list[tuple[int, float]] = []
    train(Script(), start=0, until=4, stop_requested=never, after=[lambda p: seen.append((p.step, p.loss))])
    assert seen == [(0, 1.0), (1, 1.0), (2, 1 / 2), (3, 1 / 3), (4, 1 / 4)]


def test_actions_run_in_their_order():
    said: list[str] = []
    train(
        Script(),
        start=0,
        until=2,
        stop_requested=never,
        between=[lambda step: said.append(f"save {step}"), lambda step: said.append(f"evaluate {step}")],
        after=[lambda pulled: said.append(f"pulled {pulled.step}")],
    )
    assert said == ["pulled 0", "save 1", "evaluate 1", "pulled 1", "pulled 2"]


def test_a_run_that_is_at_its_end_takes_no_step():
    seen: list[Pulled] = []
    last, stopped = train(Script(start=4), start=4, until=4, stop_requested=never, after=[seen.append])
    assert (last.step, stopped, seen) == (4, False, [])


def test_every_replica_stops_at_the_same_step():
    asked: set[int] = set()
    mine, other = Script(asked=asked), Script(asked=asked)
    last, stopped = train(mine, start=0, until=9, stop_requested=lambda: mine.at == 3)
    other_last, other_stopped = train(other, start=0, until=9, stop_requested=never)
    assert (last.step, stopped) == (other_last.step, other_stopped) == (5, True)


def test_a_stop_asked_for_at_the_last_step_comes_too_late():
    engine = Script()
    last, stopped = train(engine, start=0, until=4, stop_requested=lambda: engine.at == 3)
    assert (last.step, stopped) == (4, False)


@pytest.mark.parametrize(("every", "fetched"), [(0, []), (1, [0, 1, 2, 3, 4, 5, 6]), (3, [0, 3, 6])])
def test_gradients_are_fetched_at_multiples_of_their_interval(every, fetched):
    engine = Script()
    train(engine, start=0, until=7, stop_requested=never, gradients_every=every)
    assert engine.fetched == fetched


def test_actions_see_the_gradients_of_the_steps_that_fetch_them():
    seen: list[int] = []

    def look(pulled: Pulled) -> None:
        if pulled.gradients is not None:
            seen.append(pulled.step)

    train(Script(start=2), start=2, until=7, stop_requested=never, gradients_every=3, after=[look])
    assert seen == [3, 6]


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_that_is_not_finite_ends_the_run(loss):
    with pytest.raises(NotFiniteError, match=f"the loss of step 5 is {loss}; checkpoints before it are untouched"):
        train(Script(losses={5: loss}), start=0, until=9, stop_requested=never)


def test_no_action_sees_a_loss_that_is_not_finite():
    seen: list[int] = []
    with pytest.raises(NotFiniteError, match="the loss of step 5 is nan"):
        train(
            Script(losses={5: math.nan}),
            start=0,
            until=9,
            stop_requested=never,
            after=[lambda pulled: seen.append(pulled.step)],
        )
    assert seen == [0, 1, 2, 3, 4]


def test_the_loss_of_the_last_update_is_looked_at_too():
    with pytest.raises(NotFiniteError, match="the loss of step 4 is nan"):
        train(Script(losses={4: math.nan}), start=0, until=4, stop_requested=never)


def test_the_loss_at_the_first_step_after_a_load_means_nothing():
    last, _ = train(Script(start=2, losses={2: math.nan}), start=2, until=4, stop_requested=never)
    assert last.step == 4


def test_parameters_that_are_not_finite_are_never_saved(tmp_path: Path):
    config = load([f"run={tmp_path}", "checkpoint.every=1", "train.steps=9", "train.batch_size=2"])
    model = Description((Parameter("dense/kernel", (2,), True),), (1,), 2, 8, 2)
    plan = make_plan(config, model, Machine(cores=1, gpus=0))
    engine, directory = Script(losses={5: math.nan}), RunDirectory(tmp_path)
    status = Status("worker", 0, str(tmp_path), "")
    chief = Chief(
        config,
        plan,
        directory,
        engine=engine,
        evaluator=None,  # it never evaluates
        status=status,
        start=0,
        generation=1,
    )
    with pytest.raises(NotFiniteError, match="the loss of step 5 is nan"):
        train(engine, start=0, until=9, stop_requested=never, between=[chief.between], after=[chief.after])
    chief._writer.close()  # the save of step 4 may still be in flight
    newest, damaged = checkpoint.newest_valid(directory.checkpoints)
    assert newest is not None
    assert (newest.step, damaged) == (4, [])


class Arrivals(Script):
    """An engine whose updates wait for nobody: some pushes are dropped, others' move the step too, a stop stays."""

    def __init__(self, *, dropped: set[int] | None = None, others: int = 0, end: int = 100) -> None:
        super().__init__()
        self.dropped = dropped or set()  # pushes, by their number from 0
        self.others, self.end = others, end  # no update is made at the end or after it
        self.is_over, self.steps = False, 0  # steps: how many were taken

    def step(self, *, stop: bool = False, fetch_gradients: bool = False) -> Pulled:
        pulled, number = self.peek(), self.steps
        self.steps += 1
        self.is_over = self.is_over or stop
        if not self.is_over and number not in self.dropped:
            self.at = min(self.at + 1 + self.others, self.end)
        return pulled

    def peek(self) -> Pulled:
        return super().peek()._replace(stop=self.is_over)


def test_a_run_goes_on_when_its_last_push_was_dropped():
    engine = Arrivals(dropped={3})
    last, stopped = train(engine, start=0, until=4, stop_requested=never)
    assert (last.step, stopped, engine.steps) == (4, False, 5)


def test_a_run_goes_on_until_its_last_step_is_reached_however_often_it_is_dropped():
    engine = Arrivals(dropped={3, 4, 5})
    last, stopped = train(engine, start=0, until=4, stop_requested=never)
    assert (last.step, stopped, engine.steps) == (4, False, 7)


def test_the_end_is_seen_once_though_its_push_was_dropped_before():
    seen: list[int] = []
    engine = Arrivals(dropped={2, 3})
    train(engine, start=0, until=3, stop_requested=never, after=[lambda pulled: seen.append(pulled.step)])
    assert seen == [0, 1, 2, 2, 2, 3]  # what each step pulled, and the end


def test_a_push_that_was_dropped_before_the_end_costs_a_step():
    engine = Arrivals(dropped={1})
    last, _ = train(engine, start=0, until=4, stop_requested=never)
    assert (last.step, engine.steps) == (4, 5)


def test_a_run_that_others_end_takes_a_step_too_many_and_sees_the_end():
    engine = Arrivals(others=2, end=6)
    last, stopped = train(engine, start=0, until=6, stop_requested=never)
    assert (last.step, stopped, engine.steps) == (6, False, 3)


def test_a_stop_ends_a_run_whose_push_was_dropped_for_it():
    engine = Arrivals()
    last, stopped = train(engine, start=0, until=9, stop_requested=lambda: engine.steps == 3)
    assert (last.step, stopped) == (3, True)


def test_a_stop_at_the_last_push_ends_a_run_that_it_drops():
    engine = Arrivals()
    last, stopped = train(engine, start=0, until=4, stop_requested=lambda: engine.steps == 3)
    assert (last.step, stopped) == (3, True)


def due(every: Every, steps: Sequence[int]) -> list[int]:
    return [step for step in steps if every.is_due(step)]


def test_an_interval_is_due_at_each_of_its_multiples():
    assert due(Every(3, start=0), range(10)) == [3, 6, 9]


@pytest.mark.parametrize(("start", "expected"), [(2, [3, 6]), (3, [6]), (4, [6]), (6, [])])
def test_an_interval_of_a_resumed_run_is_due_after_its_start(start, expected):
    assert due(Every(3, start=start), range(start, 8)) == expected


def test_an_interval_is_due_where_its_multiple_was_jumped_over():
    assert due(Every(10, start=0), [3, 9, 12, 19, 21]) == [12, 21]


def test_an_interval_is_due_once_where_several_multiples_were_jumped_over():
    assert due(Every(10, start=0), [35, 36, 39, 40]) == [35, 40]


def test_an_interval_is_due_once_at_a_step_that_is_seen_again():
    assert due(Every(3, start=0), [3, 3, 4, 3, 6, 6]) == [3, 6]


def test_an_interval_of_zero_is_never_due():
    assert due(Every(0, start=0), range(100)) == []


@pytest.mark.parametrize(("start", "expected"), [(0, [0, 3, 6]), (3, [3, 6]), (4, [6])])
def test_an_interval_that_begins_before_its_start_is_due_at_it(start, expected):
    assert due(Every(3, start=start - 1), range(start, 9)) == expected


def test_the_first_step_builds_and_does_not_count():
    assert Pace(step_secs=[9.0, 0.020]).percentile_ms(0.99) == 20.0


@pytest.mark.parametrize(
    ("share", "milliseconds"), [(0.0, 1.0), (0.01, 1.0), (0.5, 50.0), (0.99, 99.0), (0.995, 100.0), (1.0, 100.0)]
)
def test_a_percentile_is_the_shortest_time_that_so_many_steps_stay_within(share, milliseconds):
    hundred = [n / 1000 for n in range(100, 0, -1)]  # 100 ms, 99 ms, ... 1 ms
    assert Pace(step_secs=[9.0, *hundred]).percentile_ms(share) == pytest.approx(milliseconds)


def test_a_run_without_steps_has_no_pace():
    pace = Pace()
    assert (pace.percentile_ms(0.5), pace.steps_per_second(), pace.wait_fraction()) == (0.0, 0.0, 0.0)


def test_steps_per_second_are_of_the_last_steps():
    pace = Pace(step_secs=[9.0, 2.0, 2.0, 0.5, 0.5])
    assert (pace.steps_per_second(), pace.steps_per_second(2)) == (4 / 5, 2.0)


def test_the_wait_fraction_is_a_share_of_the_step_time():
    assert Pace(step_secs=[1.0, 3.0], wait_secs=1.0).wait_fraction() == 0.25


def test_a_tick_takes_down_what_passed_since_the_one_before(monkeypatch):
    clock = iter([10.5, 12.0])
    monkeypatch.setattr(loop, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    pace = Pace(began=10.0)
    pace.tick(Pulled(1, 1, 0.5, 0.5, stop=False, wait_secs=0.25))
    pace.tick(Pulled(1, 2, 0.5, 0.5, stop=False, wait_secs=0.5))
    assert (list(pace.step_secs), pace.wait_secs) == ([0.5, 1.5], 0.75)
