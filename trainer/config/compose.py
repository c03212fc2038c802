"""Composes the command line and `conf/` into a typed, checked config.

All problems of a config are reported together, and a config with problems starts nothing.
"""

import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cache
from tempfile import TemporaryDirectory
from typing import NoReturn

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from trainer.config import arguments, command_line, completion, sources, user_file, versions
from trainer.config.output import print_json
from trainer.config.problems.explain import Explainer, in_own_words
from trainer.config.problems.origins import located
from trainer.config.problems.values import Examined, examine
from trainer.config.schema import RunConfig
from trainer.config.shell import printable
from trainer.config.sources import CommandLine
from trainer.config.typed import Mode, TypedConfig
from trainer.faults import exit_codes
from trainer.faults.problems import ConfigError, Problem


@dataclass(frozen=True)
class Invocation:
    """The config and the choices that one command received."""

    typed: TypedConfig  # every key, as composed
    config: RunConfig  # of the run, completed
    overrides: tuple[str, ...] = ()  # of this run alone, under --multirun


Complete = Callable[[TypedConfig, RunConfig], tuple[RunConfig, list[Problem]]]  # completes a config, and validates it
Several = Callable[[Sequence[Invocation]], int]  # runs all of them, and returns the exit code


def as_composed(typed: TypedConfig, config: RunConfig) -> tuple[RunConfig, list[Problem]]:
    """Returns a config unchanged, for callers that only need the checks of single keys."""
    return config, []


def run(main: Callable[[Invocation], int], complete: Complete, *, several: Several | None = None) -> NoReturn:
    """Runs `main` on the config of the command line, or on each of a --multirun, and exits with its code.

    No run starts unless the configs of all are valid; else every problem is printed and the exit code is 2. Of several
    runs, the first that fails gives the exit code. `complete` follows the checks of single keys. `several` gets the
    runs of a --multirun that trains.
    """
    words = command_line.typed()
    if words[:1] == ["help"] and words[1:]:
        _explain(words[1:])
    given = arguments.sort(["--help"] if words == ["help"] else words)
    if "--version" in given.flags:
        print(versions.describe())
        sys.exit(0)
    for note in given.notes:
        print(f"note: {note}", file=sys.stderr)
    command_line.pass_on(given.in_order())
    flags = given.parse()
    if flags.shell_completion and (shell := completion.queried(given.overrides)) is not None:
        print(completion.answer(shell))
        sys.exit(0)
    line = CommandLine(
        () if flags.shell_completion else given.overrides,  # which gives them another meaning
        config_dir=flags.config_dir,
        config_name=flags.config_name or "config",
        multirun=flags.multirun,
        faults=given.faults,
    )
    try:
        if flags.experimental_rerun:
            message, remedy = "reads a pickle, which can run any code", "type the overrides of that run again"
            raise ConfigError([Problem("--experimental-rerun", "unsafe", message, remedy, about="flag")])
        is_plain = not given.flags and not any("hydra" in text for text in line.overrides)
        runs = _checked(line, complete, _compose_one if is_plain else _compose_with_hydra, several=several)
    except ConfigError as error:
        print(printable(str(error)), file=sys.stderr)
        if "json=true" in line.overrides:
            print_json({"problems": [problem.to_json() for problem in error.problems]})
        sys.exit(exit_codes.CONFIG)
    if several is not None and _are_trials(runs):
        sys.exit(several(runs))
    first_failure = 0
    for invocation in runs:
        code = main(invocation)
        first_failure = first_failure or code
        if code in (exit_codes.INTERRUPTED, exit_codes.TERMINATED):
            break  # the user stopped this run and does not want the next
    sys.exit(first_failure)


def _explain(topics: Sequence[str]) -> NoReturn:
    from trainer.config import help_topics  # imports rich

    try:
        help_topics.show(topics)
    except ConfigError as error:
        print(printable(str(error)), file=sys.stderr)
        sys.exit(exit_codes.CONFIG)
    sys.exit(exit_codes.OK)


def load(overrides: Sequence[str], complete: Complete = as_composed, *, config_dir: str | None = None) -> Invocation:
    """Composes and checks one config, as `run` does, in this process.

    Raises:
        ConfigError: with every problem of the config.
    """
    line = CommandLine(tuple(overrides), config_dir)
    (invocation,) = _checked(line, complete, lambda line: [examine(*sources.compose(line, line.overrides), line)])
    return invocation


def _compose_one(line: CommandLine) -> list[Examined]:
    """Composes the config of one run, once; Hydra's command line composes it twice, to learn the mode."""
    composed, choices = sources.compose(line, line.overrides)
    if HydraConfig.get().mode is RunMode.MULTIRUN:  # a file says so
        return _compose_with_hydra(line)
    return [examine(composed, choices, line)]


