"""Finds changes that affect the result of a run that continues; the data has its own check."""

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from trainer.config import keys, shell, user_file
from trainer.config.schema import RunConfig
from trainer.config.words import listed
from trainer.plan.serialize import to_json
from trainer.storage.checkpoint import Checkpoint, CheckpointError
from trainer.storage.damage import DAMAGED, RunFileError
from trainer.storage.run_directory import RunDirectory

DECIDING = (  # keys and sections
    *("seed", "train.batch_size", "train.accumulate", "train.precision", "train.jit", "optimizer"),
    *("model.name", "model.options", "model.loss", "model.loss_options", "model.loss_weights", "model.class_weight"),
    *("strategy.name", "strategy.quorum", "strategy.max_staleness", "strategy.wire", "placement.sparse"),
)
OF_ANOTHER_MODEL = ("model.", "user")  # a checkpoint does not record what these keys decide


class Change(NamedTuple):
    """A difference between a run's stored config or code and those it would continue with."""

    key: str
    text: str


def check(source: Checkpoint, config: RunConfig, directory: RunDirectory, *, steps: int) -> str:
    """Describes the changes since the last launch; empty if there are none, or if resume names the checkpoint.

    Raises:
        CheckpointError: if the model differs, or no step is left and the result would be that of other settings.
    """
    if config.resume != "auto":
        return ""
    try:
        found = list(changes(directory.read_config(), config, directory))
    except FileNotFoundError:
        return ""  # there are only its checkpoints
    except RunFileError as error:
        return f"warning: {error}; changes since the last launch are unknown"
    if not found:
        return ""
    text = "; ".join(change.text for change in found)
    if source.step >= steps or any(change.key.startswith(OF_ANOTHER_MODEL) for change in found):
        continues = f"{shell.typed('resume', str(source.path))} to continue anyway"
        remedy = f"choose another run=PATH, start over with resume=never, or type {continues}"
        raise CheckpointError(source.path, f"belongs to a different run: {text}", remedy)
    return f"warning: changed since the last launch: {text}"


def changes(
    before: RunConfig, now: RunConfig, directory: RunDirectory, *, is_resolved: bool = True
) -> Iterator[Change]:
    """Yields the differences that affect the result.

    Args:
        is_resolved: the config includes the compiled optimizer; otherwise only settings that were set count.
    """
    old, new = _deciding(before), _deciding(now)
    given = {name.partition(".")[0] for name in (*before.given, *now.given)}
    for key in [*old, *(key for key in new if key not in old)]:
        counts = is_resolved or not key.startswith("optimizer.") or key.split(".")[1] in given
        if counts and old.get(key) != new.get(key):
            yield Change(key, f"{key}={keys.shown(new.get(key))} instead of {keys.shown(old.get(key))}")
    yield from _changed_code(directory, now.user)


def _deciding(config: RunConfig) -> dict[str, Any]:
    values = dict(_flat("", to_json(config)))
    sections = tuple(f"{name}." for name in DECIDING)
    return {k: v for k, v in values.items() if k in DECIDING or k.startswith(sections)}


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value:
        for name, item in value.items():
            yield from _flat(f"{prefix}.{name}" if prefix else str(name), item)
    else:
        yield prefix, value


def _changed_code(directory: RunDirectory, user: str | None) -> Iterator[Change]:
    """Yields changes of the user's code; runs of older versions did not record it."""
    with suppress(OSError, *DAMAGED):
        known = json.loads(directory.code.read_text())
        main, before = known["file"], known["digests"]
        if not isinstance(main, str) or not all(isinstance(digest, list) for digest in before.values()):
            return  # damaged
        if user is None:
            yield Change("user", f"no user= instead of {main}")
            return
        now = user_file.digests(user)
        changed = sorted(name for name in {*before, *now} if not _is_same(before.get(name), now.get(name)))
        if changed and main != Path(user).name:
            yield Change("user", f"user={Path(user).name} instead of {main}")
        elif changed:
            yield Change("code", f"{listed([name or main for name in changed])} changed")


def _is_same(before: Any, now: Any) -> bool:
    """Whether a file has the same text or, parsed by the same Python, the same code."""
    return before is not None and now is not None and bool({*before} & {*now})
