"""Composes the command line and `conf/` into a typed, checked config.

All problems of a config are reported together, and a config with problems starts nothing.
"""

import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
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
from trainer.config.schema import Mode, RunConfig
from trainer.config.shell import printable
from trainer.config.sources import CommandLine
from trainer.faults import exit_codes
from trainer.faults.problems import ConfigError, Problem

Step = Callable[[RunConfig], list[Problem]]  # completes or validates a config, and returns its problems
Runs = list[tuple[tuple[str, ...], RunConfig]]  # overrides and config of each
Several = Callable[[Runs], int]  # runs all of them, and returns the exit code


def run(main: Callable[[RunConfig], int], *steps: Step, several: Several | None = None) -> NoReturn:
    """Runs `main` on the config of the command line, or on each of a --multirun, and exits with its code.

    No run starts unless the configs of all are valid; else every problem is printed and the exit code is 2. Of several
    runs, the first that fails gives the exit code. `steps` follow the checks of single keys, in order. `several` gets
    the runs of a --multirun that trains.
    """
    given = arguments.sort(command_line.typed())
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
            message, remedy = "reads a pickle, which can run any code", "give the overrides of that run again"
            raise ConfigError([Problem("--experimental-rerun", "unsafe", message, remedy, about="flag")])
        is_plain = not given.flags and not any("hydra" in text for text in line.overrides)
        runs = _checked(line, steps, _compose_one if is_plain else _compose_with_hydra, several=several)
    except ConfigError as error:
        print(printable(str(error)), file=sys.stderr)
        if "json=true" in line.overrides:
            print_json({"problems": [problem.to_json() for problem in error.problems]})
        sys.exit(exit_codes.CONFIG)
    if several is not None and _are_trials(runs):
        sys.exit(several(runs))
    first_failure = 0
    for _, config in runs:
        code = main(config)
        first_failure = first_failure or code
        if code in (exit_codes.INTERRUPTED, exit_codes.TERMINATED):
            break  # the user stopped this run and does not want the next
    sys.exit(first_failure)


def load(overrides: Sequence[str], *steps: Step, config_dir: str | None = None) -> RunConfig:
    """Composes and checks one config, as `run` does, in this process.

    Raises:
        ConfigError: with every problem of the config.
    """
    line = CommandLine(tuple(overrides), config_dir)
    ((_, config),) = _checked(line, steps, lambda line: [examine(*sources.compose(line, line.overrides), line)])
    return config


def _compose_one(line: CommandLine) -> list[Examined]:
    """Composes the config of one run, once; Hydra's command line composes it twice, to learn the mode."""
    composed, choices = sources.compose(line, line.overrides)
    if HydraConfig.get().mode is RunMode.MULTIRUN:  # a file says so
        return _compose_with_hydra(line)
    return [examine(composed, choices, line)]


def _checked(
    line: CommandLine,
    steps: Sequence[Step],
    compose: Callable[[CommandLine], list[Examined]],
    *,
    several: Several | None = None,
) -> Runs:
    """Returns the configs of all runs, each with its own overrides.

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
            problems += _explained(line, steps, user_file_works=not unreadable)
        else:
            try:
                examined = compose(line)
            except BrokenPipeError:
                raise  # nobody reads what Hydra prints, as in `--help | head`
            except Exception as error:
                if os.environ.get("HYDRA_FULL_ERROR") == "1":
                    raise
                problems = _explained(line, steps) or in_own_words(" ".join(line.overrides), error)
        for one in examined:
            problems += [*one.problems, *_cross_check(one, steps)]
        runs = [(one.overrides, one.config) for one in examined if one.config is not None]
        if several is None or not _are_trials(runs):
            problems += _shared_runs(examined)
        if problems:
            raise ConfigError(located(list(dict.fromkeys(problems)), line))
    return runs


def _are_trials(runs: Runs) -> bool:
    """Whether these are runs of a --multirun that are to train, below one directory if one is named."""
    return (
        len(runs) > 1
        and all(config.mode is Mode.train for _, config in runs)
        and len({config.run for _, config in runs}) == 1
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
    """The functions of the file that `user=`, or else `user:` in a YAML file, names; or the problems with it."""
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
        # Where conf/config.yaml sends what Hydra writes under --multirun, so that nothing is left behind.
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


def _explained(line: CommandLine, steps: Sequence[Step], *, user_file_works: bool = True) -> list[Problem]:
    """Returns every problem of a config that cannot be composed, and of the values in it that can."""
    found = Explainer(line, user_file_works=user_file_works).explain()
    if found.choices is None:
        return found.problems
    examined = examine(found.composed, found.choices, line, unknown=found.dropped)
    crossed = _cross_check(examined, steps, found.dropped) if found.whole else []
    return [*found.problems, *examined.problems, *crossed]


def _cross_check(examined: Examined, steps: Sequence[Step], dropped: Sequence[str] | None = None) -> list[Problem]:
    """Problems between keys, except those that name a key already known to be wrong, which would mislead.

    `dropped` are the keys left out of a config that could not be composed as typed.
    """
    if examined.config is None:
        return []
    wrong = [*(dropped or []), *(problem.key for problem in examined.problems)]
    try:
        found = [problem for step in steps for problem in step(examined.config)]
    except Exception:
        if wrong or dropped is not None:
            return []  # a step may rely on a value that is wrong
        raise
    return [problem for problem in found if not any(_names(problem, key) for key in wrong)]


def _names(problem: Problem, key: str) -> bool:
    return f"{problem.key}.".startswith(f"{key}.") or f"{key}=" in f"{problem.message} {problem.remedy}"


def _shared_runs(examined: Sequence[Examined]) -> list[Problem]:
    runs = Counter(one.config.run for one in examined if one.config is not None and one.config.run is not None)
    return [
        Problem("run", "duplicate", f"{count} runs of this --multirun share the directory {run}", "leave run out")
        for run, count in runs.items()
        if count > 1
    ]
