"""Which failures lead to a restart, of which tasks, and how often."""

from __future__ import annotations

import pytest

from trainer.config.schema import RestartConfig
from trainer.launch.restarts import Budget, can_help, find_cause, holds_state
from trainer.plan.layout import Shard
from trainer.plan.plan import Plan, Task


def plan(strategy: str, hosts: list[str], tasks: list[str]) -> Plan:
    shards = tuple(Shard(index, host, (), ()) for index, host in enumerate(hosts))
    task_plans = tuple(
        Task(job, int(index), "", "127.0.0.1:1", (), None, 1, 2) for job, index in (name.split(":") for name in tasks)
    )
    return Plan("test", strategy, 10, 8, task_plans, shards, 96, ())


WITH_PS = plan("sync", ["ps:0", "ps:1"], ["ps:0", "ps:1", "worker:0", "worker:1", "evaluator:0"])


def test_the_pause_doubles_and_the_fourth_restart_is_refused():
    budget = Budget(RestartConfig())
    assert [budget.spend("worker:1", now) for now in (0.0, 10.0, 20.0, 30.0)] == [1.0, 2.0, 4.0, None]
    assert budget.total == {"worker:1": 3}


def test_restarts_of_one_task_are_not_counted_for_another():
    budget = Budget(RestartConfig(max=1))
    assert budget.spend("worker:1", 0.0) == 1.0
    assert budget.spend("worker:2", 0.0) == 1.0
    assert budget.spend("worker:1", 1.0) is None


def test_restarts_before_the_window_are_forgotten():
    budget = Budget(RestartConfig(max=1, window_secs=60.0))
    assert [budget.spend("ps:0", now) for now in (0.0, 60.0, 61.0)] == [1.0, None, 1.0]
    assert budget.total == {"ps:0": 2}


def test_a_task_has_its_own_number_before_its_job_and_a_job_before_all():
    budget = Budget(RestartConfig(max=3, max_of={"ps": 1, "ps:1": 0}))
    assert [budget.allowed(task) for task in ("worker:0", "ps:0", "ps:1")] == [3, 1, 0]


@pytest.mark.parametrize(
    ("code", "before", "after"),
    [
        (-9, True, True),  # killed
        (-11, True, True),
        (75, True, True),  # a part of the state is lost
        (69, False, True),  # a taken port stays taken
        (70, False, True),  # a model that cannot be built fails again
        (2, False, False),
        (65, False, False),
        (66, False, False),
        (73, False, False),
        (74, False, False),
        (76, False, False),
    ],
)
def test_whether_a_restart_can_help(code: int, before: bool, after: bool):
    assert can_help(code, has_stepped=False) == before
    assert can_help(code, has_stepped=True) == after


@pytest.mark.parametrize(
    ("where", "task", "expected"),
    [
        (WITH_PS, "ps:1", True),
        (WITH_PS, "worker:0", False),
        (WITH_PS, "evaluator:0", False),
        (plan("sync", ["worker:0", "worker:1"], ["worker:0", "worker:1"]), "worker:1", True),
        (plan("all_reduce", ["worker:0"], ["worker:0", "worker:1"]), "worker:1", True),
        (plan("local", ["worker:0"], ["worker:0"]), "worker:0", True),
    ],
    ids=["a ps", "a worker", "an evaluator", "a worker with a shard", "a worker of all-reduce", "one process"],
)
def test_whether_a_task_holds_a_part_of_the_state(where: Plan, task: str, expected: bool):
    assert holds_state(where, task) == expected


def test_a_task_that_lost_a_peer_is_not_the_cause():
    assert find_cause({"worker:0": 69, "ps:0": -9, "worker:1": 69}, WITH_PS) == "ps:0"
    assert find_cause({"worker:0": 69, "worker:1": 70}, WITH_PS) == "worker:1"
    assert find_cause({"worker:0": -9, "ps:1": -9}, WITH_PS) == "ps:1"
