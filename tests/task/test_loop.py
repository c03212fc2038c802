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
from pages import page
from quick_config import load

from trainer.engine.step_result import StepResult
from trainer.engine.vectors.snapshot import Snapshot
from trainer.faults.exit_codes import NotFiniteError
from trainer.plan.description import Description
from trainer.plan.devices import Machine
from trainer.plan.layout import Parameter
from trainer.plan.make import make_plan
from trainer.storage import checkpoint
from trainer.storage.journal import Journal
from trainer.storage.run_directory import RunDirectory
from trainer.task import not_finite
from trainer.task.chief.finish import finish
from trainer.task.chief.initial_state import InitialState
from trainer.task.chief.wiring import Chief, assemble
from trainer.task.loop import train
from trainer.task.pace import Every, Pace
from trainer.task.runtime import TaskRuntime
from trainer.task.spec import TaskSpec


class Script:
    """An engine of one replica: the loss of an update is 1 / its step."""

    generation = 1

    def __init__(
        self,
        *,
        start: int = 0,
        bad: set[int] | None = None,
        spoilt_at: int | None = None,
        asked: set[int] | None = None,
    ) -> None:
        self.at = start
        self.bad = bad or set()  # steps whose update was skipped
        self.spoilt_at = spoilt_at  # the first step at which parameters are not finite
        self.asked = set() if asked is None else asked  # steps at which a replica asked to stop; shared by all
        self.fetched: list[int] = []
        self.graph, self.session = tf.Graph(), None

    def connect(self, target: str, session_config: Any) -> None: ...

    def load(self, snapshot: Snapshot, *, generation: int) -> None: ...

    def start(self) -> int:
        return self.at

    def step(self, *, stop: bool = False, reductions: int = 0, fetch_gradients: bool = False) -> StepResult:
        result = self.peek()
        if stop:
            self.asked.add(self.at)
        if fetch_gradients:
            self.fetched.append(self.at)
            result = result._replace(gradients={"dense/kernel": np.ones(2, np.float32)})
        self.at += 1
        return result

    def peek(self) -> StepResult:
        loss = 1 / max(self.at, 1)
        bad = max((step for step in self.bad if step <= self.at), default=0)
        return StepResult(1, self.at, loss, stop=self.at - 1 in self.asked, bad=bad)

    def snapshot(self) -> Snapshot:
        is_spoilt = self.spoilt_at is not None and self.at >= self.spoilt_at
        parameters = {"dense/kernel": np.full(2, math.nan if is_spoilt else 1.0, np.float32)}
        return Snapshot(self.at, parameters, {}, {}, bad=self.peek().bad)

    def release(self) -> None:
        pass

    def contributions(self) -> None: ...

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


def test_actions_get_the_result_of_each_step_and_of_the_end():
    seen: list[tuple[int, float]] = []
    train(Script(), start=0, until=4, stop_requested=never, after=[lambda r: seen.append((r.step, r.loss))])
    assert seen == [(0, 1.0), (1, 1.0), (2, 1 / 2), (3, 1 / 3), (4, 1 / 4)]


def test_actions_run_in_their_order():
    calls: list[str] = []
    train(
        Script(),
        start=0,
        until=2,
        stop_requested=never,
        between=[lambda step: calls.append(f"save {step}"), lambda step: calls.append(f"evaluate {step}")],
        after=[lambda result: calls.append(f"after {result.step}")],
    )
    assert calls == ["after 0", "save 1", "evaluate 1", "after 1", "after 2"]


def test_a_run_that_is_at_its_end_takes_no_step():
    seen: list[StepResult] = []
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

    def collect(result: StepResult) -> None:
        if result.gradients is not None:
            seen.append(result.step)

    train(Script(start=2), start=2, until=7, stop_requested=never, gradients_every=3, after=[collect])
    assert seen == [3, 6]


# Skipped updates


def test_a_skipped_update_ends_the_run():
    message = "the loss or a gradient of step 5 is NaN or infinite, so its update was skipped; .* are untouched"
    with pytest.raises(NotFiniteError, match=message):
        train(Script(bad={5}), start=0, until=9, stop_requested=never)


def test_no_action_sees_an_update_that_ends_the_run(raises):
    seen: list[int] = []
    with raises(NotFiniteError):
        train(Script(bad={5}), start=0, until=9, stop_requested=never, after=[lambda result: seen.append(result.step)])
    assert seen == [0, 1, 2, 3, 4]


def test_a_skipped_last_update_ends_the_run_too(raises):
    with raises(NotFiniteError):
        train(Script(bad={4}), start=0, until=4, stop_requested=never)


