"""Fails a run whose operations did not run where the plan put them."""

from pathlib import Path

from trainer.faults.exit_codes import TrainerError
from trainer.observe.placement import files
from trainer.observe.placement.differences import differences
from trainer.observe.placement.record import PlacementRecord
from trainer.plan.plan import Plan


class PlacementError(TrainerError):
    """Something ran on a device other than the planned one."""


def verify(record: PlacementRecord, plan: Plan, run: Path | None) -> None:
    """Records where a task's step ran, and compares it with the plan.

    Args:
        run: the run directory; None: this task writes no record.

    Raises:
        PlacementError: with one sentence for each difference.
    """
    if run is not None:
        files.write(run, record, plan)
    problems = differences(record, plan)
    if problems:
        raise PlacementError("it did not run as planned:\n" + "\n".join(problems))
