"""What Hydra keeps to itself and is needed all the same, each with the reason."""

from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.sources_registry import SourcesRegistry
from hydra._internal.utils import create_config_search_path, get_args_parser

__all__ = [
    "ConfigLoaderImpl",  # tells the files that a config is made of
    "FileConfigSource",  # the base class of files that are checked before they are read
    "SourcesRegistry",  # which the sources of generated configs join
    "create_config_search_path",  # for a loader without Hydra's main
    "get_args_parser",  # the flags of Hydra's command line
]
