"""Configs for tests: each set of group choices is composed once, and the other overrides are applied to a copy.

Hydra composes a config in 70 ms; a copy takes 10 ms. All checks of a config are made on the copy as well.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Sequence
from typing import Any
from unittest import mock

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig

from trainer.config import compose, sources
from trainer.config.schema import RunConfig
from trainer.config.sources import CommandLine
from trainer.plan import validate
from trainer.plan.devices import Machine

GROUPS = {path.name for path in sources.conf_dir().iterdir() if path.is_dir()}
WITHOUT_COPIES = ("user=", "experiment=", "hydra")  # they bring choices of their own, or are Hydra's

compose_with_hydra, _content = sources.compose, sources.content


def load(
    overrides: Sequence[str], complete: compose.Complete = compose.as_composed, config_dir: str | None = None
) -> RunConfig:
    """Returns the config of the run of what trainer.config.compose.load returns; raises what that does."""
    return invoke(overrides, complete, config_dir).config


def invoke(
    overrides: Sequence[str], complete: compose.Complete = compose.as_composed, config_dir: str | None = None
) -> compose.Invocation:
    """Returns or raises what trainer.config.compose.load does."""
    if config_dir is not None or any(text.lstrip("+").startswith(WITHOUT_COPIES) for text in overrides):
        return compose.load(overrides, complete, config_dir=config_dir)
    with mock.patch.multiple(sources, compose=compose_a_copy, content=_content_once, user_files=lambda line: []):
        return compose.load(overrides, complete)


def validated_on(machine: Machine) -> compose.Complete:
    """Returns what validates a config as for a run on a machine, with nothing completed."""
    return lambda typed, config: (config, validate.validate(config, machine, typed.mode, typed.target))


def compose_a_copy(line: CommandLine, overrides: Iterable[str]) -> tuple[DictConfig, dict[str, Any]]:
    """What sources.compose returns or raises."""
    parsed = [_parse(text) for text in overrides]
    composed, choices = _compose_once(tuple(str(one.input_line) for one in parsed if one.key_or_group in GROUPS))
    config = copy.deepcopy(composed)
    ConfigLoaderImpl._apply_overrides_to_config([one for one in parsed if one.key_or_group not in GROUPS], config)
    return config, dict(choices)


@functools.cache
def _parse(text: str) -> Override:
    return OverridesParser.create().parse_overrides([text])[0]


@functools.cache
def _compose_once(choices: tuple[str, ...]) -> tuple[DictConfig, dict[str, Any]]:
    return compose_with_hydra(CommandLine(()), choices)


def _content_once(line: CommandLine, group: str, choice: Any) -> dict[str, Any]:
    return copy.deepcopy(_content_of(group, choice))


@functools.cache
def _content_of(group: str, choice: str | None) -> dict[str, Any]:
    return _content(CommandLine(()), group, choice)
