"""Provides Hydra's config groups: YAML files, checked first; cluster sizes; functions of the user's file."""

import copy
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path, PurePosixPath
from typing import Any

import hydra
import yaml
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.core.utils import setup_globals
from hydra.errors import HydraException
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.config import help_page, hydra_internals, keys, user_file, yaml_files
from trainer.config.cluster_size import parse_size
from trainer.faults.problems import ConfigError, Problem

ERRORS = (HydraException, OmegaConfBaseException, ValueError, TypeError, LookupError, OSError, RecursionError)
"""What Hydra, OmegaConf and their parser raise for a config that cannot be composed; ConfigError is a ValueError."""

USUAL_SIZES = ["2ps4w", "4w"]  # for tab completion and --help; any other size works as well
EXPERIMENT = "experiment/"

# Hydra makes its sources itself, from a search path of strings; this is how the user's functions reach them.
_functions: ContextVar[Mapping[str, user_file.Options]] = ContextVar("functions")

_Key = tuple[tuple[str, ...], str]  # where configs are looked for, and the path of one
_loaded: ContextVar[dict[_Key, ConfigResult | None] | None] = ContextVar("loaded", default=None)


@dataclass(frozen=True)
class CommandLine:
    """The part of the command line that chooses the config."""

    overrides: tuple[str, ...]
    config_dir: str | None = None
    config_name: str = "config"
    multirun: bool = False
    faults: tuple[Problem, ...] = ()  # of arguments that are neither key=value nor a flag of Hydra's


def conf_dir() -> Path:
    """Returns the folder of the shipped YAML files: inside the package when installed, beside it in the repository."""
    package = Path(__file__).resolve().parent.parent
    return package / "conf" if (package / "conf").is_dir() else package.parent / "conf"


@contextmanager
def user_functions(options: Mapping[str, user_file.Options]) -> Iterator[None]:
    """Makes functions of the user's file choices of the groups `model` and `data`; `options` by function name."""
    token = _functions.set(options)
    try:
        yield
    finally:
        _functions.reset(token)


@contextmanager
def loaded_once() -> Iterator[None]:
    """Caches loaded configs: explaining a bad config composes many, and locating a value reads all files."""
    token = _loaded.set({}) if _loaded.get() is None else None
    try:
        yield
    finally:
        if token is not None:
            _loaded.reset(token)


class Repository(hydra_internals.ConfigRepository):
    """Hydra's config repository, with the cache of `loaded_once`."""

    def load_config(self, config_path: str) -> ConfigResult | None:
        """Returns a config that may be changed."""
        if (loaded := _loaded.get()) is None:
            return super().load_config(config_path)
        key = tuple(source.full_path() for source in self.sources), config_path
        if key not in loaded:
            loaded[key] = super().load_config(config_path)
        return copy.deepcopy(loaded[key])


class CheckedFiles(hydra_internals.FileConfigSource):
    """YAML files, checked before OmegaConf builds anything from them; paths with `..` are not found."""

    def load_config(self, config_path: str) -> ConfigResult:
        path = Path(self.path, self._normalize_file_name(config_path))
        if faults := yaml_files.faults(path):
            raise ConfigError(faults)
        try:
            result = _with_user_file_beside(self._read(path), path)
            if path == conf_dir() / "config.yaml":
                return _with_users_defaults(result)
            return _with_choices(result) if config_path.startswith(EXPERIMENT) else result
        except (yaml.YAMLError, ValueError, OmegaConfBaseException) as error:
            message = f"cannot be read: {str(error).splitlines()[0]}"
            remedy = "correct that key"
            raise ConfigError([Problem(yaml_files.shown(path), "unreadable", message, remedy, about="file")]) from error

    def _read(self, path: Path) -> ConfigResult:
        text = path.read_text(encoding="utf-8")
        config = OmegaConf.create(yaml.load(text, Loader=hydra_internals.yaml_loader()))
        return ConfigResult(self.provider, self.full_path(), config, header=self._get_header_dict(text))

    def is_config(self, config_path: str) -> bool:
        return ".." not in PurePosixPath(config_path).parts and super().is_config(config_path)


