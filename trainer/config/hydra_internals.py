"""The private parts of Hydra and OmegaConf that the trainer needs, each with the reason."""

import copy
from collections import defaultdict
from functools import cache
from typing import Any

import yaml
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.config_store import ConfigStore
from omegaconf._utils import get_yaml_loader
from omegaconf.base import Metadata

__all__ = [
    "ConfigLoaderImpl",  # tells the files that a config is made of
    "ConfigRepository",  # loads the files that a config is made of
    "FileConfigSource",  # the base class of files that are checked before they are read
    "SourcesRegistry",  # which the sources of generated configs join
    "create_config_search_path",  # for a loader without Hydra's main
    "get_args_parser",  # the flags of Hydra's command line
]


@cache
def yaml_loader() -> Any:
    """Returns a loader that reads numbers as OmegaConf does, on libyaml where PyYAML has it: in a fifth of the time."""
    rules = {"yaml_implicit_resolvers": get_yaml_loader().yaml_implicit_resolvers}
    return type("ConfigLoader", (getattr(yaml, "CSafeLoader", yaml.SafeLoader),), rules)


def copy_less() -> None:
    """Halves the time to copy configs, and stops Hydra from copying the schema for each composition."""
    Metadata.__deepcopy__ = _copy_metadata  # type: ignore[attr-defined]
    ConfigStore.__deepcopy__ = lambda store, _memo: store  # type: ignore[attr-defined]


def _copy_metadata(metadata: Metadata, memo: dict[int, Any]) -> Metadata:
    copied: Metadata = object.__new__(type(metadata))
    flags, cached = copy.copy(metadata.flags), metadata.resolver_cache
    copied.__dict__.update(
        vars(metadata), flags=flags, resolver_cache=copy.deepcopy(cached, memo) if cached else defaultdict(dict)
    )
    return copied
