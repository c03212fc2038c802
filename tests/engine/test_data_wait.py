"""Whether a step waits for its batch, or for something else."""

from __future__ import annotations

import pytest

from trainer.engine import data_wait
from trainer.engine.data_wait import DataWait


@pytest.mark.parametrize(
    ("ended", "is_running", "taken", "secs", "waited"),
    [
        (3, True, 3, 5.0, 5.0),  # the batch of the fourth step has not come
        (3, True, 4, 5.0, 0.0),  # it has, so the step waits for something else
        (3, True, 3, 0.5, 0.0),  # not long enough to ask
        (3, False, 3, 5.0, 0.0),  # no step runs
        (0, True, 0, 2.0, 2.0),
    ],
)
def test_a_step_waits_for_data_until_its_batch_has_come(monkeypatch, ended, is_running, taken, secs, waited):
    now = [0.0]
    monkeypatch.setattr(data_wait.time, "monotonic", lambda: now[0])
    wait = DataWait(lambda: taken)
    for _ in range(ended):
        wait.begin_step()
        wait.end_step()
    if is_running:
        wait.begin_step()
    now[0] = secs
    assert wait.secs() == waited
