"""Finds the files of this host that a run reads, which its containers must mount."""

import os
from dataclasses import replace
from glob import glob, has_magic
from pathlib import Path
from typing import Any

from trainer.config.schema import RunConfig


def with_absolute_paths(config: RunConfig) -> tuple[RunConfig, list[str]]:
    """Returns the config with absolute paths of its inputs, and the files and folders that hold them.

    Inputs are the user's file with the folder it is in, the checkpoint to start from, and data options that are the
    path of a file or of a folder, or a pattern of files.
    """
    user, resume, options = config.user, config.resume, dict(config.data.options)
    inputs: list[str] = []
    if user is not None:
        user = str(Path(user).resolve())
        inputs.append(str(Path(user).parent))
    if resume not in ("auto", "never"):
        resume = str(Path(resume).resolve())
        inputs.append(resume)
    for name, value in config.data.options.items():
        if _is_input(value, is_path=name == "path"):
            options[name] = str(Path(value).absolute())
            inputs.append(_folder_of(options[name]) if has_magic(value) else options[name])
    config = replace(config, user=user, resume=resume, data=replace(config.data, options=options))
    return config, [path for path in dict.fromkeys(inputs) if path != "/"]


def _is_input(value: Any, *, is_path: bool) -> bool:
    if not isinstance(value, str) or not value:
        return False
    path = Path(value)
    if path.exists() and (path.is_absolute() or is_path):
        return True
    is_name = path.suffix == "" and os.sep not in value  # a key or a kind, even if a file here has the same name
    return not is_name and (path.exists() or (has_magic(value) and bool(glob(value))))


def _folder_of(pattern: str) -> str:
    """Returns the folder that contains everything that a pattern matches."""
    folder = Path(pattern).parent
    while has_magic(str(folder)):
        folder = folder.parent
    return str(folder)
