"""Reads the user's models and data sets: the functions of the Python file that `user=my_models.py` names.

The command line only reads the file (`functions`); tasks import it (`load`).
"""

import ast
import functools
import hashlib
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from omegaconf import MISSING

from trainer.faults.problems import ConfigError, Problem

_of_user = partial(Problem, about="user")

HOOKS = ("on_step", "on_evaluation", "on_end")  # functions that the chief calls
BY_NAME = ("loss", "metrics", *HOOKS)  # what is used without being chosen
GROUPS = ("model", "data")  # of functions; one of the same name is the default of its group

Options = dict[str, Any]  # keyword arguments of a function, with their defaults


def functions(path: str | Path) -> dict[str, Options]:
    """Returns the public functions and subclasses of a Python file and their options, without executing any of it.

    Functions imported by name from a file beside it count too (`from beside import model`).
    An option is a parameter with a default, or a keyword-only one; without a default it must be set. A parameter
    whose default is no literal (`width=WIDTH`) is left to the function: the config cannot know its value.

    Returns:
        Options with their defaults by function name; `???` stands for a default that is missing.

    Raises:
        ConfigError: if the file cannot be read as Python.
    """
    return _functions(Path(path), frozenset())


def candidates(path: str | Path) -> dict[str, list[str]]:
    """Returns what could be the model, or the data, judged by names and arguments; private names are excluded."""
    found: dict[str, list[str]] = {group: [] for group in GROUPS}
    for node in _parse(Path(path)).body:
        if isinstance(node, ast.ClassDef) and any(ast.unparse(base).endswith("Model") for base in node.bases):
            found["model"].append(node.name)
        elif isinstance(node, ast.FunctionDef) and node.name not in (*BY_NAME, *GROUPS):
            arguments = [*node.args.posonlyargs, *node.args.args]
            required = [one.arg for one in arguments[: len(arguments) - len(node.args.defaults)]]
            if required in (["spec"], ["input_shape"], ["input_shape", "classes"]) or (
                not required and "model" in node.name
            ):
                found["model"].append(node.name)
            elif not required and "data" in node.name:
                found["data"].append(node.name)
    return {group: [name for name in names if not name.startswith("_")] for group, names in found.items()}


def bound_names(path: str | Path) -> dict[str, int]:
    """Returns the names that a Python file assigns or imports by name, with their lines; see `functions` for errors."""
    lines: dict[str, int] = {}
    for node in _parse(Path(path)).body:
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names = [one.id for target in targets for one in ast.walk(target) if isinstance(one, ast.Name)]
        else:
            names = [one.asname or one.name for one in node.names] if isinstance(node, ast.ImportFrom) else []
        lines |= dict.fromkeys(names, node.lineno)
    return lines


def digests(path: str | Path) -> dict[str, list[str]]:
    """Returns digests by file: of its text, and of its code without comments, which depends on the Python version.

    The key of the file itself is ""; files that it imports from its folder have their path relative to that folder.
    """
    path = Path(path).resolve()
    sources, waiting = {}, [path]
    while waiting:
        source = waiting.pop()
        if source not in sources:
            tree = _parse(source)
            code = f"{sys.version_info[:2]} {ast.dump(tree)}"
            sources[source] = [hashlib.sha256(text).hexdigest()[:16] for text in (source.read_bytes(), code.encode())]
            waiting += _imported(tree, source.parent, path.parent)
    return {"" if one == path else os.path.relpath(one, path.parent): value for one, value in sources.items()}


def _imported(tree: ast.Module, here: Path, top: Path) -> list[Path]:
    """Returns the files in the folder of the user's file that a file imports, anywhere in its code."""
    modules: list[tuple[Path, str]] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules += [(top, one.name) for one in node.names]
        elif isinstance(node, ast.ImportFrom):
            folder = here.joinpath(*[".."] * (node.level - 1)) if node.level else top
            names = [node.module] if node.module else []
            modules += [(folder, ".".join([*names, *more])) for more in ([], *([one.name] for one in node.names))]
    files = [folder / name.replace(".", "/") for folder, name in modules if name]
    found = [next(filter(Path.is_file, (one.with_suffix(".py"), one / "__init__.py")), None) for one in files]
    return [one.resolve() for one in found if one is not None]


def _functions(path: Path, importers: frozenset[Path]) -> dict[str, Options]:
    """Returns the functions of one file; `importers` are files being read, which this one may import in turn."""
    found = {}
    for node in _parse(path).body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            found[node.name] = _options(node.args)
        elif isinstance(node, ast.ClassDef) and node.bases and not node.name.startswith("_"):
            found[node.name] = _options_of_class(node)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level <= 1:
            module = path.parent / node.module.replace(".", "/")
            beside = next(filter(Path.is_file, (module.with_suffix(".py"), module / "__init__.py")), None)
            if beside and beside not in importers:
                found |= _chosen(_functions(beside, importers | {path}), node.names)
    return found


