"""Merges the files of all tasks into <run>/profile/trace.json and a part of the summary."""

import json

from trainer.observe.profile import attempts, shares
from trainer.observe.profile.trace import trace
from trainer.storage.atomic import write_atomically
from trainer.storage.run_directory import RunDirectory


class MergedProfile(shares.ProfileSummary):
    """The profile, with the path of the trace."""

    trace: str


def merge(directory: RunDirectory) -> MergedProfile:
    """Writes the trace of a run, finished or not; returns the profile's part of the summary.

    Raises:
        OSError: if the run has no plan, or the trace cannot be written.
    """
    plan, folder = directory.read_plan(), directory.profile
    files = {
        task.name: path.read_text(errors="replace")
        for task in plan.trainers
        if (path := folder / f"{task.job}-{task.index}.jsonl").exists()
    }
    profile = attempts.read(files, [task.name for task in plan.trainers])
    folder.mkdir(exist_ok=True)
    path = folder / "trace.json"
    write_atomically(path, json.dumps(trace(profile.attempts), separators=(",", ":")))
    return {**shares.summarize(profile), "trace": str(path)}


def describe(summary: MergedProfile) -> str:
    """Returns the table, and the path of the trace."""
    return f"{shares.describe(summary)}\n{summary['trace']}: open it in Perfetto, or in chrome://tracing"
