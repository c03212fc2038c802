"""Finds problems in the values of a composed config: unset, out of range, or references to nothing."""

import dataclasses
import math
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict
from omegaconf.errors import InterpolationKeyError, InterpolationResolutionError, OmegaConfBaseException

from trainer.config import keys, shell, sources, user_file, yaml_files
from trainer.config.groups import check_groups
from trainer.config.limits import check_limits
from trainer.config.problems.functions import check_functions
from trainer.config.problems.origins import given, last_set
from trainer.config.schema import AUTO, NAME, RunConfig, TrainConfig
from trainer.config.shell import CONTROL
from trainer.config.typed import Mode, TypedConfig
from trainer.faults.problems import Problem

OF_RUNS = (PurePath("runs"), PurePath("sweeps"))  # where runs without `run=` and sweeps have their directories
OF_ANOTHER_RUN = (Mode.evaluate, Mode.predict)  # modes that may set options of the data
LENGTHS = ("train.steps", "train.epochs")
OPTIONS = ".options."


@dataclass(frozen=True)
class Examined:
    """A composed config, unless a section lacks even its name, and every problem of its values."""

    typed: TypedConfig | None
    config: RunConfig | None  # of the run
    problems: list[Problem]
    overrides: tuple[str, ...] = ()  # of this run alone, under --multirun


@sources.loaded_once()
def examine(
    composed: DictConfig, choices: Mapping[str, Any], line: sources.CommandLine, *, unknown: Collection[str] = ()
) -> Examined:
    """Checks every value of a composed config, replacing bad references and removing unset options.

    `choices` are the files chosen in each group. The options of `unknown` groups, composed with another choice than the
    user's, cannot be checked.
    """
    raw = OmegaConf.to_container(composed, resolve=False)
    # References first: OmegaConf cannot look for unset keys behind a broken one.
    problems = list(_unresolvable(composed, raw, ()))
    missing = sorted(OmegaConf.missing_keys(composed))
    problems += _unset(missing, composed, choices)
    if any(OPTIONS not in key for key in missing):
        return Examined(None, None, problems)
    typed = OmegaConf.to_object(composed)
    assert isinstance(typed, TypedConfig)
    config = typed.run_config(given(line, "optimizer"))
    problems += [*_check_characters(raw, ()), *check_limits(typed), *_check_name(config.name)]
    problems += _check_run(config.run, typed.mode)
    train, wrong = _one_length(config.train, line)
    config, problems = dataclasses.replace(config, train=train), [*problems, *wrong]
    problems += [*_check_part(config.placement.max_part_mib), *check_groups(config.optimizer)]
    chosen = {group: choices.get(group) for group in user_file.GROUPS if group not in unknown}
    problems += check_functions(config, chosen, line)
    return Examined(typed, config, problems)


def _unset(missing: Sequence[str], composed: DictConfig, choices: Mapping[str, Any]) -> Iterator[Problem]:
    """Yields the keys that are still `???`; removes an unset option so that the rest can be checked."""
    for key in missing:
        group, _, option = key.partition(OPTIONS)
        if option:
            choice = f"{group}={choices.get(group)}"
            if group != "data" or composed.mode not in OF_ANOTHER_RUN:
                message = f"is not set, and {choice} needs it"
                yield Problem(key, "not-set", message, f"add {key}={_hint(group, choices, option)}")
            options = OmegaConf.select(composed, key.rpartition(".")[0])
            with open_dict(options):
                del options[key.rpartition(".")[2]]
        elif key in keys.EXAMPLES and key.endswith(".name"):
            group = key.removesuffix(".name")
            message = "is not set"
            yield Problem(key, "not-set", message, f"choose a file of conf/{group}, e.g. {group}={keys.EXAMPLES[key]}")
        else:
            yield Problem(key, "not-set", "is not set", f"e.g. {keys.example(key.partition('[')[0])}")


def _hint(group: str, choices: Mapping[str, Any], option: str) -> str:
    """Returns a placeholder for an option, with its comment in the shipped file."""
    path = sources.conf_dir() / group / f"{choices.get(group)}.yaml"
    place = yaml_files.line_of(path, f"options.{option}") if path.is_file() else None
    return f"VALUE ({place[1]})" if place and place[1] else "VALUE"