def _chosen(functions: dict[str, Options], names: Sequence[ast.alias]) -> dict[str, Options]:
    """Returns the functions that an import statement names, by their new names."""
    if names[0].name == "*":
        return functions
    return {one.asname or one.name: functions[one.name] for one in names if one.name in functions}


def choices(group: str, functions: Mapping[str, Options]) -> dict[str, Options]:
    """Returns the functions that could be choices of a group: their names do not suggest something else."""
    others = {*BY_NAME, *GROUPS} - {group}
    return {name: options for name, options in functions.items() if name not in others}


def options_of(group: str, options: Options) -> Options:
    """Returns the options of a function that a config may set; `train` of a model is the data, not an option."""
    return {name: value for name, value in options.items() if (group, name, value) != ("model", "train", MISSING)}


def load(path: str | Path) -> ModuleType:
    """Imports a Python file by its path, once; it can import modules that lie beside it, as `beside` or `.beside`."""
    path = Path(path).resolve()
    return _load(path, path.stat().st_mtime_ns)


@functools.cache
def _load(path: Path, _mtime_ns: int) -> ModuleType:
    folder = str(path.parent)
    # As a package, whose modules are the files beside it.
    spec = importlib.util.spec_from_file_location(f"user_{path.stem}", path, submodule_search_locations=[folder])
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickles of the file look their module up by name
    if folder not in sys.path:
        sys.path.append(folder)
    spec.loader.exec_module(module)
    return module


def definitions(path: str | Path) -> dict[str, Any]:
    """Returns by name the public functions and classes of a Python file, as `functions` does, and its values."""
    module, found = load(path), functions(path)
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_")
        and not isinstance(value, ModuleType)
        and (name not in BY_NAME or callable(value))  # metrics = [...] is not a hook of that name
        and (name in found or getattr(value, "__module__", module.__name__) == module.__name__)
    }


def _parse(path: Path) -> ast.Module:
    where = f"user={path}"
    if path.suffix != ".py":
        raise ConfigError(
            [_of_user(where, "malformed", "is not a Python file: its name must end in .py", "e.g. user=my_models.py")]
        )
    try:
        return ast.parse(path.read_text(encoding="utf-8-sig"), filename=str(path))
    except OSError as error:
        remedy = f"give a path that can be read from {Path.cwd()}, e.g. user=my_models.py"
        raise ConfigError([_of_user(where, "unreadable", f"cannot be read: {error.strerror}", remedy)]) from error
    except UnicodeDecodeError as error:
        message = f"is not UTF-8: byte {error.start} is 0x{error.object[error.start]:02x}"
        raise ConfigError([_of_user(where, "unreadable", message, "save the file as UTF-8")]) from error
    except SyntaxError as error:
        message = f"is not valid Python: {error.msg}, line {error.lineno}"
        raise ConfigError(
            [_of_user(where, "unreadable", message, f"python -m py_compile {path} shows where")]
        ) from error
    except (ValueError, RecursionError, MemoryError) as error:  # null bytes, absurd nesting
        raise ConfigError(
            [_of_user(where, "unreadable", f"is not valid Python: {error}", f"python -m py_compile {path}")]
        ) from error


def _options_of_class(node: ast.ClassDef) -> Options:
    """Returns the constructor's options; arguments without a default must be set, except `self` and `spec`."""
    constructor = next((one for one in node.body if isinstance(one, ast.FunctionDef) and one.name == "__init__"), None)
    if constructor is None:
        return {}
    arguments = constructor.args
    required = arguments.args[1 : len(arguments.args) - len(arguments.defaults)]
    return {one.arg: MISSING for one in required if one.arg != "spec"} | _options(arguments)


def _options(arguments: ast.arguments) -> Options:
    positional = [*arguments.posonlyargs, *arguments.args]
    defaulted = positional[len(positional) - len(arguments.defaults) :]
    options: Options = {}
    for parameter, default in [
        *zip(defaulted, arguments.defaults, strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]:
        if parameter in arguments.posonlyargs:
            continue  # cannot be given by name
        try:
            value = MISSING if default is None else _plain(ast.literal_eval(default))
        except (ValueError, TypeError):
            continue
        options[parameter.arg] = value
    return options


def _plain(value: Any) -> Any:
    """Returns a literal as YAML would hold it; a tuple becomes a list.

    Raises:
        ValueError: for what a config cannot hold: bytes, sets, complex numbers, keys that are no text.
    """
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: _plain(item) for key, item in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise ValueError(f"{value!r} is not a YAML value")
