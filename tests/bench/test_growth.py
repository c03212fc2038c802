"""The fit of what steps cost, from rows with known answers; and how its runs are measured."""

from __future__ import annotations

import os
import time

import numpy as np
import pytest

from bench import growth, processes, steady
from trainer.launch.describe import describe
from trainer.plan.forecast.costs import Work, secs
from trainer.workload.describe import answer

pytestmark = pytest.mark.slow

RATES = Work(calls=2e-3, messages=3e-4, nbytes=1e-9, update_nbytes=5e-10, flops=2e-11, layers=1e-4)
MACHINE = {"cpu": "a processor", "cores": 2, "tensorflow": "2.21.0", "date": "2026-01-31", "load": 0.1}


@pytest.fixture
def described_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Builds models in this process, instead of a new one for each."""
    monkeypatch.setattr(growth, "describe", lambda question: describe(question, answer))


def row(workers: int, *, ps: int = 1, workload: str = "null", noise: float = 1.0, **work: float) -> dict[str, object]:
    done = Work(calls=workers + ps, messages=2 * workers * ps, **work)
    cpu = secs(done, RATES) * noise
    return {
        "workload": workload,
        "size": f"{ps}ps{workers}w",
        "wire": "float32",
        "ps": ps,
        "workers": workers,
        "steps": 100,
        "secs": cpu + 0.002,
        "cpu_secs": cpu,
        "cpu_secs_by_job": {"ps": 0.25 * cpu, "worker": 0.75 * cpu},
        "sent_nbytes": 1.1 * done.nbytes,
        "work": done._asdict(),
    }


def rows(noise: float = 1.0) -> list[dict[str, object]]:
    fitted_rows = [row(w, ps=ps, noise=noise if w == 4 else 1.0) for w in (1, 2, 4, 8) for ps in (1, 2)]
    fitted_rows += [row(w, workload="wide", nbytes=2e7 * w, update_nbytes=1e7 * (w + 6)) for w in (1, 2, 4)]
    return (
        fitted_rows
        + [
            row(w, workload="cnn", nbytes=4e7 * w, update_nbytes=2e7 * (w + 6), flops=6e8 * w, layers=4 * w)
            for w in (1, 2, 4)
        ]
        + [row(w, workload="deep", nbytes=1e6 * w, update_nbytes=1e6 * (w + 6), layers=20.0 * w) for w in (1, 2)]
    )


def test_the_fit_recovers_known_rates():
    fitted = growth.fit(rows())
    assert fitted.rates == pytest.approx(RATES, rel=1e-3)
    assert max(map(abs, fitted.errors)) < 1e-6


def test_the_errors_are_relative_and_signed():
    fitted = growth.fit(rows(noise=1.25))
    assert min(fitted.errors) == pytest.approx(-0.15, abs=0.06)  # where a quarter more was measured
    assert max(fitted.errors) > 0


def test_no_rate_is_below_zero():
    falling = np.array([[1.0, 3.0], [1.0, 2.0], [1.0, 1.0]])
    assert growth.nonnegative(falling, np.array([1.0, 2.0, 3.0])).tolist() == pytest.approx([2.0, 0.0])


def test_waiting_is_what_a_step_takes_beyond_its_cpu():
    assert growth.fit(rows()).turn_secs == pytest.approx(0.002)


def test_the_constants_can_be_pasted():
    names: dict[str, object] = {"Work": Work}
    exec(growth.constants(MACHINE, growth.fit(rows()), [0.1, -0.2]), names)
    assert names["RATES"] == pytest.approx(RATES, rel=0.01)
    assert names["FITTED_ON"] == "a processor, 2 cores; TensorFlow 2.21.0; 2026-01-31"
    assert (names["ERROR"], names["STEP_ERROR"]) == (0.0, 0.2)


@pytest.mark.usefixtures("described_here")
def test_the_error_of_a_step_is_that_of_the_forecast():
    measured = [
        {"workload": "null", "size": "1ps1w", "wire": "float32", "secs": 0.010},
        {"workload": "null", "size": "1ps1w", "wire": "float32", "secs": 0.020},
    ]
    errors = growth.step_errors(measured, growth.Fit(Work(calls=0.005), 0.002, ()))
    plan, _ = growth.planned([*growth.WORKLOADS["null"][0], "cluster=1ps1w"], 8)
    ps, worker = (task.intra_op_threads for task in plan.tasks)
    expected = 0.005 / worker + 0.005 / ps + 0.002  # a call of each, and the turn
    assert errors == pytest.approx([expected / 0.010 - 1, expected / 0.020 - 1])


def test_the_table_has_a_line_for_every_run_and_the_time_that_each_worker_adds():
    page = growth.page({"machine": MACHINE, "own_network": True, "rows": rows()})
    assert "| null | 1ps2w | float32 | 7.20 | 2.70 | 1.80 | +0 % | 4 | 0.000 | 0.000 | 9.20 |" in page.splitlines()
    assert "- null: 1 to 2: 2.60, 2 to 4: 2.60, 4 to 8: 2.60" in page.splitlines()


@pytest.mark.usefixtures("described_here")
def test_the_formula_applies_to_the_plan_of_every_run():
    for workload, (options, examples) in growth.WORKLOADS.items():
        plan, step_workload = growth.planned([*options, "cluster=1ps2w"], examples)
        assert (plan.replicas, plan.replica_batch) == (2, examples)
        assert step_workload.flops > 0, workload


def test_the_cpu_time_of_a_process_is_measured():
    before, until = processes.cpu_secs(os.getpid()), time.process_time() + 0.1
    while time.process_time() < until:
        pass
    assert processes.cpu_secs(os.getpid()) - before == pytest.approx(0.1, abs=0.08)


@pytest.mark.long
@pytest.mark.cluster
def test_a_run_is_measured_and_leaves_no_process():
    options, examples = growth.WORKLOADS["null"]
    with steady.steady_run([*options, "cluster=1ps1w", f"train.batch_size={examples}"]) as run:
        run.wait_for_step(3)
        sample = run.measure(0.5)
    assert sample.steps > 0
    assert sorted(sample.cpu_secs) == ["ps:0", "worker:0"]
    assert len(run.pids) == 2
    assert not any(processes.is_alive(pid) for pid in run.pids)


@pytest.mark.cluster
def test_a_run_that_cannot_start_says_why():
    with pytest.raises(steady.RunError, match="unknown key model"), steady.steady_run(["model.optionz.x=1"]) as run:
        run.wait_for_step(1)