class GivenFiles(CheckedFiles):
    """YAML files anywhere, as experiments named by their path: `experiment=mine/first.yaml`."""

    @staticmethod
    def scheme() -> str:
        return "given"

    @staticmethod
    def _normalize_file_name(filename: str) -> str:
        return filename.removeprefix(EXPERIMENT)

    def load_config(self, config_path: str) -> ConfigResult:
        result = super().load_config(config_path)
        result.header["package"] = result.header.get("package") or "_global_"  # its keys are those of the whole config
        return result

    def is_group(self, config_path: str) -> bool:
        return False

    def is_config(self, config_path: str) -> bool:
        return (
            config_path.startswith(EXPERIMENT)
            and config_path.endswith(".yaml")
            and os.path.isfile(self._normalize_file_name(config_path))
        )

    def available(self) -> bool:
        return True

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return []


class Generated(ConfigSource):
    """Configs that need no file: `cluster=2ps4w`, and `model=tiny` for a function `tiny` of the user's file."""

    @staticmethod
    def scheme() -> str:
        return "generated"

    def load_config(self, config_path: str) -> ConfigResult:
        config = OmegaConf.create(_generate(config_path))
        return ConfigResult(self.provider, self.full_path(), config, header={"package": None})

    def is_group(self, config_path: str) -> bool:
        return config_path in ("cluster", "experiment", *user_file.GROUPS)

    def is_config(self, config_path: str) -> bool:
        return _generate(config_path) is not None

    def available(self) -> bool:
        return True

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        if results_filter == ObjectType.GROUP:
            return []
        return list(USUAL_SIZES) if config_path == "cluster" else sorted(_choices(config_path))


class SourceOrder(SearchPathPlugin):
    """Searches files named by their path before all others, and generated configs after all files.

    Hydra inserts --config-dir in front of the first provider `schema`; with another provider's name
    a file of the user would come after the generated config, and be ignored.
    """

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.prepend(provider="given", path="given://")
        search_path.append(provider="schema", path="generated://")


@cache
def register() -> None:
    """Registers with Hydra what conf/config.yaml refers to, and the sources above."""
    hydra.version.setbase("1.3")
    setup_globals()
    ConfigStore.instance().store(name="run_schema", node=keys.schema())
    OmegaConf.register_new_resolver("help_page", help_page.template, replace=True)  # which is called for --help only
    ConfigStore.instance().store(group="hydra/help", name="trainer", node={"template": "${help_page:}"})
    Plugins.instance().register(Generated)
    Plugins.instance().register(GivenFiles)
    Plugins.instance().register(SourceOrder)
    hydra_internals.SourcesRegistry.instance().types["file"] = CheckedFiles  # register() would keep Hydra's own
    hydra_internals.copy_less()


def loader(line: CommandLine) -> hydra_internals.ConfigLoaderImpl:
    """Returns Hydra's loader, with the search path that `@hydra.main` would use."""
    register()
    search_path = hydra_internals.create_config_search_path(str(conf_dir()))
    if line.config_dir is not None:
        anchor = SearchPathQuery(provider="schema", path=None)
        search_path.prepend("command-line", f"file://{os.path.abspath(line.config_dir)}", anchor)
    loader = hydra_internals.ConfigLoaderImpl(search_path)
    loader.repository = Repository(search_path)
    return loader


def compose(line: CommandLine, overrides: Iterable[str]) -> tuple[DictConfig, dict[str, Any]]:
    """Returns the config of one run, composed by Hydra, and the choice in each group."""
    config = loader(line).load_configuration(line.config_name, list(overrides), RunMode.RUN)
    HydraConfig.instance().set_config(config)
    choices = dict(config.hydra.runtime.choices)
    OmegaConf.set_struct(config, False)
    del config["hydra"]
    OmegaConf.set_struct(config, True)
    return config, choices


