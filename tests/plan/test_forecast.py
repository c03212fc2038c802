"""What is expected of plans, by rates that are round numbers."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from quick_config import load

from trainer.faults.problems import ConfigError
from trainer.plan import validate
from trainer.plan.description import Description
from trainer.plan.devices import Machine
from trainer.plan.forecast import costs, step_time
from trainer.plan.forecast.costs import Work
from trainer.plan.forecast.step_time import Forecast, Parts, Unknown, Workload, forecast, parts_of
from trainer.plan.layout import Parameter
from trainer.plan.make import make_plan, with_other_ps
from trainer.plan.plan import Plan

FLOATS = 2**20  # of the one parameter: 4 MiB
MODEL = Description((Parameter("dense/kernel", (FLOATS,), True),), 10, 8000, 2000, layers=("dense",), flops=10**6)
VECTOR = 4 * (FLOATS + 32)  # bytes of a shard that holds it, with metrics and header
MACHINE = Machine(cores=4, gpus=0)
WORKLOAD = Workload(flops=3 * 10**6, uncounted=(), layers=1, slots=2, is_clipped=False, cores=4)


@pytest.fixture(autouse=True)
def rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "RATES", Work(1e-3, 1e-4, 1e-9, 1e-9, 1e-10, 1e-5, 1e-5))
    monkeypatch.setattr(costs, "TURN_SECS", 0.0)


MESSAGES = ("strategy=sync", "strategy.wire=float32")  # vectors travel, on one machine too


def planned(*overrides: str, model: Description = MODEL, machine: Machine = MACHINE) -> Plan:
    return make_plan(load(["train.batch_size=64", *overrides], lambda c: validate.validate(c, machine)), model, machine)


def workload(**changed: Any) -> Workload:
    return dataclasses.replace(WORKLOAD, **changed)


def expected(*overrides: str, model: Description = MODEL, machine: Machine = MACHINE) -> Forecast | Unknown:
    config = load(["train.batch_size=64", *overrides], lambda c: validate.validate(c, machine))
    workload = Workload.of(model, config.optimizer, config.plan, cores=machine.cores)
    return forecast(make_plan(config, model, machine), workload, with_other_ps(config, model, machine))


def test_one_worker_and_one_ps_in_numbers():
    """A call of 1 ms, 64 x 3 million operations at 0.1 ns, a layer of 10 us, on a worker's 4 threads; and so on."""
    parts = parts_of(planned("cluster=1ps1w", *MESSAGES), WORKLOAD)
    assert parts.compute == pytest.approx((1e-3 + 64 * 3e6 * 1e-10 + 1e-5) / 4)
    assert parts.wire == pytest.approx(2 * (1e-4 + VECTOR * 1e-9))  # there and back, one after the other
    assert parts.update == pytest.approx((1e-3 + (1 + 2 + 2 * 2) * VECTOR * 1e-9) / 4)
    assert parts.wait == 0
    assert parts.total == pytest.approx(sum(parts))


def test_a_backward_pass_has_twice_the_operations_of_a_forward_pass():
    """The gradients of a layer's weights are one product, and those of its input another."""
    config = load(["optimizer=adam"])
    assert Workload.of(MODEL, config.optimizer, config.plan, cores=4) == workload(flops=3 * MODEL.flops)


def test_the_work_of_a_step_is_known_task_by_task():
    work = step_time.work_of(planned("cluster=1ps2w", *MESSAGES), WORKLOAD)
    assert work["worker:0"] == {
        "compute": Work(calls=1, flops=32 * 3e6, layers=1),
        "wire": Work(messages=1, nbytes=VECTOR),  # a half of two
    }
    assert work["ps:0"] == {
        "wire": Work(messages=2, nbytes=2 * VECTOR),
        "update": Work(calls=1, update_nbytes=(2 + 2 + 4) * VECTOR),
    }


