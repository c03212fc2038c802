"""Finds the settings of a run that differ from the defaults, or from other runs."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from trainer.config import compose, keys, sources
from trainer.config.keys import shown
from trainer.config.schema import RunConfig
from trainer.plan.serialize import to_json

OF_THE_COMMAND = ("run", "report", "prometheus", "job", "task", "given")
NOT_SHOWN = ("cluster.ps", "cluster.worker", "cluster.evaluator")  # others say the same
NOTHING = "(not set)"


def flat(config: RunConfig) -> dict[str, str]:
    """Returns every value of a config by its dotted key, as typed."""
    values = {key: value for key, value in to_json(config).items() if key not in OF_THE_COMMAND}
    return {key: shown(value) for key, value in _leaves("", values) if key not in NOT_SHOWN}


def _leaves(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the keys of sections, and each of the options of a model or data set; other mappings are values."""
    is_section = not prefix or dataclasses.is_dataclass(keys.hint(prefix.split("."))) or prefix.endswith(".options")
    if isinstance(value, Mapping) and is_section:
        for key, item in value.items():
            yield from _leaves(f"{prefix}.{key}" if prefix else str(key), item)
    else:
        yield prefix, value


def changed(config: RunConfig) -> list[tuple[str, str, str]]:
    """Returns (key, value, default) of settings that differ from the defaults; options are those of the same model."""
    mine = {"model": config.model.name, "data": config.data.name, "optimizer": config.optimizer.name.value}
    usual = _usual_choices()
    chosen = {group: name for group, name in mine.items() if name != usual[group]}
    shipped = {group: name for group, name in chosen.items() if _is_shipped(group, name)}
    required = [f"{group}.options.{option}" for group, name in shipped.items() for option in _required(group, name)]
    choices = [f"{group}={name}" for group, name in shipped.items()]
    defaults = flat(compose.load([*choices, *(f"{key}=null" for key in required)]).config) | dict.fromkeys(
        required, NOTHING
    )
    rest = [(key, value, defaults.get(key, NOTHING)) for key, value in flat(config).items()]
    return [
        *((group, name, usual[group]) for group, name in chosen.items()),
        *(row for row in rest if row[1] != row[2] and row[0] not in [f"{group}.name" for group in chosen]),
    ]


def _usual_choices() -> dict[str, str]:
    """Returns the default choice of each group."""
    main = yaml.safe_load((sources.conf_dir() / "config.yaml").read_text())
    return {group: name for one in main["defaults"] if isinstance(one, dict) for group, name in one.items()}


def _is_shipped(group: str, name: str) -> bool:
    """Whether a model or data set is not a function of the user's file."""
    return (sources.conf_dir() / group / f"{name}.yaml").is_file()


def _required(group: str, name: str) -> list[str]:
    """Returns the options that have no default."""
    shipped = yaml.safe_load((sources.conf_dir() / group / f"{name}.yaml").read_text())
    return [option for option, value in shipped.get("options", {}).items() if value == "???"]


def differences(configs: Sequence[RunConfig]) -> list[tuple[str, list[str]]]:
    """Returns (key, its value in each run) of settings that differ between configs."""
    values = [flat(config) for config in configs]
    keys = dict.fromkeys(key for one in values for key in one)
    rows = [(key, [one.get(key, NOTHING) for one in values]) for key in keys]
    return [(key, row) for key, row in rows if len(set(row)) > 1]
