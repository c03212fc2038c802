"""Sorts the command line into overrides, Hydra's flags, and mistakes with what was probably meant.

A first word without `=` is the command: `trainer plan cluster=2ps4w` is `trainer mode=plan cluster=2ps4w`.
"""

import argparse
import difflib
import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial

from trainer.config import keys, shell
from trainer.config.hydra_internals import get_args_parser
from trainer.config.problems.explain import meant
from trainer.config.synonyms import COMMANDS
from trainer.config.typed import Mode
from trainer.faults.problems import Problem

_of_flag = partial(Problem, about="flag")

# Numbers from which a sweep draws: Hydra would take them for calls of functions that it does not know.
RANGE = re.compile(r"""(?<!["'\w])(?:log|linear|integer)\([^()]*\)""")
OF_EXPORT = ("export", "evaluate", "predict")  # modes that use the section export; two of its keys need no prefix
NOT_SUGGESTED = ("--experimental-rerun", "--shell-completion")


@dataclass(frozen=True)
class Arguments:
    """The words of a command line, by kind."""

    overrides: tuple[str, ...]
    flags: tuple[str, ...]  # of Hydra, with their values
    faults: tuple[Problem, ...]
    notes: tuple[str, ...] = ()  # what was typed but has no effect

    def parse(self) -> argparse.Namespace:
        """Parses overrides with Hydra's own parser."""
        return get_args_parser().parse_args(self.in_order())

    def in_order(self) -> list[str]:
        """Returns everything but the mistakes; overrides come first, because Hydra's parser expects them together."""
        return [*self.overrides, *self.flags]


def sort(arguments: Sequence[str]) -> Arguments:
    """Sorts arguments; a bare path of a YAML file is an experiment, and a bare word after an unknown flag its value."""
    overrides: list[str] = []
    flags: list[str] = []
    faults: list[Problem] = []
    paths: list[str] = []
    known, waiting = get_args_parser()._option_string_actions, deque(arguments)
    while waiting:
        text = waiting.popleft()
        name, equals, value = text.partition("=")
        if _is_path(text):
            paths.append(text)
        elif text == "--json":
            overrides.append("json=true")
        elif not text.startswith("-"):
            overrides.append(RANGE.sub(r'"\g<0>"', text) if text.startswith("sweep.space") else text)
        elif name in known:
            typed = [text, *_values(known[name], equals, waiting)]
            fault = _fault(known[name], name, typed)
            faults += [fault] if fault else []
            flags += [] if fault else typed
        else:
            if not equals and waiting and not waiting[0].startswith("-") and "=" not in waiting[0]:
                value = waiting.popleft()
            faults.append(_unknown(text, name, value, known))
    message = f"is a second experiment, after {''.join(paths[:1])}"
    faults += [
        Problem(path, "duplicate", message, "give one, and other settings as key=value", about="experiment")
        for path in paths[1:]
    ]
    overrides, notes = _last(overrides)
    overrides, contradictions = _with_mode(_with_section(_with_project(overrides)))
    experiments = [shell.override("experiment", path) for path in paths[:1]]
    return Arguments((*overrides, *experiments), tuple(flags), (*faults, *contradictions), tuple(notes))


def _last(overrides: list[str]) -> tuple[list[str], list[str]]:
    """Returns the overrides without those that a later one of the same key replaces, and notes about the latter.

    A script may thus append its arguments. Values in braces are merged, and keys of Hydra are left to Hydra.
    """
    left: dict[str, str] = {}
    notes = []
    for number, text in enumerate(overrides):
        key, equals, value = text.partition("=")
        replaces = equals and not value.startswith("{") and not key.startswith(("+", "~", "hydra."))
        place = key if replaces else f"{number} {text}"
        if (earlier := left.pop(place, text)) != text:
            notes.append(f"{key} is given twice: using {text}, ignoring {earlier}")
        left[place] = text
    return list(left.values()), notes