def content(line: CommandLine, group: str, choice: Any) -> dict[str, Any]:
    """Returns the content of the chosen file of a group, with the files that it builds on."""
    loaded = loader(line).repository.load_config(f"{group}/{choice}") if isinstance(choice, str) else None
    if loaded is not None and not loaded.defaults_list:
        config: Any = loaded.config
    elif choice is not None:
        config = compose(line, [f"{group}={choice}"])[0][group]
    else:
        return {}
    container = OmegaConf.to_container(config, resolve=False)
    assert isinstance(container, dict)
    return {str(name): value for name, value in container.items()}


def user_files(line: CommandLine) -> list[str]:
    """Returns the files that `user:` names in the main config and in each experiment that was typed."""
    chosen = [EXPERIMENT + name for text in line.overrides for name in _experiments(text)]
    repository, paths = loader(line).repository, list[str]()
    for name in (line.config_name, *chosen):
        try:
            loaded = repository.load_config(name)
            if loaded is not None and isinstance(loaded.config, DictConfig) and loaded.config.get("user") is not None:
                paths.append(str(loaded.config.user))
        except ERRORS:
            continue  # reported when the config is composed
    return paths


def _experiments(text: str) -> Iterator[str]:
    """Yields the experiments that an override names; several under --multirun."""
    if not text.lstrip("+").startswith("experiment="):
        return
    override = OverridesParser.create().parse_overrides([text])[0]
    names = override.sweep_string_iterator() if override.is_choice_sweep() else [override.value()]
    yield from (name for name in names if isinstance(name, str))


def file_of(result: ConfigResult, config_path: str) -> Path | None:
    """Returns the YAML file that a loaded config is from; None for a config that is generated or part of Hydra."""
    for source in (CheckedFiles, GivenFiles):
        if result.path.startswith(f"{source.scheme()}://"):
            return Path(result.path.partition("://")[2], source._normalize_file_name(config_path))
    return None


def _with_user_file_beside(result: ConfigResult, path: Path) -> ConfigResult:
    """Resolves a relative `user:` against the folder of its YAML file, or else against the working directory."""
    config = result.config
    if isinstance(config, DictConfig) and not OmegaConf.is_interpolation(config, "user"):
        user = config.get("user")
        if isinstance(user, str) and (path.parent / user).is_file():
            config.user = yaml_files.shown(path.parent / user)
    return result


def _with_choices(result: ConfigResult) -> ConfigResult:
    """Treats `optimizer: adamw` in an experiment as Hydra's `override /optimizer: adamw`."""
    config = result.config
    assert isinstance(config, DictConfig)
    groups = {path.name for path in conf_dir().iterdir() if path.is_dir()} - {"experiment"}
    written = [name for name in config if name in groups and not OmegaConf.is_interpolation(config, name)]
    chosen = [name for name in written if isinstance(config[name], str)]
    if chosen:
        defaults = OmegaConf.to_container(config.get("defaults", OmegaConf.create(["_self_"])))
        assert isinstance(defaults, list)
        config.defaults = [*defaults, *({f"override /{name}": config.pop(name)} for name in chosen)]
    return result


def _with_users_defaults(result: ConfigResult) -> ConfigResult:
    """Chooses the functions `model` and `data` of the user's file by default, where it has them."""
    assert isinstance(result.config, DictConfig)
    for default in result.config.defaults:
        for group in user_file.GROUPS:
            if isinstance(default, DictConfig) and group in default and group in _choices(group):
                default[group] = group
    return result


def _choices(group: str) -> Mapping[str, user_file.Options]:
    return user_file.choices(group, _functions.get({})) if group in user_file.GROUPS else {}


def _generate(config_path: str) -> dict[str, Any] | None:
    group, _, name = config_path.partition("/")
    if group == "cluster":
        try:
            size = parse_size(name)
        except ValueError:
            return None
        return {"name": name, "ps": size.ps, "worker": size.worker, "evaluator": size.evaluator}
    options = _choices(group).get(name)
    return None if options is None else {"name": name, "options": user_file.options_of(group, options)}
