"""Completes a word of the command line: commands, groups, keys, and the values that a key can have.

Hydra's shell script asks for it with `trainer -sc query=bash`; Hydra's own answer offers only a key's present value.
"""

import contextlib
import os
from collections.abc import Iterable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, get_args

from omegaconf import DictConfig

from trainer.config import keys, sources, user_file
from trainer.config.sources import CommandLine
from trainer.config.typed import Mode
from trainer.faults.problems import ConfigError

QUERY = "query="  # then the shell's name
RUNS = "runs"  # where runs without run= leave their directories
FLAGS = ("--help", "--version", "--cfg", "--config-dir", "--multirun", "--hydra-help")
WORDS = {"resume": ("auto", "never"), "job": ("ps", "worker", "evaluator")}  # values that a type does not show


def queried(overrides: Iterable[str]) -> str | None:
    """Returns the shell that asks for candidates; None if its script is to be printed."""
    return next((text.removeprefix(QUERY) for text in overrides if text.startswith(QUERY)), None)


def answer(shell: str) -> str:
    """Returns the candidates for the end of $COMP_LINE, as the shell's script reads them."""
    return ("\n" if shell == "fish" else " ").join(candidates(os.environ.get("COMP_LINE", "")))


def candidates(line: str) -> list[str]:
    """Returns the completions of the last word of a command line, which is empty if the line ends with a space."""
    _, *words = line.split() or [""]
    word = words.pop() if words and not line.endswith(" ") else ""
    if word.startswith("-"):
        return [flag for flag in FLAGS if flag.startswith(word)]
    overrides = tuple(text for text in words if "=" in text and not text.startswith("-"))
    folder = next((text.partition("=")[2] for text in words if text.startswith("--config-dir=")), None)
    key, equals, value = word.partition("=")
    typed = CommandLine(overrides, folder)
    with sources.user_functions(_of_users_file(overrides)):
        if equals:
            found = [f"{key}={one}" for one in _values(typed, key, value)]
        else:
            files = [path for path in _files(word) if path.endswith((".yaml", "/"))] if word else []  # an experiment's
            found = [*([] if words else Mode.__members__), *_keys(typed, key), *files]
    return sorted({one for one in found if one.startswith(word)})


def _of_users_file(overrides: Sequence[str]) -> dict[str, user_file.Options]:
    """Returns the functions of the file that `user=` names, with their options; none if it cannot be read."""
    for path in [text.removeprefix("user=") for text in overrides if text.startswith("user=")]:
        with contextlib.suppress(ConfigError):
            return user_file.functions(path)
    return {}


def _keys(line: CommandLine, prefix: str) -> list[str]:
    """Returns groups, keys with `=` and sections with a dot, one level deeper than the typed word."""
    section = prefix.rpartition(".")[0]
    if section in ("model.options", "data.options"):
        return [f"{section}.{name}=" for name in _options(line, section.partition(".")[0])]
    names = [name for name in keys.declared() if name.rpartition(".")[0] == section and name != "experiment"]
    deeper = {name.rpartition(".")[0] for name in keys.declared()} | {"model.options", "data.options"}
    found = [f"{name}{'.' if name in deeper else '='}" for name in names]
    return found if section else [*found, *(f"{group}=" for group in _groups())]


def _groups() -> list[str]:
    return [path.name for path in sources.conf_dir().iterdir() if path.is_dir()]


def _values(line: CommandLine, key: str, value: str) -> Sequence[str]:
    if key in _groups():
        return sources.loader(line).get_group_options(key)
    kind = keys.hint(key.split("."))
    kinds = [one for one in get_args(kind) or [kind] if one is not type(None)]
    if isinstance(kinds[0], type) and issubclass(kinds[0], Enum):
        return [member.name for member in kinds[0]]
    if kinds[0] is bool:
        return ["true", "false"]
    if kinds[0] is str or kind is None or kind is Any:
        return [*WORDS.get(key, ()), *_files(value or (f"{RUNS}/" if key in ("run", "resume") else ""))]
    default = keys.example(key).partition("=")[2]
    return [default] if default else []


def _files(start: str) -> list[str]:
    """Returns the files and folders (with a slash) whose paths begin with the typed word."""
    folder, begin = os.path.split(start)
    try:
        found = [path for path in Path(folder or ".").iterdir() if path.name.startswith(begin)]
    except OSError:
        return []
    return [os.path.join(folder, path.name) + ("/" if path.is_dir() else "") for path in found]


def _options(line: CommandLine, group: str) -> list[str]:
    """Returns the options of the model or data set that the line chooses."""
    try:
        options = sources.compose(line, line.overrides)[0][group].options
    except sources.ERRORS:
        return []
    return [str(name) for name in options] if isinstance(options, DictConfig) else []
