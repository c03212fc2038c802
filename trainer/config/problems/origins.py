"""Finds where a value of the config comes from: its file and line."""

import dataclasses
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from hydra.core.default_element import GroupDefault, ResultDefault
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException
from hydra.types import RunMode
from omegaconf import MISSING, DictConfig, OmegaConf

from trainer.config import keys, sources, yaml_files
from trainer.config.hydra_internals import ConfigLoaderImpl
from trainer.faults.problems import Problem


def values(loader: ConfigLoaderImpl, default: ResultDefault) -> Iterator[tuple[str, tuple[str, ...], Any]]:
    """Yields every key that a file sets, as (file:line key, key, value); nothing for a generated config."""
    loaded = loader.repository.load_config(str(default.config_path))
    file = sources.file_of(loaded, str(default.config_path)) if loaded else None
    if loaded is None or file is None or not isinstance(loaded.config, DictConfig):
        return
    package = tuple(default.package.split(".")) if default.package else ()
    content = OmegaConf.to_container(loaded.config, resolve=False)
    assert isinstance(content, dict)
    if not package:
        content.pop("hydra", None)  # Hydra's own settings; it has a schema for them
    for path, value in keys.flatten(package, content):
        place = yaml_files.line_of(file, ".".join(path[len(package) :]))
        yield f"{yaml_files.shown(file)}:{place[0] if place else 1} {'.'.join(path)}", path, value


@sources.loaded_once()
def located(problems: Sequence[Problem], line: sources.CommandLine) -> list[Problem]:
    """Returns the problems, with file and line before each key whose value comes from a file."""
    typed = {text.lstrip("+~").partition("=")[0] for text in line.overrides}
    if not any(
        _is_setting(key) and key not in typed for key in (problem.key.partition("[")[0] for problem in problems)
    ):
        return list(problems)
    places = _places(line)
    return [_located(problem, places) if _is_setting(problem.key) else problem for problem in problems]


def given(line: sources.CommandLine, group: str) -> tuple[str, ...]:
    """Returns the keys of a section that were typed, or that an experiment or a file of the user sets.

    `name` is among them where one of these chooses a file of the group.
    """
    typed = [text.lstrip("+~").partition("=")[0] for text in line.overrides]
    found = {key.partition(".")[2].partition(".")[0] or "name" for key in typed if key.split(".")[0] == group}
    if line.config_dir is not None or line.config_name != "config" or "experiment" in typed:
        found.update(_in_files(line, group))
    return tuple(sorted(found))


def last_set(line: sources.CommandLine, names: Container[str]) -> set[str]:
    """Returns the keys among `names` that were typed, or else those set by the last file that sets any of them."""
    if typed := {key for text in line.overrides for key in _keys_of(text) if key in names}:
        return typed
    loader = sources.loader(line)
    for default in reversed(_files(loader, line.config_name, _choices(line, loader))):
        set_here = {".".join(path) for _, path, value in values(loader, default) if value not in (MISSING, None)}
        if in_file := {key for key in set_here if key in names}:
            return in_file
    return set()


def _keys_of(override: str) -> Iterator[str]:
    """Yields the keys that an override sets: several for `train={steps: 5, batch_size: 8}`."""
    try:
        parsed = OverridesParser.create().parse_overrides([override])[0]
    except (OverrideParseException, RecursionError):
        return
    for path, value in keys.flatten(tuple(parsed.key_or_group.split(".")), parsed.value()):
        if value is not None:
            yield ".".join(path)


def _choices(line: sources.CommandLine, loader: ConfigLoaderImpl) -> list[str]:
    """Returns the overrides that choose a file of a group."""
    texts = [text.lstrip("+~") for text in line.overrides]
    pairs = [(text, *text.partition("=")[::2]) for text in texts]
    return [text for text, key, value in pairs if loader.repository.group_exists(key) and value[:1] != "{"]


def _in_files(line: sources.CommandLine, group: str) -> Iterator[str]:
    """Yields the same from files other than the shipped defaults."""
    loader, shipped = sources.loader(line), sources.conf_dir()
    for default in _files(loader, line.config_name, _choices(line, loader)):
        path = str(default.config_path)
        loaded = loader.repository.load_config(path)
        file = sources.file_of(loaded, path) if loaded else None
        if loaded is None or file is None or file in (shipped / "config.yaml", shipped / group / file.name):
            continue
        set_here = [key for _, key, value in values(loader, default) if value != MISSING]
        yield from (key[1] for key in set_here if key[0] == group and key[1:])
        chosen = [one for one in loaded.defaults_list or () if isinstance(one, GroupDefault)]
        yield from ("name" for one in chosen if str(one.group).lstrip("/") == group)


def _is_setting(key: str) -> bool:
    kind = keys.hint(key.partition("[")[0].split("."))
    return kind is not None and not dataclasses.is_dataclass(kind)


def _located(problem: Problem, places: Mapping[str, str]) -> Problem:
    key, bracket, index = problem.key.partition("[")  # cluster.addresses.ps[0]
    return replace(problem, key=f"{places.get(key, key)}{bracket}{index}", about=problem.code.rpartition("/")[0])


def _places(line: sources.CommandLine) -> dict[str, str]:
    """Returns, by key, `file:line key` of the last file that sets it; keys that were typed are left out."""
    loader = sources.loader(line)
    choices = _choices(line, loader)
    typed = [text.lstrip("+~") for text in line.overrides]
    set_here = [text.partition("=")[0] for text in typed if text not in choices]
    places = {
        ".".join(path[:end]): where
        for default in _files(loader, line.config_name, choices)
        for where, path, value in values(loader, default)
        if value != MISSING
        for end in range(1, len(path) + 1)
    }
    return {key: where for key, where in places.items() if not any(f"{key}.".startswith(f"{t}.") for t in set_here)}


def _files(loader: ConfigLoaderImpl, config_name: str, choices: Sequence[str]) -> Sequence[ResultDefault]:
    """Returns the files that choices bring in; an invalid choice brings none."""
    try:
        return loader.compute_defaults_list(config_name, list(choices), RunMode.RUN).defaults
    except sources.ERRORS:
        pass  # one of them is invalid
    valid: list[str] = []
    files: Sequence[ResultDefault] = ()
    for tried in ([], *([choice] for choice in choices)):
        try:
            files = loader.compute_defaults_list(config_name, valid + tried, RunMode.RUN).defaults
            valid += tried
        except sources.ERRORS:
            continue
    return files
