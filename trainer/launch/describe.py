"""Describes a model, from the cache or else by a child process that imports TensorFlow."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.faults.problems import ConfigError, Problem
from trainer.plan.description import Description, DescriptionError, ModelProbe, ProbeResult, Waits
from trainer.plan.downloads import is_missing
from trainer.plan.serialize import from_json
from trainer.storage import cache
from trainer.storage.atomic import write_atomically

Child = Callable[[ModelProbe], ProbeResult]


def describe(question: ModelProbe, child: Child | None = None, waits: Waits = lambda *_: None) -> Description:
    """Returns the cached description, or else asks a child process that imports TensorFlow and downloads data.

    Args:
        child: runs `answer` in a process with TensorFlow.
        waits: if there is no `child`, called each second with the line of the user's code that is running, and with the
            seconds that the process has taken.

    Raises:
        ConfigError: if the model or the data set refuses its options.
        DescriptionError: if the data cannot be used, or the model cannot be built.
    """
    cached = _cache_file(question) if _is_cacheable(question) else None
    try:
        if cached is not None and not is_missing(question.data):  # tasks may have no network to download it
            description = _read(json.loads(cached.read_text()))
            if question.store is None or not description.frozen.sha256:  # else files must be left
                return description
    except (OSError, ValueError, KeyError, TypeError):
        pass  # missing, or from another version: ask again
    result = child(question) if child else _ask_new_process(question, waits)
    if "problem" in result:
        raise ConfigError([Problem(**result["problem"])])
    if "failure" in result:
        raise DescriptionError(result["failure"], result["exit_code"])
    if cached is not None:
        _write_cache(cached, json.dumps(result["description"]))
    return _read(result["description"])


def _read(answer: Any) -> Description:
    return from_json(Description, answer)


def _ask_new_process(question: ModelProbe, waits: Waits) -> ProbeResult:
    from trainer.launch.processes.tasks import ProcessTasks

    with ProcessTasks() as tasks:
        return tasks.describe(question, waits)


def _is_cacheable(question: ModelProbe) -> bool:
    """Whether a probe's key covers everything its answer depends on; a user's data function may read any file."""
    if question.init or question.frozen:
        return False
    if question.user is None:
        return True
    from trainer.workload.data import DATA_SETS  # imports numpy

    return question.data["name"] in DATA_SETS


def _cache_file(question: ModelProbe) -> Path:
    return cache.folder() / "models" / f"{question.key()}.json"


def _write_cache(path: Path, text: str) -> None:
    """Writes the description to the cache; a cache that cannot be written is ignored."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, text)
    except OSError as error:
        print(f"trainer: the model's description is not cached: {error}", file=sys.stderr)
