"""Fails a run that did not run where it was planned to."""

from __future__ import annotations

from pathlib import Path

from trainer.faults.exit_codes import TrainerError
from trainer.observe.placement import files
from trainer.observe.placement.differences import differences
from trainer.observe.placement.record import Record
from trainer.plan.plan import Plan


class PlacementError(TrainerError):
    """Something ran on another device than the plan says."""


def prove(record: Record, plan: Plan, run: Path | None) -> None:
    """Writes down where a task's step ran, and compares it with the plan.

    Args:
        run: the run directory; none where this task does not write.

    Raises:
        PlacementError: with one sentence for each difference.
    """
    if run is not None:
        files.write(run, record, plan)
    found = differences(record, plan)
    if found:
        raise PlacementError("it did not run as planned:\n" + "\n".join(found))
