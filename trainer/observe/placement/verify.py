"""Records where a run executed, per task and merged, and fails a run that did not follow its plan."""

import json
import threading
from pathlib import Path

from trainer.faults.exit_codes import TrainerError
from trainer.observe.placement.differences import differences
from trainer.observe.placement.record import PlacementRecord
from trainer.plan.plan import Plan
from trainer.storage.atomic import write_atomically
from trainer.storage.run_directory import RunDirectory

# A worker with a shard records both in different threads, which would write to one temporary file.
_writing = threading.Lock()


class PlacementError(TrainerError):
    """An operation ran on a device other than the planned one."""


def verify(record: PlacementRecord, plan: Plan, directory: RunDirectory) -> None:
    """Compares where a task's step ran with the plan, and records it if a launcher made the run directory.

    Raises:
        PlacementError: with one sentence for each difference.
    """
    if directory.plan.exists():
        write(directory.path, record, plan)
    problems = differences(record, plan)
    if problems:
        raise PlacementError("it did not run as planned:\n" + "\n".join(problems))


def write(run: Path, record: PlacementRecord, plan: Plan) -> None:
    """Writes a task's part, e.g. placement/worker-0.step.json, and merges all parts so far."""
    folder = run / "placement"
    folder.mkdir(parents=True, exist_ok=True)
    with _writing:
        name = f"{record.task.replace(':', '-')}.{record.run}.json"
        write_atomically(folder / name, json.dumps(record.to_json(plan), indent=1))
        merged: dict[Path, int] = {}
        # Again if another task's part arrived meanwhile: that task may have merged first and be overwritten here.
        while (parts := {part: part.stat().st_mtime_ns for part in folder.glob("*.json")}) != merged:
            merged = parts
            _merge(run, [PlacementRecord.from_json(json.loads(part.read_text())) for part in parts], plan)


def _merge(run: Path, records: list[PlacementRecord], plan: Plan) -> None:
    """Writes placement.json."""
    order = {task.name: number for number, task in enumerate(plan.tasks)}
    known = sorted((r for r in records if r.task in order), key=lambda r: (order[r.task], r.run))
    entries = [{"differences": differences(record, plan), **record.to_json(plan)} for record in known]
    merged = {"as_planned": not any(entry["differences"] for entry in entries), "records": entries}
    write_atomically(run / "placement.json", json.dumps(merged, indent=1))
