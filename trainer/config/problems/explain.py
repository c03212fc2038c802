"""Explains why a config could not be composed, by trying every override and every file on its own.

Hydra stops at its first error. Here every failure is reported and left out, and the rest still makes a config whose
values can be checked.
"""

import difflib
import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from hydra.core.default_element import ResultDefault
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import MissingConfigException, OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, open_dict

from trainer.config import keys, sources, user_file
from trainer.config.cluster_size import EXAMPLES, SIZE, nearest_size, parse_size
from trainer.config.problems import origins
from trainer.config.problems.functions import unknown_choice
from trainer.config.typed import Mode
from trainer.faults.problems import ConfigError, Problem

_of_override = partial(Problem, about="override")

MAX_SWEEP = 100  # values of one swept key that are tried
HELP = "see python -m trainer --help"


@dataclass
class Explained:
    """The problems of overrides and files, and the config that remains without them."""

    problems: list[Problem] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)  # keys and groups without the value that the user meant
    composed: DictConfig = field(default_factory=keys.schema)
    choices: dict[str, Any] | None = None  # none: nothing could be composed
    whole: bool = True  # whether every file could be read; else keys that belong together may be missing

    def drop(self, override: str, *problems: Problem) -> None:
        """Reports the problems of an override that is left out."""
        self.problems += problems
        self.dropped.append(override.lstrip("+~").partition("=")[0])


