"""Finds problems in the functions that a config chooses: built-in ones, and those of the user's file."""

import difflib
import math
import re
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any

from trainer.config import keys, sources
from trainer.config import user_file as user
from trainer.config.problems.origins import given
from trainer.config.schema import DataConfig, ModelConfig, RunConfig
from trainer.faults.problems import ConfigError, Problem

_of_user = partial(Problem, about="user")

KERAS_HOOK = re.compile("on_(epoch|batch|train|test|predict)_")  # methods of keras.callbacks.Callback


def check_functions(config: RunConfig, choices: Mapping[str, Any], line: sources.CommandLine) -> Iterator[Problem]:
    """Checks that model and data exist and take the options that were set, with the types of their defaults."""
    try:
        functions = user.functions(config.user) if config.user else {}
    except ConfigError as error:
        yield from error.problems
        return
    for group, choice in choices.items():
        section, chosen = getattr(config, group), sources.content(line, group, choice)
        yield from _check_function(group, choice, chosen, section, functions, config.user)
    if config.user:
        yield from _check_use(config, config.user, functions, line)


def _check_function(
    group: str,
    choice: Any,
    chosen: Mapping[str, Any],
    section: ModelConfig | DataConfig,
    functions: Mapping[str, user.Options],
    user_file: str | None,
) -> Iterator[Problem]:
    """Checks one section; `chosen` is the content of the chosen file, and `functions` are the user's."""
    name, key = section.name, f"{group}.name"
    builtin = {path.stem for path in (sources.conf_dir() / group).glob("*.yaml")}
    if name not in functions and name not in builtin:
        yield unknown_choice(key, group, name, [*builtin, *user.choices(group, functions)])
    elif name in functions and name in builtin:
        message = f"{name} is both built in and a function of {user_file}"
        yield Problem(key, "duplicate", message, f"rename the function and type {group}=NEW_NAME")
    elif chosen.get("name", "???") not in ("???", name):
        message = f"{group}={choice} has the options of {chosen['name']}, not of {name}"
        yield Problem(key, "conflict", message, f"{group}={name}")
    else:
        declared = user.options_of(group, functions.get(name, {})) | chosen.get("options", {})
        yield from _check_options(group, name, section.options, declared)


def _check_use(
    config: RunConfig, user_file: str, functions: Collection[str], line: sources.CommandLine
) -> Iterator[Problem]:
    """Refuses a file whose model or data, or all of it, would be left out in silence."""
    where, names = f"user={user_file}", {group: getattr(config, group).name for group in user.GROUPS}
    not_chosen = [group for group in user.GROUPS if names[group] not in functions and "name" not in given(line, group)]
    problems = []
    for group in not_chosen:
        choice, lines = f"{group}={names[group]}", user.bound_names(user_file)
        others = [name for name in user.candidates(user_file)[group] if name not in names.values()]
        if group in lines:
            message = f"line {lines[group]} assigns {group}, which must be a function of this file or of one beside it"
            problems.append(
                _of_user(where, "no-effect", f"{message}; {choice} would run", f"write def {group}, or type {choice}")
            )
        elif others:
            message = f"defines {', '.join(others)} but no function {group}; {choice} would run instead"
            problems.append(_of_user(where, "no-effect", message, f"type {group}={others[0]}, or {choice}"))
    used = {*user.BY_NAME, *names.values(), *_names_in([config.model.loss, config.model.metrics])}
    if not problems and len(not_chosen) == len(user.GROUPS) and not used & {*functions, *user.bound_names(user_file)}:
        message = f"nothing in it is used; it defines {', '.join(functions) or 'no functions'}"
        example = f"e.g. model={next(iter(functions), 'NAME')}"
        problems.append(
            _of_user(where, "no-effect", message, f"choose by name, {example}, or name a function model or data")
        )
    yield from problems
    for name in functions:
        is_near = name.startswith("on_") and difflib.get_close_matches(name, user.HOOKS, cutoff=0.8)
        if name not in user.HOOKS and (is_near or KERAS_HOOK.match(name)):
            yield _of_user(where, "no-effect", f"{name} is never called", f"the hooks are {', '.join(user.HOOKS)}")


def _names_in(value: Any) -> Iterator[str]:
    """Yields the texts and keys of nested lists and mappings."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from (str(name) for name in value)
        yield from _names_in(list(value.values()))
    elif isinstance(value, list):
        for one in value:
            yield from _names_in(one)


def unknown_choice(where: str, group: str, name: str, options: list[str]) -> Problem:
    """Returns the problem of an unknown choice of a group, with the available ones."""
    options = sorted(set(options))
    if not options:
        message = f"unknown {group} '{name}'; none is available"
        return Problem(where, "unknown-choice", message, f"leave {group} out", about=group)
    near = (*difflib.get_close_matches(name, options, n=1), options[0])[0]
    message = f"unknown {group} '{name}'; available: {', '.join(options)}"
    return Problem(where, "unknown-choice", message, f"e.g. {group}={near}", about=group)


def _check_options(group: str, name: str, given: Mapping[str, Any], declared: Mapping[str, Any]) -> Iterator[Problem]:
    for option, value in given.items():
        key = f"{group}.options.{option}"
        if not declared:
            yield Problem(key, "no-effect", f"{name} takes no options", "leave it out")
        elif option not in declared:
            yield keys.unknown(key, key, value, [f"{group}.options.{known}" for known in declared])
        elif not _same_kind(declared[option], value):
            default = keys.shown(declared[option])
            message = f"{keys.shown(value)!r} is not {_kind(declared[option])}, which {name} needs"
            yield Problem(key, "wrong-type", message, f"e.g. {key}={default}")
        elif isinstance(value, float) and not math.isfinite(value):
            message = f"{value} is not a finite number"
            yield Problem(key, "out-of-range", message, f"e.g. {key}={keys.shown(declared[option])}")


def _same_kind(default: Any, value: Any) -> bool:
    """Whether a value has the type of the default; defaults that are null, unset or references accept any type."""
    if default is None or (isinstance(default, str) and (default == "???" or "${" in default)):
        return True
    if type(default) is float:
        return type(value) in (int, float)
    return type(value) is type(default)


def _kind(default: Any) -> str:
    if isinstance(default, list | dict):
        return "a list [a,b]" if isinstance(default, list) else "a mapping {name:value}"
    return keys.describe(type(default))