def test_updates_that_were_skipped_before_a_worker_joined_do_not_concern_it():
    last, _ = train(Script(start=2, bad={1, 2}), start=2, until=4, stop_requested=never)
    assert (last.step, last.bad) == (4, 2)


def test_each_skipped_update_is_reacted_to_once():
    seen: list[tuple[int, int]] = []
    engine, react = Script(bad={2, 3, 6}), lambda result: seen.append((result.step, result.bad))
    last, _ = train(engine, start=0, until=9, stop_requested=never, on_bad=react)
    assert (last.step, seen) == (9, [(2, 2), (3, 3), (6, 6)])


def test_an_update_that_others_skipped_is_noticed_at_the_next_step():
    seen: list[tuple[int, int]] = []
    engine = Arrivals(others=2, end=9, bad={4})
    train(engine, start=0, until=9, stop_requested=never, on_bad=lambda result: seen.append((result.step, result.bad)))
    assert seen == [(6, 4)]  # the results were of 0, 3, 6 and the end


def test_a_run_that_skips_bad_updates_logs_each_once_and_continues(caplog, snapshot):
    last, _ = train(Script(bad={2, 4}), start=0, until=6, stop_requested=never, on_bad=not_finite.skip)
    assert last.step == 6
    assert caplog.messages == snapshot


# What the chief saves


def make_chief(folder: Path, engine: Script, *overrides: str) -> Chief:
    """A chief that saves after each step, and never evaluates."""
    config = load([f"run={folder}", "checkpoint.every=1", "train.steps=9", "train.batch_size=2", *overrides])
    model = Description((Parameter("dense/kernel", (2,), True),), 2, 8, 2)
    plan = make_plan(config, model, Machine(cores=1, gpus=0))
    runtime = TaskRuntime(page(run=str(folder)), SimpleNamespace(requested=False), Journal(None))
    spec = TaskSpec(config, plan, RunDirectory(folder), plan.workers[0])
    return assemble(spec, runtime, engine, SimpleNamespace(size=0, metric_names=tuple), (), None, InitialState(step=0))


def train_under(chief: Chief, engine: Script, **options: Any) -> None:
    train(engine, start=0, until=9, stop_requested=never, between=chief.between, **options)


def saved(folder: Path) -> list[int]:
    return [int(path.name) for path in checkpoint.finished(RunDirectory(folder).checkpoints)]


def test_parameters_that_are_not_finite_are_never_saved(tmp_path: Path):
    engine = Script(spoilt_at=5)
    chief = make_chief(tmp_path, engine)
    train_under(chief, engine)
    chief.saver.writer.close()  # the save of step 4 may still be in flight
    assert saved(tmp_path) == [1, 2, 3, 4]


@pytest.mark.parametrize(("policy", "expected"), [("stop", [1, 2, 3]), ("skip", [1, 2, 3, 4, 5, 6, 7, 8])])
def test_a_state_without_a_bad_update_is_saved_only_where_the_policy_is_skip(tmp_path: Path, policy, expected, caplog):
    engine = Script(bad={4})
    chief = make_chief(tmp_path, engine, f"train.on_not_finite={policy}")
    train_under(chief, engine, on_bad=lambda _: None)
    chief.saver.writer.close()
    assert saved(tmp_path) == expected
    assert ("step 4 was not saved" in caplog.text) == (policy == "stop")


def test_a_save_that_fails_ends_the_run(tmp_path: Path, raises):
    (tmp_path / "checkpoints").write_text("in the way")
    engine = Script()
    with raises(OSError):
        train_under(make_chief(tmp_path, engine), engine)


def test_a_save_that_fails_is_logged_where_training_continues_and_the_next_is_tried(tmp_path: Path, caplog, snapshot):
    in_the_way = tmp_path / "checkpoints"
    in_the_way.write_text("")
    engine = Script()
    chief = make_chief(tmp_path, engine, "checkpoint.on_error=continue", "checkpoint.every=2")

    def make_way(result: StepResult) -> None:
        if result.step == 5:  # the save of step 4 may still be in flight
            chief.saver.writer.wait()
            in_the_way.unlink()

    train_under(chief, engine, after=[make_way])
    chief.saver.writer.close()
    assert saved(tmp_path) == [6, 8]
    assert caplog.messages == snapshot


@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_the_last_save_of_a_run_must_succeed(tmp_path: Path, policy, raises):
    (tmp_path / "checkpoints").write_text("in the way")
    engine = Script()
    chief = make_chief(tmp_path, engine, f"checkpoint.on_error={policy}", "checkpoint.every=0")
    train_under(chief, engine)
    with raises(OSError):
        finish(chief, Pace(), None, stopped=False, resumed_from=None)


