"""`trainer check run=PATH`: verifies a finished run from the files in its directory.

Each claim is one line: what was verified, why it could not be, or what contradicts it. TensorFlow is not needed.
"""

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from trainer.commands.check import invariants
from trainer.commands.check.example_counts import check_counts, expected_counts
from trainer.config.schema import OptimizerConfig, OptimizerName, ScheduleName
from trainer.config.words import count
from trainer.faults import exit_codes
from trainer.plan.plan import Plan
from trainer.storage import checkpoint, journal, json_lines
from trainer.storage.checkpoint import CheckpointError
from trainer.storage.damage import DAMAGED, RunFileError, read_json
from trainer.storage.journal import Entry, TaskStart
from trainer.storage.run_directory import RunDirectory

LAUNCHER = "launcher"
NOT_RECORDED = "its tasks recorded no steps (history.journal=true)"
NO_CHECK = "so it cannot be verified; to continue the run, type its command again"
NO_WAITING = "its workers do not wait for each other"


@dataclass(frozen=True)
class Claim:
    """Something that should hold for a run, and what contradicts it."""

    text: str
    problems: Sequence[str] = ()
    skipped: str | None = None  # why it was not checked

    def __str__(self) -> str:
        if self.skipped:
            return f"not checked: {self.text}; {self.skipped}"
        return "\n".join([f"{'WRONG' if self.problems else 'ok'}: {self.text}", *(f"    {p}" for p in self.problems)])


class RunRecord:
    """The files of a run that the claims are verified against."""

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory
        self.config = directory.read_config()
        self.plan: Plan = directory.read_plan()
        self.summary: Mapping[str, Any] = read_json(directory.summary)
        self.damaged: list[str] = []  # lines that cannot be read
        self.history = self._read_lines(directory.history)
        names = [LAUNCHER, *(task.name for task in self.plan.tasks)]
        self.journals = {n: self._read_journal(directory.journal / f"{n.replace(':', '-')}.jsonl") for n in names}

    @property
    def end(self) -> int:
        """Returns the global step that the run ended at."""
        steps = self.summary["steps"]
        return steps if type(steps) is int else 0

    @property
    def is_stopped(self) -> bool:
        return self.end < self.plan.steps

    @property
    def waits_for_all(self) -> bool:
        return self.plan.effective_strategy.waits_for_all

    @property
    def chief(self) -> list[Entry]:
        return self.journals["worker:0"]

    @cached_property
    def reloads(self) -> dict[int, int]:
        return invariants.reloads_of(self.chief)

    @cached_property
    def begin(self) -> int:
        """Returns the global step that the last launch of the run began at."""
        launched_at = read_json(self.directory.generation).get("launched_at", 0)
        return next((step for generation, step in self.reloads.items() if generation > launched_at), 0)

    def _read_journal(self, path: Path) -> list[Entry]:
        return [journal.read(line) for line in self._read_lines(path)]

    def _read_lines(self, path: Path) -> list[Mapping[str, Any]]:
        events: list[Mapping[str, Any]] = []
        for number, line in enumerate(path.read_bytes().splitlines() if path.is_file() else (), 1):
            if (event := json_lines.parse(line)) is None:
                self.damaged.append(f"line {number} of {path} is not a JSON object")
            else:
                events.append(event)
        return events


def run(path: Path) -> int:
    """Prints which claims hold for the run in a directory; returns the exit code."""
    directory = RunDirectory(path)
    for file in (directory.config, directory.plan):
        if not file.is_file():
            print(f"trainer: {file} does not exist; run=PATH must name a run directory", file=sys.stderr)
            return exit_codes.INPUT_MISSING
    try:
        claims = examine(directory)
    except RunFileError:
        raise
    except DAMAGED as error:
        problem = f"a line of its history or journals was not written by a run ({type(error).__name__}: {error})"
        raise RunFileError(directory.path, problem, NO_CHECK) from error
    print(directory.path, *claims, sep="\n")
    problems = sum(len(claim.problems) for claim in claims)
    print(count(problems, "problem") if problems else "all checks passed")
    return exit_codes.BAD_DATA if problems else exit_codes.OK


def examine(directory: RunDirectory) -> list[Claim]:
    """Returns every claim about the run in a directory that has its config and its plan."""
    run = RunRecord(directory)
    ended = _ended(run)
    if ended.problems:
        return [ended]
    return [
        ended,
        Claim("every line of the history and the journals can be read", run.damaged),
        _history(run),
        _pushes(run),
        _hosts(run),
        _chief(run),
        _lives(run),
        _checkpoints(run),
        *([_counts(run)] if run.config.model.name == "oracle" else []),
    ]


def _ended(run: RunRecord) -> Claim:
    if not run.directory.summary.exists():
        return Claim("the run ended", [f"{run.directory.summary} does not exist"])
    failed = run.summary.get("failed")
    problems = [f"{failed} failed"] if failed else []
    if "steps" not in run.summary:
        return Claim("the run ended", [*problems, f"{run.directory.summary} has no steps: the chief did not finish"])
    how = "was stopped" if run.is_stopped else "ended"
    return Claim(f"the run {how} at step {run.end} of {run.plan.steps}", problems)