class Explainer:
    """Tries the overrides of one command line, and the files they bring in."""

    def __init__(self, line: sources.CommandLine, *, user_file_works: bool = True) -> None:
        self.line = line
        self.user_file_works = user_file_works  # whether the functions of the file named by `user` are known
        self.loader = sources.loader(line)
        self.schema = keys.schema()  # takes every good value, so that the bad ones fail
        self.checked: set[str] = set()  # files
        self.brought: dict[str, str] = {}  # choices by group that the last file tried brings with it
        self.assignments: list[tuple[str, tuple[str, ...], Any]] = []  # where, key, value; of files and overrides
        self.result = Explained()

    def explain(self) -> Explained:
        """Finds the faults of overrides and files, one by one."""
        valid, values = [], []
        for override in self.overrides():
            if self.is_special(override):
                valid += self.try_alone(override)
            elif self.is_choice(override):
                valid += self.try_choice(override)
            else:
                values.append(override)
        try:
            self.result.composed, self.result.choices = sources.compose(self.line, valid)
        except sources.ERRORS as error:
            shipped = self.file_faults([])  # conf/config.yaml and its own choices
            self.result.problems += shipped or in_own_words(" ".join(valid), error)
            return self.result
        for where, path, value in self.assignments:
            self.assign(where, path, value)
        for override in values:
            self.try_value(override)
        return self.result

    def overrides(self) -> Iterator[Override]:
        """Yields the overrides that can be read; under --multirun one for each value of a swept key."""
        for text in self.line.overrides:
            override = _parse(text)
            key, _, value = text.partition("=")
            if override is None:
                self.result.drop(text, _unreadable(text))
            elif not override.key_or_group:
                self.result.drop(
                    text, _of_override(text, "malformed", "has no key before the =", "e.g. train.steps=300")
                )
            elif not override.is_sweep_override():
                yield override
            elif not self.line.multirun:
                remedy = f"give one, e.g. {key}={_one_of(value)}, or add --multirun to run each"
                self.result.drop(text, _of_override(text, "malformed", "has several values", remedy))
            elif override.is_choice_sweep():
                for choice in itertools.islice(override.sweep_string_iterator(), MAX_SWEEP):
                    yield from OverridesParser.create().parse_overrides([f"{override.get_key_element()}={choice}"])

    def is_special(self, override: Override) -> bool:
        """Whether only Hydra can check an override: one of its own config, of the defaults list, or a deletion."""
        of_group = self.loader.repository.group_exists(override.key_or_group)
        added = of_group and (override.is_add() or override.is_force_add())
        return override.is_hydra_override() or override.is_delete() or bool(override.package) or added

    def is_choice(self, override: Override) -> bool:
        """Whether an override chooses a file of a group, rather than the value of a key."""
        return self.loader.repository.group_exists(override.key_or_group) and not isinstance(override.value(), dict)

    def try_alone(self, override: Override) -> list[str]:
        """Returns the override if Hydra accepts it."""
        text = str(override.input_line)
        try:
            sources.compose(self.line, [text])
        except sources.ERRORS as error:
            problems = in_own_words(text, error)
            if override.is_delete():
                problems = [
                    _of_override(
                        text, "not-set", "removes a key that every config needs", "leave it out to use the default"
                    )
                ]
            elif override.is_add() or override.is_force_add():
                problems = [_of_override(text, "duplicate", "the + adds a second choice to a group", text.lstrip("+"))]
            self.result.drop(text, *problems)
            return []
        return [text]

    def try_choice(self, override: Override) -> list[str]:
        """Returns the override if its group has that choice and its files are valid; for a bad size, the nearest."""
        text, group = str(override.input_line), override.key_or_group
        name = str(override.value()) if "'" in text else text.partition("=")[2].strip('"')
        if not isinstance(override.value(), list) and not self.has_choice(override, name):
            if group == "cluster":
                self.result.problems.append(self.no_such_choice(text, group, name))
                return [f"cluster={nearest_size(name)}"]
            if self.user_file_works or group not in user_file.GROUPS:
                self.result.problems.append(self.no_such_choice(text, group, name))
            self.result.drop(text)
            return []
        faults = self.file_faults([text])
        if not faults:
            return [text]
        self.result.drop(text, *faults)
        return [f"{other}={choice}" for other, choice in self.brought.items() if other != group]

    def has_choice(self, override: Override, name: str) -> bool:
        """Whether the group of an override has that file or generated config."""
        try:
            exists = self.loader.repository.config_exists(f"{override.key_or_group}/{name}")
        except (OSError, ValueError):  # names that no file can have
            return False
        return isinstance(override.value(), str) and exists

    def no_such_choice(self, where: str, group: str, name: str) -> Problem:
        """Returns the problem of an unknown choice of a group, with the choices that exist."""
        options = self.loader.get_group_options(group)
        if group == "experiment" and name.endswith(".yaml"):
            return _no_such_file(name)
        if group != "cluster":
            return unknown_choice(where, group, name, options)
        if not any(letter.isdigit() for letter in name):
            near = (*difflib.get_close_matches(name, options, n=1), "2ps4w")[0]
            message = f"unknown cluster '{name}'; available: {', '.join(options)}, and any size such as {EXAMPLES}"
            return Problem(where, "unknown-choice", message, f"e.g. cluster={near}", about=group)
        try:
            parse_size(name)
        except ValueError as error:
            return Problem(where, "malformed", str(error), f"cluster={nearest_size(name)}", about=group)
        raise AssertionError(f"{name} is a size, and so has a config")

    def file_faults(self, overrides: list[str]) -> list[Problem]:
        """Yields the faults of the files that overrides bring in; each file is reported once."""
        where = " ".join(overrides) or self.line.config_name
        self.brought = {}
        try:
            result = self.loader.compute_defaults_list(self.line.config_name, overrides, RunMode.RUN)
            new = [default for default in result.defaults if default.config_path not in self.checked]
            self.checked |= {str(default.config_path) for default in new}
            chosen = result.overrides.known_choices.items()
            self.brought = {group: choice for group, choice in chosen if choice and not group.startswith("hydra/")}
            return [problem for default in new for problem in self.key_faults(default)]
        except MissingConfigException as error:
            self.result.whole = False
            group, _, name = (error.missing_cfg_file or "").rpartition("/")
            return [self.no_such_choice(where, group, name)] if group else in_own_words(where, error)
        except sources.ERRORS as error:
            self.result.whole = False
            return in_own_words(where, error)

    def key_faults(self, default: ResultDefault) -> list[Problem]:
        """Yields the keys of one file that are not in the schema, and the values that it refuses."""
        problems, good = [], []
        for where, path, value in origins.values(self.loader, default):
            problem = keys.fault(where, path, value, self.schema)
            if problem:
                problems.append(problem)
            else:
                good.append((where, path, value))
        if problems:
            self.assignments += good  # a file that is left out still has values to check
        return problems

    def try_value(self, override: Override) -> None:
        """Assigns a value in the composed config, key by key, unless the schema refuses it."""
        text = str(override.input_line)
        for path, value in keys.flatten(tuple(override.key_or_group.split(".")), override.value()):
            problem = keys.fault(text, path, value, self.schema)
            if problem:
                self.result.drop(text, problem)
            else:
                self.assign(text, path, value)

    def assign(self, where: str, path: tuple[str, ...], value: Any) -> None:
        """Sets a key that the schema knows."""
        section: Any = self.result.composed
        try:
            for part in path[:-1]:
                section = section[part]
            with open_dict(section):
                section[path[-1]] = value
        except sources.ERRORS as error:
            self.result.drop(where, *in_own_words(where, error))