def test_in_shared_memory_the_writer_copies_a_vector_once():
    travels, stays = (step_time.work_of(planned("cluster=1ps2w", *more), WORKLOAD) for more in (MESSAGES, ()))
    assert stays["worker:0"]["wire"] == Work(messages=1, nbytes=12, update_nbytes=2 * VECTOR, accesses=2)
    assert stays["ps:0"]["wire"] == Work(messages=2, nbytes=24)
    copied = Work(update_nbytes=2 * VECTOR, accesses=3)  # reads two gradients, writes a vector
    assert stays["ps:0"]["update"] == travels["ps:0"]["update"].plus(copied)


def test_beyond_the_cores_the_wire_grows_with_the_workers():
    wire = [parts_of(planned(f"cluster=1ps{workers}w", *MESSAGES), WORKLOAD).wire for workers in (8, 16, 32)]
    assert wire[1] == pytest.approx(2 * wire[0])
    assert wire[2] == pytest.approx(4 * wire[0])


def test_an_update_grows_by_a_vector_for_every_worker():
    update = [parts_of(planned(f"cluster=1ps{workers}w"), WORKLOAD).update for workers in (1, 2, 4)]
    access = 1e-5  # to the gradient of one more worker
    assert update[1] - update[0] == pytest.approx((VECTOR * 1e-9 + access) / 4)
    assert update[2] - update[1] == pytest.approx(2 * (VECTOR * 1e-9 + access) / 4)


@pytest.mark.parametrize("overrides", [[], ["strategy=async"], ["strategy=backup", "strategy.quorum=3"]])
@pytest.mark.parametrize("part", ["wire", "update"])
def test_more_bytes_never_take_less_time(overrides, part):
    larger = dataclasses.replace(MODEL, parameters=(Parameter("dense/kernel", (4 * FLOATS,), True),))
    small, large = (parts_of(planned("cluster=2ps4w", *overrides, model=m), WORKLOAD) for m in (MODEL, larger))
    assert getattr(large, part) >= getattr(small, part)
    assert large.total > small.total


def test_compute_is_linear_in_the_examples():
    one, two = (parts_of(planned("cluster=1ps2w", f"train.batch_size={size}"), WORKLOAD) for size in (64, 128))
    assert two.compute - one.compute == pytest.approx(64 * 3e6 * 1e-10 / 4)


def test_a_measured_example_replaces_the_operations():
    plan = planned("cluster=1ps2w")
    assert parts_of(plan, workload(example_ms=0.5)).compute == pytest.approx((1e-3 + 32 * 0.5e-3) / 2)


def test_a_clipped_update_sends_norms_to_the_other_hosts():
    two = dataclasses.replace(MODEL, parameters=(*MODEL.parameters, Parameter("bias", (10,), True)))
    plan = planned("cluster=2ps2w", model=two)
    messages = [sum(step_time.messages_of(plan, workload(is_clipped=clipped)).values()) for clipped in (False, True)]
    assert messages == [8, 14]  # of both ways, each update: tags, norms, and that they came


def test_an_async_update_is_a_share_of_each_workers_step():
    plan = planned("cluster=1ps4w", "strategy=async")
    assert sum(step_time.messages_of(plan, WORKLOAD).values()) == pytest.approx(2)
    assert step_time.total(step_time.work_of(plan, WORKLOAD)).flops == pytest.approx(16 * 3e6)


def test_an_async_update_takes_at_least_the_time_of_its_host():
    parts = parts_of(planned("cluster=1ps32w", "strategy=async"), workload(flops=0, layers=0))
    assert parts.total >= (2e-3 + (1 + 2 + 4) * VECTOR * 1e-9) / 4  # on its 4 threads


def test_one_process_sends_nothing():
    parts = parts_of(planned("cluster=local"), WORKLOAD)
    assert (parts.wire, parts.wait) == (0, 0)
    assert parts.update == pytest.approx((1 + 2 + 4) * VECTOR * 1e-9)


