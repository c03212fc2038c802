"""What work costs, without TensorFlow."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from trainer.plan.forecast import costs
from trainer.plan.forecast.costs import Work, secs

KINDS = Work._fields


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_of_work_costs_in_proportion(kind):
    once, more = Work(**{kind: 1000.0}), Work(**{kind: 3000.0})
    assert secs(more) == pytest.approx(3 * secs(once))


def test_kinds_of_work_add_up():
    rates = Work(calls=1e-3, messages=1e-4, nbytes=1e-9, update_nbytes=2e-9, flops=1e-11, layers=1e-5)
    work = Work(calls=3, messages=8, nbytes=2e6, update_nbytes=1e6, flops=1e8, layers=20)
    assert secs(work, rates) == pytest.approx(3e-3 + 8e-4 + 2e-3 + 2e-3 + 1e-3 + 2e-4)


def test_work_is_added_and_multiplied_kind_by_kind():
    assert Work(calls=1, flops=2).plus(Work(calls=3, layers=4)).times(0.5) == Work(calls=2, flops=1, layers=2)


def test_no_rate_is_negative_and_messages_and_operations_have_a_cost():
    assert min(costs.RATES) >= 0
    assert costs.RATES.messages > 0
    assert costs.RATES.flops > 0
    assert 1e-12 < costs.RATES.flops < 1e-8  # between a thousandth and ten times of what cores do


def test_the_rates_name_their_machine_and_their_errors():
    assert re.search(r"\d+ cores; TensorFlow \d+\.\d+\.\d+; \d{4}-\d\d-\d\d$", costs.FITTED_ON)
    assert 0 < costs.ERROR < 1
    assert 0 < costs.STEP_ERROR < 1


def test_costs_and_forecasts_import_no_tensorflow():
    modules = "trainer.plan.forecast.costs, trainer.plan.forecast.step_time"
    code = f"import sys, {modules}; assert not {{'tensorflow', 'keras'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