def _with_mode(overrides: list[str]) -> tuple[list[str], list[Problem]]:
    """Returns the overrides with `mode=` for a leading command, and the problem of an unknown or contradicted one."""
    first, rest = next(iter(overrides), "="), overrides[1:]
    modes = list(Mode.__members__)
    if first in modes:
        others = [text for text in rest if text.startswith("mode=") and text != f"mode={first}"]
        message = f"{first} and {others[0]} are two commands" if others else ""
        problems = (
            [Problem(f"{first} {others[0]}", "conflict", message, f"type {first} or {others[0]}", about="mode")]
            if others
            else []
        )
        return [f"mode={first}", *(text for text in rest if not text.startswith("mode="))], problems
    if first.isalpha() and meant(first) is None:
        near = [COMMANDS.get(first.lower()), *difflib.get_close_matches(first.lower(), modes, n=1)]
        flag = f"--{first.lower()}" if near[0] == "" else "--help"
        name = next(filter(None, near), None)
        remedy = f"did you mean {name}?" if name else f"see python -m trainer {flag}"
        message = f"unknown command; available: {', '.join(modes)}, and settings are key=value"
        return rest, [Problem(first, "unknown-choice", message, remedy, about="mode")]
    return overrides, []


def _with_project(overrides: list[str]) -> list[str]:
    """Takes the word behind `init` as the folder of a project."""
    if overrides[:1] == ["init"] and len(overrides) > 1 and "=" not in overrides[1]:
        return ["init", shell.override("project", overrides[1]), *overrides[2:]]
    return overrides


def _with_section(overrides: list[str]) -> list[str]:
    """Expands `to=` and `checkpoint=` after a command that reads a checkpoint."""
    if not any(text.removeprefix("mode=") in OF_EXPORT for text in overrides):
        return overrides
    return [f"export.{text}" if text.startswith(("to=", "checkpoint=")) else text for text in overrides]


def _is_path(text: str) -> bool:
    """Whether an argument is the bare path of a YAML file."""
    return text.endswith(".yaml") and "=" not in text and not text.startswith("-")


def _values(action: argparse.Action, equals: str, waiting: deque[str]) -> list[str]:
    """Returns the values that follow a flag."""
    if equals or action.nargs == 0 or not waiting:
        return []
    is_optional = action.nargs == "?"
    return [waiting.popleft()] if not is_optional or waiting[0] in (action.choices or ()) else []


def _fault(action: argparse.Action, name: str, typed: Sequence[str]) -> Problem | None:
    value = typed[1] if len(typed) > 1 else typed[0].partition("=")[2]
    if action.nargs == 0 and value:
        return _of_flag(typed[0], "malformed", f"{name} takes no value", f"type {name}")
    if action.nargs is None and not value:
        return _of_flag(name, "not-set", "needs a value", f"e.g. {name} {next(iter(action.choices or ['VALUE']))}")
    if value and action.choices is not None and value not in action.choices:
        if value.endswith((".yaml", ".yml")):
            return _of_flag(
                " ".join(typed), "malformed", f"{name} prints a config", f"type {value}, without a flag, to use it"
            )
        allowed = [str(choice) for choice in action.choices]
        near = (*difflib.get_close_matches(value, allowed, n=1), allowed[0])[0]
        return _of_flag(
            " ".join(typed), "unknown-choice", f"{value!r} is not one of {', '.join(allowed)}", f"e.g. {name} {near}"
        )
    return None


def _unknown(text: str, name: str, value: str, known: Iterable[str]) -> Problem:
    key = name.lstrip("-").replace("-", "_")
    where = text if not value or "=" in text else f"{text} {value}"
    if (setting := keys.meant(key, value)) is not None:
        return _of_flag(where, "unknown-key", "is not a flag; settings are key=value", f"type {setting}")
    near = keys.nearest(key, keys.declared())
    if near is not None and not value and keys.hint(near.split(".")) is bool:
        value = "true"
    if near is not None and value:
        return _of_flag(
            where, "unknown-key", "is not a flag; settings are key=value", f"type {keys.typed(near, value)}"
        )
    remedy = meant(near or key)
    if remedy is not None:
        return _of_flag(
            where, "unknown-key", "is not a flag; settings are key=value", f"type {remedy.removeprefix('e.g. ')}"
        )
    flags = [flag for flag in known if flag.startswith("--") and flag not in NOT_SUGGESTED]
    like = difflib.get_close_matches(name.lstrip("-"), [flag.lstrip("-") for flag in flags], n=1)
    remedy = f"did you mean --{like[0]}?" if like else "see python -m trainer --help"
    return _of_flag(
        where, "unknown-key", f"unknown flag; available: {', '.join(flags)}, and settings are key=value", remedy
    )