def test_a_rollback_records_its_step_and_its_checkpoint(tmp_path: Path):
    engine = Script()
    chief = make_chief(tmp_path, engine)
    train_under(chief, engine)
    chief.saver.roll_back(9)  # the save of step 8 may still be in flight
    assert (tmp_path / "rollbacks.jsonl").read_text() == '{"step": 9, "checkpoint": 8}\n'


class Arrivals(Script):
    """An async engine: some pushes are dropped, other workers move the step too, and a stop is final."""

    def __init__(
        self, *, dropped: set[int] | None = None, others: int = 0, end: int = 100, bad: set[int] | None = None
    ) -> None:
        super().__init__(bad=bad)
        self.dropped = dropped or set()  # pushes, by their number from 0
        self.others, self.end = others, end  # no update is made at the end or after it
        self.is_over, self.steps = False, 0  # steps: taken by this worker

    def step(self, *, stop: bool = False, reductions: int = 0, fetch_gradients: bool = False) -> StepResult:
        result, number = self.peek(), self.steps
        self.steps += 1
        self.is_over = self.is_over or stop
        if not self.is_over and number not in self.dropped:
            self.at = min(self.at + 1 + self.others, self.end)
        return result

    def peek(self) -> StepResult:
        return super().peek()._replace(stop=self.is_over)


def test_a_run_continues_when_its_last_push_was_dropped():
    engine = Arrivals(dropped={3})
    last, stopped = train(engine, start=0, until=4, stop_requested=never)
    assert (last.step, stopped, engine.steps) == (4, False, 5)


def test_a_run_continues_until_its_last_step_however_often_it_is_dropped():
    engine = Arrivals(dropped={3, 4, 5})
    last, stopped = train(engine, start=0, until=4, stop_requested=never)
    assert (last.step, stopped, engine.steps) == (4, False, 7)


def test_actions_get_the_end_once_although_its_push_was_dropped_before():
    seen: list[int] = []
    engine = Arrivals(dropped={2, 3})
    train(engine, start=0, until=3, stop_requested=never, after=[lambda result: seen.append(result.step)])
    assert seen == [0, 1, 2, 2, 2, 3]  # the result of each step, and the end


def test_a_push_that_was_dropped_before_the_end_costs_a_step():
    engine = Arrivals(dropped={1})
    last, _ = train(engine, start=0, until=4, stop_requested=never)
    assert (last.step, engine.steps) == (4, 5)


def test_a_run_that_other_workers_end_takes_one_step_more_and_sees_the_end():
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


def test_an_interval_is_due_when_its_multiple_was_skipped():
    assert due(Every(10, start=0), [3, 9, 12, 19, 21]) == [12, 21]


def test_an_interval_is_due_once_when_several_multiples_were_skipped():
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
def test_a_percentile_is_the_shortest_time_that_this_share_of_steps_does_not_exceed(share, milliseconds):
    hundred = [n / 1000 for n in range(100, 0, -1)]  # 100 ms, 99 ms, ... 1 ms
    assert Pace(step_secs=[9.0, *hundred]).percentile_ms(share) == pytest.approx(milliseconds)


def test_a_run_without_steps_has_no_pace():
    pace = Pace()
    assert (pace.percentile_ms(0.5), pace.steps_per_second(), pace.wait_fraction()) == (0.0, 0.0, 0.0)


def test_steps_per_second_are_of_the_last_steps():
    pace = Pace(step_secs=[9.0, 2.0, 2.0, 0.5, 0.5])
    assert (pace.steps_per_second(), pace.steps_per_second(2)) == (4 / 5, 2.0)


def test_the_wait_fraction_is_a_share_of_the_step_time():
    pace = Pace(step_secs=[1.0, 3.0], wait_secs=[0.25, 0.75])
    assert (pace.wait_fraction(), pace.wait_fraction(last=1), pace.wait_fraction(last=9)) == (0.25, 0.25, 0.25)
    assert Pace(step_secs=[9.0, 1.0], wait_secs=[0.0, 0.5]).wait_fraction(last=1) == 0.5


def test_a_tick_records_the_time_since_the_last_one(monkeypatch):
    clock = iter([10.5, 12.0])
    monkeypatch.setattr("trainer.task.pace.time", SimpleNamespace(monotonic=lambda: next(clock)))
    pace = Pace(began=10.0)
    pace.tick(StepResult(1, 1, 0.5, stop=False, wait_secs=0.25))
    pace.tick(StepResult(1, 2, 0.5, stop=False, wait_secs=0.5))
    assert (list(pace.step_secs), list(pace.wait_secs)) == ([0.5, 1.5], [0.25, 0.5])
