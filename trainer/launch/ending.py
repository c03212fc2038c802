"""Prints how a run ended, where its results are, and what to type next."""

from collections.abc import Iterable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trainer.config import shell
from trainer.config.command_line import program, spelled, typed
from trainer.launch.attempts import Failure
from trainer.observe.report.page import REPORT
from trainer.storage.run_directory import RunDirectory

LABEL_COLUMNS = 13
NAMED_TABLES = 3  # at most; of more, the sum is printed
MODELS = ("model.keras", "saved_model", "model.weights.h5", "params.npz")  # of export/; the first that exists is named


def done(directory: RunDirectory, summary: Mapping[str, Any], *, start: int, longer: str, has_report: bool) -> str:
    """Describes the result of a run that has made its last step, aligned, with the next commands.

    Args:
        start: global step that this launch of the run began at.
        longer: the setting that makes the run train longer.
        has_report: whether its report is written.
    """
    steps, first = summary["steps"], summary["time_to_first_step_secs"]
    best, exported = summary.get("best"), [directory.export / name for name in MODELS]
    early = summary.get("ended_early")
    again = command(directory.path, resumes=True)
    rows = {
        "evaluation": ", ".join(f"{name} {value:.4f}" for name, value in summary.items() if name.startswith("eval_")),
        "learning rate": f"{rate:.6g} at the end" if (rate := summary.get("learning_rate")) is not None else None,
        "best": _describe_best(best) if best else None,
        "rows": _describe_rows(summary.get("rows", {})),
        "params_sha256": summary["params_sha256"],
        "run": shown(directory.path),
        "model": next((_describe_model(path, summary) for path in exported if path.exists()), None),
        "not exported": f"{why}; to try again: {again}" if (why := summary.get("not_exported")) else None,
        "left out": summary.get("export_skipped"),
        "report": shown(directory.path / REPORT) if has_report else None,
        "continue": None if early else command(directory.path, resumes=True, more=[longer]),
        "TensorBoard": _tensorboard(directory) if directory.events.exists() else None,
    }
    now = f" ({steps - start:,} of them now)" if start else ""
    took = f"in {summary['seconds']:.1f} s{f' (first step after {first:.1f} s)' if first else ''}"
    lines = [f"ended early: {early}"] if early else []
    lines += [f"done: {steps} steps{now} {took}, {summary['examples_per_second']:,.0f} examples/s"]
    return "\n".join([*lines, *(f"{label:<{LABEL_COLUMNS}} {text}" for label, text in rows.items() if text)])


def _describe_rows(rows: Mapping[str, int]) -> str:
    """Describes the rows of growing tables."""
    if len(rows) > NAMED_TABLES:
        return f"{sum(rows.values()):,} in {len(rows)} growing tables"
    return ", ".join(f"{path} {count:,}" for path, count in rows.items())


def _describe_model(path: Path, summary: Mapping[str, Any]) -> str:
    step = summary.get("exported_step", summary["steps"])
    return shown(path) if step == summary["steps"] else f"{shown(path)} (the best, of step {step})"


def _tensorboard(directory: RunDirectory) -> str:
    """Returns the command that shows the events; if TensorBoard is missing, preceded by its installation."""
    command = shell.joined(["tensorboard", "--logdir", shown(directory.path)])
    return command if find_spec("tensorboard") else f"pip install tensorboard && {command}"


def _describe_best(best: Mapping[str, Any]) -> str:
    scores = [f"{name} {value:.4f}" for name, value in best.items() if name not in ("step", "path")]
    return ", ".join([f"step {best['step']}", *scores, shown(Path(best["path"]))])


def stopped(directory: RunDirectory, summary: Mapping[str, Any]) -> str:
    """Describes whether the state was saved, and how to continue."""
    steps = [int(path.name) for path in directory.checkpoints.glob("*") if path.name.isdigit()]
    if "steps" in summary:
        how = f"at step {summary['steps']}, checkpoint saved"
    else:
        how = "without saving" if summary["time_to_first_step_secs"] else "before the first step"
        how += f"; the newest checkpoint is from step {max(steps)}" if steps else ""
    what = "continue" if steps else "start again"
    return f"Stopped {how}. To {what}: {command(directory.path, resumes=bool(steps))}"


def shown(path: Path) -> str:
    """Returns a path as it is typed: relative to the working directory, if it is below that."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) and path != here else str(path)


def failed(directory: RunDirectory, failure: Failure) -> str:
    """Describes the first failure, with the end of its log at that time."""
    lines = [
        f"{failure.task.name} failed first, exit code {failure.code}: {failure.why}",
        f"the end of {shown(directory.path / failure.task.log)}:",
        *(f"    {text}" for text in failure.tail),
    ]
    return shell.printable("\n".join(lines))


def command(run: Path, *, resumes: bool, more: Iterable[str] = ()) -> str:
    """Returns the typed command with this run directory; one that resumes finds its checkpoint there."""
    replaced = ("mode=train", "run=", *["resume="] * resumes, *(f"{text.partition('=')[0]}=" for text in more))
    words = [word for word in typed() if not word.startswith(replaced)]
    return shell.joined([*program(), *spelled(words), shell.override("run", shown(run)), *more])