def _unresolvable(section: DictConfig, raw: Any, path: tuple[str, ...]) -> Iterator[Problem]:
    """Yields references `${...}` to nothing, or to a value of another type, and replaces them by the default."""
    for name in list(section):
        inner = (*path, str(name))
        key = ".".join(inner)
        try:
            value = None if OmegaConf.is_missing(section, name) else section[name]
            if isinstance(value, ListConfig):
                OmegaConf.to_container(value, resolve=True)
            if isinstance(value, DictConfig) and OmegaConf.is_interpolation(section, name):
                raise InterpolationResolutionError("a reference cannot stand for a whole section")
        except OmegaConfBaseException as error:
            text = keys.shown(raw[name])
            yield Problem(key, "unresolved", f"{text} {_reason(error)}", f"give a value, e.g. {keys.example(key)}")
            _stand_in(section, name, key)
        else:
            if isinstance(value, DictConfig):
                yield from _unresolvable(value, raw[name], inner)


def _stand_in(section: DictConfig, name: Any, key: str) -> None:
    """Replaces a bad value by its default; an entry of a mapping has no default and is removed."""
    with open_dict(section):
        if dataclasses.is_dataclass(OmegaConf.get_type(section)):
            section[name] = OmegaConf.select(keys.schema(), key)
        else:
            del section[name]


def _reason(error: OmegaConfBaseException) -> str:
    first = str(error).splitlines()[0]
    if isinstance(error, InterpolationKeyError):
        missing = re.search(r"'(.*)'", first)
        near = keys.nearest(missing[1], keys.declared()) if missing else None
        return "refers to a key that does not exist" + (f"; the nearest is {near}" if near else "")
    return f"cannot be resolved: {first.rpartition('interpolation: ')[2]}"


def _check_name(name: str) -> Iterator[Problem]:
    if not NAME.fullmatch(name):
        nearest = re.sub(r"[^a-z0-9-]+", "-", name.lower()).strip("-")[:63] or "run"
        message = f"'{name}' must be 1 to 63 characters from a-z, 0-9 and -"
        yield Problem("name", "malformed", message, f"e.g. name={nearest}")


def _check_characters(value: Any, path: tuple[str, ...]) -> Iterator[Problem]:
    """Finds control characters, which terminals and readers of rendered files interpret; options may contain them."""
    if isinstance(value, Mapping):
        for name, item in value.items():
            if name != "options":
                yield from _check_characters(item, (*path, str(name)))
    elif isinstance(value, list):
        for item in value:
            yield from _check_characters(item, path)
    elif isinstance(value, str) and (control := CONTROL.search(value)):
        message = f"'{value}' has the control character {shell.printable(ascii(control[0]))[1:-1]}"
        remedy = "remove it; if a file or folder has it in its name, rename it"
        yield Problem(".".join(path), "malformed", message, remedy)


def _check_run(run: str | None, mode: Mode) -> Iterator[Problem]:
    """Checks that a run directory is named in full, because it is created, locked and cleaned."""
    if run is None:
        return
    path = PurePath(run)
    if ".." in path.parts:
        message = f"'{run}' contains '..', which is not allowed in a run directory"
        yield Problem("run", "unsafe", message, shell.typed("run", str(Path(run).resolve())))
    elif run.startswith("~"):
        message = f"'{run}' starts with ~, which only a shell expands"
        yield Problem("run", "malformed", message, shell.typed("run", str(Path(run).expanduser())))
    elif not path.name or "\0" in run or (path in OF_RUNS and mode is Mode.train):
        message = f"'{run}' cannot be a run directory: a run writes and deletes files in it"
        yield Problem("run", "unsafe", message, "e.g. run=runs/first, or leave run out")


def _one_length(train: TrainConfig, line: sources.CommandLine) -> tuple[TrainConfig, list[Problem]]:
    """Resolves epochs against steps: what is typed overrides what a file sets; setting both in one place is refused."""
    lengths = last_set(line, LENGTHS) if train.epochs is not None else set()
    if lengths == {"train.steps"}:
        return dataclasses.replace(train, epochs=None), []
    if len(lengths) < 2:
        return train, []
    message = f"is set together with train.steps={train.steps}, but only one of them may set the length of training"
    remedy = f"leave one out, e.g. train.epochs={train.epochs} alone"
    return train, [Problem("train.epochs", "conflict", message, remedy)]


def _check_part(given: str | None) -> Iterator[Problem]:
    """Checks that the size of parts is a number, auto or null."""
    if given in (None, AUTO):
        return
    try:
        is_size = 0 < float(given) < math.inf
    except ValueError:
        is_size = False
    if not is_size:
        message = f"{given} is not a size in MiB; it must be {AUTO}, null or a number above 0"
        remedy = "leave it out, or type placement.max_part_mib=6"
        yield Problem("placement.max_part_mib", "out-of-range", message, remedy)