def in_own_words(where: str, error: BaseException) -> list[Problem]:
    """Returns the message of Hydra or OmegaConf, for errors that this module does not explain better."""
    if isinstance(error, ConfigError):
        return error.problems
    first = str(error.__cause__ or error).strip().splitlines() or [type(error).__name__]
    return [Problem(where or "config", "failed", first[0], HELP, about="config")]


def _no_such_file(name: str) -> Problem:
    """Returns the problem of an experiment whose file does not exist, with the YAML files beside it."""
    folder = Path(name).parent
    others = sorted(str(path) for path in folder.glob("*.yaml"))
    near = (*difflib.get_close_matches(name, others, n=1), *others)
    if near:
        return Problem(name, "not-found", "there is no such file", f"did you mean {near[0]}?", about="experiment")
    message = f"there is no such file, and no other .yaml file in {folder.resolve()}"
    remedy = "give the path of an experiment, or trainer init FOLDER makes one"
    return Problem(name, "not-found", message, remedy, about="experiment")


def _parse(text: str) -> Override | None:
    try:
        return OverridesParser.create().parse_overrides([text])[0]
    except (OverrideParseException, RecursionError):
        return None


def _one_of(values: str) -> str:
    """Returns what a value with commas means: 0,001 is 0.001, 10,000 is 10000; else the first."""
    if re.fullmatch(r"0,\d+", values):
        return values.replace(",", ".")
    return values.replace(",", "") if re.fullmatch(r"[1-9]\d{0,2}(,\d{3})+", values) else values.partition(",")[0]


def _unreadable(text: str) -> Problem:
    key, equals, value = text.partition("=")
    if text in Mode.__members__:
        return _of_override(text, "malformed", "is a command, and commands come first", f"type {meant(text)}")
    if not equals:
        return _of_override(text.strip() or "''", "malformed", "is not key=value", meant(text) or HELP)
    if _parse(f"{key}=1") is None:
        return _of_override(
            text, "malformed", f"has a key that cannot be read: {key!r}", "write it with dots, e.g. train.steps=300"
        )
    if "${" in value:
        return _of_override(
            text, "malformed", "has a reference that cannot be read", "references are written '${section.key}'"
        )
    quoted = value.replace("\\", "\\\\").replace('"', '\\"')
    return _of_override(text, "malformed", "has a value that cannot be read", f"quote it twice: '{key}=\"{quoted}\"'")


def meant(text: str) -> str | None:
    """Returns the probable meaning of an argument without `=`."""
    if text in Mode.__members__:
        return f"trainer {text} ..."
    if SIZE.fullmatch(text):
        return f"cluster={text}"
    if text.endswith(".py"):
        return f"user={text}"
    if text.endswith(".yml"):
        return f"rename it to {text.removesuffix('.yml')}.yaml, and type that"
    if keys.hint(text.split(".")) is not None:
        return f"e.g. {keys.example(text)}"
    return None