def test_between_machines_the_wire_takes_as_long_as_the_fullest_link():
    """4 workers pull 4 MiB from one ps, and push as much: 1 Gbit/s carries it in 0.13 s each way."""
    parts = parts_of(planned("cluster=1ps4w", "plan.link_gbps=1"), workload(link_gbps=1.0))
    assert parts.wire == pytest.approx(2 * 4 * VECTOR * 8 / 1e9)
    assert parts.wait == pytest.approx(2 * step_time.LATENCY_SECS)
    assert parts.longest == "wire"


def test_machines_with_addresses_have_links_of_10_gigabits():
    hosts = "cluster.addresses={ps:['10.0.0.1:2222'],worker:['10.0.0.2:2222','10.0.0.3:2222']}"
    parts = parts_of(planned("cluster=1ps2w", hosts), workload(cores=64))
    assert parts.wire == pytest.approx(max(2 * (1e-4 + VECTOR * 1e-9), 2 * 2 * VECTOR * 8 / 10e9))
    assert parts.wait > 0


def test_over_slow_links_more_ps_are_better_and_on_one_machine_they_are_not():
    shared = dataclasses.replace(MODEL, parameters=tuple(Parameter(f"p{i}", (FLOATS,), True) for i in range(4)))
    apart = expected("cluster=1ps4w", "plan.link_gbps=1", model=shared)
    together = expected("cluster=4ps4w", model=dataclasses.replace(MODEL, parameters=(Parameter("p", (16,), True),)))
    assert isinstance(apart, Forecast)
    assert isinstance(together, Forecast)
    assert apart.best_ps == 4
    assert [ps for ps, _ in apart.best] == [1, 2, 3, 4]
    assert together.best_ps == 1


def test_the_best_number_of_ps_is_the_smallest_of_nearly_equal_ones():
    assert Forecast(Parts(1, 0, 0, 0), 64, ((1, 1.5), (2, 1.01), (3, 1.0))).best_ps == 2


def test_a_cluster_without_ps_has_no_best_number_of_ps():
    without = expected("cluster=2w")
    assert isinstance(without, Forecast)
    assert without.best_ps is None


def test_a_pin_of_a_shard_rules_out_fewer_ps():
    pinned = expected("cluster=3ps4w", "placement.pins={dense/*:2}")
    assert isinstance(pinned, Forecast)
    assert [ps for ps, _ in pinned.best] == [3, 4]


@pytest.mark.parametrize(
    ("overrides", "model", "reason"),
    [
        (["cluster=2w", "strategy=all_reduce"], MODEL, "all_reduce is not modelled"),
        (
            ["cluster=1ps2w"],
            dataclasses.replace(MODEL, uncounted=("memory/lstm_cell",)),
            "the operations of memory/lstm_cell cannot be counted",
        ),
        (["cluster=1ps1w", "device=gpu"], MODEL, "the speed of /gpu:0 is unknown"),
    ],
)
def test_the_reason_for_an_unknown_time_is_reported(overrides, model, reason):
    result = expected(*overrides, model=model, machine=Machine(cores=4, gpus=1))
    assert isinstance(result, Unknown)
    assert result.reason.startswith(reason)


def test_a_measured_example_gives_the_speed_of_a_gpu():
    result = expected("cluster=1ps2w", "device=gpu", "device.memory_fraction={worker:0.4}", "plan.example_ms=0.01",
                    machine=Machine(cores=4, gpus=1))  # fmt: skip
    assert isinstance(result, Forecast)
    assert result.parts.compute == pytest.approx(1e-3 / 2 + 32 * 0.01e-3)


@pytest.mark.parametrize("key", ["plan.example_ms", "plan.link_gbps"])
@pytest.mark.parametrize("value", ["0", "-1", "nan"])
def test_times_and_links_are_above_zero(key, value):
    with pytest.raises(ConfigError, match=f"{key}: "):
        load([f"{key}={value}"], lambda config: [])