def _history(run: RunRecord) -> Claim:
    every = run.config.history.every
    text = f"history.jsonl has a line {'every step' if every == 1 else f'every {every} steps'} from {run.begin} on"
    if not run.waits_for_all:
        return Claim(text, skipped=NO_WAITING)
    steps = [line["step"] for line in run.history]
    return Claim(text, invariants.check_history(steps, begin=run.begin, end=run.end, every=every, last=run.plan.steps))


def _pushes(run: RunRecord) -> Claim:
    text = f"every update had one gradient from each replica ({run.plan.replicas})"
    if not run.waits_for_all:
        return Claim(text, skipped=NO_WAITING)
    if reason := _unrecorded(run):
        return Claim(text, skipped=reason)
    workers = [run.journals[task.name] for task in run.plan.workers]
    return Claim(
        text, invariants.check_pushes(workers, run.reloads, replicas=run.plan.replicas, begin=run.begin, end=run.end)
    )


def _hosts(run: RunRecord) -> Claim:
    text = "every shard took one step at a time, and went back only when the chief announced it"
    if not run.plan.hosts:
        return Claim(text, skipped="no task holds shards for others")
    if reason := _unrecorded(run):
        return Claim(text, skipped=reason)
    problems = [p for host in run.plan.hosts for p in invariants.check_host(host, run.journals[host], run.reloads)]
    if run.waits_for_all:
        problems += [p for host in run.plan.hosts for p in invariants.check_host_end(host, run.journals[host], run.end)]
    return Claim(text, problems)


def _unrecorded(run: RunRecord) -> str | None:
    """Returns why the steps of the tasks are not recorded, or None."""
    if not run.config.history.journal:
        return NOT_RECORDED
    missing = [task.name for task in run.plan.trainers if not run.journals[task.name]]
    if missing and not run.journals[LAUNCHER]:
        return f"no launcher started it, and the journal of {', '.join(missing)} is missing"
    return None


def _chief(run: RunRecord) -> Claim:
    text = f"the chief loaded {count(len(run.reloads), 'generation')}, and each checkpoint is of the last one"
    return Claim(text, invariants.check_chief(run.chief))


def _lives(run: RunRecord) -> Claim:
    launcher = run.journals[LAUNCHER]
    again = sum(isinstance(entry, TaskStart) and entry.attempt > 0 for entry in launcher)
    text = f"every task exited cleanly and never ran twice at once; {count(again, 'restart')}"
    if not launcher:
        return Claim(text, skipped="no launcher started it")
    good = {exit_codes.OK, exit_codes.TERMINATED} if run.is_stopped else {exit_codes.OK}
    return Claim(text, invariants.check_lives(launcher, [task.name for task in run.plan.tasks], good=good))


def _checkpoints(run: RunRecord) -> Claim:
    folder = run.directory.checkpoints
    paths = checkpoint.finished(folder)
    other = sorted({path.name for path in folder.iterdir()} - {path.name for path in paths}) if folder.is_dir() else []
    problems = [f"{folder / name} is not a checkpoint" for name in other]
    for path in paths:
        try:
            manifest = checkpoint.read_manifest(path)
            checkpoint.verify(manifest)
        except CheckpointError as error:
            problems.append(f"{path}: {error.problem}")
            continue
        generation = invariants.standing(run.reloads, manifest.step)
        if generation not in (None, manifest.generation):
            problems.append(
                f"{path} is of generation {manifest.generation}, step {manifest.step} of generation {generation}"
            )
    if run.end not in [int(path.name) for path in paths]:
        problems.append(f"{folder} has no checkpoint of step {run.end}")
    return Claim(
        f"{count(len(paths), 'complete checkpoint')}, the newest of step {run.end}, and no other files", problems
    )


def _counts(run: RunRecord) -> Claim:
    config, plan = run.config, run.plan
    text = (
        f"every example was used exactly as often as {count(run.end, 'step')} of {plan.global_batch} examples require"
    )
    if not run.waits_for_all:
        return Claim(text, skipped=NO_WAITING)
    if not _adds_one(config.optimizer, plan.global_batch):
        wanted = f"optimizer=sgd optimizer.learning_rate={plan.global_batch}"
        return Claim(text, skipped=f"the parameters count examples only with {wanted}")
    tensors = run.directory.checkpoints / f"{run.end:09d}" / checkpoint.TENSORS
    if not tensors.is_file():
        return Claim(text, [f"{tensors} does not exist"])
    expected = expected_counts(config.seed, run.end, plan.global_batch, plan.train_examples)
    return Claim(text, check_counts(tensors, expected))


def _adds_one(optimizer: OptimizerConfig, batch: int) -> bool:
    """Whether an update by model=oracle adds 1 for each use of an example."""
    plain = OptimizerConfig(OptimizerName.sgd, learning_rate=batch)
    compared = ("name", "learning_rate", "momentum", "weight_decay", "clip_norm")
    is_constant = optimizer.schedule.name is ScheduleName.constant
    return is_constant and all(getattr(optimizer, name) == getattr(plain, name) for name in compared)