def _checked(
    line: CommandLine,
    complete: Complete,
    compose: Callable[[CommandLine], list[Examined]],
    *,
    several: Several | None = None,
) -> list[Invocation]:
    """Returns the invocation of each run, checked.

    Raises:
        ConfigError: with every problem of them.
    """
    line = _without_code(line)
    if line.config_dir is not None and not os.path.isdir(line.config_dir):
        where, remedy = f"--config-dir={line.config_dir}", "give a folder with the layout of conf/"
        raise ConfigError([*line.faults, Problem(where, "not-found", "is not a directory", remedy, about="flag")])
    sources.register()
    functions, unreadable = _user_functions(line)
    problems = [*line.faults, *unreadable]
    examined: list[Examined] = []
    with sources.user_functions(functions):
        if problems:
            problems += _explained(line, complete, user_file_works=not unreadable)
        else:
            try:
                examined = compose(line)
            except BrokenPipeError:
                raise  # Hydra's output is no longer read, as in `--help | head`
            except Exception as error:
                if os.environ.get("HYDRA_FULL_ERROR") == "1":
                    raise
                problems = _explained(line, complete) or in_own_words(" ".join(line.overrides), error)
        runs: list[Invocation] = []
        for one in examined:
            config, crossed = _cross_check(one, complete)
            problems += [*one.problems, *crossed]
            if one.typed is not None and config is not None:
                runs.append(Invocation(one.typed, config, one.overrides))
        if several is None or not _are_trials(runs):
            problems += _shared_runs(runs)
        if problems:
            raise ConfigError(located(list(dict.fromkeys(problems)), line))
    return runs


def _are_trials(runs: Sequence[Invocation]) -> bool:
    """Whether these are training runs of a --multirun, below one directory if `run` is set."""
    return (
        len(runs) > 1
        and all(invocation.typed.mode is Mode.train for invocation in runs)
        and len({invocation.config.run for invocation in runs}) == 1
    )


def _without_code(line: CommandLine) -> CommandLine:
    """Removes overrides that name code, and reports them: Hydra imports and calls some `_target_`s itself."""
    named = [text for text in line.overrides if re.search(r"\b_target_\b", text)]
    message = "names code to import, but a config is plain data"
    remedy = "choose by name, e.g. model=cnn, or write a function in a file: user=my_models.py"
    return replace(
        line,
        overrides=tuple(text for text in line.overrides if text not in named),
        faults=(*line.faults, *(Problem(text, "unsafe", message, remedy, about="override") for text in named)),
    )


def _user_functions(line: CommandLine) -> tuple[dict[str, user_file.Options], list[Problem]]:
    """Returns the functions of the file named by `user=`, or else by `user:` in a YAML file; or its problems."""
    typed = [text for text in line.overrides if text.lstrip("+").startswith("user=")]
    try:
        paths = [OverridesParser.create().parse_overrides(typed[-1:])[0].value()] if typed else sources.user_files(line)
        files = [user_file.functions(path) for path in paths if isinstance(path, str)]
        return {name: options for functions in files for name, options in functions.items()}, []
    except (OverrideParseException, RecursionError):
        return {}, []  # reported with the other overrides
    except ConfigError as error:
        return {}, error.problems


def _compose_with_hydra(line: CommandLine) -> list[Examined]:
    """Runs Hydra's whole command line (overrides, --multirun, --cfg, --help, ...); no config if it only prints."""
    examined = []

    @hydra.main(version_base="1.3", config_path=str(sources.conf_dir()), config_name="config")
    def collect(composed: DictConfig) -> None:
        hydra_config = HydraConfig.get()
        one = examine(composed, hydra_config.runtime.choices, line)
        examined.append(replace(one, overrides=tuple(hydra_config.overrides.task)))

    with _errors_raised(), ExitStack() as stack:
        # The folder for Hydra's files under --multirun, so that nothing is left behind.
        scratch = cache(lambda: stack.enter_context(TemporaryDirectory()))
        OmegaConf.register_new_resolver("scratch_dir", scratch, replace=True)
        collect()
    return examined


@contextmanager
def _errors_raised() -> Iterator[None]:
    """Makes Hydra raise its errors, instead of printing them and exiting with 1."""
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"
    try:
        yield
    finally:
        del os.environ["HYDRA_FULL_ERROR"]
        if before is not None:
            os.environ["HYDRA_FULL_ERROR"] = before


@sources.loaded_once()
def _explained(line: CommandLine, complete: Complete, *, user_file_works: bool = True) -> list[Problem]:
    """Returns every problem of a config that cannot be composed, and of the values in it that can."""
    found = Explainer(line, user_file_works=user_file_works).explain()
    if found.choices is None:
        return found.problems
    examined = examine(found.composed, found.choices, line, unknown=found.dropped)
    crossed = _cross_check(examined, complete, found.dropped)[1] if found.whole else []
    return [*found.problems, *examined.problems, *crossed]


def _cross_check(
    examined: Examined, complete: Complete, dropped: Sequence[str] | None = None
) -> tuple[RunConfig | None, list[Problem]]:
    """Returns a completed config, and problems between keys, except those that name a key already known to be wrong.

    `dropped` are the keys left out of a config that could not be composed as typed.
    """
    if examined.typed is None or examined.config is None:
        return None, []
    wrong = [*(dropped or []), *(problem.key for problem in examined.problems)]
    try:
        config, found = complete(examined.typed, examined.config)
    except Exception:
        if wrong or dropped is not None:
            return None, []  # a check may rely on a value that is wrong
        raise
    return config, [problem for problem in found if not any(_names(problem, key) for key in wrong)]


def _names(problem: Problem, key: str) -> bool:
    return f"{problem.key}.".startswith(f"{key}.") or f"{key}=" in f"{problem.message} {problem.remedy}"


def _shared_runs(runs: Sequence[Invocation]) -> list[Problem]:
    counts = Counter(one.config.run for one in runs if one.config.run is not None)
    return [
        Problem("run", "duplicate", f"{count} runs of this --multirun share the directory {run}", "leave run out")
        for run, count in counts.items()
        if count > 1
    ]
