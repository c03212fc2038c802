"""Distinguishes a run directory from other folders, whose files a run would replace."""

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from trainer.config import yaml_files
from trainer.config.shell import typed
from trainer.config.words import some
from trainer.faults.problems import ConfigError, Problem
from trainer.plan.description import FROZEN_FILE, INITIAL_FILE
from trainer.storage.damage import RunFileError, read_json

# What a run writes or moves away; some are written before its config.
FILES = (
    *("config.yaml", "plan.json", "code.json", "summary.json", "report.html", "history.jsonl", "events.jsonl"),
    *("evaluations.jsonl", "rollbacks.jsonl", "generation.json", "status.json", "placement.json", "placement.html"),
    *("prometheus.json", FROZEN_FILE, INITIAL_FILE),
)
FOLDERS = ("checkpoints", "events", "export", "best", "journal", "loggers", "profile", "requests", "placement")
NAMED_AT_MOST = 3


def check(run: Path) -> None:
    """Raises a ConfigError if a folder was never a run directory, but has files or folders with names that runs use."""
    check_kinds(run)
    taken = [name for name in (*FILES, *(f"{name}/" for name in FOLDERS)) if (run / name).exists()]
    if not taken or was_run(run):
        return
    message = f"{run} is not a run directory, but has {some(taken, NAMED_AT_MOST)}, which a run would replace"
    remedy = f"choose another folder, e.g. {typed('run', str(run / 'run'))}"
    raise ConfigError([Problem("run", "taken", message, remedy)])


def check_kinds(run: Path) -> None:
    """Raises a RunFileError if a path that a run uses has another kind, or this user may not read and write it."""
    for name in (*FILES, *FOLDERS):
        path, kind = run / name, "folder" if name in FOLDERS else "file"
        if not os.path.lexists(path):
            continue
        is_kind = path.is_dir() if kind == "folder" else path.is_file()
        if is_kind and os.access(path, os.R_OK | os.W_OK):
            continue
        if is_kind:
            raise RunFileError(
                path, f"no permission to read and write this {kind}", "change it, or choose another run=PATH"
            )
        raise RunFileError(path, f"is not a {kind}", f"move it away; a run has a {kind} of its own there")


def was_run(path: Path) -> bool:
    """Whether a run has used a folder, even if its config was damaged or removed since."""
    config, plan = _yaml(path / "config.yaml"), read_json(path / "plan.json")
    return (
        {"cluster", "train", "model"} <= config.keys()
        or {"tasks", "shards"} <= plan.keys()
        or "loaded" in read_json(path / "generation.json")
        or any((path / "checkpoints").glob("[0-9]" * 9 + "*/manifest.json"))
        or any((path / "journal").glob("worker-*.jsonl"))
    )


def _yaml(path: Path) -> dict[str, Any]:
    with suppress(OSError, ValueError, RecursionError, yaml.YAMLError):
        if path.is_file() and isinstance(value := yaml_files.load(path.read_bytes()), dict):
            return value
    return {}
